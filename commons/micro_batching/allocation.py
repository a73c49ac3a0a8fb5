"""Allocators: rows into groups, none of which holds more than a capacity.

All of them keep the same rules, in this order: no group above the capacity; no group empty, every row in one; at least
`min_groups` groups, a multiple of `n_groups_divisor` in number; with `equal_size`, sizes that differ by one at most. An
algorithm that finds nothing within these rules hands over to "refined"; only where that finds nothing either is there
an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commons.checks import as_count
from commons.micro_batching.fewest_groups import PackingProblem, fewest_groups, groups_of, in_order
from commons.micro_batching.first_fit import l2_bound
from commons.perf_model.partitioner.inputs import INT64_MAX, as_int64_workloads
from commons.perf_model.partitioner.padded import padded_groups

AllocateFn = Callable[..., list[list[int]]]

# Values above the capacity that an error names.
_NAMED = 5


def ffd_allocate(
    values: Any, capacity: int, min_groups: int = 1, n_groups_divisor: int = 1, *, equal_size: bool = False
) -> list[list[int]]:
    """First-fit decreasing: the next heaviest row goes into the first group that has room for it.

    Where `min_groups` or the divisor ask for more groups than that takes, the capacity is lowered for first fit until
    it takes as many (MULTIFIT), which also makes the groups more even. With `equal_size`, groups that have their number
    of rows are passed over, and one more group is tried until every row has found one.

    Takes O(n log n), for further groups O(n log n · log capacity), with `equal_size` O(n·k) for each number of groups
    that is tried. At most 11/9 of the fewest groups, and a constant; their loads are uneven.

    Args:
        values: what each row takes up, such as its tokens: list, array or CPU tensor `(n,)` of non-negative integers.
        capacity: most that the values of a group may add up to, at least 1.
        min_groups: fewest groups.
        n_groups_divisor: the number of groups is a multiple of it.
        equal_size: the groups' numbers of rows differ by one at most. Rows that the groups do not divide are no error,
            as they are in AReaL.

    Returns:
        Lists that hold every index once, ascending; no list is empty. The heaviest group comes first, of equally heavy
        ones that with the smallest index.

    Raises:
        ValueError: no values; values that are negative, no integers or above the capacity, which are named; or groups
            that cannot be made, and why.

    Examples:
        >>> ffd_allocate([7, 5, 4, 4, 3, 1], capacity=16)  # loads 16 and 8
        [[0, 1, 2], [3, 4, 5]]
        >>> ffd_allocate([7, 5, 4, 4, 3, 1], capacity=16, n_groups_divisor=4)
        [[0], [2, 4], [1, 5], [3]]
    """
    return _allocate("ffd", values, capacity, min_groups, n_groups_divisor, equal_size)


def kk_allocate(
    values: Any, capacity: int, min_groups: int = 1, n_groups_divisor: int = 1, *, equal_size: bool = False
) -> list[list[int]]:
    """Karmarkar-Karp: largest differencing into the fewest groups whose loads all keep the capacity.

    From the lower bound of their number on, each number of groups is tried. The loads come out even; because
    differencing does not see the capacity, it may take more groups than first fit.

    Takes O(n log n + n·k log k) for each number of groups that is tried.

    Args, Returns, Raises: as `ffd_allocate`.

    Examples:
        >>> kk_allocate([7, 5, 4, 4, 3, 1], capacity=16)  # loads 12 and 12
        [[0, 3, 5], [1, 2, 4]]
    """
    return _allocate("kk", values, capacity, min_groups, n_groups_divisor, equal_size)


def refined_allocate(
    values: Any, capacity: int, min_groups: int = 1, n_groups_divisor: int = 1, *, equal_size: bool = False
) -> list[list[int]]:
    """Fewest groups first, then the least spread of their loads.

    The number of groups begins at the larger of `min_groups` and the Martello–Toth L2 bound, rounded up to the divisor.
    For it the planner's "refined" is tried, then first fit, Karmarkar-Karp, minimum bin slack, and packing a few groups
    anew again and again. In the end swaps narrow the spread. The next number of groups is tried only if nothing keeps
    the capacity, so there are never more groups than from "ffd" or "kk".

    For each number of groups that is tried: O(n log n + n·k log k) for the plans, O(n log n) for each of the swaps, of
    which there are mostly fewer than k, and where only a search can tell, O(n·k) for it.

    Args, Returns, Raises: as `ffd_allocate`.

    Examples:
        >>> refined_allocate([8, 7, 6, 5, 4], capacity=15)  # Karmarkar-Karp's 16 and 14 would need a third group
        [[0, 1], [2, 3, 4]]
    """
    return _allocate("refined", values, capacity, min_groups, n_groups_divisor, equal_size)


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
    return groups_of(padded_groups(workloads, num_groups=num_groups, max_cost=max_cost))


ALLOCATORS: dict[str, AllocateFn] = {"ffd": ffd_allocate, "kk": kk_allocate, "refined": refined_allocate}


def get_allocate_fn(algorithm: str = "ffd") -> AllocateFn:
    """The allocator of this name: "ffd", "kk" or "refined".

    Raises:
        ValueError: an unknown name; lists the names.

    Examples:
        >>> get_allocate_fn().__name__, get_allocate_fn("refined").__name__
        ('ffd_allocate', 'refined_allocate')
    """
    if not isinstance(algorithm, str) or algorithm not in ALLOCATORS:
        names = ", ".join(map(repr, ALLOCATORS))
        raise ValueError(f"packing_algorithm is {algorithm!r}; it must be one of {names}: choose one of these")
    return ALLOCATORS[algorithm]


def _allocate(
    algorithm: str, values: Any, capacity: int, min_groups: int, n_groups_divisor: int, equal_size: bool
) -> list[list[int]]:
    array = as_int64_workloads(values, "values")
    capacity = min(as_count(capacity, "capacity", 1), INT64_MAX)
    min_groups, divisor = as_count(min_groups, "min_groups", 1), as_count(n_groups_divisor, "n_groups_divisor", 1)
    _require_rows(len(array), min_groups, divisor)
    _require_room(array, capacity)
    order = np.argsort(-array, kind="stable")
    problem = PackingProblem(array[order], capacity, min_groups, divisor, bool(equal_size))
    parts = fewest_groups(problem, algorithm)
    if parts is None:
        raise _no_groups(problem)
    return groups_of(in_order(parts[np.argsort(order)], array))


def _require_rows(num_rows: int, min_groups: int, divisor: int) -> None:
    if num_rows == 0:
        raise ValueError("values is empty; a packing has at least one row: leave out empty batches")
    for name, count in (("min_groups", min_groups), ("n_groups_divisor", divisor)):
        if count > num_rows:
            raise ValueError(f"{name} is {count}, there are {num_rows} rows; every group has a row: lower {name}")


def _require_room(values: np.ndarray, capacity: int) -> None:
    too_large = np.flatnonzero(values > capacity)
    if len(too_large) == 0:
        return
    named = [f"values[{index}] = {values[index]}" for index in too_large[:_NAMED]]
    if len(too_large) == 1:
        what = f"{named[0]} is above the capacity {capacity}"
    else:
        more = ", …" if len(too_large) > _NAMED else ""
        what = f"{len(too_large)} of {len(values)} values are above the capacity {capacity} ({', '.join(named)}{more})"
    raise ValueError(f"{what}; a row is never split: raise the capacity, or truncate or drop such rows")


def _no_groups(problem: PackingProblem) -> ValueError:
    weights, capacity, divisor, most = problem.weights, problem.capacity, problem.divisor, problem.most_groups
    fewest = l2_bound(weights, capacity)
    remedy = "lower n_groups_divisor, raise the capacity or bring more rows"
    if problem.round_up(fewest) > most:
        why = f"{int(weights.sum())} in {len(weights)} values" if fewest >= problem.min_groups else "min_groups"
        return ValueError(
            f"{max(fewest, problem.min_groups)} groups are needed (for {why}, capacity {capacity}), the next multiple "
            f"of n_groups_divisor {divisor} is {problem.round_up(fewest)}, there are {len(weights)} rows; every group "
            f"has a row: {remedy}"
        )
    equal, reason = "", "no packing was found"
    if problem.equal_size:
        # More than half as many groups as rows, so these have one row or two; the lightest rows make the best pairs.
        # Fewer groups cannot do better: halved, they would be as many.
        num_pairs = len(weights) - most
        lightest = weights[len(weights) - 2 * num_pairs :]
        heaviest_pair = int((lightest + lightest[::-1]).max())
        equal = " of equal size"
        reason = f"{num_pairs} groups have two rows, and one of these holds at least {heaviest_pair}"
    return ValueError(
        f"{len(weights)} rows do not fit {most} groups{equal}, the most that n_groups_divisor {divisor} allows, under "
        f"capacity {capacity}: {reason}; {remedy}"
    )
