"""Karmarkar-Karp: the largest differencing method.

A state is a tentative plan of a few rows into `k` sets. The two states with the largest spread (largest set − smallest
set) are merged, the largest set of one with the smallest of the other and so on, until one state is left. Among equal
spreads the older state goes first, and equal sums keep their places.

Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD 82/113 (1982); for equal sizes, Michiels,
Korst, Aarts and van Leeuwen, "Performance ratios for the differencing method applied to the balanced number
partitioning problem" (2003).
"""

from __future__ import annotations

import heapq
from bisect import insort_right
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

State = TypeVar("State")


def differencing(weights: np.ndarray, num_parts: int, equal_size: bool) -> np.ndarray:
    """Largest differencing.

    Args:
        weights: int64 `(n,)`, descending.
        num_parts: number of partitions.
        equal_size: whether the sizes of partitions may differ by one at most.

    Returns:
        int64 `(n,)`, the partition of each row; the heaviest partition is 0.

    """
    return _equal_sizes(weights, num_parts) if equal_size else _free_sizes(weights, num_parts)


def _merge_all(states: list[State], spread: Callable[[State], int], merge: Callable[[State, State], State]) -> State:
    # Ages differ, so the heap never compares states.
    heap = [(-spread(state), age, state) for age, state in enumerate(states)]
    heapq.heapify(heap)
    for age in range(len(states), 2 * len(states) - 1):
        left, right = heapq.heappop(heap)[2], heap[0][2]
        merged = merge(left, right)
        heapq.heapreplace(heap, (-spread(merged), age, merged))
    return heap[0][2]


class _Block(NamedTuple):
    """A state that has the same number of rows in each set.

    Attributes:
        sums: int64 `(k,)`, descending.
        first_row: of `k` consecutive rows, one in each set; if it was not merged.
        left, right, slots: what it was merged from, and the place that each set had before sorting.

    """

    sums: np.ndarray
    first_row: int = 0
    left: _Block | None = None
    right: _Block | None = None
    slots: np.ndarray | None = None


def _equal_sizes(weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Merge the blocks of `k` consecutive rows, padded by rows of nothing: a partition has one row of each block."""
    num_rows = len(weights)
    padded = np.zeros(-(-num_rows // num_parts) * num_parts, np.int64)
    padded[:num_rows] = weights
    if len(padded) == 0:
        return padded

    def merge(left: _Block, right: _Block) -> _Block:
        sums = left.sums + right.sums[::-1]
        slots = np.argsort(-sums, kind="stable")
        return _Block(sums[slots], left=left, right=right, slots=slots)

    blocks = [_Block(padded[first : first + num_parts], first) for first in range(0, len(padded), num_parts)]
    root = _merge_all(blocks, lambda block: int(block.sums[0] - block.sums[-1]), merge)

    # Down again from the last merge to the rows, with what partition each set has become.
    parts = np.empty(len(padded), np.int64)
    stack = [(root, np.arange(num_parts))]
    while stack:
        block, names = stack.pop()
        if block.left is None or block.right is None:
            parts[block.first_row : block.first_row + num_parts] = names
        else:
            by_slot = np.empty_like(names)
            by_slot[block.slots] = names
            stack += [(block.left, by_slot), (block.right, by_slot[::-1])]
    return parts[:num_rows]


# A set of rows: minus its sum, and its first row, from which the others are linked.
_Set = tuple[int, int]
_EMPTY = (0, -1)
_minus_sum = itemgetter(0)


def _free_sizes(weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Merge the rows that are not zero; zero rows change no sum and go where the fewest rows are.

    A state is the list of its sets that are not empty, heaviest first.
    """
    num_positive = int(np.count_nonzero(weights))
    following = [-1] * num_positive
    last = list(range(num_positive))  # of the set that begins at a row

    def join(one: _Set, other: _Set) -> _Set:
        if one[1] < 0:
            return other
        following[last[one[1]]] = other[1]
        last[one[1]] = last[other[1]]
        return one[0] + other[0], one[1]

    def merge(left: list[_Set], right: list[_Set]) -> list[_Set]:
        overlap = len(left) + len(right) - num_parts
        if overlap <= 0:
            left += right[::-1]
            left.sort(key=_minus_sum)
        elif len(right) == 1:
            insort_right(left, join(left.pop(), right[0]), key=_minus_sum)
        else:
            left += [_EMPTY] * (num_parts - len(left))
            for place, other in enumerate(right, start=1):
                left[-place] = join(left[-place], other)
            left.sort(key=_minus_sum)
        return left

    def spread(state: list[_Set]) -> int:
        return (state[-1][0] if len(state) == num_parts else 0) - state[0][0]

    parts = np.empty(len(weights), np.int64)
    counts = [0] * num_parts
    states: list[list[_Set]] = [[(-weight, row)] for row, weight in enumerate(weights[:num_positive].tolist())]
    root = _merge_all(states, spread, merge) if states else []
    for part, (_, row) in enumerate(root):
        while row >= 0:
            parts[row] = part
            counts[part] += 1
            row = following[row]
    fewest = [(count, part) for part, count in enumerate(counts)]
    heapq.heapify(fewest)
    for row in range(num_positive, len(weights)):
        count, part = fewest[0]
        parts[row] = part
        heapq.heapreplace(fewest, (count + 1, part))
    return parts
