"""A shuffler whose costs are easily told, and batches with a known id in every row."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.sequence_batch.open_batch import batch_rows
from tests.helpers.batches.random_batches import random_batch

__all__ = ["SquareShuffler", "closing", "my_batch"]


class SquareShuffler(BaseTaskBalancedBatchShuffler):
    """A row costs 10 plus the square of its items."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        features = batch.features if hasattr(batch, "features") else batch.sparse_features
        lengths = features.lengths().view(len(features.keys()), batch_rows(batch)).sum(0)
        return lengths.to(torch.int64) ** 2 + 10


def my_batch(seed, rows_by_rank, real_by_rank=None, **kwargs):
    rank = dist.get_rank()
    real = (real_by_rank or rows_by_rank)[rank]
    first = sum((real_by_rank or rows_by_rank)[:rank])
    return random_batch(seed * 100 + rank, rows_by_rank[rank], real, first_id=first, **kwargs)
