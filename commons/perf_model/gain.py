"""GAIN: predicts the speed-up of several ways to distribute rows to ranks, without training.

    LoadedRows ─► batches or windows, planned as in training ─► DealtRows ─► Comparison of all ways

`evenrank report` and the demo define these terms in the same way; sums are over steps:

- imbalance: largest load of a rank ÷ mean load − 1, mean over steps;
- speed-up: Σ largest load as loaded ÷ Σ largest load as distributed;
- possible: Σ largest load as loaded ÷ Σ lower bound of every plan of these batches, or windows.

With a StepCost the sums are of milliseconds, including the fixed cost of each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner import partition
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan, plan_shuffle

# Slacks to plan with, see `ShufflerOptions.slack`; the second is a shuffler's default.
SLACKS = (0.0, 0.01, 0.05)
TRAINED_SLACK = 0.01
# Plans with slack take ten times as long, so they are made only for this many first rows, and at least these steps.
_ROWS_NEAR_HOME = 1 << 17
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class LoadedRows:
    """Rows in the order in which they are read, with the step and rank that load them."""

    workloads: np.ndarray  # int64 `(rows,)`
    tokens: np.ndarray  # int64 `(rows,)`, tokens that the model computes
    step: np.ndarray  # int64 `(rows,)`, ascending, from 0 to the last step
    rank: np.ndarray  # int64 `(rows,)`
    num_ranks: int  # ranks

    @classmethod
    def in_turn(cls, workloads: np.ndarray, tokens: np.ndarray, num_ranks: int, rows_per_rank: int) -> LoadedRows:
        """Row i of each step on rank i modulo the number of ranks, as our loaders distribute rows; all steps are full.

        >>> rows = LoadedRows.in_turn(np.arange(8), np.arange(8), num_ranks=2, rows_per_rank=2)
        >>> rows.rank.tolist(), rows.step.tolist()
        ([0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1])
        """
        row = np.arange(len(workloads))
        return cls(workloads, tokens, row // (num_ranks * rows_per_rank), row % num_ranks, num_ranks)

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return int(self.step[-1]) + 1

    def first_steps(self, steps: int) -> LoadedRows:
        """The rows of the first steps."""
        end = int(np.searchsorted(self.step, steps))
        return LoadedRows(self.workloads[:end], self.tokens[:end], self.step[:end], self.rank[:end], self.num_ranks)

    def windows(self, window: int) -> Iterator[GatheredRows]:
        """The rows of `window` steps at a time, fewer at the end, as gathered rows."""
        for first in range(0, self.num_steps, window):
            steps = min(window, self.num_steps - first)
            begin, end = np.searchsorted(self.step, [first, first + steps])
            place = self.rank[begin:end] * steps + self.step[begin:end] - first
            order = np.argsort(place, kind="stable")
            counts = np.bincount(place, minlength=self.num_ranks * steps).astype(np.int64)
            workloads, tokens = self.workloads[begin:end][order], self.tokens[begin:end][order]
            yield GatheredRows(counts, counts, workloads, tokens, steps=steps)

    @cached_property
    def as_loaded(self) -> DealtRows:
        """The ranks' loads with every row where it was loaded."""
        place, places = self.step * self.num_ranks + self.rank, self.num_steps * self.num_ranks
        loads, tokens = (sum_by_rank(place, values, places) for values in (self.workloads, self.tokens))
        return DealtRows("as loaded", loads.reshape(-1, self.num_ranks), tokens.reshape(-1, self.num_ranks))

    @cached_property
    def largest_share(self) -> np.ndarray:
        """float64 `(steps,)`, the costliest row ÷ the mean load; above 1, this row alone makes its rank the slowest."""
        costliest = np.zeros(self.num_steps)
        np.maximum.at(costliest, self.step, self.workloads)
        return costliest / np.maximum(1.0, self.as_loaded.loads.mean(axis=1))


@dataclass(frozen=True)
class Budget:
    """The limits of steps of constant cost."""

    rows: int  # most cost of a rank's rows in a step, as a number of average rows
    most_rows: int  # most rows of a rank in a step


