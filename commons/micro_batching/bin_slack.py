"""Minimum bin slack: fill one group after the other, each as full as a bounded search can make it.

Gupta and Ho, "A new heuristic algorithm for the one-dimensional bin-packing problem", Production Planning & Control 10
(1999), in the form of Fleszar and Hindi, "New heuristics for one-dimensional bin-packing", Computers & Operations
Research 29 (2002): the heaviest row left begins each group. It packs where rows must nearly fill every group, and first
fit, which looks at one row at a time, leaves gaps.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from commons.perf_model.partitioner.problem import load_per_part

# Rows that the search for one group's best filling looks at.
SEARCH = 200


def minimum_bin_slack(weights: np.ndarray, capacity: int, num_groups: int) -> np.ndarray:
    """Deal rows to `num_groups` groups. O(n · (n + SEARCH)).

    The search for a group ends at a filling that leaves no more room than is left on average: a better one would only
    take the small rows that later groups need. Rows that fit nowhere in the end go to the lightest groups, which then
    are above the capacity: exchanges may still bring these under it.

    Args:
        weights: int64 `(n,)`, descending, none above the capacity.
        capacity: what a group should hold.
        num_groups: groups, at most n.

    Returns:
        int64 `(n,)`, the group of each row.

    """
    groups = np.full(len(weights), -1)
    left = list(range(int(np.count_nonzero(weights))))
    slack = capacity * num_groups - int(weights.sum())
    for group in range(num_groups):
        if not left:
            break
        first, *left = left
        minus = [-int(weights[row]) for row in left]
        chosen = _best_filling(minus, capacity - int(weights[first]), max(0, slack) // (num_groups - group))
        rows = [first, *(left[at] for at in chosen)]
        slack -= capacity - int(weights[rows].sum())
        groups[rows] = group
        for at in reversed(chosen):
            del left[at]
    dealt = groups >= 0
    loads = load_per_part(weights[dealt], groups[dealt], num_groups)
    for row in np.flatnonzero(~dealt).tolist():
        groups[row] = int(loads.argmin())
        loads[groups[row]] += weights[row]
    return groups


def _best_filling(minus: list[int], room: int, enough: int) -> list[int]:
    """Which of the rows leave the least room, ascending; of equal fillings the first in lexicographic order.

    Args:
        minus: the rows' weights, negative so that they ascend and can be searched.
        room: what they have to fit into.
        enough: room at which the search ends.

    """
    best: list[int] = []
    least = room
    chosen: list[int] = []
    looked_at = 0
    at = 0
    while least > enough and looked_at < SEARCH:
        # Depth first: the heaviest row that fits comes next; where none does, the last chosen one is given up.
        at = bisect_left(minus, -room, at)
        if at == len(minus):
            if not chosen:
                break
            last = chosen.pop()
            room -= minus[last]
            # Another row of the same weight would lead to the same fillings.
            at = bisect_left(minus, minus[last] + 1, last)
            continue
        looked_at += 1
        chosen.append(at)
        room += minus[at]
        at += 1
        if room < least:
            best, least = chosen.copy(), room
    return best
