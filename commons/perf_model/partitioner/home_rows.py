"""Plans for rows that already are somewhere: as good as planned freely, but with as few tokens moved as possible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.locality import Home, even_counts, relabel, repair
from commons.perf_model.partitioner.problem import Problem
from commons.perf_model.partitioner.refined import refined_to
from commons.perf_model.partitioner.refinement import refine
from commons.perf_model.partitioner.swaps import Cap
from commons.perf_model.partitioner.token_cap import under_cap


def keep_rows_home(
    problem: Problem,
    assignment: np.ndarray,
    home: np.ndarray,
    sizes: np.ndarray,
    ranks_per_node: int,
    slack: float,
    cap: Cap | None,
) -> np.ndarray:
    """A plan within `1 + slack` of the largest load of `assignment` that leaves many rows at home.

    Never worse than home: if `assignment` does not lower the largest load of a home that keeps the cap, the answer is
    home itself, whatever its counts.

    Args:
        problem: the rows.
        assignment: int64 `(n,)`, a good plan, by sample.
        home: int64 `(n,)`, the partition each sample is in now.
        sizes: int64 `(n,)`, tokens of each sample: what moving it costs.
        ranks_per_node: partitions per node.
        slack: how much of the balance may be given up.
        cap: tokens by sample, and their limit, which `assignment` keeps unless home alone does.

    Returns:
        int64 `(n,)`, the partition of each sample.

    """
    num_parts = problem.num_parts
    home_parts = home[problem.order]
    best_load, home_load = problem.largest_load(assignment[problem.order]), problem.largest_load(home_parts)
    load_limit = with_slack(best_load, slack)
    even = problem.limits.keep(np.bincount(home, minlength=num_parts))
    if cap is None or _largest(cap.weights, home, num_parts) <= cap.limit:
        no_gain = best_load >= home_load or (
            cap is not None and _largest(cap.weights, assignment, num_parts) > cap.limit
        )
        if no_gain or (even and home_load <= load_limit):
            return home.copy()
        load_limit = min(load_limit, home_load - 1)
    by_row = Home(home_parts, movable(sizes)[problem.order], ranks_per_node)
    row_cap = None if cap is None else Cap(cap.weights[problem.order], cap.limit)
    start = home_parts if even else even_counts(problem.weights, num_parts, problem.limits, load_limit, by_row)
    return problem.by_sample(near_home(problem, assignment[problem.order], start, by_row, load_limit, row_cap))


def near_home(
    problem: Problem, plan: np.ndarray, start: np.ndarray, home: Home, load_limit: int, cap: Cap | None
) -> np.ndarray:
    """Repair `start` until no load is above the limit; if that moves more tokens than naming `plan` well, that.

    Args:
        problem: the rows.
        plan: int64 `(n,)`, the partition of each row in a plan within the limit.
        start: int64 `(n,)`, the partition of each row to begin with, most rows at home, counts within their limits.
        home: where rows are now and what moving them costs.
        load_limit: largest load wanted.
        cap: tokens by row, and their limit.

    Returns:
        int64 `(n,)`, the partition of each row.

    """
    repaired = repair_start(problem, start, home, load_limit, cap)
    # Repair moves least by far, unless home is so uneven that almost everything has to move.
    if repaired is None or 2 * home.cost(repaired) > int(home.sizes.sum()):
        renamed = relabel(plan, np.arange(len(plan)), np.arange(problem.num_parts), home)
        if repaired is None or home.cost(renamed) < home.cost(repaired):
            return renamed
    return repaired


def repair_start(
    problem: Problem, parts: np.ndarray, home: Home, load_limit: int, cap: Cap | None
) -> np.ndarray | None:
    """Repair `parts`, by row; None if that does not get within the limits."""
    num_parts, limits = problem.num_parts, problem.limits
    if cap is not None and _largest(cap.weights, parts, num_parts) > cap.limit:
        parts = _repair_tokens(problem, parts, home, cap)
        if _largest(cap.weights, parts, num_parts) > cap.limit:
            return None
    parts = repair(problem.weights, parts, num_parts, limits, load_limit, home, cap, problem.base)
    if problem.largest_load(parts) > load_limit:
        parts = refine(problem.weights, parts, num_parts, limits, load_limit, cap, problem.base)
    return redeal_heaviest(problem, parts, home, load_limit, cap)


def redeal_heaviest(
    problem: Problem, parts: np.ndarray, home: Home, load_limit: int, cap: Cap | None
) -> np.ndarray | None:
    """Plan the partitions still above the limit afresh, together with as many of the lightest as it takes.

    None if that would be all partitions.
    """
    num_parts = problem.num_parts
    loads = problem.loads(parts)
    ranked = np.argsort(-loads, kind="stable")
    num_over = int(np.count_nonzero(loads > load_limit))
    num_light = num_over
    while num_over:
        if num_over + num_light >= num_parts:
            return None
        names = np.sort(np.concatenate((ranked[:num_over], ranked[num_parts - num_light :])))
        rows = np.flatnonzero(np.isin(parts, names))
        base = None if problem.base is None else problem.base[names]
        weights, order = problem.weights[rows], np.arange(len(rows))
        part = replace(problem, weights=weights, order=order, num_parts=len(names), base=base)
        dealt = refined_to(part, load_limit, load_limit, None)
        if cap is not None:
            dealt = under_cap(part, dealt, load_limit, Cap(cap.weights[rows], cap.limit))
        if part.largest_load(dealt) <= load_limit and (
            cap is None or _largest(cap.weights[rows], dealt, len(names)) <= cap.limit
        ):
            parts = parts.copy()
            parts[rows] = relabel(dealt, rows, names, home)
            return parts
        num_light *= 2
    return parts


def _repair_tokens(problem: Problem, parts: np.ndarray, home: Home, cap: Cap) -> np.ndarray:
    """Bring tokens under the cap, first with few of them moved, then at any price."""
    tokens = Problem.of(cap.weights, problem.num_parts, problem.equal_size, problem.limits)
    by_tokens = Home(home.parts[tokens.order], home.sizes[tokens.order], home.ranks_per_node, home.steps)
    parts = repair(tokens.weights, parts[tokens.order], tokens.num_parts, tokens.limits, cap.limit, by_tokens)
    return tokens.by_sample(refine(tokens.weights, parts, tokens.num_parts, tokens.limits, cap.limit))


def movable(sizes: np.ndarray) -> np.ndarray:
    """Sizes whose sum, four times, fits into int64: costs are compared, so a common scale changes nothing."""
    return sizes >> max(0, int(sizes.sum()).bit_length() - 60)


def _largest(weights: np.ndarray, parts: np.ndarray, num_parts: int) -> int:
    return int(sum_by_rank(parts, weights, num_parts).max())


def with_slack(load: int, slack: float) -> int:
    """`floor(load · (1 + slack))`, exact: a float times a load of 60 bits would round, and rounding must not decide."""
    numerator, denominator = slack.as_integer_ratio()
    return load + load * numerator // denominator
