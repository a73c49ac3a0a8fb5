"""Batches that cannot state padding: the example on TorchRec's own trains the same with the shuffler and without."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import experimental_pipelines
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import examples.torchrec_dlrm as example
from commons.distributed import global_mean_loss, mean_over_ranks
from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import resolve_process_group
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.pipeline import balanced, windowed_iter
from tests.helpers.batches.square_shuffler import SquareShuffler
from tests.helpers.models.torchrec_model import AnyBatch
from tests.helpers.pipelines.shuffled_pipelines import ON_CPU, PIPELINES, lacking, steps_of
from tests.helpers.ranks.faults import error_of, logged
from tests.helpers.ranks.on_ranks import on_two_ranks

CPU = torch.device("cpu")
STEPS = 5  # as many on both ranks, which the stock pipeline needs
# Pipelines that trace the model they are given.
TRACING = {name: PIPELINES[name] for name in ("sparse", "lite", "fused", "prefetch", "semi-sync, before it starts")}
TRACING["semi-sync"] = ON_CPU[TrainPipelineSemiSync], {}
# How a forward pass may state the count of its loss terms.
STATED = {
    "rows": lambda batch: batch.labels.numel(),
    "tensor": lambda batch: torch.ones_like(batch.labels).sum(),
    "number": lambda batch: example.ROWS,  # equal counts of rows stay equal
    "known": lambda batch: batch.labels.numel(),
}


class HostBatch(Batch):
    """TorchRec's, which would hand a CPU stream to CUDA's allocator."""

    def to(self, device, non_blocking=False, data_copy_stream=None, dense_only=False):
        return self

    def record_stream(self, stream):
        pass


@dataclasses.dataclass
class PaddedHostBatch(HostBatch):
    """States its padding, as windows need it."""

    actual_batch_size: int = example.ROWS


def own_batches(kind: type[HostBatch] = HostBatch) -> Iterator[HostBatch]:
    return (kind(**vars(batch)) for batch in itertools.islice(example.draw_batches(dist.get_rank()), STEPS))


def losses_of(pipeline: Any, batches: Iterator[HostBatch]) -> Iterator[float]:
    """The mean over the ranks of every step."""
    return (mean_over_ranks(loss).item() for loss in steps_of(pipeline, batches))


class Traced(example.DLRMTrain):
    """The example's top module, which is traced and returns the loss, with its count stated in one way."""

    def __init__(self, count: str, group: dist.ProcessGroup | None) -> None:
        super().__init__(example.DLRM(CPU))
        self.count, self.groups = count, [group]
        self.traced = False

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.traced |= isinstance(batch, torch.fx.Proxy)
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss_sum = binary_cross_entropy_with_logits(logits, batch.labels.float(), reduction="sum")
        group, known = self.groups[0] or resolve_process_group(), None
        if self.count == "known":  # of all ranks, and as much of the batch as the tracer sees
            known = batch.labels.numel() * dist.get_world_size()
        loss = global_mean_loss(loss_sum, STATED[self.count](batch), group, global_count=known)
        return loss, loss.detach()


def _train(pipeline_class: Any, options: Any, top: Any, shuffler: TokensBalancedBatchShuffler | None) -> Any:
    """Whether the model was traced, the mean loss of every step over the ranks, and the worst imbalance trained."""
    # SGD, not the example's Adagrad, whose first step would make as much of a gradient of rounding errors as of any. An
    # item is in few of the rows and gets little of the mean's gradient.
    apply_optimizer_in_backward(torch.optim.SGD, top.model.embeddings.parameters(), {"lr": 2000.0})
    model = DistributedModelParallel(top, device=CPU)
    dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    arguments = model, torch.optim.SGD(dense, lr=0.5), CPU
    pipeline: Any = (
        pipeline_class(*arguments, **options)
        if shuffler is None
        else balanced(pipeline_class)(*arguments, batch_shuffler=shuffler, **options)
    )
    losses, imbalance = [], 0.0
    for loss in losses_of(pipeline, own_batches()):
        losses.append(loss)
        if shuffler is not None:
            imbalance = max(imbalance, pipeline.last_stats.imbalance_after)
    return getattr(top, "traced", False), losses, imbalance


