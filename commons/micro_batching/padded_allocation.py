"""padded_allocate: micro-batches of rows that are padded to the longest of their micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commons.perf_model.partitioner.inputs import as_int64_workloads
from commons.perf_model.partitioner.padded import padded_groups


def padded_allocate(
    lengths: Any,
    *,
    num_groups: int | None = None,
    max_cost: int | None = None,
    cost: Callable[[np.ndarray], Any] | None = None,
) -> list[list[int]]:
    """Groups of rows that cost rows × cost(longest), the costliest as cheap as any grouping makes it.

    Rows of like length come together. Without `num_groups` there are as few groups as `max_cost` allows. The search is
    exact; see `padded_groups`.

    Args:
        lengths: tokens of each row: list, array or CPU tensor `(n,)` of non-negative integers.
        num_groups: number of groups, none of which is empty.
        max_cost: most that a group may cost.
        cost: what rows of these lengths cost each, such as a task's `get_workloads`: int64 `(m,)` to integers `(m,)`,
            not negative, and not less for a longer row. Tokens if not given.

    Returns:
        Lists that hold every index once, ascending; the group of the longest rows comes first.

    Raises:
        ValueError: as of `padded_groups`, or a cost that falls with the length.

    Examples:
        >>> padded_allocate([90, 10, 80, 20, 20, 10], num_groups=2)  # 2 × 90 and 4 × 20 tokens
        [[0, 2], [1, 3, 4, 5]]
        >>> padded_allocate([90, 10, 80, 20, 20, 10], max_cost=100)
        [[0], [2], [1, 3, 4, 5]]
    """
    tokens = as_int64_workloads(lengths, "lengths")
    workloads = tokens if cost is None else as_int64_workloads(cost(tokens), "cost(lengths)", len(tokens))
    order = np.argsort(tokens, kind="stable")
    falls = np.flatnonzero(np.diff(workloads[order]) < 0)
    if len(falls):
        shorter, longer = order[falls[0]], order[falls[0] + 1]
        raise ValueError(
            f"cost is {workloads[shorter]} of {tokens[shorter]} tokens and {workloads[longer]} of {tokens[longer]}; a "
            "padded row costs as much as the longest: give a cost that does not fall with the length"
        )
    groups = padded_groups(workloads, num_groups=num_groups, max_cost=max_cost)
    return [np.flatnonzero(groups == group).tolist() for group in range(int(groups.max()) + 1)]
