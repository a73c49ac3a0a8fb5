"""Repacking: take a few groups apart and pack their rows anew, again and again, until no group is above the capacity.

A large neighborhood search: Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", CP (1998). Exchanges look at one row on either side; a dozen groups at once have many more ways to fit.
"""

from __future__ import annotations

import numpy as np

from commons.micro_batching.bin_slack import minimum_bin_slack
from commons.micro_batching.first_fit import split_heaviest
from commons.perf_model.partitioner.problem import Limits, load_per_part
from commons.perf_model.partitioner.refinement import refine

# Groups that are packed anew at a time, at most half of them; among them the heaviest and so many of the lightest.
NEIGHBORHOOD = 16
LIGHTEST = 5
# Times that this is done, and at most four times for each group.
MOST_REPACKS = 200


def pack_under(weights: np.ndarray, num_groups: int, capacity: int) -> np.ndarray | None:
    """Pack rows into so many groups by minimum bin slack, exchanges, and repacking.

    Args:
        weights: int64 `(n,)`, descending, none above the capacity.
        num_groups: groups, at most n.
        capacity: what a group may hold.

    Returns:
        int64 `(n,)`, the group of each row, none of them empty; None if no packing was found.

    """
    groups = _exchange(weights, minimum_bin_slack(weights, capacity, num_groups), num_groups, capacity)
    if int(load_per_part(weights, groups, num_groups).max()) > capacity:
        groups = repack(weights, groups, num_groups, capacity)
    if int(load_per_part(weights, groups, num_groups).max()) > capacity:
        return None
    without_gaps = np.unique(groups, return_inverse=True)[1]  # filled to the brim, fewer groups may do
    return split_heaviest(weights, without_gaps, num_groups)


def repack(weights: np.ndarray, groups: np.ndarray, num_groups: int, capacity: int) -> np.ndarray:
    """Lower what groups hold above the capacity, in sum.

    Args:
        weights: int64 `(n,)`, descending.
        groups: int64 `(n,)`, the group of each row.
        num_groups: groups.
        capacity: what a group should hold.

    Returns:
        int64 `(n,)`, the group of each row.

    """
    groups = groups.copy()
    if num_groups < 3:
        return groups
    size = min(NEIGHBORHOOD, (num_groups + 1) // 2)
    loads = load_per_part(weights, groups, num_groups)
    turn = 0
    for _ in range(min(MOST_REPACKS, 4 * num_groups)):
        ranked = np.argsort(-loads, kind="stable").tolist()
        if loads[ranked[0]] <= capacity:
            break
        # The heaviest group, the lightest ones, and others in turn.
        picked = [ranked[0], *ranked[: -min(size, LIGHTEST + 1) : -1]]
        while len(picked) < size:
            if turn % num_groups not in picked:
                picked.append(turn % num_groups)
            turn += 1
        rows = np.flatnonzero(np.isin(groups, picked))
        parts = _exchange(weights[rows], minimum_bin_slack(weights[rows], capacity, size), size, capacity)
        new_loads = load_per_part(weights[rows], parts, size)
        # Equal is taken too, to come to other rows.
        if _excess(new_loads, capacity) <= _excess(loads[picked], capacity):
            groups[rows] = np.array(picked)[parts]
            loads[picked] = new_loads
    return groups


def _exchange(weights: np.ndarray, groups: np.ndarray, num_groups: int, capacity: int) -> np.ndarray:
    """Exchanges until no load is above the capacity, or as far as they go."""
    return refine(weights, groups, num_groups, Limits.of(len(weights), num_groups, equal_size=False), capacity)


def _excess(loads: np.ndarray, capacity: int) -> int:
    return int((loads - capacity).clip(min=0).sum())
