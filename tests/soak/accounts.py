"""Every row accounted for: what all ranks bring to a step is what they train in it, row by row and bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.helpers.batches.random_batches import rows_as_values


def row_digests(batch: Any) -> np.ndarray:
    """A 64-bit digest of each real row: uint64 `(real rows,)`, of every field's name, dtype, values and weights."""
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8).digest() for row in rows_as_values(batch)]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


class Steps:
    """Sums over the rows of each step, on one rank: how many, and their digests modulo 2^64."""

    def __init__(self, sums: Sequence[tuple[int, int]] = ()) -> None:
        self.sums: list[tuple[int, int]] = list(sums)

    def add(self, batch: Any) -> None:
        """One more step."""
        digests = row_digests(batch)
        self.sums.append((len(digests), int(digests.sum(dtype=np.uint64))))

    def noted(self, batches: Iterator[Any], read: list[Any] | None = None) -> Iterator[Any]:
        """The batches, each one a step when it is read, and then in the list `read`, if there is one."""
        for batch in batches:
            self.add(batch)
            if read is not None:
                read.append(batch)
            yield batch

    def over_ranks(self, num_steps: int, group_by: int = 1) -> np.ndarray:
        """uint64 `(steps, 2)`, the sums over all ranks, `group_by` neighbouring steps together; a collective call."""
        own = np.zeros((num_steps, 2), dtype=np.uint64)
        own[: len(self.sums)] = np.array(self.sums[:num_steps], dtype=np.uint64).reshape(-1, 2)
        grouped = np.add.reduceat(own, np.arange(0, num_steps, group_by)) if num_steps else own
        total = torch.from_numpy(grouped.view(np.int64).copy())
        dist.all_reduce(total)
        return total.numpy().view(np.uint64)


def most_steps(steps: Steps) -> int:
    """The number of steps of the rank that has most; a collective call."""
    most = torch.tensor([len(steps.sums)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def require_equal(brought: np.ndarray, trained: np.ndarray, what: str) -> int:
    """How many rows the sums are of; AssertionError on every rank if a row was lost, doubled or changed."""
    if brought.shape != trained.shape:
        raise AssertionError(f"{what}: {len(brought)} steps were brought and {len(trained)} trained")
    wrong = np.flatnonzero((brought != trained).any(axis=1))
    if len(wrong):
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(brought)} steps differ, the first is {first}: {brought[first][0]} rows were "
            f"brought and {trained[first][0]} trained, with digests {brought[first][1]:x} and {trained[first][1]:x}"
        )
    return int(brought[:, 0].sum())
