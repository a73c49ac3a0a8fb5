"""The rows of a trial, by number: what every rank loads."""

from __future__ import annotations

BATCHES = 8
ROWS = 6


def own_ids(rank: int) -> list[list[int]]:
    """The rows that a rank loads, by batch."""
    return [[1 + 1000 * rank + 100 * step + row for row in range(ROWS)] for step in range(BATCHES)]
