"""Allocators: they divide rows into groups under a capacity.

All allocators keep the same rules, in this order: no group is above the capacity; no group is empty, and every row is
in one group; there are at least `min_groups` groups, and their number is a multiple of `n_groups_divisor`; with
`equal_size`, the sizes differ by one at most. If an algorithm finds no such groups, "refined" is tried; if that finds
none either, the allocator raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commons.checks import as_boolean, as_count
from commons.micro_batching.fewest_groups import PackingProblem, fewest_groups, groups_of, in_order
from commons.micro_batching.first_fit import l2_bound
from commons.perf_model.partitioner.inputs import INT64_MAX, as_int64_workloads
from commons.perf_model.partitioner.padded import padded_groups

AllocateFn = Callable[..., list[list[int]]]

# Most values above the capacity that an error lists.
_NAMED = 5


def ffd_allocate(
    values: Any, capacity: int, min_groups: int = 1, n_groups_divisor: int = 1, *, equal_size: bool = False
) -> list[list[int]]:
    """First-fit decreasing: each row, heaviest first, goes into the first group that has room for it.

    If `min_groups` or the divisor requires more groups, first fit runs under a lower capacity that yields their number
    (MULTIFIT), which also makes the groups more even. With `equal_size`, groups that are full by number of rows are
    skipped; if a row fits no group then, "refined" divides the rows into as many groups, and if these exceed the
    capacity, there is one group more.

    Takes O(n log n); with more groups than first fit needs O(n log n · log capacity); with `equal_size` O(n log n) and
    a plan for each number of groups tried. The number of groups is at most 11/9 of the fewest plus a constant; the
    loads are uneven.

    Args:
        values: size of each row, such as its tokens: list, array or CPU tensor `(n,)` of non-negative integers.
        capacity: largest sum of the values of a group, at least 1.
        min_groups: fewest groups.
        n_groups_divisor: the number of groups is a multiple of it.
        equal_size: whether the groups' numbers of rows differ by one at most. Unlike in AReaL, the number of rows need
            not be a multiple of the number of groups.

    Returns:
        Lists of ascending indices, which contain every index once; no list is empty. The heaviest group comes first;
        of equally heavy groups, the group with the smallest index.

    Raises:
        ValueError: no values; values that are negative, no integers or above the capacity (the error names them); or no
            such groups exist (the error explains why).

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

    Each number of groups from the lower bound upwards is tried. The loads are even, but because differencing ignores
    the capacity, it may need more groups than first fit.

    Takes O(n log n + n·k log k) for each number of groups tried.

    Args, Returns, Raises: as `ffd_allocate`.

    Examples:
        >>> kk_allocate([7, 5, 4, 4, 3, 1], capacity=16)  # loads 12 and 12
        [[0, 3, 5], [1, 2, 4]]
    """
    return _allocate("kk", values, capacity, min_groups, n_groups_divisor, equal_size)


def refined_allocate(
    values: Any, capacity: int, min_groups: int = 1, n_groups_divisor: int = 1, *, equal_size: bool = False
) -> list[list[int]]:
    """The fewest groups, and among these the least spread of the loads.

    The number of groups begins at the larger of `min_groups` and the Martello–Toth L2 bound, rounded up to the divisor.
    For each number the planner's "refined", first fit, Karmarkar-Karp, minimum bin slack, and repeated repacking of a
    few groups are tried in turn, until one keeps the capacity; then swaps narrow the spread. The next number of groups
    is tried only if all of these fail, so there are never more groups than from "ffd" or "kk".

    Takes for each number of groups tried O(n log n + n·k log k) for the plans, O(n·k) for repacking where it is
    needed, and O(n log n) for each swap; there are mostly fewer than k swaps.

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
    """Groups of padded rows; a group costs rows × cost(longest), and the costliest group is as cheap as possible.

    A group contains rows of similar length. Without `num_groups` there are as few groups as `max_cost` allows. The
    search is exact; see `padded_groups`.

    Args:
        lengths: tokens of each row: list, array or CPU tensor `(n,)` of non-negative integers.
        num_groups: number of groups, none of which is empty.
        max_cost: largest cost of a group.
        cost: function from lengths int64 `(m,)` to the cost of each row, integers `(m,)`, such as a task's
            `get_workloads`; not negative, and not less for a longer row. None for tokens.

    Returns:
        Lists of ascending indices, which contain every index once; the group of the longest rows comes first.

    Raises:
        ValueError: as `padded_groups`, or a cost that falls with the length.

    Examples:
        >>> padded_allocate([90, 10, 80, 20, 20, 10], num_groups=2)  # 2 × 90 and 4 × 20 tokens
        [[0, 2], [1, 3, 4, 5]]
        >>> padded_allocate([90, 10, 80, 20, 20, 10], max_cost=100)
        [[0], [2], [1, 3, 4, 5]]
    """
    tokens = as_int64_workloads(lengths, "lengths")
    workloads = tokens if cost is None else as_int64_workloads(cost(tokens), "cost(lengths)", len(tokens))
    longest_first = np.argsort(-tokens, kind="stable")
    rises = np.flatnonzero(np.diff(workloads[longest_first]) > 0)
    if len(rises):
        longer, shorter = longest_first[rises[0]], longest_first[rises[0] + 1]
        raise ValueError(
            f"cost is {workloads[shorter]} for {tokens[shorter]} tokens and {workloads[longer]} for {tokens[longer]}; "
            "a padded row costs as much as the longest: give a cost that does not fall with the length"
        )
    groups = padded_groups(workloads, num_groups=num_groups, max_cost=max_cost)
    groups[longest_first] = np.sort(groups)  # also where a cost in steps makes rows of different lengths equal
    return groups_of(groups)


ALLOCATORS: dict[str, AllocateFn] = {"ffd": ffd_allocate, "kk": kk_allocate, "refined": refined_allocate}


def get_allocate_fn(algorithm: str = "ffd") -> AllocateFn:
    """The allocator of this name: "ffd", "kk" or "refined".

    Raises:
        ValueError: an unknown name; the error lists the names.

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
    problem = PackingProblem(array[order], capacity, min_groups, divisor, as_boolean(equal_size, "equal_size"))
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
    least = max(problem.min_groups, l2_bound(problem.weights, problem.capacity))
    equal = " of equal size" if problem.equal_size else ""
    return ValueError(
        f"{len(problem.weights)} rows fit no number of groups{equal} that is a multiple of n_groups_divisor "
        f"{problem.divisor} and at least {least}, under capacity {problem.capacity}; every group has a row: lower "
        "n_groups_divisor, raise the capacity or pass more rows"
    )
