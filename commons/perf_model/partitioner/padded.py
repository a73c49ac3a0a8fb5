"""padded_groups: assigns rows to groups that are padded to their longest row."""

from __future__ import annotations

from typing import Any

import numpy as np

from commons.checks import as_count
from commons.perf_model.partitioner import core
from commons.perf_model.partitioner.inputs import INT64_MAX, as_int64_workloads


def padded_groups(
    workloads: Any,
    *,
    num_groups: int | None = None,
    max_cost: int | None = None,
    max_rows: int | None = None,
    steps: int = 1,
) -> np.ndarray:
    """Assign rows to groups such that the costliest padded group is as cheap as possible.

    In a padded group every row takes as long as the longest one: the group costs its number of rows times its heaviest
    workload. Finds the optimum by bisection over that cost (parametric search; Pınar and Aykanat 2004, "Fast optimal
    load balancing algorithms for 1D partitioning"), in O(n log n + k log(n · heaviest)).

    Args:
        workloads: cost of each row without padding: list, array or CPU tensor `(n,)` of non-negative integers.
        num_groups: number of groups, none of them empty; None for the fewest within `max_cost`.
        max_cost: most that a group may cost.
        max_rows: most rows of a group.
        steps: steps in which the groups are computed, each with `num_groups / steps` consecutive groups. A step takes
            as long as its costliest group. The sum of these costs over the steps is lowered too, but not to its
            minimum: rows move between neighbouring steps as long as no group becomes costlier than the optimum.

    Returns:
        int64 `(n,)`, the group of each row. Groups are contiguous in the rows sorted by workload, heaviest first; of
        equal rows those with the lower index come first.

    Raises:
        ValueError: no rows, neither number nor cost, more groups than rows, a row or groups that `max_cost` or
            `max_rows` do not allow, or padded costs of 2^63 or more.

    Examples:
        >>> padded_groups([8, 1, 7, 2, 2], num_groups=2)  # two rows of 8, three of 2
        array([0, 1, 0, 1, 1])
    """
    weights = as_int64_workloads(workloads)
    largest = int(weights.max(initial=0))
    if len(weights) == 0:
        raise ValueError("there are no rows; a group has at least one row: leave out empty batches")
    if num_groups is None and max_cost is None:
        raise ValueError("num_groups and max_cost are None; one of the two sets how rows are grouped: give one")
    groups = 0 if num_groups is None else as_count(num_groups, "num_groups", 1)
    cost = INT64_MAX if max_cost is None else min(as_count(max_cost, "max_cost", 1), INT64_MAX)
    steps = as_count(steps, "steps", 1)
    if groups % steps or (steps > 1 and not groups):
        raise ValueError(
            f"steps is {steps}, num_groups {num_groups}; all steps have equally many groups: make num_groups a multiple"
        )
    rows = len(weights) if max_rows is None else min(as_count(max_rows, "max_rows", 1), len(weights))
    if groups > len(weights):
        raise ValueError(
            f"num_groups is {groups}, there are {len(weights)} rows; every group has a row: lower num_groups"
        )
    if groups * rows < len(weights) and groups:
        raise ValueError(
            f"num_groups is {groups}, max_rows {rows}; {len(weights)} rows do not fit into these groups: raise one"
        )
    if groups and largest * -(-len(weights) // groups) > INT64_MAX:
        raise ValueError(
            f"the heaviest row costs {largest}, and {groups} groups of {len(weights)} rows have up to "
            f"{-(-len(weights) // groups)} rows; the product must be below 2^63: scale the workloads down"
        )
    if largest > cost:
        raise ValueError(
            f"row {int(weights.argmax())} alone costs {largest}, max_cost is {cost}; a row is never split: raise "
            "max_cost, or truncate the row"
        )
    order = np.argsort(-weights, kind="stable")
    sizes = core.padded_groups(weights[order], groups, cost, rows, steps)
    heaviest = weights[order[np.cumsum(sizes) - sizes]]
    if int((sizes * heaviest).max()) > cost:
        raise ValueError(
            f"num_groups is {groups}, max_cost {cost}; the cheapest {groups} groups cost up to "
            f"{int((sizes * heaviest).max())}: raise one of the two"
        )
    assignment = np.empty(len(weights), np.int64)
    assignment[order] = np.repeat(np.arange(len(sizes)), sizes)
    return assignment
