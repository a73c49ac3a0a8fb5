"""Batches whose rows are named by rank and step, and whether a row is what its name says."""

from __future__ import annotations

import torch.distributed as dist

from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import SampleBatch
from tests.helpers.pipelines.shuffled_pipelines import Source

ROWS = 4


class Injected(Exception):
    """An error of a test."""


def named_batch(rank: int, step: int) -> SampleBatch:
    """Rows that depend on their ids alone; rank 0 has the long ones, so that rows move."""
    return as_loaded([1 + rank * 100_000 + step * 100 + row for row in range(ROWS)])


def as_loaded(ids: list[int]) -> SampleBatch:
    return models.make_batch(ids, len(ids), longest=3 if max(ids) > 100_000 else 40)


def is_torn(batch: SampleBatch) -> bool:
    """Whether a row is not what its id says."""
    ids = batch.sample_id[: batch.actual_batch_size].tolist()
    return rows_as_values(batch) != [row for sample in ids for row in rows_as_values(as_loaded([sample]))]


def ids_of(*batches: tuple[int, int]) -> list[int]:
    """The ids of batches, by rank and step."""
    return sorted(int(sample) for rank, step in batches for sample in named_batch(rank, step).sample_id)


def own_batches(steps: int, first: int = 0, fails_at: int | None = None) -> Source:
    """Batches of this rank."""
    batches = (named_batch(dist.get_rank(), step) for step in range(first, first + steps))
    return Source(batches, fails_at, Injected("in the loader"))
