"""TorchRec's evaluation with embeddings on the host, and a model and a batch for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline.experimental_pipelines import EvalPipelineCPUSparse
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from tests.helpers.models.torchrec_model import KEYS, NUM_IDS, WIDTH, SampleBatch, _init, shard


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
