"""Plans of partitions: the algorithm asked for, then the cap on tokens, then rows kept home."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.bounds import Split, counting_bound
from commons.perf_model.partitioner.differencing import differencing
from commons.perf_model.partitioner.home_rows import keep_rows_home
from commons.perf_model.partitioner.lpt import lpt
from commons.perf_model.partitioner.many_parts import MANY, near_home_of_many
from commons.perf_model.partitioner.problem import Limits, Problem
from commons.perf_model.partitioner.refined import near, refined
from commons.perf_model.partitioner.request import Plan, Request
from commons.perf_model.partitioner.snake import snake
from commons.perf_model.partitioner.swaps import Cap
from commons.perf_model.partitioner.token_cap import under_cap

Algorithm = Callable[[Problem, int, "Split | None"], np.ndarray]

# Add an algorithm by adding a line. In: the rows, a lower bound and where it is attained; out: the partition of a row.
METHODS: dict[str, Algorithm] = {
    "karmarkar_karp": lambda rows, bound, split: differencing(rows.weights, rows.num_parts, rows.equal_size),
    "lpt": lambda rows, bound, split: lpt(rows.weights, rows.num_parts, rows.limits),
    "refined": refined,
    "snake": lambda rows, bound, split: snake(len(rows.weights), rows.num_parts),
}


def plan(request: Request) -> Plan:
    """Plan by the algorithm asked for, bring tokens under their cap, then bring rows back home.

    Of many partitions, what is asked for near home is sought there first.
    """
    num_parts = request.num_parts
    problem = Problem.of(request.workloads, num_parts, request.equal_size)
    bound, split = counting_bound(problem.weights, num_parts, problem.limits)
    assignment = None
    if request.method == "refined" and num_parts >= MANY:
        assignment = near_home_of_many(request, problem, bound)
    if assignment is None:
        assignment = _plan_freely(request, problem, bound, split)
    if request.home is not None and not problem.limits.keep(np.bincount(assignment, minlength=num_parts)):
        # Home won over equal sizes, so only the bound for free sizes holds for it.
        bound, _ = counting_bound(problem.weights, num_parts, Limits.of(len(assignment), num_parts, False))
    loads = sum_by_rank(assignment, request.workloads, num_parts)
    most_tokens = 0
    if request.max_tokens is not None and request.tokens is not None:
        held = sum_by_rank(assignment, request.tokens, num_parts)
        most_tokens = max(request.max_tokens, int(held.max()))
    return Plan(assignment, loads, bound, most_tokens)


def _plan_freely(request: Request, problem: Problem, bound: int, split: Split | None) -> np.ndarray:
    """The partition of each sample, int64 `(n,)`: planned as if rows were nowhere, then brought home."""
    assignment = problem.by_sample(METHODS[request.method](problem, bound, split))
    cap = None
    if request.max_tokens is not None and request.tokens is not None:
        cap = Cap(request.tokens, request.max_tokens)
        assignment = under_cap(problem, assignment, near(bound), cap)
        cap = Cap(request.tokens, max(request.max_tokens, _least_of_largest(request.tokens, assignment, request)))
    if request.home is None:
        return assignment
    sizes = request.workloads if request.tokens is None else request.tokens
    return keep_rows_home(problem, assignment, request.home, sizes, request.ranks_per_node, request.slack, cap)


def lower_bound(workloads: np.ndarray, num_parts: int, equal_size: bool) -> int:
    """Lower bound of the largest load."""
    problem = Problem.of(workloads, num_parts, equal_size)
    return counting_bound(problem.weights, num_parts, problem.limits)[0]


def _least_of_largest(tokens: np.ndarray, assignment: np.ndarray, request: Request) -> int:
    """Most tokens of a partition in the plan, or at home if it is less there."""
    plans = [assignment] if request.home is None else [assignment, request.home]
    return min(int(sum_by_rank(parts, tokens, request.num_parts).max()) for parts in plans)
