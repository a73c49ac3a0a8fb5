"""A lower bound of what the steps of a grid take together: the sum over the steps of the largest load."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commons.perf_model.partitioner.bounds import counting_bound
from commons.perf_model.partitioner.problem import Limits


class GridBound(NamedTuple):
    """A lower bound of the sum, and the largest loads that make it up.

    Attributes:
        total: no plan has a smaller sum over the steps of the largest load.
        largest: a largest load per step, heaviest step first; together at most `total`.

    """

    total: int
    largest: list[int]


def grid_bound(weights: np.ndarray, num_ranks: int, num_steps: int, limits: Limits) -> GridBound:
    """Follow the steps of any plan from the one with the largest largest load to the one with the smallest.

    Let `M_1 ≥ M_2 ≥ … ≥ M_T` be these loads, `P_i = M_1 + … + M_i`, and `S_r` the sum of the `r` heaviest rows. `M_1`
    is at least the counting bound for all rows in all `T·W` cells. Now let row `r` be the first (heaviest) that the
    first `i−1` steps do not hold.

    - It is in a later step, so `M_i ≥ w_r`.
    - The first `i−1` steps hold all rows before it, and at least `(i−1)·W·min_count` in all. No cell of step `j` holds
      more than `M_j`, so `W·P_(i−1) ≥ S_r` + the lightest rows that make up this number.
    - They hold at most `c = (i−1)·W·max_count` rows, so `r ≤ c`, and the others hold no less than the rows from `c` on,
      however these are chosen. Of the `q·m + 1` heaviest of these, in the `m = (T−i+1)·W` cells of these steps, some
      cell has `q + 1`, so `M_i` is at least `L_i`, the lightest `q + 1` of them, for the best `q`.

    So from any lower bound `P` of `P_(i−1)`, `P_i ≥ max(P, ⌈(S_r + fillers) / W⌉) + max(w_r, L_i)` for some `r`, and
    the smallest over all `r` is a lower bound of `P_i`. And for every `i` the steps after the first `i` hold what the
    `i·W·max_count` heaviest rows leave over, so the sum is at least `P_i + ⌈rest / W⌉`. The best over all `i` counts;
    `i = 0` is the mean load, `i = T` the last `P_i`.

    Args:
        weights: int64 `(n,)`, descending, at least one.
        num_ranks: `W`.
        num_steps: `T`.
        limits: fewest and most rows per cell.

    """
    num_rows = len(weights)
    sums = np.zeros(num_rows + 1, np.int64)
    np.cumsum(weights, out=sums[1:])
    first_left = np.append(weights, 0)
    total = int(sums[-1])
    reached, _ = counting_bound(weights, num_ranks * num_steps, limits)
    largest = [reached]
    best = max(reached, -(-total // num_ranks))
    for step in range(1, num_steps):
        most_rows = min(step * num_ranks * limits.max_count, num_rows)
        best = max(best, reached - (int(sums[most_rows]) - total) // num_ranks)
        # In one cell q + 1 rows up to and with `last`.
        last = np.arange(most_rows, num_rows, (num_steps - step) * num_ranks)
        least = int((sums[last + 1] - sums[last - np.arange(len(last))]).max(initial=0))
        rows = np.arange(most_rows + 1)
        fillers = np.maximum(step * num_ranks * limits.min_count - rows, 0)
        before = -(-(sums[rows] + total - sums[num_rows - fillers]) // num_ranks)
        load = np.maximum(first_left[rows], least)
        together = np.maximum(before, reached) + load
        at = int(together.argmin())
        reached = int(together[at])
        largest.append(int(load[at]))
    return GridBound(max(best, reached), largest)


def share_out(total: int, largest: list[int]) -> list[int]:
    """A largest load per step, heaviest first: `total` in even shares, but no step below its part of the bound.

    >>> share_out(20, [11, 4, 2])
    [11, 5, 5]

    """
    shares: list[int] = []
    for step, least in enumerate(largest):
        even = -(-total // (len(largest) - step))
        if even >= least:
            return shares + [even] * (len(largest) - step)
        shares.append(least)
        total -= least
    return shares
