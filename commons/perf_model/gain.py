"""GAIN: what each way of dealing rows to ranks makes of the same lengths, before anything is trained.

Input: the costs and tokens of rows in the order in which ranks load them. Every way deals the same rows: as loaded, by
Karmarkar-Karp with equal counts, refined, with free counts, and over windows of several batches. It is planned as in
training; what a plan moves near home, and how long planning takes, is measured on the first steps alone.

`commons.perf_model.simulation` says what one set of options does to the batches of a training config.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commons.perf_model.partitioner import lower_bound, partition, partition_grid
from commons.perf_model.partitioner.core import sum_at
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan, plan_shuffle

# Shares of the best load that a plan may give up to keep rows where they are; the second is the default of a shuffler.
SLACKS = (0.0, 0.01, 0.05)
TRAINED_SLACK = 0.01
# Rows that what moves is looked at for, and at least so many steps: near home a plan takes ten times as long.
_ROWS_LOOKED_AT = 1 << 17
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class LoadedRows:
    """Rows in the order in which ranks load them.

    Attributes:
        workloads: int64 `(steps, num_ranks, batch_size)`.
        tokens: int64 `(steps, num_ranks, batch_size)`, tokens that the model computes.
    """

    workloads: np.ndarray
    tokens: np.ndarray

    @property
    def num_steps(self) -> int:
        """Steps."""
        return self.workloads.shape[0]

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return self.workloads.shape[1]

    @property
    def batch_size(self) -> int:
        """Rows of a rank in a step."""
        return self.workloads.shape[2]

    @property
    def looked_at(self) -> int:
        """Steps that are planned near home, too."""
        per_step = self.num_ranks * self.batch_size
        return min(self.num_steps, max(_FEWEST_STEPS, _ROWS_LOOKED_AT // per_step))

    def window(self, first: int, last: int) -> GatheredRows:
        """Steps `[first, last)`, as every rank knows them after the gather."""
        steps = last - first
        rows = np.full(self.num_ranks * steps, self.batch_size, dtype=np.int64)
        workloads, tokens = (
            np.ascontiguousarray(values[first:last].swapaxes(0, 1)).ravel() for values in (self.workloads, self.tokens)
        )
        return GatheredRows(rows, rows, workloads, tokens, steps=steps)


@dataclass(frozen=True)
class Budget:
    """What steps of constant cost are filled to.

    Attributes:
        rows: a rank's rows of a step cost as much as this many average rows, at most.
        most_rows: rows of a rank in a step, at most.
    """

    rows: int
    most_rows: int


@dataclass(frozen=True)
class DealtRows:
    """What ranks hold when rows are dealt in one way.

    Attributes:
        name: of the way.
        loads: int64 `(steps, num_ranks)`, summed workloads.
        tokens: int64 `(steps, num_ranks)`, summed tokens.
        moved: by slack, the tokens that change rank, as a fraction of all; empty where nothing is sent.
        sent_tokens: most tokens that a rank sends or receives in a step, mean over steps, near home at the slack of
            training where the way knows one; None where nothing is sent.
        planning_ms: processor time of a step's plan, as in training; None where nothing is planned.
        window: batches of every rank that are planned together.
        same_steps: whether a step has the rows that it has as loaded.
        budget: of steps of constant cost; None for steps of equally many rows.
    """

    name: str
    loads: np.ndarray
    tokens: np.ndarray
    moved: Mapping[float, float] = field(default_factory=dict)
    sent_tokens: float | None = None
    planning_ms: float | None = None
    window: int = 1
    same_steps: bool = True
    budget: Budget | None = None

    @property
    def largest_to_mean(self) -> np.ndarray:
        """float64 `(steps,)`, largest ÷ mean load of the steps that have work."""
        mean = self.loads.mean(axis=1)
        return self.loads.max(axis=1)[mean > 0] / mean[mean > 0]

    @property
    def total(self) -> float:
        """Sum over steps of the largest load ÷ sum of the mean: what waiting makes of the work."""
        return float(self.loads.max(axis=1).sum() / self.loads.mean(axis=1).sum())

    @property
    def fullest(self) -> float:
        """Most tokens of a rank in any step ÷ the mean over ranks and steps."""
        return float(self.tokens.max() / max(1e-12, self.tokens.mean()))


@dataclass(frozen=True)
class Comparison:
    """All ways of dealing the same rows to a number of ranks.

    Attributes:
        rows: the rows.
        ways: the first is as loaded.
        bound: no plan of single batches has a smaller sum over steps of largest ÷ mean load; its ratio, as `total`.
        largest_share: float64 `(steps,)`, the costliest row ÷ an even share; above 1 it alone holds a rank up.
    """

    rows: LoadedRows
    ways: tuple[DealtRows, ...]
    bound: float
    largest_share: np.ndarray

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return self.rows.num_ranks

    @property
    def possible(self) -> float:
        """Speed-up if every rank of every step had the mean load."""
        return self.ways[0].total

    def speed_up(self, way: DealtRows) -> float:
        """Work per time of a way ÷ that of the rows as loaded; what a step costs besides its rows is left out."""
        return self.ways[0].total / way.total

    def median_speed_up(self, way: DealtRows) -> float | None:
        """Median over steps of the largest load as loaded ÷ that of a way; None where steps have other rows."""
        before, after = (each.loads.max(axis=1) for each in (self.ways[0], way))
        if not way.same_steps:
            return None
        return float(np.median(before[after > 0] / after[after > 0]))

    def share(self, way: DealtRows) -> float:
        """The speed-up ÷ the possible one."""
        return 1 / way.total

    @property
    def dominated(self) -> int:
        """Steps in which one row is more than an even share."""
        return int((self.largest_share > 1).sum())


def compare_ways(rows: LoadedRows, windows: Sequence[int] = (2, 4, 8)) -> Iterator[DealtRows]:
    """Deal rows in every way, one after another; the first is as loaded.

    Args:
        rows: with work in at least one of them.
        windows: batches of every rank that are planned together, each at least 2; those longer than the data are left
            out.
    """
    loaded = DealtRows("as loaded", rows.workloads.sum(axis=2), rows.tokens.sum(axis=2))
    yield loaded
    yield _karmarkar_karp(rows)
    yield _of_batches("refined", rows, equal_size=True)
    yield _of_batches("free counts", rows, equal_size=False)
    for window in windows:
        if window <= rows.num_steps:
            yield _of_windows(rows, window, loaded)


def compared(rows: LoadedRows, ways: Sequence[DealtRows]) -> Comparison:
    """The ways side by side, with what no plan can go below.

    Args:
        rows: the rows.
        ways: as `compare_ways` gives them, and perhaps more.
    """
    bound = sum(
        lower_bound(np.ascontiguousarray(step).ravel(), rows.num_ranks, equal_size=False) for step in rows.workloads
    )
    mean = rows.workloads.sum(axis=2).mean(axis=1)
    share = rows.workloads.max(axis=(1, 2)) / np.maximum(1.0, mean)
    return Comparison(rows, tuple(ways), float(bound / mean.sum()), share)


def _karmarkar_karp(rows: LoadedRows) -> DealtRows:
    """Equal counts by Karmarkar-Karp, and no look at where rows are: what other libraries ship."""
    loads, tokens, moved, sent, spent = [], [], [], [], 0.0
    for step in range(rows.num_steps):
        gathered = rows.window(step, step + 1)
        begin = time.thread_time()
        assignment = partition(gathered.workloads, rows.num_ranks, method="karmarkar_karp").assignment
        spent += time.thread_time() - begin
        assignment = np.asarray(assignment, dtype=np.int64)
        loads.append(sum_at(assignment, gathered.workloads, rows.num_ranks))
        tokens.append(sum_at(assignment, gathered.tokens, rows.num_ranks))
        changes, most = _traffic(gathered, gathered.home, assignment)
        moved.append(changes)
        sent.append(most)
    share = sum(moved) / max(1, int(rows.tokens.sum()))
    return DealtRows(
        "Karmarkar-Karp",
        np.stack(loads),
        np.stack(tokens),
        {0.0: share},  # it knows no slack
        float(np.mean(sent)),
        1e3 * spent / rows.num_steps,
    )


def _of_batches(name: str, rows: LoadedRows, *, equal_size: bool) -> DealtRows:
    """Every batch by itself, near home."""
    plans = [
        plan_shuffle(rows.window(step, step + 1), equal_size=equal_size, slack=0.0) for step in range(rows.num_steps)
    ]
    loads = np.stack([plan.loads_after for plan in plans])
    tokens = np.stack([sum_at(plan.destination, plan.gathered.tokens, rows.num_ranks) for plan in plans])
    return DealtRows(name, loads, tokens, **_near_home(rows, 1, equal_size))


def _of_windows(rows: LoadedRows, window: int, loaded: DealtRows) -> DealtRows:
    """Windows of batches, planned together; as loaded where that is no better."""
    loads: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    for first in range(0, rows.num_steps, window):
        last = min(first + window, rows.num_steps)
        gathered, steps = rows.window(first, last), last - first
        rank, step = np.divmod(gathered.home, steps)
        grid = partition_grid(gathered.workloads, rows.num_ranks, steps, home_step=step)
        place = grid.step * rows.num_ranks + grid.assignment
        if grid.sum_of_largest >= int(loaded.loads[first:last].max(axis=1).sum()):
            place = step * rows.num_ranks + rank
        for of_rows, of_steps in ((gathered.workloads, loads), (gathered.tokens, tokens)):
            of_steps.append(sum_at(place, of_rows, steps * rows.num_ranks).reshape(steps, rows.num_ranks))
    near = _near_home(rows, window, True)
    return DealtRows(
        f"window of {window}", np.concatenate(loads), np.concatenate(tokens), window=window, same_steps=False, **near
    )


def _near_home(rows: LoadedRows, window: int, equal_size: bool) -> dict[str, Any]:
    """What moves at every slack, what a rank sends, and how long planning takes, as fields of DealtRows."""
    steps = max(window, rows.looked_at - rows.looked_at % window)
    moved: dict[float, float] = {}
    most_sent, spent = 0.0, 0.0
    all_tokens = max(1, int(rows.tokens[:steps].sum()))
    for slack in SLACKS:
        changes, sent = 0, 0.0
        for first in range(0, steps, window):
            gathered = rows.window(first, first + window)
            begin = time.thread_time()
            plan: ShufflePlan = plan_shuffle(gathered, equal_size=equal_size, slack=slack)
            if slack == TRAINED_SLACK:
                spent += time.thread_time() - begin
            of_plan, most = _traffic(gathered, gathered.rank_of(gathered.home), gathered.rank_of(plan.destination))
            changes, sent = changes + of_plan, sent + most
        moved[slack] = changes / all_tokens
        if slack == TRAINED_SLACK:
            most_sent = sent / steps
    return {"moved": moved, "sent_tokens": most_sent, "planning_ms": 1e3 * spent / steps}


def _traffic(gathered: GatheredRows, home: np.ndarray, destination: np.ndarray) -> tuple[int, int]:
    """Tokens that change rank, and the most that one rank sends or receives."""
    moves = np.flatnonzero(home != destination)
    tokens = gathered.tokens[moves]
    ends = [sum_at(np.ascontiguousarray(end[moves]), tokens, gathered.num_ranks) for end in (home, destination)]
    return int(tokens.sum()), int(max(end.max() for end in ends))


def dealt_steps(
    name: str, steps: Sequence[tuple[np.ndarray, np.ndarray]], planning_ms: float | None, budget: Budget
) -> DealtRows:
    """What ranks hold when a sampler has read the rows where they are trained.

    Args:
        name: of the way.
        steps: loads and tokens `(num_ranks,)` of every step.
        planning_ms: of a step.
        budget: that steps are filled to.
    """
    loads, tokens = (np.stack(values) for values in zip(*steps))
    return DealtRows(name, loads, tokens, planning_ms=planning_ms, same_steps=False, budget=budget)
