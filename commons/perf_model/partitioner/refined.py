"""The planner's default: the best of several starts, then swaps."""

from __future__ import annotations

import numpy as np

from commons.perf_model.partitioner.bounds import Split
from commons.perf_model.partitioner.differencing import differencing
from commons.perf_model.partitioner.lpt import lpt
from commons.perf_model.partitioner.problem import Problem
from commons.perf_model.partitioner.refinement import refine

# Swaps stop this near the lower bound: one part in ten thousand is far below what a step time can show.
TOLERANCE = 10_000
# Up to this many rows times partitions, a second start is worth its time, and so are the n merges of k sums that
# Karmarkar-Karp takes with free sizes.
FEW = 1 << 16


def near(bound: int) -> int:
    """The largest load at which a plan is good enough, given a lower bound of it."""
    return bound + bound // TOLERANCE


def refined(problem: Problem, bound: int, split: Split | None) -> np.ndarray:
    """LPT or Karmarkar-Karp, whichever ends lower, then swaps until the largest load is near the bound.

    Args:
        problem: the rows.
        bound: lower bound of the largest load.
        split: where the bound is attained.

    Returns:
        int64 `(n,)`, the partition of each row; the largest load is never above that of LPT, nor (with equal sizes, or
        few rows) above that of Karmarkar-Karp.

    """
    return refined_to(problem, bound, near(bound), split)


def refined_to(problem: Problem, bound: int, target: int, split: Split | None) -> np.ndarray:
    """`refined` for any `target` at which a largest load is low enough, and `bound` at which nothing else is tried."""
    first = lpt(problem.weights, problem.num_parts, problem.limits, problem.base)
    largest = problem.largest_load(first)
    if largest <= bound:
        return first
    starts = [(largest, first)]
    if split is not None and largest > target:
        starts += _with_load(problem, _split_start(problem, split))
    few = len(problem.weights) * problem.num_parts <= FEW
    if problem.equal_size or few:
        starts += _with_load(problem, differencing(problem.weights, problem.num_parts, problem.equal_size))
    starts.sort(key=lambda start: start[0])
    best = _refine(problem, starts[0][1], target)
    if few and len(starts) > 1 and problem.largest_load(best) > target:
        other = _refine(problem, starts[1][1], target)
        best = min(best, other, key=problem.largest_load)
    return best


def _with_load(problem: Problem, parts: np.ndarray | None) -> list[tuple[int, np.ndarray]]:
    return [] if parts is None else [(problem.largest_load(parts), parts)]


def _split_start(problem: Problem, split: Split) -> np.ndarray | None:
    """LPT within the partitions that the bound is about and within the others, each with the rows the bound says.

    LPT over all partitions cannot see that some of them must hold one large row more and so only the lightest others.
    """
    num_rows, rest = len(problem.weights), problem.num_parts - split.num_parts
    # The others cannot hold more than max_count each.
    num_fill = max(split.num_fill, num_rows - rest * problem.limits.max_count - split.num_top)
    if split.end_top > num_rows - num_fill:
        return None
    inside = np.zeros(num_rows, bool)
    inside[split.end_top - split.num_top : split.end_top] = True
    inside[num_rows - num_fill :] = True
    parts = np.empty(num_rows, np.int64)
    for chosen, first_part, num_parts in ((inside, 0, split.num_parts), (~inside, split.num_parts, rest)):
        weights = problem.weights[chosen]
        if not problem.limits.min_count * num_parts <= len(weights) <= problem.limits.max_count * num_parts:
            return None
        parts[chosen] = first_part + lpt(weights, num_parts, problem.limits)
    return parts


def _refine(problem: Problem, parts: np.ndarray, target: int) -> np.ndarray:
    return refine(problem.weights, parts, problem.num_parts, problem.limits, target, base=problem.base)
