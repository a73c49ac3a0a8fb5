"""How the shuffler is used, inside a rank: every function trains this rank's batches and returns the rows it has seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.pipeline import balanced, windowed_iter
from tests.faults import kinds
from tests.faults.injector import Injector
from tests.faults.rows import ROWS, own_ids
from tests.helpers.models import SampleBatch, make_batch

WINDOW = 2


class FaultyShuffler(BaseTaskBalancedBatchShuffler):
    """Its workloads are a place for faults."""

    injector: Injector

    def get_workloads(self, batch: Any) -> torch.Tensor:
        lengths = batch.features.lengths().view(2, batch.batch_size).sum(0).to(torch.int64)
        return self.injector.at(kinds.WORKLOADS, lengths**2 + 5)


class FaultyModel(nn.Module):
    """Remembers the rows it has trained; no collective of its own."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self.injector, self.seen = injector, list[int]()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: SampleBatch) -> tuple[torch.Tensor, None]:
        self.injector.at(kinds.MODEL)
        self.seen += batch.sample_id[: batch.actual_batch_size].tolist()
        return (self.scale * batch.target).sum(), None


def own_batches(injector: Injector) -> Iterator[SampleBatch]:
    """Rank 0's rows are long and the others' short, so that rows move in every step."""
    for ids in own_ids(injector.rank):
        batch = injector.at(kinds.BATCH, make_batch(ids, ROWS, longest=2 if injector.rank else 40))
        yield injector.at(kinds.LOADER, batch)


def shuffle(shuffler: FaultyShuffler, injector: Injector) -> list[int]:
    """Start and finish at once."""
    model = FaultyModel(injector)
    for batch in own_batches(injector):
        model(shuffler.shuffle(batch))
    return model.seen


def look_ahead(shuffler: FaultyShuffler, injector: Injector) -> list[int]:
    """The next batch's shuffle runs while this one trains."""
    model = FaultyModel(injector)
    batches = own_batches(injector)
    batch = next(batches)
    handle = shuffler.start_shuffle(batch)
    while batch is not None:
        following = next(batches, None)
        next_handle = None if following is None else shuffler.start_shuffle(following)
        model(shuffler.finish_shuffle(batch, handle))
        batch, handle = following, next_handle
    return model.seen


def pipeline(shuffler: FaultyShuffler, injector: Injector) -> list[int]:
    """A pipeline of TorchRec's."""
    model = FaultyModel(injector)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    batches = own_batches(injector)
    try:
        while True:
            trainer.progress(batches)
    except StopIteration:
        return model.seen


def windows(shuffler: FaultyShuffler, injector: Injector) -> list[int]:
    """Windows of host batches."""
    model = FaultyModel(injector)
    for batch in windowed_iter(own_batches(injector), shuffler, WINDOW):
        model(batch)
    return model.seen


USES = {kinds.SHUFFLE: shuffle, kinds.LOOK_AHEAD: look_ahead, kinds.PIPELINE: pipeline, kinds.WINDOWS: windows}