@dataclass(frozen=True)
class DealtRows:
    """The loads and tokens of all ranks when rows are distributed in one way."""

    name: str  # of the way
    loads: np.ndarray  # int64 `(steps, num_ranks)`, summed workloads
    tokens: np.ndarray  # int64 `(steps, num_ranks)`, summed tokens
    # sum of the plans' lower bounds of the largest load; None for a way that does not plan batches or windows
    bound: int | None = None
    # by slack, the tokens that change rank, as a fraction of all; empty for a way that sends nothing
    moved: Mapping[float, float] = field(default_factory=dict)
    # most tokens that a rank sends or receives in a step, mean over steps; None for a way that sends nothing
    sent_tokens: float | None = None
    planning_ms: float | None = None  # processor time of a step's plan, as in training; None without a plan
    window: int = 1  # batches of every rank that are planned together
    budget: Budget | None = None  # for steps of constant cost; None for steps with a constant number of rows

    @property
    def largest_to_mean(self) -> np.ndarray:
        """float64 `(steps,)`, largest ÷ mean load of the steps with work: 1 + imbalance."""
        mean = self.loads.mean(axis=1)
        return self.loads.max(axis=1)[mean > 0] / mean[mean > 0]

    @property
    def imbalance(self) -> float:
        """Largest load ÷ mean − 1, mean over the steps with work."""
        return float(self.largest_to_mean.mean() - 1)

    @property
    def fullest(self) -> float:
        """Most tokens of a rank in any step ÷ the mean over ranks and steps."""
        return float(self.tokens.max() / max(1e-12, self.tokens.mean()))


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step: `per_step + per_load × largest load`."""

    per_load: float
    per_step: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Several ways to distribute the same rows to the same ranks."""

    rows: LoadedRows  # at least one of them has work
    ways: tuple[DealtRows, ...]  # the first is as loaded
    cost: StepCost | None = None  # converts loads to milliseconds; None to compare loads

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.rows.num_ranks

    @property
    def balanced_batch(self) -> DealtRows:
        """The way of a shuffler with default options: each batch planned separately, with equal counts."""
        return next(way for way in self.ways if way.name in ("refined", "each batch"))

    def _cost_of_work(self, way: DealtRows, largest: float) -> float:
        """Cost of all steps ÷ the sum of their mean loads; `largest` is the sum of their largest loads."""
        fixed = self.cost.per_step / self.cost.per_load if self.cost else 0.0
        work, loaded = float(way.loads.mean(axis=1).sum()), self.ways[0].loads
        # Larger steps would save fixed costs without balancing: a budget counts as many steps as the rows as loaded.
        steps = len(way.loads) if way.budget is None else work / float(loaded.mean())
        return (steps * fixed + largest) / work

    def _as_loaded(self) -> float:
        return self._cost_of_work(self.ways[0], self.ways[0].loads.max(axis=1).sum())

    def speed_up(self, way: DealtRows) -> float:
        """Work per time of a way ÷ that of the rows as loaded."""
        return self._as_loaded() / self._cost_of_work(way, way.loads.max(axis=1).sum())

    def possible(self, way: DealtRows) -> float | None:
        """The speed-up at the lower bound of a way's plans, which no such plan exceeds; None without a bound."""
        return None if way.bound is None else self._as_loaded() / self._cost_of_work(way, way.bound)

    @property
    def equal(self) -> float:
        """The speed-up if every rank of every step had the mean load."""
        loaded = self.ways[0]
        return self._as_loaded() / self._cost_of_work(loaded, loaded.loads.mean(axis=1).sum())

    @property
    def possible_of_batches(self) -> float:
        """The largest possible speed-up if every batch is planned separately."""
        return max(self.possible(way) or 1.0 for way in self.ways if way.window == 1)

    def median_speed_up(self, way: DealtRows) -> float | None:
        """Median over steps of the largest load as loaded ÷ that of a way; None if the way's steps have other rows."""
        before, after = (each.loads.max(axis=1) for each in (self.ways[0], way))
        if way.window > 1 or way.budget is not None:
            return None
        return float(np.median(before[after > 0] / after[after > 0]))

    def step_ms(self, way: DealtRows) -> float | None:
        """Mean milliseconds of a step; None without a StepCost."""
        if self.cost is None:
            return None
        return self.cost.per_step + self.cost.per_load * float(way.loads.max(axis=1).mean())

    @property
    def dominated(self) -> int:
        """Number of steps in which one row costs more than the mean load."""
        return int((self.rows.largest_share > 1).sum())


