"""Pipelines with a shuffler, and what they are expected to train on."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from tests.helpers.cpu_pipelines import CpuFusedSparseDist, CpuPrefetch, CpuSemiSync
from tests.helpers.models import rank_batches

PIPELINES: dict[str, tuple[type, dict[str, Any]]] = {
    "base": (TrainPipelineBase, {}),
    "base in place": (TrainPipelineBase, {"enable_inplace_copy_batch": True}),
    "sparse": (TrainPipelineSparseDist, {}),
    "sparse in place": (TrainPipelineSparseDist, {"enable_inplace_copy_batch": True}),
    "sparse after forward": (TrainPipelineSparseDist, {"enqueue_batch_after_forward": True}),
    "sparse free early": (TrainPipelineSparseDist, {"free_features_storage_early": True}),
    "lite": (TrainPipelineSparseDistLite, {}),
    "fused": (CpuFusedSparseDist, {}),
    "semi-sync, before it starts": (CpuSemiSync, {"start_batch": 1000}),
    "prefetch": (CpuPrefetch, {}),
}
SIZES = [6, 0, 3, 1, 6, 2]


class CubicShuffler(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch):
        return batch.features.lengths().view(2, batch.batch_size).sum(0).to(torch.int64) ** 2 + 5


def make_shuffler(kind):
    return IdentityBalancedBatchShuffler() if kind == "identity" else CubicShuffler(ShufflerOptions(mode=kind))


def expected_ids(counts, world_size, first=0):
    return sorted(
        int(sample)
        for rank in range(world_size)
        for batch in rank_batches(rank + first, counts[rank], SIZES)
        for sample in batch.sample_id[: batch.actual_batch_size]
    )


def host_count(iterator):
    """How many batches an iterator hands out."""
    return sum(1 for _ in iterator)


def largest_difference(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)
