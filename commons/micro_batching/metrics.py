"""Measures of a packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commons.checks import as_count
from commons.micro_batching.fewest_groups import group_of_each
from commons.micro_batching.first_fit import l2_bound
from commons.perf_model.loads import imbalance, sum_by_rank
from commons.perf_model.partitioner.inputs import as_int64_workloads


def packing_metrics(
    values: Any,
    groups: Sequence[Sequence[int]],
    capacity: int,
    seconds: float | None = None,
    *,
    costs_of_ranks: Any = None,
) -> dict[str, Any]:
    """Measure a packing.

    | name             | what it is                                                                      | better is |
    | ---------------- | ------------------------------------------------------------------------------- | --------- |
    | n_groups         | number of groups                                                                | smaller   |
    | group_sums       | load of each group, the sum of its values, in the order of `groups`             |           |
    | max_load         | largest load                                                                    | smaller   |
    | min_load         | smallest load                                                                   | larger    |
    | mean_load        | mean load                                                                       |           |
    | spread           | max_load − min_load                                                             | smaller   |
    | imbalance_ratio  | spread ÷ mean_load; 0.0 without load                                            | smaller   |
    | std_dev          | population standard deviation of the loads (divided by n_groups)                | smaller   |
    | cv               | std_dev ÷ mean_load, the coefficient of variation; 0.0 without load             | smaller   |
    | max_load_ratio   | max_load ÷ mean_load: how much longer the slowest takes; 1.0 without load       | nearer 1  |
    | utilization      | sum of the values ÷ (n_groups · capacity)                                       | nearer 1  |
    | wasted_tokens    | room left in the groups: the sum of capacity − load, where that is positive     | smaller   |
    | lower_bound      | Martello–Toth L2 bound of n_groups: no packing of these values has fewer groups |           |
    | seconds          | the argument `seconds`, the time that the packing took; missing if not given    | smaller   |
    | rank_load_ratios | for each group the largest cost of a rank ÷ the ranks' mean; 1.0 without cost   | nearer 1  |
    | sum_of_largest   | sum of these: the cost of a step if ranks synchronise after every micro-batch   | smaller   |

    The last two are missing without `costs_of_ranks`.

    Args:
        values: size of each row, list, array or CPU tensor `(n,)` of non-negative integers.
        groups: indices of the rows in each group; every row in exactly one group.
        capacity: largest allowed load of a group, at least 1; a packing that exceeds it is measured too.
        seconds: time that the packing took.
        costs_of_ranks: cost of each micro-batch of each rank, non-negative integers `(ranks, n_groups)`; None if
            unknown.

    Returns:
        Python numbers, and lists for `group_sums` and `rank_load_ratios`.

    Raises:
        ValueError: no values or groups, values that are negative or no integers, a capacity below 1, groups that do
            not contain every index once, or costs for another number of groups.

    Examples:
        >>> metrics = packing_metrics([7, 5, 4, 4], [[0, 1], [2, 3]], capacity=14)
        >>> metrics["spread"], metrics["mean_load"], metrics["wasted_tokens"], metrics["lower_bound"]
        (4, 10.0, 8, 2)
    """
    array = as_int64_workloads(values, "values")
    capacity = as_count(capacity, "capacity", 1)
    loads = sum_by_rank(_group_of_each(groups, len(array)), array, len(groups))
    total, num_groups = int(array.sum()), len(groups)
    largest, smallest, mean = int(loads.max()), int(loads.min()), total / num_groups
    deviation = float(np.std(loads))
    metrics: dict[str, Any] = {
        "n_groups": num_groups,
        "group_sums": loads.tolist(),
        "max_load": largest,
        "min_load": smallest,
        "mean_load": mean,
        "spread": largest - smallest,
        "imbalance_ratio": (largest - smallest) / mean if total else 0.0,
        "std_dev": deviation,
        "cv": deviation / mean if total else 0.0,
        "max_load_ratio": largest / mean if total else 1.0,
        "utilization": total / (num_groups * capacity),
        "wasted_tokens": sum(max(0, capacity - load) for load in loads.tolist()),
        "lower_bound": l2_bound(np.sort(array)[::-1], max(capacity, int(array.max()))),
    }
    if seconds is not None:
        metrics["seconds"] = float(seconds)
    if costs_of_ranks is not None:
        metrics |= _over_ranks(costs_of_ranks, num_groups)
    return metrics


def _over_ranks(costs_of_ranks: Any, num_groups: int) -> dict[str, Any]:
    costs = np.asarray(costs_of_ranks)
    if costs.ndim != 2 or len(costs) == 0 or costs.shape[1] != num_groups:
        raise ValueError(
            f"costs_of_ranks have shape {costs.shape}, there are {num_groups} groups; they are `(ranks, n_groups)`: "
            "pass the costs of every rank's micro-batches"
        )
    costs = as_int64_workloads(costs.reshape(-1), "costs_of_ranks").reshape(costs.shape)
    return {
        "rank_load_ratios": [1 + imbalance(of_group) for of_group in costs.T],
        "sum_of_largest": int(costs.max(axis=0).sum()),
    }


def _group_of_each(groups: Sequence[Sequence[int]], num_rows: int) -> np.ndarray:
    """int64 `(num_rows,)`: the group of each row; ValueError unless every row is in exactly one group."""
    if num_rows == 0 or len(groups) == 0:
        raise ValueError(
            f"there are {num_rows} values in {len(groups)} groups; a packing has at least one of each: give both"
        )
    if np.ndim(groups[0]) != 1:
        raise ValueError(
            f"groups[0] is {groups[0]!r}; it is the list of the rows of a group: pass such lists, which "
            "Partition.groups() returns, not the group of each row"
        )
    flat = np.concatenate([np.asarray(group, np.int64) for group in groups])
    if not np.array_equal(np.sort(flat), np.arange(num_rows)):
        raise ValueError(
            f"groups hold {len(flat)} indices, among them {len(np.intersect1d(flat, np.arange(num_rows)))} of the "
            f"{num_rows} rows; every index in [0, {num_rows}) belongs to exactly one group: correct the groups"
        )
    return group_of_each(groups, num_rows)
