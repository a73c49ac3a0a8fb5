"""Leveling: swaps of rows that narrow the spread of a packing's loads."""

from __future__ import annotations

import numpy as np

from commons.perf_model.loads import sum_by_rank

# Leveling stops at a spread below mean load ÷ TOLERANCE, as the planner does: step times cannot show less.
TOLERANCE = 10_000
# Most rounds per group.
PATIENCE = 4


def level(weights: np.ndarray, parts: np.ndarray, num_groups: int, *, equal_size: bool) -> np.ndarray:
    """Raise the smallest load, without raising the largest. O(n log n) for each round.

    Each round makes the swap between the lightest group and another group, or the move of a row to the lightest group,
    that brings their loads nearest. Neither load rises above the larger of the two before, so a capacity remains kept.
    `weights` int64 `(n,)` descend; `parts` are the groups of the rows.
    """
    parts, loads = parts.copy(), sum_by_rank(parts, weights, num_groups)
    enough = max(1, int(weights.sum()) // num_groups // TOLERANCE)
    for _ in range(PATIENCE * num_groups):
        group = int(loads.argmin())
        if loads.max() - loads[group] <= enough:
            break
        own = np.flatnonzero(parts == group)
        given = np.append(weights[own], 0)  # what the group gives: one of its rows or, for a move, nothing
        gap = (loads - loads[group])[parts]
        # The best difference of two swapped rows is half the gap. For every row, find the two rows of the group with
        # the nearest differences below and above it; weights descend.
        place = np.searchsorted(-given, gap // 2 - weights)
        at = np.array((np.maximum(place - 1, 0), np.minimum(place, len(own))))  # (2, n)
        taken = weights - given[at]
        gain = np.minimum(taken, gap - taken)  # by this the larger of the two loads falls
        if equal_size:
            sizes = np.bincount(parts, minlength=num_groups)
            gain[(at == len(own)) & (sizes <= sizes[group])[parts]] = 0
        side, row = divmod(int(gain.argmax()), len(parts))
        if gain[side, row] <= 0:
            break
        other, mine = parts[row], at[side, row]
        loads[group] += taken[side, row]
        loads[other] -= taken[side, row]
        parts[own[mine : mine + 1]] = other
        parts[row] = group
    return parts
