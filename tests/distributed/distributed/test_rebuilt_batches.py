"""Batches that a constructor changes, shuffled: every row as it was, and ranks without data hold what the others do."""

from __future__ import annotations

import enum
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.dispatch import redistribute_balanced
from commons.distributed.options import ShufflerOptions
from tests.helpers.pipelines import CubicShuffler

Point = namedtuple("Point", ["x", "y"])


class Unit(enum.Enum):
    SECONDS = "s"


@dataclass(frozen=True)
class Recoded:
    """Labels come counted from 1; the constructor refuses batches without rows, and states what `made` is."""

    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    actual_batch_size: int
    plain: Any
    made: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise ValueError("a batch without rows makes no sense")
        object.__setattr__(self, "labels", self.labels - 1)
        object.__setattr__(self, "made", self.labels * 2)
        object.__setattr__(self, "unit", Unit.SECONDS)


PLAIN = {1: ("a", [2.0, float("inf")]), "1": Point(None, (True,)), Unit.SECONDS: float("-inf"), 2.0: b"x"}


def _batch(first, rows, plain=None):
    lengths = torch.arange(first, first + rows) % 5 * (dist.get_rank() + 1)
    features = KeyedJaggedTensor(["item"], torch.arange(int(lengths.sum())), lengths=lengths)
    return Recoded(features, torch.arange(first, first + rows) + 1, rows, PLAIN if plain is None else plain)


def _shuffled(transport):
    """Rank 1 never has a batch; the others' rows come to it."""
    shuffler = CubicShuffler(ShufflerOptions(transport=transport, equal_size=False))
    shuffler.get_workloads = lambda batch: batch.sparse.lengths() + 10
    rows = []
    for step in range(2):
        batch = None if dist.get_rank() == 1 else _batch(100 * dist.get_rank() + 10 * step, 6)
        handle = shuffler.start_shuffle(batch)
        result = shuffler.finish_shuffle(handle.empty_batch() if batch is None else batch, handle)
        assert shuffler.last_stats.moved and result.actual_batch_size
        assert result.made.tolist() == (result.labels * 2).tolist()
        rows.append(result.labels[: result.actual_batch_size].tolist())
    shuffler.close()
    assert result.plain == PLAIN and repr(result.plain) == repr(PLAIN) and result.unit is Unit.SECONDS
    return rows


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_rows_that_moved_are_as_the_constructor_left_them(ranks, transport):
    for step, shares in enumerate(zip(*ranks.run(_shuffled, transport))):
        firsts = [100 * rank + 10 * step for rank in range(ranks.world_size) if rank != 1]
        assert sorted(label for share in shares for label in share) == [f + i for f in firsts for i in range(6)]


def _redistributed():
    batch = None if dist.get_rank() == 1 else _batch(100 * dist.get_rank(), 6)
    result = redistribute_balanced(batch, None if batch is None else torch.ones(6, dtype=torch.int64)).batch
    assert result.made.tolist() == (result.labels * 2).tolist() and result.unit is Unit.SECONDS
    assert repr(result.plain) == repr(PLAIN)
    return result.labels.tolist()


def test_rows_that_were_dispatched_are_as_the_constructor_left_them(two_ranks):
    shares = two_ranks.run(_redistributed)
    assert sorted(label for share in shares for label in share) == list(range(6)) and all(shares)
