"""The allocators in numpy: the definition that the native core is checked against, and what serves without it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commons.micro_batching.bounds import l2_bound
from commons.micro_batching.first_fit import first_fit, first_fit_equal, multifit, split_heaviest
from commons.micro_batching.leveling import level
from commons.micro_batching.repacking import pack_under
from commons.micro_batching.request import PackRequest
from commons.perf_model.partitioner.bounds import counting_bound
from commons.perf_model.partitioner.differencing import differencing
from commons.perf_model.partitioner.lpt import lpt
from commons.perf_model.partitioner.problem import INT64_MAX, Limits, Problem
from commons.perf_model.partitioner.refined import FEW, near
from commons.perf_model.partitioner.refinement import refine

# A largest load this near its lower bound, one part in a thousand, is not worth another start.
GOOD_ENOUGH = 1000

# In: the rows and the number of groups that a packing must have. Out: the group of each row, or None.
Attempt = Callable[[Problem, int], "np.ndarray | None"]


def pack(request: PackRequest) -> list[list[int]] | None:
    """Groups of indices, heaviest first, or None where no packing was found.

    None too where there can be none: values above the capacity, negative ones, or ones whose sum overflows.
    """
    values, capacity = request.values, request.capacity
    if int(values.min()) < 0 or sum(values.tolist()) > INT64_MAX:
        return None
    order = np.argsort(-values, kind="stable")
    weights = values[order]
    if int(weights[0]) > capacity:
        return None
    fewest = request.round_up(l2_bound(weights, capacity))
    if request.algorithm == "ffd" and not request.equal_size:
        parts = _first_fit(request, weights)
    else:
        parts = _search(ATTEMPTS[request.algorithm], request, weights, order, fewest)
    if parts is None and request.algorithm != "refined":
        parts = _search(_refined, request, weights, order, fewest)
    return None if parts is None else as_groups(values, order, parts)


def as_groups(values: np.ndarray, order: np.ndarray, parts: np.ndarray) -> list[list[int]]:
    """The indices of each group, ascending; groups heaviest first, of equal ones that with the first index."""
    by_sample = np.empty_like(parts)
    by_sample[order] = parts
    samples = np.argsort(by_sample, kind="stable").tolist()
    ends = np.cumsum(np.bincount(parts)).tolist()
    groups = [samples[start:end] for start, end in zip([0, *ends[:-1]], ends)]
    loads = [int(values[group].sum()) for group in groups]
    return [group for _, group in sorted(zip(loads, groups), key=lambda each: (-each[0], each[1][0]))]


def _first_fit(request: PackRequest, weights: np.ndarray) -> np.ndarray | None:
    """First fit, and MULTIFIT where it takes too few groups; None where it takes too many."""
    parts = first_fit(weights, request.capacity)
    num_groups = request.round_up(int(parts.max()) + 1)
    if num_groups > request.most_groups:
        return None
    return parts if num_groups == int(parts.max()) + 1 else multifit(weights, request.capacity, num_groups)


def _search(
    attempt: Attempt, request: PackRequest, weights: np.ndarray, order: np.ndarray, fewest: int
) -> np.ndarray | None:
    """The first attempt that succeeds, from the fewest groups on."""
    for num_groups in range(fewest, request.most_groups + 1, request.divisor):
        limits = Limits.of(len(weights), num_groups, request.equal_size)
        problem = Problem(weights, order, num_groups, request.equal_size, limits)
        parts = attempt(problem, request.capacity)
        if parts is not None:
            return parts
    return None


def _first_fit_equal(problem: Problem, capacity: int) -> np.ndarray | None:
    return first_fit_equal(problem.weights, capacity, problem.num_parts)


def _differencing(problem: Problem, capacity: int) -> np.ndarray | None:
    bound, _ = counting_bound(problem.weights, problem.num_parts, problem.limits)
    if bound > capacity:
        return None
    parts = differencing(problem.weights, problem.num_parts, problem.equal_size)
    return parts if problem.largest_load(parts) <= capacity else None


def _refined(problem: Problem, capacity: int) -> np.ndarray | None:
    """Balance, and see whether the capacity is kept; else pack under the capacity, and balance that."""
    bound, _ = counting_bound(problem.weights, problem.num_parts, problem.limits)
    if bound > capacity:
        return None
    parts = _balanced(problem, bound, capacity)
    if problem.largest_load(parts) > capacity:
        packed = _packed_tightly(problem, capacity)
        if packed is None:
            return None
        parts = refine(problem.weights, packed, problem.num_parts, problem.limits, near(bound))
    return level(problem.weights, parts, problem.num_parts, problem.limits)


def _balanced(problem: Problem, bound: int, capacity: int) -> np.ndarray:
    """LPT with exchanges, and where that does not come near the bound, Karmarkar-Karp with exchanges too."""
    weights, num_groups, limits = problem.weights, problem.num_parts, problem.limits
    target, enough = min(near(bound), capacity), min(bound + bound // GOOD_ENOUGH, capacity)
    best = refine(weights, lpt(weights, num_groups, limits), num_groups, limits, target)
    if problem.largest_load(best) <= enough or not _may_difference(problem):
        return best
    other = refine(weights, differencing(weights, num_groups, problem.equal_size), num_groups, limits, target)
    return min(best, other, key=problem.largest_load)


def _may_difference(problem: Problem) -> bool:
    """Whether the n merges of k sums are worth their time before anything else has been tried."""
    return problem.equal_size or len(problem.weights) * problem.num_parts <= FEW


def _packed_tightly(problem: Problem, capacity: int) -> np.ndarray | None:
    weights, num_groups = problem.weights, problem.num_parts
    if problem.equal_size:
        return first_fit_equal(weights, capacity, num_groups)
    parts = first_fit(weights, capacity)
    if int(parts.max()) < num_groups:
        return split_heaviest(weights, parts, num_groups)
    if not _may_difference(problem):  # else it was a start already
        found = _differencing(problem, capacity)
        if found is not None:
            return found
    return pack_under(weights, num_groups, capacity)


ATTEMPTS: dict[str, Attempt] = {"ffd": _first_fit_equal, "kk": _differencing, "refined": _refined}
