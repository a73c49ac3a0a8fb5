"""Batches that cannot state padding: the example on TorchRec's own trains the same with the shuffler and without."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import examples.torchrec_dlrm as example
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.pipeline import balanced
from tests.helpers.models.torchrec_model import weights_of
from tests.helpers.pipelines.shuffled_pipelines import steps_of

CPU = torch.device("cpu")


def _train(shuffler: TokensBalancedBatchShuffler | None) -> tuple[list[float], Any, Any, float]:
    """The mean loss of every step over the ranks, the weights before and after, and the worst imbalance trained."""
    torch.manual_seed(0)
    model = example.DLRMTrain(example.DLRM(CPU))
    # SGD, not the example's Adagrad, whose first step would make as much of a gradient of rounding errors as of any. An
    # item is in few of the rows and gets little of the mean's gradient.
    apply_optimizer_in_backward(torch.optim.SGD, model.model.embeddings.parameters(), {"lr": 2000.0})
    model = DistributedModelParallel(model, device=CPU)
    dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    arguments = model, torch.optim.SGD(dense, lr=0.5), CPU
    stock = TrainPipelineSparseDist
    pipeline: Any = stock(*arguments) if shuffler is None else balanced(stock)(*arguments, batch_shuffler=shuffler)
    before = weights_of(model)
    steps = example.STEPS - 1  # as many on both ranks, which the stock pipeline needs
    batches = itertools.islice(example.draw_batches(dist.get_rank()), steps)
    losses, imbalance = [], 0.0
    for _ in range(steps):
        loss = pipeline.progress(batches)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        if shuffler is not None:
            imbalance = max(imbalance, pipeline.last_stats.imbalance_after)
    return losses, before, weights_of(model), imbalance


def _train_both() -> Any:
    shuffler = TokensBalancedBatchShuffler()
    results = _train(None), _train(shuffler)
    shuffler.close()
    return results


def test_the_example_trains_the_same_with_the_shuffler_and_without(two_ranks):
    for (stock_losses, before, stock, _), (losses, _, weights, imbalance) in two_ranks.run(_train_both):
        torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=1e-6)
        assert losses[-1] < losses[0] and 0 < imbalance <= 0.02
        for name, start in before.items():
            trained = (stock[name] - start).abs().max()
            assert trained > 0, name
            assert (weights[name] - stock[name]).abs().max() <= 1e-3 * trained, name


def _rows_of_a_gated_batch() -> int:
    rows = 4 * (dist.get_rank() == 0)
    features = KeyedJaggedTensor(
        ["history"], torch.arange(rows), lengths=torch.ones(rows, dtype=torch.long), stride=rows
    )
    batch = Batch(torch.zeros(rows, 2), features, torch.zeros(rows, dtype=torch.int32))
    shuffler = TokensBalancedBatchShuffler(options=ShufflerOptions(min_gain=1.0))
    received = shuffler.shuffle(batch)
    shuffler.close()
    return len(received.labels)


def test_a_rank_without_rows_gets_some_whatever_the_gate_says(two_ranks):
    assert two_ranks.run(_rows_of_a_gated_batch) == [2, 2]


@dataclasses.dataclass
class DenseBatch:
    """A batch that cannot state padding, and no more than TorchRec asks of one."""

    sample_id: torch.Tensor

    def to(self, device, non_blocking=False):
        return DenseBatch(self.sample_id.to(device))

    def record_stream(self, stream):
        pass


class _Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, batch):
        self.seen.append(batch.sample_id.tolist())
        return (self.weight * batch.sample_id.sum()), None


class _DenseShuffler(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch):
        return batch.sample_id**2


def _runs_dry(mode):
    """Rank 1 ends after two steps, rank 0 after five; twice, for the second epoch goes on as the first."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("commons").addHandler(handler)
    rank = dist.get_rank()
    model = _Sum()
    shuffler = _DenseShuffler(ShufflerOptions(mode=mode, timeout=30.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    epochs = []
    try:
        for epoch in range(2):
            sizes = [2, 0, 3] if rank == 1 and epoch else [2, 2] if rank == 1 else [3] * 5
            source = (DenseBatch(torch.arange(size) + 100 * step + 1000 * rank) for step, size in enumerate(sizes))
            model.seen.clear()
            list(steps_of(trainer, source))
            epochs.append([len(ids) for ids in model.seen])
    finally:
        logging.getLogger("commons").removeHandler(handler)
        shuffler.close()
    return epochs, records


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_where_nothing_moves_the_data_ends_with_the_first_rank(two_ranks, mode):
    (first, told), (second, silent) = two_ranks.run(_runs_dry, mode)
    assert first == [[3, 3], [3, 3, 3]]
    assert second == [[2, 2], [2, 0, 3]]  # an empty batch that a loader brings is its own affair
    assert silent == [] and len(told) == 1  # once, on one rank
    assert "the data of ranks [1] ended at step 2" in told[0] and "the 3 rows" in told[0]
