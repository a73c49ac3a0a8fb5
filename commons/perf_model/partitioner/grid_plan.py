"""Plans of a grid: rows to ranks × steps, so that the sum over the steps of the largest load is small.

A step that must hold a very heavy row has room below its load on all other ranks. Rows of other steps can fill it, so
that these take less. Every step therefore gets a limit of its own, all cells of a step begin with what its limit is
below the largest one, and so one target serves all cells: the starts and swaps of `partition` then do the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.bounds import counting_bound
from commons.perf_model.partitioner.grid_bound import GridBound, grid_bound, share_out
from commons.perf_model.partitioner.home_deal import deal_at_home
from commons.perf_model.partitioner.home_rows import movable, near_home, with_slack
from commons.perf_model.partitioner.locality import Home
from commons.perf_model.partitioner.lpt import lpt
from commons.perf_model.partitioner.plan import METHODS, plan
from commons.perf_model.partitioner.problem import Limits, Problem
from commons.perf_model.partitioner.refined import near
from commons.perf_model.partitioner.refinement import refine
from commons.perf_model.partitioner.request import Plan, Request
from commons.perf_model.partitioner.swaps import Cap
from commons.perf_model.partitioner.token_cap import under_cap

# Steps cannot be told from ideal ones at this share of the bound; half of it is room in the limits, half above them.
TOLERANCE = 1000
# Tries at a lower limit of a step, by rows times cells: every try takes a part of the time that the plan takes.
TRIES = ((1 << 21, 24), (1 << 24, 8), (1 << 27, 4))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A plan of the grid.

    Attributes:
        cells: int64 `(n,)`, the cell of each sample.
        largest: the largest load of each step.
        most_tokens: most tokens of a cell, or the cap if that is more; 0 without a cap.

    """

    cells: np.ndarray
    largest: list[int]
    most_tokens: int

    @property
    def total(self) -> int:
        """Sum over the steps of the largest load."""
        return sum(self.largest)

    def beats(self, other: Candidate) -> bool:
        """Fewer tokens above the cap, or as many and a smaller sum."""
        return (self.most_tokens, self.total) < (other.most_tokens, other.total)


def plan_grid(request: Request) -> Plan:
    """The best of the grid, every batch alone and the rows as they were loaded; then few rows change rank."""
    num_ranks, num_steps = request.num_parts, request.num_steps
    limits = _limits(request)
    problem = Problem.of(request.workloads, num_ranks * num_steps, request.equal_size, limits)
    bound = grid_bound(problem.weights, num_ranks, num_steps, limits)
    chosen = _choose(request, problem, _free_plan(request, problem, bound))
    total = bound.total
    if not limits.keep(np.bincount(chosen.cells, minlength=problem.num_parts)):
        # Rows as they were loaded: only the bound for free sizes holds for these.
        total = grid_bound(problem.weights, num_ranks, num_steps, Limits(0, len(chosen.cells))).total
    loads = sum_by_rank(chosen.cells, request.workloads, problem.num_parts)
    return Plan(chosen.cells, loads, total, chosen.most_tokens)


def _choose(request: Request, problem: Problem, best: Candidate) -> Candidate:
    """`best`, or what it does not beat; with a home, a plan near it within the slack."""
    loaded = _as_loaded(request)
    alone = None if request.home_step is None else _batches_alone(request, request.home_step, best)
    if alone is not None and not problem.limits.keep(np.bincount(alone.cells, minlength=problem.num_parts)):
        alone = None  # batches of different sizes have other counts than were asked for
    if alone is not None and not best.beats(alone):
        return alone if loaded is None or alone.beats(loaded) else loaded
    if request.home is None:
        return best
    most = with_slack(best.total, request.slack)
    if alone is not None:
        most = min(most, max(alone.total, best.total))  # the batches alone had the slack too
    if loaded is not None:
        even = problem.limits.keep(np.bincount(loaded.cells, minlength=problem.num_parts))
        if not best.beats(loaded) or (even and loaded.total <= most):
            return loaded
        most = min(most, loaded.total - 1)
    return _near_home(request, request.home, problem, best, most)


