"""GAIN: what dealing rows to ranks in another way gains, before anything is trained.

    LoadedRows ─► batches or windows, planned as in training ─► DealtRows ─► Comparison of all ways

The words mean the same here, in `evenrank report` and in the demo; sums are over steps:

- imbalance: largest load of a rank ÷ mean load − 1, mean over steps;
- speed-up: Σ largest load as loaded ÷ Σ largest load as dealt;
- possible: Σ largest load as loaded ÷ Σ lower bound, which no plan of these batches, or windows, goes below.

With a StepCost the sums are of milliseconds, the fixed cost of a step included.
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

# Shares of the best load that a plan may give up to keep rows where they are; the second is the default of a shuffler.
SLACKS = (0.0, 0.01, 0.05)
TRAINED_SLACK = 0.01
# Plans with slack are made for the first rows only, and at least so many steps: they take ten times as long.
_ROWS_NEAR_HOME = 1 << 17
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class LoadedRows:
    """Rows in the order in which they are read, and where they are loaded."""

    workloads: np.ndarray  # int64 `(rows,)`
    tokens: np.ndarray  # int64 `(rows,)`, tokens that the model computes
    step: np.ndarray  # int64 `(rows,)`, ascending, from 0 to the last step
    rank: np.ndarray  # int64 `(rows,)`
    num_ranks: int  # ranks

    @classmethod
    def in_turn(cls, workloads: np.ndarray, tokens: np.ndarray, num_ranks: int, rows_per_rank: int) -> LoadedRows:
        """Row i of each step on rank i modulo the ranks, as our loaders deal rows; all steps are full.

        >>> rows = LoadedRows.in_turn(np.arange(8), np.arange(8), num_ranks=2, rows_per_rank=2)
        >>> rows.rank.tolist(), rows.step.tolist()
        ([0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1])
        """
        row = np.arange(len(workloads))
        return cls(workloads, tokens, row // (num_ranks * rows_per_rank), row % num_ranks, num_ranks)

    @property
    def num_steps(self) -> int:
        """Steps."""
        return int(self.step[-1]) + 1

    def first_steps(self, steps: int) -> LoadedRows:
        """The rows of the first steps."""
        end = int(np.searchsorted(self.step, steps))
        return LoadedRows(self.workloads[:end], self.tokens[:end], self.step[:end], self.rank[:end], self.num_ranks)

    def windows(self, window: int) -> Iterator[GatheredRows]:
        """The rows of so many steps at a time, fewer at the end, as every rank knows them after the gather."""
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
        """Every row where it was loaded."""
        place, places = self.step * self.num_ranks + self.rank, self.num_steps * self.num_ranks
        loads, tokens = (sum_by_rank(place, values, places) for values in (self.workloads, self.tokens))
        return DealtRows("as loaded", loads.reshape(-1, self.num_ranks), tokens.reshape(-1, self.num_ranks))

    @cached_property
    def largest_share(self) -> np.ndarray:
        """float64 `(steps,)`, the costliest row ÷ an even share; above 1 it alone holds a rank up."""
        costliest = np.zeros(self.num_steps)
        np.maximum.at(costliest, self.step, self.workloads)
        return costliest / np.maximum(1.0, self.as_loaded.loads.mean(axis=1))


@dataclass(frozen=True)
class Budget:
    """What steps of constant cost are filled to."""

    rows: int  # a rank's rows of a step cost as much as this many average rows, at most
    most_rows: int  # rows of a rank in a step, at most


@dataclass(frozen=True)
class DealtRows:
    """What ranks hold when rows are dealt in one way."""

    name: str  # of the way
    loads: np.ndarray  # int64 `(steps, num_ranks)`, summed workloads
    tokens: np.ndarray  # int64 `(steps, num_ranks)`, summed tokens
    # sum of the plans' lower bounds of the largest load; None where nothing is planned batch by batch
    bound: int | None = None
    # by slack, the tokens that change rank, as a fraction of all; empty where nothing is sent
    moved: Mapping[float, float] = field(default_factory=dict)
    # most tokens that a rank sends or receives in a step, mean over steps; None where nothing is sent
    sent_tokens: float | None = None
    planning_ms: float | None = None  # processor time of a step's plan, as in training; None where nothing is planned
    window: int = 1  # batches of every rank that are planned together
    budget: Budget | None = None  # of steps of constant cost; None for steps of equally many rows

    @property
    def largest_to_mean(self) -> np.ndarray:
        """float64 `(steps,)`, largest ÷ mean load of the steps that have work: 1 + imbalance."""
        mean = self.loads.mean(axis=1)
        return self.loads.max(axis=1)[mean > 0] / mean[mean > 0]

    @property
    def imbalance(self) -> float:
        """Largest load ÷ mean − 1, mean over the steps that have work."""
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
    """All ways of dealing the same rows to a number of ranks."""

    rows: LoadedRows  # with work in at least one of them
    ways: tuple[DealtRows, ...]  # the first is as loaded
    cost: StepCost | None = None  # turns loads into milliseconds; None to compare loads

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return self.rows.num_ranks

    @property
    def balanced_batch(self) -> DealtRows:
        """The way in which a shuffler with its defaults deals rows: each batch by itself, equal counts."""
        return next(way for way in self.ways if way.name in ("refined", "each batch"))

    def _cost_of_work(self, way: DealtRows, largest: float) -> float:
        """Cost of all steps, whose largest loads are `largest` in sum, ÷ the sum of their mean loads."""
        fixed = self.cost.per_step / self.cost.per_load if self.cost else 0.0
        return (len(way.loads) * fixed + largest) / float(way.loads.mean(axis=1).sum())

    def _as_loaded(self) -> float:
        return self._cost_of_work(self.ways[0], self.ways[0].loads.max(axis=1).sum())

    def speed_up(self, way: DealtRows) -> float:
        """Work per time of a way ÷ that of the rows as loaded."""
        return self._as_loaded() / self._cost_of_work(way, way.loads.max(axis=1).sum())

    def possible(self, way: DealtRows) -> float | None:
        """The speed-up at the lower bound of a way's plans: none of that kind gains more; None without a bound."""
        return None if way.bound is None else self._as_loaded() / self._cost_of_work(way, way.bound)

    @property
    def equal(self) -> float:
        """The speed-up if every rank of every step had the mean load."""
        loaded = self.ways[0]
        return self._as_loaded() / self._cost_of_work(loaded, loaded.loads.mean(axis=1).sum())

    @property
    def possible_of_batches(self) -> float:
        """The most that is possible if every batch is planned by itself."""
        return max(self.possible(way) or 1.0 for way in self.ways if way.window == 1)

    def median_speed_up(self, way: DealtRows) -> float | None:
        """Median over steps of the largest load as loaded ÷ that of a way; None where steps have other rows."""
        before, after = (each.loads.max(axis=1) for each in (self.ways[0], way))
        if way.window > 1 or way.budget is not None:
            return None
        return float(np.median(before[after > 0] / after[after > 0]))

    def step_ms(self, way: DealtRows) -> float | None:
        """Milliseconds of a step, mean over steps; None without a StepCost."""
        if self.cost is None:
            return None
        return self.cost.per_step + self.cost.per_load * float(way.loads.max(axis=1).mean())

    @property
    def dominated(self) -> int:
        """Steps in which one row is more than an even share."""
        return int((self.rows.largest_share > 1).sum())


