"""How the shuffler is used, inside a rank: every function trains a model on this rank's batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.pipeline import balanced, windowed_iter
from commons.trainer.config.args import TrainerArgs
from commons.trainer.loop import TrainingLoop
from commons.trainer.ranks.collectives import limit_collectives
from tests.faults import kinds
from tests.faults.injector import Injector
from tests.faults.trials import ROWS, own_ids
from tests.helpers.models.torchrec_model import SampleBatch, make_batch
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, shuffled_ahead, steps_of
from tests.helpers.pipelines.trainer_loops import Output, Parts

WINDOW = 2


class FaultyShuffler(CubicShuffler):
    """Its workloads are a place for faults."""

    injector: Injector

    def get_workloads(self, batch: Any) -> torch.Tensor:
        return self.injector.at(kinds.WORKLOADS, super().get_workloads(batch))


class FaultyModel(nn.Module):
    """Remembers the rows it has trained; no collective of its own."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self.injector, self.seen = injector, list[int]()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: SampleBatch) -> tuple[torch.Tensor, Output]:
        self.injector.at(kinds.MODEL)
        ids = batch.sample_id[: batch.actual_batch_size].tolist()
        self.seen += ids
        loss = (self.scale * batch.target).sum()
        return loss, Output(loss.detach(), batch.actual_batch_size, ids)


def made_batches(injector: Injector) -> Iterator[SampleBatch]:
    """Rank 0's rows are long and the others' short, so that rows move in every step."""
    for ids in own_ids(injector.rank):
        yield injector.at(kinds.BATCH, make_batch(ids, ROWS, longest=2 if injector.rank else 40))


def own_batches(injector: Injector) -> Iterator[SampleBatch]:
    """What a loader hands out."""
    for batch in made_batches(injector):
        yield injector.at(kinds.LOADER, batch)


def shuffle(shuffler: FaultyShuffler, injector: Injector, model: FaultyModel) -> None:
    """Start and finish at once."""
    for batch in own_batches(injector):
        model(shuffler.shuffle(batch))


def look_ahead(shuffler: FaultyShuffler, injector: Injector, model: FaultyModel) -> None:
    """The next batch's shuffle runs while this one trains."""
    for batch, _ in shuffled_ahead(shuffler, own_batches(injector), 2):
        model(batch)


def pipeline(shuffler: FaultyShuffler, injector: Injector, model: FaultyModel) -> None:
    """A pipeline of TorchRec's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    list(steps_of(trainer, own_batches(injector)))


def windows(shuffler: FaultyShuffler, injector: Injector, model: FaultyModel) -> None:
    """Windows of host batches."""
    for batch in windowed_iter(own_batches(injector), shuffler, WINDOW):
        model(batch)


def training(shuffler: FaultyShuffler, injector: Injector, model: FaultyModel) -> None:
    """The trainer's loop, with a checkpoint after every third step and at the end."""
    args = TrainerArgs(
        ROWS,
        ROWS,
        run_dir="../run",
        pipeline_type="none",
        num_epochs=1,
        log_interval=2,
        ckpt_save_interval=3,
        ckpt_save_dir="../checkpoints",
        sinks=(),
        shuffler=shuffler.options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = list(made_batches(injector))
    loader = DataLoader(batches, batch_size=None, collate_fn=functools.partial(injector.at, kinds.LOADER))
    limit_collectives(shuffler.options.timeout)  # as `run_training` does
    TrainingLoop(Parts(args, model, optimizer, [shuffler], loader)).run()


USES = {
    kinds.SHUFFLE: shuffle,
    kinds.LOOK_AHEAD: look_ahead,
    kinds.PIPELINE: pipeline,
    kinds.WINDOWS: windows,
    kinds.TRAINING: training,
}
