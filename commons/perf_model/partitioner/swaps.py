"""Swaps of rows between partitions, for refinement and repair: a partition that they change, pairs, and candidates.

One *round* pairs the heaviest partitions with others, finds the best swap for each of them, and carries all of
these out at once; every partition takes part in one swap at most, so that they do not disturb one another. A swap
gives one row for one, or for none: a move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.problem import Limits

# The row that a move brings back.
NO_ROW = -1


class Cap(NamedTuple):
    """A second weight, such as tokens, of which no partition may hold more than `limit`.

    Attributes:
        weights: int64 `(n,)`, by row.
        limit: most that a partition may hold.
        base: int64 `(k,)`, what each partition holds before it has any rows; None for nothing.

    """

    weights: np.ndarray
    limit: int
    base: np.ndarray | None = None


class Pairs(NamedTuple):
    """Partitions that may swap rows: consecutive pairs with the same heavy partition are its choice.

    Attributes:
        heavy: int64 `(p,)`, the partition that has too much.
        light: int64 `(p,)`, the other one.
        first: int64 `(h,)`, where the pairs of each heavy partition begin.

    """

    heavy: np.ndarray
    light: np.ndarray
    first: np.ndarray


def pair_up(ranked: np.ndarray, num_heavy: int) -> Pairs:
    """Assign the other partitions to the `num_heavy` first ones in turn, lightest first; what is left takes no part.

    Args:
        ranked: int64 `(k,)`, partitions from heaviest to lightest.
        num_heavy: how many look for a swap, at most half of them.

    """
    share = (len(ranked) - num_heavy) // num_heavy
    in_turn = np.arange(num_heavy * share).reshape(share, num_heavy).T.ravel()
    return Pairs(
        heavy=np.repeat(ranked[:num_heavy], share),
        light=ranked[len(ranked) - 1 - in_turn],
        first=np.arange(0, num_heavy * share, share),
    )


class WorkingPartition:
    """A partition of the rows that swaps change in place.

    Attributes:
        weights: int64 `(n,)`, descending.
        parts: int64 `(n,)`, the partition of each row.
        loads: int64 `(k,)`, sum of weights per partition, and what it began with.
        counts: int64 `(k,)`, rows per partition.

    """

    def __init__(
        self,
        weights: np.ndarray,
        parts: np.ndarray,
        num_parts: int,
        limits: Limits,
        cap: Cap | None = None,
        base: np.ndarray | None = None,
    ) -> None:
        self.weights = weights
        self.parts = parts.copy()
        self.loads = _held(parts, weights, num_parts, base)
        self.counts = np.bincount(parts, minlength=num_parts)
        self._limits = limits
        self._cap = cap
        self._held = None if cap is None else _held(parts, cap.weights, num_parts, cap.base)

    def may_move(self, pairs: Pairs) -> np.ndarray:
        """Whether the counts allow a move within each pair, bool `(p,)`."""
        return (self.counts[pairs.heavy] > self._limits.min_count) & (self.counts[pairs.light] < self._limits.max_count)

    def keeps_cap(self, pairs: Pairs, choice: Choice, back: np.ndarray | None) -> np.ndarray | bool:
        """Whether the second weight allows swapping each query's row for `back`, bool `(q,)`; None for a move."""
        if self._cap is None or self._held is None:
            return True
        taken = self._cap.weights[choice.row]
        if back is not None:
            taken = taken - self._cap.weights[back]
        heavy, light = self._held[pairs.heavy][choice.pair], self._held[pairs.light][choice.pair]
        return (heavy - taken <= self._cap.limit) & (light + taken <= self._cap.limit)

    def apply(self, heavy: np.ndarray, light: np.ndarray, row: np.ndarray, back: np.ndarray) -> None:
        """Give `row` from `heavy` to `light` and `back`, unless `NO_ROW`, the other way; all partitions differ."""
        swapped = back != NO_ROW
        self.parts[row] = light
        self.parts[back[swapped]] = heavy[swapped]
        taken = self.weights[row] - np.where(swapped, self.weights[back], 0)
        self.loads[heavy] -= taken
        self.loads[light] += taken
        self.counts[heavy[~swapped]] -= 1
        self.counts[light[~swapped]] += 1
        if self._cap is not None and self._held is not None:
            taken = self._cap.weights[row] - np.where(swapped, self._cap.weights[back], 0)
            self._held[heavy] -= taken
            self._held[light] += taken


class Choice:
    """Every row of every heavy partition against every partition it is paired with: `q` queries.

    Attributes:
        pair: int64 `(q,)`, which pair the query is about.
        row: int64 `(q,)`, the row that would leave the heavy partition.
        weight: int64 `(q,)`, its weight.
        first: int64 `(h,)`, where the queries of each heavy partition begin.

    """

    def __init__(self, plan: WorkingPartition, pairs: Pairs) -> None:
        num_rows = len(plan.parts)
        self._num_rows = num_rows
        self._weights = plan.weights
        # Partition · n + row: sorted, the rows of each partition lie together, heaviest first, and can be searched.
        self._keys = np.sort(plan.parts * num_rows + np.arange(num_rows))
        self._rows = self._keys % num_rows
        end = np.cumsum(plan.counts)
        start = end - plan.counts
        sizes = plan.counts[pairs.heavy]
        offset = np.cumsum(sizes) - sizes
        self.pair = np.repeat(np.arange(len(sizes)), sizes)
        self.row = self._rows[np.arange(len(self.pair)) + (start[pairs.heavy] - offset)[self.pair]]
        self.weight = plan.weights[self.row]
        self.first = offset[pairs.first]
        self._light = pairs.light[self.pair]
        self._start, self._end = start[self._light], end[self._light]

    def partners(self, threshold: np.ndarray, offsets: range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows of the light partition next to the first one that weighs less than `threshold` `(q,)`.

        Yields, for each of `offsets` from that row, the rows `(q,)` and where there is such a row `(q,)`.
        """
        # Weights descend; their negatives ascend and can be searched.
        below = np.searchsorted(-self._weights, -threshold, side="right")
        place = np.searchsorted(self._keys, self._light * self._num_rows + below)
        for offset in offsets:
            at = place + offset
            exists = (at >= self._start) & (at < self._end)
            yield self._rows[np.where(exists, at, 0)], exists


def _held(parts: np.ndarray, weights: np.ndarray, num_parts: int, base: np.ndarray | None) -> np.ndarray:
    held = sum_by_rank(parts, weights, num_parts)
    return held if base is None else held + base


def first_best(score: np.ndarray, first: np.ndarray) -> np.ndarray:
    """For each segment that begins at `first`, the index of its first largest `score`."""
    largest = np.maximum.reduceat(score, first)
    sizes = np.diff(first, append=len(score))
    hits = np.flatnonzero(score == np.repeat(largest, sizes))
    return hits[np.searchsorted(hits, first)]