def deal(
    rows: LoadedRows, name: str, window: int = 1, plan: Callable[..., ShufflePlan] = plan_shuffle, **options: Any
) -> DealtRows:
    """Plan every batch, or every window of batches, as training would.

    Args:
        rows: of all ranks and steps.
        name: of the way.
        window: batches of every rank that are planned together, at least 1; the last window may have fewer.
        plan: plans one batch or window.
        **options: of `plan_shuffle`.
    """
    loads, tokens, planning_seconds, bound, moved, sent = [], [], 0.0, 0, 0, 0
    for gathered in rows.windows(window):
        begin = time.thread_time()
        made = plan(gathered, **options)
        planning_seconds += time.thread_time() - begin
        of_places = sum_by_rank(made.destination, gathered.tokens, gathered.num_places)
        loads.append(made.loads_after.reshape(rows.num_ranks, -1).T)
        tokens.append(of_places.reshape(rows.num_ranks, -1).T)
        bound += made.lower_bound
        of_plan, most = _traffic(made)
        moved, sent = moved + of_plan, sent + most
    return DealtRows(
        name,
        np.concatenate(loads),
        np.concatenate(tokens),
        bound,
        {options.get("slack", 0.0): moved / max(1, int(rows.tokens.sum()))},
        sent / rows.num_steps,
        1e3 * planning_seconds / rows.num_steps,
        window,
    )


def compare_ways(rows: LoadedRows, windows: Sequence[int] = (2, 4, 8)) -> Iterator[DealtRows]:
    """Distribute rows in all ways, one after another; the first is as loaded.

    Args:
        rows: at least one of them has work.
        windows: batches of every rank that are planned together, each at least 2; windows longer than the data are
            skipped.
    """
    yield rows.as_loaded
    yield deal(rows, "Karmarkar-Karp", plan=_karmarkar_karp)
    yield _near_home(rows, "refined")
    yield _near_home(rows, "free counts", equal_size=False)
    for window in windows:
        if window <= rows.num_steps:
            yield _near_home(rows, f"window of {window}", window)


def _karmarkar_karp(gathered: GatheredRows) -> ShufflePlan:
    """A plan by Karmarkar-Karp with equal counts, as other libraries make it: it ignores where rows are."""
    made = partition(gathered.workloads, gathered.num_ranks, method="karmarkar_karp")
    return ShufflePlan.of(gathered, np.asarray(made.assignment, dtype=np.int64), made.lower_bound)


def _near_home(rows: LoadedRows, name: str, window: int = 1, **options: Any) -> DealtRows:
    """Plan all steps with slack 0, and the first steps with each slack for moved and sent tokens and planning time."""
    best = deal(rows, name, window, slack=0.0, **options)
    steps = max(_FEWEST_STEPS, _ROWS_NEAR_HOME * rows.num_steps // len(rows.workloads))
    first = rows.first_steps(min(rows.num_steps, max(window, steps - steps % window)))
    near = {slack: deal(first, name, window, slack=slack, **options) for slack in SLACKS[1:]}
    trained = near[TRAINED_SLACK]
    moved = {**best.moved, **{slack: way.moved[slack] for slack, way in near.items()}}
    return replace(best, moved=moved, sent_tokens=trained.sent_tokens, planning_ms=trained.planning_ms)


def _traffic(plan: ShufflePlan) -> tuple[int, int]:
    """Tokens that change rank, and the most tokens that one rank sends or receives."""
    gathered, moves = plan.gathered, np.flatnonzero(plan.moves)
    tokens, ends = gathered.tokens[moves], (gathered.home[moves], plan.destination[moves])
    of_ranks = (sum_by_rank(gathered.rank_of(end), tokens, gathered.num_ranks) for end in ends)
    return int(tokens.sum()), int(max(each.max() for each in of_ranks))
