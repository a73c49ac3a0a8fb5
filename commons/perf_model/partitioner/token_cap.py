"""Plans under a cap on the tokens of a partition."""

from __future__ import annotations

import numpy as np

from commons.perf_model.partitioner.bounds import counting_bound
from commons.perf_model.partitioner.problem import Problem
from commons.perf_model.partitioner.refined import refined
from commons.perf_model.partitioner.refinement import refine
from commons.perf_model.partitioner.swaps import Cap

# While tokens are lowered, loads may rise by 2^-8 of the largest, if that is not enough by more, at last at any price.
LOAD_ROOM = (8, 6, 5, 4, 3, 2, 1)


def under_cap(problem: Problem, assignment: np.ndarray, target: int, cap: Cap) -> np.ndarray:
    """Change a plan until no partition holds more tokens than the cap allows, then balance its loads under it.

    Tokens are lowered by the same swaps as loads. If those do not get there, a plan that balances tokens alone
    may; if that does not either, its cap is what it reached.

    Args:
        problem: the rows.
        assignment: int64 `(n,)`, the partition of each sample.
        target: stop when no load is above it.
        cap: tokens of each sample, and their limit.

    Returns:
        int64 `(n,)`, the partition of each sample. Whether it keeps the cap is for the caller to see; if not, it
        exceeds it by the least that was found.

    """
    tokens = Problem.of(cap.weights, problem.num_parts, problem.equal_size, problem.limits)
    parts = assignment[tokens.order]
    reached = tokens.largest_load(parts)
    if reached <= cap.limit:
        return assignment
    largest = problem.largest_load(assignment[problem.order])
    loads = problem.by_sample(problem.weights)[tokens.order]
    for shift in LOAD_ROOM:
        room = Cap(loads, largest + (largest >> shift), problem.base)
        parts = refine(tokens.weights, parts, tokens.num_parts, tokens.limits, cap.limit, room)
    parts = refine(tokens.weights, parts, tokens.num_parts, tokens.limits, cap.limit)
    reached = tokens.largest_load(parts)
    if reached > cap.limit:
        bound, split = counting_bound(tokens.weights, tokens.num_parts, tokens.limits)
        other = refined(tokens, bound, split)
        if tokens.largest_load(other) < reached:
            parts, reached = other, tokens.largest_load(other)
    parts = tokens.by_sample(parts)[problem.order]
    reached_cap = Cap(cap.weights[problem.order], max(reached, cap.limit))
    return problem.by_sample(
        refine(problem.weights, parts, problem.num_parts, problem.limits, target, reached_cap, problem.base)
    )
