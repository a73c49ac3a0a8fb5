"""First-fit decreasing: every row, heaviest first, goes into the first group that has room for it.

Johnson, Demers, Ullman, Garey and Graham, "Worst-case performance bounds for simple one-dimensional packing
algorithms", SIAM J. Comput. 3 (1974): at most 11/9 of the fewest groups, and a constant. With a given number of groups
it becomes MULTIFIT: Coffman, Garey and Johnson, "An application of bin-packing to multiprocessor scheduling", SIAM J.
Comput. 7 (1978).
"""

from __future__ import annotations

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.lpt import lpt
from commons.perf_model.partitioner.problem import Limits


def first_fit(weights: np.ndarray, capacity: int) -> np.ndarray:
    """Pack rows into as many groups as it takes. O(n log n).

    Args:
        weights: int64 `(n,)`, descending, none above the capacity.
        capacity: what a group may hold.

    Returns:
        int64 `(n,)`, the group of each row; groups are numbered as they are opened.

    """
    # A tree over the room of n groups: every node has the most room among those below it.
    size = 1 << (len(weights) - 1).bit_length()
    room = [capacity] * (2 * size)
    groups = []
    for weight in weights.tolist():
        node = 1
        while node < size:
            node *= 2
            if room[node] < weight:
                node += 1
        groups.append(node - size)
        most = room[node] = room[node] - weight
        while node > 1:
            if room[node ^ 1] > most:
                most = room[node ^ 1]
            node >>= 1
            if room[node] == most:
                break
            room[node] = most
    return np.array(groups, np.int64)


def first_fit_equal(weights: np.ndarray, capacity: int, num_groups: int) -> np.ndarray | None:
    """Pack rows into `num_groups` groups whose sizes differ by one at most. O(n·k).

    Args:
        weights: int64 `(n,)`, descending.
        capacity: what a group may hold.
        num_groups: groups, at most n.

    Returns:
        int64 `(n,)`, the group of each row; None if a row finds no group with room for it.

    """
    size, num_larger = divmod(len(weights), num_groups)
    room, counts, groups = [capacity] * num_groups, [0] * num_groups, []
    not_full = list(range(num_groups))
    for weight in weights.tolist():
        group = next((each for each in not_full if weight <= room[each]), None)
        if group is None:
            return None
        groups.append(group)
        room[group] -= weight
        counts[group] += 1
        if counts[group] > size:
            num_larger -= 1
            not_full.remove(group)
            if num_larger == 0:
                not_full = [each for each in not_full if counts[each] < size]
        elif counts[group] == size and num_larger == 0:
            not_full.remove(group)
    return np.array(groups, np.int64)


def multifit(weights: np.ndarray, capacity: int, num_groups: int) -> np.ndarray:
    """Pack rows into exactly `num_groups` groups: first fit under the least capacity for which these are enough.

    O(n log n · log capacity).

    Args:
        weights: int64 `(n,)`, descending, none above the capacity; first fit needs `num_groups` for them at most.
        capacity: what a group may hold.
        num_groups: groups, at most n.

    Returns:
        int64 `(n,)`, the group of each row; no group is empty.

    """
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
    """Halve the heaviest group that has two rows, until there are `num_groups`.

    Args:
        weights: int64 `(n,)`, descending.
        groups: int64 `(n,)`, the group of each row; empty ones are left out.
        num_groups: groups in the end, at most n.

    Returns:
        int64 `(n,)`, the group of each row; no load is larger than before.

    """
    counts = np.bincount(groups)
    groups = (np.cumsum(counts > 0) - 1)[groups]
    for new in range(int(np.count_nonzero(counts)), num_groups):
        loads, counts = sum_by_rank(groups, weights, new), np.bincount(groups, minlength=new)
        heaviest = int(np.where(counts > 1, loads, -1).argmax())
        rows = np.flatnonzero(groups == heaviest)
        halves = lpt(weights[rows], 2, Limits(0, len(rows)))
        groups[rows[halves == 1]] = new
    return groups
