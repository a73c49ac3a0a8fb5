"""Loads of ranks, partitions or groups: sums, imbalance, and times on ranks of different speeds."""

from __future__ import annotations

import numpy as np

# A rank is slow if the median over this many steps of its time relative to the others' is above this factor.
SLOW, SLOW_STEPS = 1.25, 20


def sum_by_rank(rank: np.ndarray, values: np.ndarray, num_ranks: int) -> np.ndarray:
    """int64 `(num_ranks,)` sums of `values` by `rank`, exact: a float bincount rounds beyond 2^53."""
    totals = np.zeros(num_ranks, np.int64)
    np.add.at(totals, rank, values)
    return totals


def members(numbers: np.ndarray, count: int) -> list[np.ndarray]:
    """The indices of each number 0 … `count` − 1, ascending: one sort, instead of one search for each number.

    >>> [indices.tolist() for indices in members(np.array([2, 0, 2]), 3)]
    [[1], [], [0, 2]]
    """
    small = numbers.astype(np.min_scalar_type(count))  # numpy sorts 16 bits in linear time
    return np.split(np.argsort(small, kind="stable"), np.cumsum(np.bincount(small, minlength=count))[:-1])


def numbered(ids: np.ndarray) -> np.ndarray:
    """Number equal ids, in the order of first appearance, int64 `(rows,)`."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.reshape(-1)]


def fill_empty(parts: np.ndarray, weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Give every empty part the lightest row of a part that has several; the largest load does not grow.

    `parts` is int64 `(n,)`, the part of each row, with n at least `num_parts`.

    >>> fill_empty(np.array([0, 0, 1, 1]), np.array([1, 2, 5, 6]), 4).tolist()
    [2, 0, 3, 1]
    """
    counts = np.bincount(parts, minlength=num_parts)
    if counts.all():
        return parts
    filled = parts.copy()
    lightest_first = iter(np.argsort(weights, kind="stable"))
    for part in np.flatnonzero(counts == 0):
        row = next(row for row in lightest_first if counts[filled[row]] > 1)
        counts[filled[row]] -= 1
        filled[row] = part
    return filled


def imbalance(loads: np.ndarray | list[int], speeds: np.ndarray | None = None) -> float:
    """Largest load divided by the mean, minus 1; 0.0 if there is no load. With speeds, the same for `times_of`.

    Of loads of several steps, ranks last, the sum of the largest loads is divided by that of the means.
    """
    loads = np.asarray(loads)
    total = sum(loads.ravel().tolist())  # Python's integers do not overflow
    largest = sum(np.ravel(times_of(loads, speeds).max(axis=-1, initial=0)).tolist())
    return largest * ranks_of_fastest(loads.shape[-1], speeds) / total - 1.0 if total else 0.0


def times_of(loads: np.ndarray, speeds: np.ndarray | None) -> np.ndarray:
    """Time of each rank, int64 like `loads` (ranks last): the load that the fastest rank does in it, rounded up.

    >>> times_of(np.array([6, 5]), np.array([2, 1])).tolist()
    [6, 10]
    """
    if speeds is None:
        return loads
    products = loads.astype(object) * int(speeds.max())  # up to 92 bits
    return -(-products // speeds.astype(object)).astype(np.int64)


def ranks_of_fastest(num_ranks: int, speeds: np.ndarray | None) -> float:
    """How many ranks of the fastest speed work as much as all ranks together; without speeds, the number of ranks."""
    return num_ranks if speeds is None else int(speeds.sum()) / int(speeds.max())


def median_of_others(values: np.ndarray) -> np.ndarray:
    """For every value the median of the others; at least two values.

    >>> median_of_others(np.array([1.0, 9.0, 3.0])).tolist()
    [6.0, 2.0, 5.0]
    """
    count, order = len(values), np.argsort(values)
    in_order, place = values[order], np.empty_like(order)
    place[order] = np.arange(count)
    lower, upper = (count - 2) // 2, (count - 1) // 2
    return (in_order[lower + (lower >= place)] + in_order[upper + (upper >= place)]) / 2
