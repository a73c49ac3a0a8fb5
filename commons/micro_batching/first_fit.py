"""First-fit decreasing: every row, heaviest first, goes into the first group that has room for it.

Johnson, Demers, Ullman, Garey and Graham, "Worst-case performance bounds for simple one-dimensional packing
algorithms", SIAM J. Comput. 3 (1974): at most 11/9 of the fewest groups plus a constant. For a given number of groups,
MULTIFIT: Coffman, Garey and Johnson, "An application of bin-packing to multiprocessor scheduling", SIAM J. Comput. 7
(1978).
"""

from __future__ import annotations

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner import partition


class _Rooms:
    """The room of every group, as the leaves of a tree; an inner node stores the largest room below it."""

    def __init__(self, num_groups: int, capacity: int) -> None:
        self._size = 1 << (num_groups - 1).bit_length()
        self._most = [capacity] * (2 * self._size)
        for group in range(num_groups, self._size):
            self.set(group, -1)

    def take(self, weight: int) -> int | None:
        """Put a row into the first group with room for it, and return the group; None if no group has room."""
        most, node = self._most, 1
        if most[1] < weight:
            return None
        while node < self._size:
            node *= 2
            if most[node] < weight:
                node += 1
        group = node - self._size
        self.set(group, most[node] - weight)
        return group

    def set(self, group: int, room: int) -> None:
        """Set the room of a group; −1 closes the group."""
        most, node = self._most, self._size + group
        most[node] = room
        while node > 1:
            if most[node ^ 1] > room:
                room = most[node ^ 1]
            node >>= 1
            if most[node] == room:
                break
            most[node] = room


def first_fit(weights: np.ndarray, capacity: int) -> np.ndarray:
    """int64 `(n,)`, the group of each row; groups are numbered in the order of their first rows. O(n log n).

    In all of this module weights are int64 `(n,)`, descending, and none is above the capacity.
    """
    rooms = _Rooms(len(weights), capacity)
    return np.array([rooms.take(weight) for weight in weights.tolist()], np.int64)


def first_fit_equal(weights: np.ndarray, capacity: int, num_groups: int) -> np.ndarray | None:
    """First fit into groups whose sizes differ by one at most; None if a row fits none. O(n log k)."""
    size, num_larger = divmod(len(weights), num_groups)
    rooms, counts, groups = _Rooms(num_groups, capacity), [0] * num_groups, []
    for weight in weights.tolist():
        group = rooms.take(weight)
        if group is None:
            return None
        groups.append(group)
        counts[group] += 1
        full = [group] if counts[group] > size or (counts[group] == size and num_larger == 0) else []
        if counts[group] > size:
            num_larger -= 1
            if num_larger == 0:
                full = [each for each in range(num_groups) if counts[each] >= size]
        for each in full:
            rooms.set(each, -1)
    return np.array(groups, np.int64)


def multifit(weights: np.ndarray, capacity: int, num_groups: int) -> np.ndarray:
    """First fit under the least capacity for which `num_groups` groups suffice. O(n log n · log capacity)."""
    total = int(weights.sum())
    groups = first_fit(weights, capacity)
    low, high = max(int(weights[0]), -(-total // num_groups)), min(capacity, total)
    while low < high:
        middle = low + (high - low) // 2
        tried = first_fit(weights, middle)
        if int(tried.max()) < num_groups:
            groups, high = tried, middle
        else:
            low = middle + 1
    return split_heaviest(weights, groups, num_groups)


def split_heaviest(weights: np.ndarray, groups: np.ndarray, num_groups: int) -> np.ndarray:
    """Halve the heaviest group of two rows or more until there are `num_groups`; empty groups are removed first."""
    counts = np.bincount(groups)
    groups = (np.cumsum(counts > 0) - 1)[groups]
    for new in range(int(np.count_nonzero(counts)), num_groups):
        loads, counts = sum_by_rank(groups, weights, new), np.bincount(groups, minlength=new)
        heaviest = int(np.where(counts > 1, loads, -1).argmax())
        rows = np.flatnonzero(groups == heaviest)
        halves = partition(weights[rows], 2, method="lpt", equal_size=False).assignment
        groups[rows[halves == 1]] = new
    return groups


def l2_bound(weights: np.ndarray, capacity: int) -> int:
    """A lower bound of the number of groups of `capacity` that can hold `weights`.

    For a threshold α, ignore the rows lighter than α. Each row above C ÷ 2 needs a group of its own, and a group with a
    row above C − α has no room for another row. The other rows fill the free room beside the rows above C ÷ 2; what
    exceeds this room needs further groups. The bound is the largest over α: 0 and every weight up to C ÷ 2. O(n log n).

    Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem", Discrete Applied
    Mathematics 28 (1990); its value is at least ⅔ of the fewest groups.

    Args:
        weights: int64 `(n,)`, descending, none above the capacity; their sum is at most `MOST_LOAD`.
        capacity: largest load of a group.

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
    # No overflow: the free room is at most the sum of the large rows, because each of these is above C ÷ 2.
    free = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
    beyond = int((light - free).max())
    return max(1, num_large + max(0, -(-beyond // capacity)))