def deal(
    rows: LoadedRows, name: str, window: int = 1, plan: Callable[..., ShufflePlan] = plan_shuffle, **options: Any
) -> DealtRows:
    """Plan every batch, or every window of batches, as training would.

    Args:
        rows: of all ranks and steps.
        name: of the way.
        window: batches of every rank that are planned together, at least 1; the last ones may be fewer.
        plan: makes the plan of one batch or window.
        **options: as for `plan_shuffle`.
    """
    loads, tokens, spent, bound, moved, sent = [], [], 0.0, 0, 0, 0
    for gathered in rows.windows(window):
        begin = time.thread_time()
        made = plan(gathered, **options)
        spent += time.thread_time() - begin
        of_places = sum_by_rank(made.destination, gathered.tokens, gathered.num_places)
        loads.append(made.loads_after.reshape(rows.num_ranks, -1).T)
        tokens.append(of_places.reshape(rows.num_ranks, -1).T)
        # Where nobody moves, counts may stay unequal, which the bound of equal counts does not allow for.
        bound += min(made.lower_bound, int(loads[-1].max(axis=1).sum()))
        of_plan, most = _traffic(made)
        moved, sent = moved + of_plan, sent + most
    return DealtRows(
        name,
        np.concatenate(loads),
        np.concatenate(tokens),
        bound,
        {options.get("slack", 0.0): moved / max(1, int(rows.tokens.sum()))},
        sent / rows.num_steps,
        1e3 * spent / rows.num_steps,
        window,
    )


def compare_ways(rows: LoadedRows, windows: Sequence[int] = (2, 4, 8)) -> Iterator[DealtRows]:
    """Deal rows in every way, one after another; the first is as loaded.

    Args:
        rows: with work in at least one of them.
        windows: batches of every rank that are planned together, each at least 2; those longer than the data are left
            out.
    """
    yield rows.as_loaded
    yield deal(rows, "Karmarkar-Karp", plan=_karmarkar_karp)
    yield _near_home(rows, "refined")
    yield _near_home(rows, "free counts", equal_size=False)
    for window in windows:
        if window <= rows.num_steps:
            yield _near_home(rows, f"window of {window}", window)


def _karmarkar_karp(gathered: GatheredRows) -> ShufflePlan:
    """Equal counts by Karmarkar-Karp, and no look at where rows are: what other libraries ship."""
    made = partition(gathered.workloads, gathered.num_ranks, method="karmarkar_karp")
    return ShufflePlan.of(gathered, np.asarray(made.assignment, dtype=np.int64), made.lower_bound)


def _near_home(rows: LoadedRows, name: str, window: int = 1, **options: Any) -> DealtRows:
    """The best plan of all steps; of the first ones what moves with each slack, and what training plans and sends."""
    best = deal(rows, name, window, slack=0.0, **options)
    steps = max(_FEWEST_STEPS, _ROWS_NEAR_HOME * rows.num_steps // len(rows.workloads))
    first = rows.first_steps(min(rows.num_steps, max(window, steps - steps % window)))
    near = {slack: deal(first, name, window, slack=slack, **options) for slack in SLACKS[1:]}
    trained = near[TRAINED_SLACK]
    moved = {**best.moved, **{slack: way.moved[slack] for slack, way in near.items()}}
    return replace(best, moved=moved, sent_tokens=trained.sent_tokens, planning_ms=trained.planning_ms)


def _traffic(plan: ShufflePlan) -> tuple[int, int]:
    """Tokens that change rank, and the most that one rank sends or receives."""
    gathered, moves = plan.gathered, np.flatnonzero(plan.moves)
    tokens, ends = gathered.tokens[moves], (gathered.home[moves], plan.destination[moves])
    of_ranks = (sum_by_rank(gathered.rank_of(end), tokens, gathered.num_ranks) for end in ends)
    return int(tokens.sum()), int(max(each.max() for each in of_ranks))
