"""Lower bounds: what no plan can beat, so that every plan can say how near the optimum it is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commons.perf_model.partitioner.problem import INT64_MAX, Limits


class Split(NamedTuple):
    """Where the counting bound is attained: `num_parts` partitions that must hold `num_top` of the heaviest rows.

    A plan that meets the bound gives these partitions the lightest rows that they can have: the rows
    `[end_top - num_top, end_top)` and the `num_fill` last ones.
    """

    num_parts: int
    end_top: int
    num_top: int
    num_fill: int


def counting_bound(weights: np.ndarray, num_parts: int, limits: Limits) -> tuple[int, Split | None]:
    """The best of the mean load and the counting bound.

    Look at the `T` heaviest rows, `T = q·k + m` with `0 < m < k`. However they are dealt, the rows beyond `q` in each
    partition are at least `m` in all. So for some `e`, either a partition has `q+3` of them, or `e` partitions have
    `q+2` and `m−2e` others `q+1`. These partitions also have to be filled up to `min_count` rows. The mean load of
    such a group is at least that of the lightest rows it can be made of, and its largest load is at least the mean.
    The bound is the smallest over the cases, the largest over all `T`. `T = 1` is the heaviest row with the lightest
    fillers.

    Args:
        weights: int64 `(n,)`, descending.
        num_parts: `k`.
        limits: fewest and most rows per partition.

    Returns:
        The bound, and the split that attains it; None where that is the mean load.

    """
    min_count, max_count = limits
    num_rows = len(weights)
    sums = np.zeros(num_rows + 1, np.int64)
    np.cumsum(weights, out=sums[1:])
    bound = -(-int(sums[-1]) // num_parts)
    tops = np.arange(1, num_rows + 1)
    quotient, remainder = np.divmod(tops, num_parts)
    group = _Groups(sums, tops, quotient, remainder, min_count).where(remainder > 0)
    if len(group.tops) == 0:
        return bound, None

    # Every case bounds its T from above, so that few T need all cases. The first case alone rules most of them out.
    ceiling = group.mean_load(0 * group.tops)
    group, ceiling = group.where(ceiling > bound), ceiling[ceiling > bound]
    has_two = group.quotient + 2 <= np.minimum(max_count, group.tops)
    for extra in (group.remainder // 2, group.remainder // 4):
        ceiling = np.minimum(ceiling, group.mean_load(np.where(has_two, extra, 0)))
    has_three = group.quotient + 3 <= np.minimum(max_count, group.tops)
    three = np.where(has_three, group.load_of_one(3), INT64_MAX)
    ceiling = np.minimum(ceiling, three)

    split = None
    for index in np.argsort(-ceiling, kind="stable").tolist():
        if ceiling[index] <= bound:
            break
        most_extra = (int(group.remainder[index]) + 1) // 2 if has_two[index] else 0
        case = group.at(index, most_extra)
        extra = np.arange(most_extra + 1)
        loads = case.mean_load(extra)
        best = int(loads.argmin())
        value = min(int(loads[best]), int(three[index]))
        if value > bound:
            bound = value
            num_parts_in_split, num_top, num_fill = (int(each[best]) for each in case.make_up(extra))
            split = Split(num_parts_in_split, int(group.tops[index]), num_top, num_fill)
    return bound, split


class _Groups(NamedTuple):
    """One candidate `T` per entry; prefix sums of the weights are shared."""

    sums: np.ndarray  # (n + 1,)
    tops: np.ndarray
    quotient: np.ndarray
    remainder: np.ndarray
    min_count: int

    def where(self, mask: np.ndarray) -> _Groups:
        return self._replace(tops=self.tops[mask], quotient=self.quotient[mask], remainder=self.remainder[mask])

    def at(self, index: int, most_extra: int) -> _Groups:
        """The candidate at `index`, once for each number of partitions with one more row."""
        repeat = np.full(most_extra + 1, index)
        return self._replace(tops=self.tops[repeat], quotient=self.quotient[repeat], remainder=self.remainder[repeat])

    def make_up(self, extra: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number of partitions, top rows and fillers if `extra` partitions hold `q+2` top rows."""
        single = np.maximum(self.remainder - 2 * extra, 0)
        num_top = (self.quotient + 2) * extra + (self.quotient + 1) * single
        num_fill = (
            np.maximum(self.min_count - self.quotient - 2, 0) * extra
            + np.maximum(self.min_count - self.quotient - 1, 0) * single
        )
        return extra + single, num_top, num_fill

    def mean_load(self, extra: np.ndarray) -> np.ndarray:
        """Least mean load of the group, rounded up; INT64_MAX where there are too few top rows for it."""
        num_parts, num_top, num_fill = self.make_up(extra)
        return np.where(num_top <= self.tops, -(-self._lightest(num_top, num_fill) // num_parts), INT64_MAX)

    def load_of_one(self, beyond: int) -> np.ndarray:
        """Least load of one partition with `q + beyond` top rows."""
        num_top = self.quotient + beyond
        return self._lightest(num_top, np.maximum(self.min_count - num_top, 0))

    def _lightest(self, num_top: np.ndarray, num_fill: np.ndarray) -> np.ndarray:
        top = self.sums[self.tops] - self.sums[np.maximum(self.tops - num_top, 0)]
        return top + (self.sums[-1] - self.sums[len(self.sums) - 1 - num_fill])
