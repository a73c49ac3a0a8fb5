"""The Martello–Toth L2 bound: groups that no packing can do without."""

from __future__ import annotations

import numpy as np


def l2_bound(weights: np.ndarray, capacity: int) -> int:
    """Fewest groups of `capacity` that could hold `weights`, as far as this bound can tell.

    Leave out the rows lighter than some α. Rows above C ÷ 2 need a group each; of these, rows above C − α share theirs
    with no row that is left. What the light rows from α on weigh beyond the free space beside the others needs
    further groups. The bound is the largest over α: 0 and every weight up to C ÷ 2. O(n log n).

    Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem", Discrete Applied
    Mathematics 28 (1990); its value is at least ⅔ of the fewest groups.

    Args:
        weights: int64 `(n,)`, descending, none above the capacity; their sum is at most `MOST_LOAD`.
        capacity: what a group may hold.

    Returns:
        At least 1.

    """
    capacity = min(capacity, max(1, int(weights.sum())))
    sums = np.zeros(len(weights) + 1, np.int64)
    np.cumsum(weights, out=sums[1:])
    num_large = int(np.count_nonzero(weights > capacity // 2))
    alphas = np.append(weights[num_large:], 0)
    ascending = -weights
    num_alone = np.minimum(np.searchsorted(ascending, alphas - capacity, side="left"), num_large)
    num_kept = np.searchsorted(ascending, -alphas, side="right")
    light = sums[num_kept] - sums[num_large]
    # Room beside the large rows is only counted where there are such rows, each above C ÷ 2: it is below their sum.
    free = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
    beyond = int((light - free).max())
    return max(1, num_large + max(0, -(-beyond // capacity)))