@pytest.mark.slow
@on_two_ranks
def test_the_example_trains_the_same_in_every_pipeline_that_traces_it():
    """Balanced, with counts stated in turn; a loss is that of the weights that the steps before have made."""
    torch.manual_seed(0)
    _, stock_losses, _ = _train(TrainPipelineSparseDist, {}, example.DLRMTrain(example.DLRM(CPU)), None)
    assert len(stock_losses) == STEPS and stock_losses[-1] < 0.9 * stock_losses[0]
    ways = itertools.cycle([("rows", None), ("tensor", dist.new_group()), ("number", None), ("known", None)])
    installed = {name: each for name, each in TRACING.items() if lacking(*each) is None}  # not of an old TorchRec
    assert len(installed) >= 4
    for name, (pipeline_class, options) in installed.items():
        torch.manual_seed(0)
        with contextlib.closing(TokensBalancedBatchShuffler()) as shuffler:
            traced, losses, imbalance = _train(pipeline_class, options, Traced(*next(ways)), shuffler)
        assert traced and losses[-1] < losses[0] and 0 < imbalance <= 0.02, name
        if name != "semi-sync":  # which trains on embeddings that are a step old
            torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=1e-6)


class Bags(nn.Module):
    """That pipeline takes no other kind of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="item_table", embedding_dim=4, num_embeddings=example.NUM_ITEMS, feature_names=["history"]
        )
        self.bags = EmbeddingBagCollection([table], device=torch.device("meta"))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        errors = self.bags(batch.sparse_features).values().sum(1) - batch.labels
        loss = global_mean_loss(errors.square().sum(), batch.labels.numel())
        return loss, loss


@pytest.mark.slow
@on_two_ranks
def test_what_takes_the_place_of_a_pipeline_with_embeddings_on_the_host():
    """`balanced` refuses it, and names this."""

    class EvalOnHost(experimental_pipelines.EvalPipelineCPUSparse):
        def _get_or_alloc_pinned(self, name, tensor):  # torch can pin memory on machines with CUDA alone
            return torch.empty_like(tensor)

    model = DistributedModelParallel(Bags(), device=CPU).eval()
    pipelines = [EvalOnHost(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU) for _ in range(2)]
    off = list(losses_of(pipelines[0], own_batches(PaddedHostBatch)))
    pipelines[0].detach()
    with contextlib.closing(TokensBalancedBatchShuffler()) as shuffler:
        windowed = windowed_iter(own_batches(PaddedHostBatch), shuffler, 1)
        on = list(losses_of(pipelines[1], windowed))
        assert len(on) == STEPS and all(windowed.take_stats().moved for _ in on)
    torch.testing.assert_close(on, off, rtol=1e-5, atol=1e-6)


@dataclasses.dataclass
class Stated(Batch):
    """Has the field that the error asks for, but inherits `to`, which returns TorchRec's Batch without it."""

    actual_batch_size: int | None = None


@on_two_ranks
def test_a_subclass_whose_copy_is_of_another_class_is_told_so():
    batches = (Stated(**vars(batch)) for batch in own_batches())
    model = AnyBatch(lambda batch: None)
    with contextlib.closing(TokensBalancedBatchShuffler()) as shuffler:
        trainer = balanced(TrainPipelineBase)(model, torch.optim.SGD(model.parameters()), CPU, batch_shuffler=shuffler)
        said = error_of(trainer.progress, batches)
    assert "was started with a Stated of" in said and "is finished with a Batch of" in said
    assert said.endswith("or with the copy that its to() returns, which must be of its class and keep all fields")


@dataclasses.dataclass
class DenseBatch:
    """A batch that cannot state padding, and no more than TorchRec asks of one; its copy is made of its `vars`."""

    sample_id: torch.Tensor

    def to(self, device, non_blocking=False):
        return DenseBatch(**{name: value.to(device) for name, value in vars(self).items()})

    def record_stream(self, stream):
        pass


@pytest.mark.parametrize("mode", ["observe", "off"])
@on_two_ranks
def test_where_nothing_moves_the_data_ends_with_the_first_rank(mode):
    """Rank 1 ends after two steps, rank 0 after five; twice, for the second epoch goes on as the first."""
    rank, epochs = dist.get_rank(), []
    model = AnyBatch(lambda batch: epochs[-1].append(len(batch.sample_id)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    brought = [[2, 2], [2, 0, 3]] if rank else [[3] * 5, [3] * 5]  # an empty batch of a loader is its own affair
    with contextlib.closing(SquareShuffler(ShufflerOptions(mode=mode, timeout=30.0))) as shuffler, logged() as told:
        shuffler.get_workloads = lambda batch: batch.sample_id**2
        trainer = balanced(TrainPipelineBase)(model, optimizer, CPU, batch_shuffler=shuffler)
        for sizes in brought:
            epochs.append([])
            source = (DenseBatch(torch.arange(size) + 100 * step + 1000 * rank) for step, size in enumerate(sizes))
            list(steps_of(trainer, source))
    assert epochs == (brought if rank else [[3, 3], [3, 3, 3]])
    assert len(told) == (rank == 0)  # once, on one rank
    assert rank or ("the data of ranks [1] ended at step 2" in told[0] and "the 3 rows" in told[0])
