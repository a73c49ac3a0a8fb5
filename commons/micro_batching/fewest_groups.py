"""The search for the fewest groups under a capacity: the planner, first fit, and repacking where these fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from commons.micro_batching.first_fit import first_fit, first_fit_equal, l2_bound, multifit, split_heaviest
from commons.micro_batching.leveling import level
from commons.micro_batching.repacking import pack_under
from commons.perf_model.loads import members, sum_by_rank
from commons.perf_model.partitioner import lower_bound, partition

# Up to this number of rows times groups, "refined" starts from Karmarkar-Karp too: kFew in native/plan.hpp.
_FEW = 1 << 16


@dataclass
class PackingProblem:
    """The rows to pack, and the constraints of the packing."""

    weights: np.ndarray  # int64 `(n,)`, descending, none above the capacity, at least one
    capacity: int  # largest load of a group
    min_groups: int = 1  # fewest groups, at most n
    divisor: int = 1  # the number of groups is a multiple of it; at most n
    equal_size: bool = False  # whether the groups' numbers of rows differ by one at most
    # The result of the last repacking, which exceeded the capacity: the start for more groups. None before the first.
    repacked: list[list[int]] | None = None

    @property
    def most_groups(self) -> int:
        """The largest multiple of the divisor that leaves a row for every group."""
        return len(self.weights) // self.divisor * self.divisor

    def round_up(self, num_groups: int) -> int:
        """The smallest multiple of the divisor that is at least `num_groups` and `min_groups`."""
        return -(-max(num_groups, self.min_groups) // self.divisor) * self.divisor

    @cached_property
    def first_fit(self) -> np.ndarray:
        """Groups by first fit `(n,)`."""
        return first_fit(self.weights, self.capacity)

    def planned(self, num_groups: int, method: str) -> np.ndarray | None:
        """Groups by a method of the planner `(n,)`; None if they do not keep the capacity."""
        plan = partition(self.weights, num_groups, method=method, equal_size=self.equal_size)
        return plan.assignment if int(plan.loads.max()) <= self.capacity else None


# A function of the rows and the number of groups that a packing must have; returns the group of each row, or None.
Attempt = Callable[[PackingProblem, int], "np.ndarray | None"]


def fewest_groups(problem: PackingProblem, algorithm: str) -> np.ndarray | None:
    """The group of each row `(n,)` by an algorithm, else by "refined"; None if that finds nothing either."""
    parts = _search(ATTEMPTS[algorithm], problem)
    return _search(_refined, problem) if parts is None and algorithm != "refined" else parts


def group_of_each(groups: Sequence[Sequence[int]], number: int) -> np.ndarray:
    """int64 `(number,)`, the group of each index; every index is in one group."""
    parts = np.empty(number, np.int64)
    for group, indices in enumerate(groups):
        parts[np.asarray(indices, np.int64)] = group
    return parts


def groups_of(parts: np.ndarray) -> list[list[int]]:
    """The inverse of `group_of_each`: the indices of each group, ascending."""
    return [indices.tolist() for indices in members(parts, int(parts.max()) + 1)]


def in_order(parts: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Renumber groups, the heaviest first, ties by their first index; index i weighs `loads[i]`."""
    sums = sum_by_rank(parts, loads, int(parts.max()) + 1)
    ranked = np.lexsort((np.unique(parts, return_index=True)[1], -sums))
    return np.argsort(ranked)[parts]


def _search(attempt: Attempt, problem: PackingProblem) -> np.ndarray | None:
    """The result of the first attempt that succeeds, trying the fewest groups first."""
    fewest = problem.round_up(l2_bound(problem.weights, problem.capacity))
    for num_groups in range(fewest, problem.most_groups + 1, problem.divisor):
        if lower_bound(problem.weights, num_groups, problem.equal_size) <= problem.capacity:
            parts = attempt(problem, num_groups)
            if parts is not None:
                return parts
    return None


def _first_fit(problem: PackingProblem, num_groups: int) -> np.ndarray | None:
    if problem.equal_size:
        # First fit leaves the light rows for the last groups, which then lack room for their number of rows.
        parts = first_fit_equal(problem.weights, problem.capacity, num_groups)
        return problem.planned(num_groups, "refined") if parts is None else parts
    needed = int(problem.first_fit.max()) + 1
    if needed > num_groups:
        return None
    return problem.first_fit if needed == num_groups else multifit(problem.weights, problem.capacity, num_groups)


def _differencing(problem: PackingProblem, num_groups: int) -> np.ndarray | None:
    return problem.planned(num_groups, "karmarkar_karp")


def _refined(problem: PackingProblem, num_groups: int) -> np.ndarray | None:
    """The planner's groups if they keep the capacity, else groups packed under the capacity; then narrow the spread."""
    parts = problem.planned(num_groups, "refined")
    if parts is None and problem.equal_size:
        parts = first_fit_equal(problem.weights, problem.capacity, num_groups)
    elif parts is None:
        parts = _packed_tightly(problem, num_groups)
    if parts is None:
        return None
    parts = split_heaviest(problem.weights, parts, num_groups)
    return level(problem.weights, parts, num_groups, equal_size=problem.equal_size)


def _packed_tightly(problem: PackingProblem, num_groups: int) -> np.ndarray | None:
    parts = problem.first_fit
    if int(parts.max()) < num_groups:
        return parts
    if len(parts) * num_groups > _FEW:  # below, the planner has already tried it
        found = _differencing(problem, num_groups)
        if found is not None:
            return found
    problem.repacked, done = pack_under(problem.weights.tolist(), num_groups, problem.capacity, problem.repacked)
    if not done:
        return None
    return group_of_each(problem.repacked, len(parts))


ATTEMPTS: dict[str, Attempt] = {"ffd": _first_fit, "kk": _differencing, "refined": _refined}
