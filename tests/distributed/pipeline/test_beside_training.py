"""What takes the place of a pipeline that `balanced` refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline.experimental_pipelines import EvalPipelineCPUSparse
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from commons.pipeline import windowed_iter
from tests.helpers.models.torchrec_model import (
    KEYS,
    NUM_IDS,
    WIDTH,
    SampleBatch,
    _init,
    rank_batches,
    shard,
)
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, steps_of

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
STEPS = 6


@dataclasses.dataclass
class DenseOnlyBatch(SampleBatch):
    """A batch whose `to` knows `dense_only`, as EvalPipelineCPUSparse asks."""

    def to(self, *args: Any, dense_only: bool = False, **kwargs: Any) -> DenseOnlyBatch:
        return super().to(*args, **kwargs)


class CpuEvalCPUSparse(EvalPipelineCPUSparse):
    """Without pinned memory, which torch has on machines with CUDA alone."""

    def _get_or_alloc_pinned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)


class _Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, pooled: KeyedTensor, batch: DenseOnlyBatch) -> tuple[torch.Tensor, torch.Tensor]:
        real = batch.actual_batch_size
        self.seen.append(batch.sample_id[:real].tolist())
        total = (pooled.values()[:real].sum(1) * batch.target[:real]).sum()
        return total, total


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tail = _Tail()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{key}", embedding_dim=WIDTH, num_embeddings=NUM_IDS, feature_names=[key], init_fn=_init
            )
            for key in KEYS
        ]
        self.bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables, is_weighted=True)

    def forward(self, batch: DenseOnlyBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tail(self.bags(batch.features), batch)


def build_bags() -> tuple[nn.Module, list[list[int]], torch.optim.Optimizer]:
    """The model with a whole table on every rank, the ids that it sees, and an optimizer."""
    model = _Bags()
    parallel = shard(model, EmbeddingBagCollectionSharder(), "data_parallel")
    return parallel.eval(), model.tail.seen, torch.optim.SGD(parallel.parameters(), lr=0.1)


def _with_embeddings_on_the_host(balance: bool) -> tuple[list[list[int]], float]:
    model, seen, optimizer = build_bags()
    pipeline = CpuEvalCPUSparse(model, optimizer, CPU)
    shuffler = CubicShuffler()
    names = [field.name for field in dataclasses.fields(DenseOnlyBatch)]
    source: Any = (
        DenseOnlyBatch(**{name: getattr(batch, name) for name in names})
        for batch in rank_batches(dist.get_rank(), STEPS, [6])
    )
    source = windowed_iter(source, shuffler, 1) if balance else source
    total = sum(map(float, steps_of(pipeline, source)))
    shuffler.close()
    return seen, total


def test_what_to_use_where_embeddings_lie_on_the_host(two_ranks):
    on, off = (two_ranks.run(_with_embeddings_on_the_host, balance) for balance in (True, False))
    rows_on, rows_off = (sorted(i for seen, _ in results for step in seen for i in step) for results in (on, off))
    assert rows_on == rows_off and len(rows_on) == 2 * 6 * STEPS
    assert [seen for seen, _ in on] != [seen for seen, _ in off]
    assert sum(total for _, total in on) == pytest.approx(sum(total for _, total in off), rel=1e-5)