def _limits(request: Request) -> Limits:
    """Equal counts, or free ones down to a row per cell: a step without rows would be one batch less."""
    num_rows, num_cells = len(request.workloads), request.num_parts * request.num_steps
    limits = Limits.of(num_rows, num_cells, request.equal_size)
    return limits if request.equal_size else Limits(min(1, num_rows // num_cells), num_rows)


def _candidate(request: Request, cells: np.ndarray) -> Candidate:
    num_cells = request.num_parts * request.num_steps
    loads = sum_by_rank(cells, request.workloads, num_cells)
    largest = loads.reshape(request.num_parts, request.num_steps).max(axis=0).tolist()
    most_tokens = 0
    if request.max_tokens is not None and request.tokens is not None:
        most_tokens = max(request.max_tokens, int(sum_by_rank(cells, request.tokens, num_cells).max()))
    return Candidate(cells, largest, most_tokens)


def _cap(request: Request) -> Cap | None:
    if request.max_tokens is None or request.tokens is None:
        return None
    return Cap(request.tokens, request.max_tokens)


def _keeps_cap(request: Request, plan: Candidate) -> bool:
    return request.max_tokens is None or plan.most_tokens <= request.max_tokens


def _free_plan(request: Request, problem: Problem, bound: GridBound) -> Candidate:
    """The best plan that does not look at where rows are.

    Limits that sum up to the bound come first, then even partitions sorted by load and cut into steps; the better of
    both is improved step by step.
    """
    refined = request.method == "refined"
    best = None
    if refined and len(set(first := share_out(bound.total + _half(bound.total), bound.largest))) > 1:
        best = _within(request, problem, first)
        if best.total <= _good(bound.total) and _keeps_cap(request, best):
            return best
    cut = _cut_into_steps(request, problem)
    if best is None or cut.beats(best):
        best = cut
    return _lower_steps(request, problem, bound, best) if refined else best


def _lower_steps(request: Request, problem: Problem, bound: GridBound, best: Candidate) -> Candidate:
    """Take half of what is left above the bound off the largest load of one step after the other, where swaps can."""
    failed, step = 0, 0
    for _ in range(_num_tries(problem)):
        if failed == request.num_steps or best.total <= _good(bound.total):
            break
        wanted = list(best.largest)
        wanted[step] = max(wanted[step] - (best.total - bound.total) // 2, 0)
        above = problem.above(_base(request, wanted))
        cap = None
        if request.max_tokens is not None and request.tokens is not None:
            cap = Cap(request.tokens[problem.order], best.most_tokens)
        parts = best.cells[problem.order]
        parts = refine(above.weights, parts, above.num_parts, above.limits, max(wanted), cap, above.base)
        tried = _candidate(request, problem.by_sample(parts))
        failed = 0 if tried.beats(best) else failed + 1
        best = best if failed else tried
        step = (step + 1) % request.num_steps
    return best


def _half(total: int) -> int:
    return total // (2 * TOLERANCE)


def _good(bound: int) -> int:
    """The sum at which a grid is good enough, given a lower bound of it."""
    return bound + bound // TOLERANCE


def _num_tries(problem: Problem) -> int:
    size = len(problem.weights) * problem.num_parts
    return next((tries for most, tries in TRIES if size <= most), 0)


def _base(request: Request, largest: list[int]) -> np.ndarray:
    """What every cell begins with, so that one limit, the largest, serves all steps."""
    return np.tile(max(largest) - np.array(largest, np.int64), request.num_parts)


def _within(request: Request, problem: Problem, largest: list[int]) -> Candidate:
    """LPT and swaps towards a largest load per step."""
    above = problem.above(_base(request, largest))
    target = max(largest) + _half(sum(largest)) // request.num_steps
    parts = lpt(above.weights, above.num_parts, above.limits, above.base)
    cells = problem.by_sample(refine(above.weights, parts, above.num_parts, above.limits, target, base=above.base))
    cap = _cap(request)
    return _candidate(request, cells if cap is None else under_cap(above, cells, target, cap))


def _cut_into_steps(request: Request, problem: Problem) -> Candidate:
    """Even partitions by the algorithm asked for, sorted by load and cut into steps."""
    bound, split = counting_bound(problem.weights, problem.num_parts, problem.limits)
    cells = problem.by_sample(METHODS[request.method](problem, bound, split))
    cap = _cap(request)
    if cap is not None:
        cells = under_cap(problem, cells, near(bound), cap)
    loads = sum_by_rank(cells, request.workloads, problem.num_parts)
    place = np.empty(problem.num_parts, np.int64)
    place[np.argsort(-loads, kind="stable")] = np.arange(problem.num_parts)
    step, rank = np.divmod(place[cells], request.num_parts)
    return _candidate(request, rank * request.num_steps + step)


def _as_loaded(request: Request) -> Candidate | None:
    """The rows where they are, if that is known and keeps the cap."""
    if request.home is None or request.home_step is None:
        return None
    loaded = _candidate(request, request.home * request.num_steps + request.home_step)
    return loaded if _keeps_cap(request, loaded) else None


def _batches_alone(request: Request, home_step: np.ndarray, best: Candidate) -> Candidate | None:
    """Each batch planned by itself, unless their lower bounds tell that `best` is better."""
    batches = [np.flatnonzero(home_step == step) for step in range(request.num_steps)]
    batches = [rows for rows in batches if len(rows)]
    if _keeps_cap(request, best):
        least = 0
        for rows in batches:
            weights = np.sort(request.workloads[rows])[::-1]
            least += counting_bound(weights, request.num_parts, Limits(0, len(rows)))[0]
        if best.total < least:
            return None
    cells = np.empty(len(request.workloads), np.int64)
    for rows in batches:
        alone = replace(
            request,
            workloads=request.workloads[rows],
            tokens=None if request.tokens is None else request.tokens[rows],
            home=None if request.home is None else request.home[rows],
            num_steps=1,
            home_step=None,
        )
        cells[rows] = plan(alone).assignment * request.num_steps + home_step[rows]
    return _candidate(request, cells)


def _near_home(request: Request, home: np.ndarray, problem: Problem, best: Candidate, most: int) -> Candidate:
    """A plan whose sum is at most `most`, at least that of `best`, with few tokens that change rank."""
    # Half the room in proportion, half in equal parts: beside a very heavy step the others have little of their own.
    room, total = most - best.total, max(best.total, 1)
    largest = [load + load * room // (2 * total) + room // (2 * request.num_steps) for load in best.largest]
    limit = max(largest)
    above = problem.above(_base(request, largest))
    sizes = movable(request.workloads if request.tokens is None else request.tokens)
    by_row = Home(home[problem.order], sizes[problem.order], request.ranks_per_node, request.num_steps)
    cap = None
    if request.tokens is not None and request.max_tokens is not None:
        cap = Cap(request.tokens[problem.order], best.most_tokens)
    start = deal_at_home(above, by_row, limit)
    parts = near_home(above, best.cells[problem.order], start, by_row, limit, cap)
    return _candidate(request, problem.by_sample(parts))
