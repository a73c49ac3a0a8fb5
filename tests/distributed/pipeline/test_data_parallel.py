"""Models in torch's own wrappers for data parallelism, DDP and FSDP, train the same weights, balanced and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.distributed import global_mean_loss
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.pipeline import balanced
from tests.helpers.models.torchrec_model import NUM_IDS, SampleBatch, rank_batches

CPU = torch.device("cpu")
STEPS = 5


class ItemModel(nn.Module):
    """An MLP over every item of a row, added up; squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(NUM_IDS, 8)
        self.score = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.double()

    def forward(self, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        items, rows = batch.features["item"], batch.actual_batch_size
        scores = self.score(self.items(items.values()))
        summed = torch.segment_reduce(scores, "sum", lengths=items.lengths().long(), initial=0)
        error = ((summed[:rows, 0] - batch.target[:rows].double()) ** 2).sum()
        return global_mean_loss(error, rows), error.detach()


def _sharded(model: ItemModel) -> nn.Module:
    fully_shard(model.score)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[ItemModel], nn.Module]] = {"DDP": DistributedDataParallel, "FSDP": _sharded}


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {name.removeprefix("module."): weight.detach() for name, weight in model.named_parameters()}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in named.items()}


def _train(wrapper: str, shuffler: TokensBalancedBatchShuffler | None) -> tuple[Any, Any, list[bool]]:
    """The weights before and after, and in which steps rows have moved."""
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](ItemModel())
    arguments = model, torch.optim.SGD(model.parameters(), lr=0.02), CPU
    stock = TrainPipelineBase
    pipeline: Any = stock(*arguments) if shuffler is None else balanced(stock)(*arguments, batch_shuffler=shuffler)
    before, moved = _weights(model), []
    source = rank_batches(dist.get_rank(), STEPS, [6])
    for _ in range(STEPS):
        pipeline.progress(source)
        moved += [] if shuffler is None else [pipeline.last_stats.moved]
    return before, _weights(model), moved


def _train_both(wrapper: str) -> Any:
    shuffler = TokensBalancedBatchShuffler()
    results = _train(wrapper, None), _train(wrapper, shuffler)
    shuffler.close()
    return results


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_are_those_of_the_stock_pipeline(two_ranks, wrapper):
    for (before, stock, _), (_, weights, moved) in two_ranks.run(_train_both, wrapper):
        assert any(moved) and len(before) == 5
        for name, start in before.items():
            assert float((stock[name] - start).abs().max()) > 1e-3, name
            torch.testing.assert_close(weights[name], stock[name], rtol=0, atol=1e-10)
