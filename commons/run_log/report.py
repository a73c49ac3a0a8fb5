"""Figures of a run from its log, for tables, pages and JSON: the effect of balancing, and where the time goes.

Imbalance, speed-up and possible speed-up are defined as in `commons.perf_model.gain`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np

from commons.perf_model.loads import SLOW, SLOW_STEPS, median_of_others
from commons.run_log.files import finite_only
from commons.run_log.reading import RunLog, setting
from commons.run_log.step_time import StepTime, step_time_of, time_fit_of

# "off": rows are trained where they are loaded; "observed": they are planned but not moved; "balanced": they are moved.
Balancing = Literal["off", "observed", "balanced"]


@dataclass(frozen=True)
class Speed:
    """The speed of a run without its warm-up; None for unknown values."""

    step_ms: float | None  # median over lines of their median step
    rows_per_s: float | None  # rows of all ranks per second of training
    tokens_per_s: float | None
    tflops_per_rank: float | None  # forward and backward operations per second, in 10^12
    mfu: float | None  # tflops_per_rank ÷ the peak rate of the device


def _mean_of(column: str) -> Any:
    """A field whose value is the mean of a column over all steps."""
    return field(metadata={"column": column})


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The effect of balancing on the loads (predicted, if rows were only observed); None for unknown values."""

    # largest load ÷ mean − 1, mean over steps: as the rows were loaded, and as planned
    imbalance_before: float | None = _mean_of("imbalance_before")
    imbalance_after: float | None = _mean_of("imbalance_after")
    # the same with steps weighted by their work, so Σ largest load ÷ Σ mean load − 1: small steps cost little time
    uneven_before: float | None
    uneven_after: float | None
    worst_before: float | None  # of the most uneven line
    worst_after: float | None
    work: float | None  # speed-up of the slowest rank: largest load before ÷ after, both summed over steps
    possible: float | None  # largest load before ÷ lower bound: no plan gains more
    # Time of an unbalanced step ÷ of a balanced step: including exchange and waiting if rows were balanced, without the
    # exchange if they were only observed.
    step: float | None
    predicted_step: float | None  # the same, predicted by the shuffler's calibration
    gated: float | None = _mean_of("gated")  # fraction of steps in which a better plan was not worth it
    gap: float | None = _mean_of("optimality_gap")  # largest planned load ÷ lower bound − 1
    tokens_moved: float | None = _mean_of("tokens_moved")  # per step
    token_fraction_moved: float | None = _mean_of("token_fraction_moved")
    bytes_sent: float | None = _mean_of("bytes_sent")  # by rank 0 per step
    # most embedding lookups of a rank ÷ mean − 1: as loaded, and as trained
    lookups_before: float | None = _mean_of("lookup_imbalance_before")
    lookups_after: float | None = _mean_of("lookup_imbalance_after")
    # Fraction of the slowest rank's time that planning by the ranks' speeds saves, or would save if only observed.
    speeds: float | None = _mean_of("speed_saving")


@dataclass(frozen=True)
class Background:
    """The shuffler's work that overlaps with the steps, in milliseconds per step."""

    gather_ms: float  # gather of the rows' metadata
    plan_ms: float
    exchange_ms: float | None  # exchange of windows, which overlaps with the steps; None if no window moves rows
    hidden: float  # fraction of gather and plan that no step waited for


@dataclass(frozen=True)
class RankSpeed:
    """A slow rank and its relative speed: load per millisecond ÷ median of other ranks, or planned speed ÷ fastest."""

    rank: int
    speed: float


class RunReport:
    """The figures of a run's log; None for unknown values."""

    def __init__(self, log: RunLog) -> None:
        log = _since_balancing_changed(log)
        self.log = log
        self.steps = int(log.step[-1])  # the last step in the log
        self.ranks = log.num_ranks[-1] if log.num_ranks else None  # data-parallel ranks, of the last line
        # over all ranks
        self.rows_per_step = log.mean(log.column("rows_per_s") * log.mean_step_ms / 1e3)
        self.balancing = _balancing_of(log)
        self.by_work = _is_by_work(log)  # whether rows were read or scattered by their work, so that none has to move
        self.window = _window_of(log)  # batches that are planned together; 1 without a window
        self.speed = _speed_of(log)
        self.step_time = step_time_of(log, self.trained)  # None if no line has times
        self.gain = _gain_of(log, self.balancing, self.step_time)
        if not self.knows_loaded:  # a plan for rows that are balanced already says nothing about the gain
            after = ("imbalance_after", "uneven_after", "worst_after")
            unknown = (*after, "work", "possible", "step", "predicted_step", "gated", "gap")
            self.gain = replace(self.gain, **dict.fromkeys(unknown))
            self.step_time = self.step_time and replace(self.step_time, saved=None)
        if self.by_work and self.window > 1:  # the log has bounds of the sampler's steps, not of its windows
            self.gain = replace(self.gain, possible=None, gap=None)
        self.time_fit = time_fit_of(log, self.trained)
        # None without a shuffler, or in mode "off"
        self.background = _background_of(log, exchanges=self.moves_rows and self.window > 1)
        self.slow_ranks = _slow_ranks(log)  # the slowest first
        self.given_less = _given_less(log)  # ranks that get less work because of their `speeds`, the slowest first
        loss = float(log.column("loss")[-1])
        self.loss = None if loss != loss else loss  # of the last line
        # the last evaluation, metrics by name; empty without evaluation
        self.evaluation: Mapping[str, float] = log.evaluations[-1][1] if log.evaluations else {}

    @property
    def trained(self) -> Literal["before", "after"]:
        """The suffix of the columns with the trained loads: before or after balancing."""
        return "after" if self.balancing == "balanced" else "before"

    @property
    def moves_rows(self) -> bool:
        """Whether the shuffler moves rows; with a sampler they are read where they are trained."""
        return self.balancing == "balanced" and not self.by_work

    @property
    def knows_loaded(self) -> bool:
        """Whether "before" is the rows as loaded; if rank 0 assigned them by their work, it is the rows as trained."""
        return self.balancing == "balanced" or not self.by_work

    @property
    def is_as_loaded(self) -> bool:
        """Whether this run is an unbalanced baseline."""
        return self.balancing != "balanced" and not self.by_work

    def to_dict(self) -> dict[str, Any]:
        """The report as data for JSON, with None for unknown values."""
        content = {name: _plain(value) for name, value in vars(self).items() if name != "log"}
        content["step_time_ms"] = content.pop("step_time")
        evaluated = self.log.evaluations[-1][0] if self.log.evaluations else None
        content["evaluation"] = None if evaluated is None else {"step": evaluated, **finite_only(self.evaluation)}
        return {"run": self.log.name, **content}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [asdict(each) for each in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def ratio(over: float | None, under: float | None) -> float | None:
    """`over` ÷ `under`; None if either is unknown, or if `under` is not positive.

    >>> ratio(3.0, 2.0), ratio(0.0, 0.0), ratio(1.0, None)
    (1.5, None, None)
    """
    return None if over is None or under is None or under <= 0 else over / under


def _since_balancing_changed(log: RunLog) -> RunLog:
    """The lines since a run was resumed with another balancing, the whole log if there are none; with a note."""
    runs = log.runs
    of_runs = [_logged_balancing(run) for run in reversed(runs)]
    # A run in which nothing could be balanced has a shuffler: it does not continue "off".
    last = of_runs[0] or next((each for each in of_runs if each not in (None, "off")), None)
    kept = list(itertools.takewhile(lambda run: _logged_balancing(run) in (None, last), reversed(runs)))
    if len(kept) == len(runs):
        return log
    found = log.lines(slice(-sum(len(run.step) for run in kept), None))
    before = int(log.step[-len(found.step) - 1])
    left_out = f"up to step {before} the run was balanced in another way, and these steps are left out"
    found.notes = (*log.notes, left_out)
    return found


def _logged_balancing(log: RunLog) -> str | None:
    """How the rows of a run were balanced, by its logged numbers; None if nothing could be balanced."""
    if (in_turn := log.mean("before_in_turn")) is not None:
        return "by work" if in_turn else "by work, as trained"
    if log.mean("largest_load_after") is None:
        return "off"
    if log.mean("moved"):
        is_end = log.steps.sum() == 1 and _window_of(log) > 1  # the last window of an epoch may have one batch
        return "windows" if is_end or (_largest(log.column("window")) or 1) > 1 else "balanced"
    return "observed" if log.mean("imbalance_before") != log.mean("imbalance_after") else None


def _balancing_of(log: RunLog) -> Balancing:
    """Decide by the logged numbers, because with a balancing sampler the settings say that the shuffler observes."""
    if log.mean("largest_load_after") is None:
        return "off"
    if log.mean("before_in_turn"):
        return "balanced"  # by a sampler: the loads before are those of the same rows assigned in turn
    if setting(log.config, "trainer.shuffler.mode") == "observe" or _is_by_work(log):
        return "observed"
    if not log.config and not log.mean("moved") and log.mean("imbalance_before") != log.mean("imbalance_after"):
        return "observed"
    return "balanced"


def _window_of(log: RunLog) -> int:
    """The setting of the run or, if it is unknown, the longest window: the last window of an epoch may be shorter."""
    longest, planned = _largest(log.column("window")), setting(log.config, "trainer.shuffle_window")
    # In mode "off" nothing is logged of windows, which a sampler has nevertheless.
    if longest is None and not setting(log.config, "trainer.balance_sampler"):
        return 1
    return planned if isinstance(planned, int) else round(longest or 1)


def _is_by_work(log: RunLog) -> bool:
    """Whether a sampler or the first rank assigned the rows to ranks by their work."""
    return any(setting(log.config, f"trainer.{name}") is True for name in ("balance_sampler", "balance_batch"))


def _speed_of(log: RunLog) -> Speed:
    times = log.column("step_ms")[log.timed]
    known = times[np.isfinite(times)]
    names = ("rows_per_s", "tokens_per_s", "tflops_per_rank", "mfu")
    return Speed(float(np.median(known)) if len(known) else None, *(log.rate(name) for name in names))


def _gain_of(log: RunLog, balancing: Balancing, step_time: StepTime | None) -> Gain:
    step = predicted = None
    if step_time is not None and balancing != "off":
        step = _step_gain(step_time, step_time.saved, balancing)
        predicted = _step_gain(step_time, log.mean("predicted_saving_ms", log.timed), balancing)
    before, after, bound = (log.mean(name) for name in ("largest_load_before", "largest_load_after", "lower_bound"))
    if bound is not None and after is not None:
        # If no row moves, counts may be unequal, and the load below the bound for equal counts.
        bound = min(bound, after)
    means = {each.name: log.mean(each.metadata["column"]) for each in fields(Gain) if each.metadata}
    return Gain(
        uneven_before=_uneven(log, "before"),
        uneven_after=_uneven(log, "after"),
        worst_before=_largest(log.column("imbalance_before")),
        worst_after=_largest(log.column("imbalance_after")),
        work=ratio(before, after),
        possible=ratio(before, bound),
        step=step,
        predicted_step=predicted,
        **means,
    )


def _uneven(log: RunLog, when: str) -> float | None:
    """The imbalance of the lines, weighted by their mean loads or, in a run without loads, by their operations."""
    imbalances = log.column(f"imbalance_{when}")
    work = log.column(f"largest_load_{when}") / (1 + imbalances)
    work = work if np.isfinite(work).any() else log.column("tflops_per_rank") * log.mean_step_ms
    return ratio(log.mean(imbalances * work), log.mean(np.where(np.isfinite(imbalances), work, np.nan)))


def _step_gain(step_time: StepTime, saved: float | None, balancing: Balancing) -> float | None:
    """Time of an unbalanced step ÷ of a balanced step."""
    if saved is None:
        return None
    if balancing == "balanced":
        return ratio(step_time.total + saved - step_time.overhead, step_time.total)
    return ratio(step_time.total, step_time.total - saved)


def _background_of(log: RunLog, *, exchanges: bool) -> Background | None:
    gather, plan = log.mean("gather_ms", log.timed), log.mean("plan_ms", log.timed)
    if gather is None or plan is None:
        return None
    exchange = log.mean("exchange_ms", log.timed) if exchanges else None
    return Background(gather, plan, exchange, log.mean("hidden_fraction", log.timed) or 0.0)


def _slow_ranks(log: RunLog) -> tuple[RankSpeed, ...]:
    """Ranks that work slower than the others, in the lines with the last line's number of ranks."""
    known = [
        (speeds, count) for speeds, count in zip(log.of_ranks.get("rank_speeds", ()), log.steps) if speeds is not None
    ]
    same = [(speeds, count) for speeds, count in known if len(speeds) == len(known[-1][0]) > 1]
    if not same:
        return ()
    relative = np.stack([_relative_speeds(speeds) for speeds, _ in same])
    measured = np.isfinite(relative).T @ np.array([count for _, count in same])
    often = np.flatnonzero(measured >= SLOW_STEPS)
    slow = [RankSpeed(rank, float(np.nanmedian(relative[:, rank]))) for rank in often.tolist()]
    return tuple(sorted((each for each in slow if each.speed < 1 / SLOW), key=lambda each: each.speed))


def _given_less(log: RunLog) -> tuple[RankSpeed, ...]:
    """Ranks with a lower speed than the fastest, by the last line with the speeds of plans."""
    known = [speeds for speeds in log.of_ranks.get("speeds", ()) if speeds is not None and len(speeds)]
    shares = known[-1] / known[-1].max() if known else np.ones(0)
    less = [RankSpeed(rank, share) for rank, share in enumerate(shares.tolist()) if share < 1]
    return tuple(sorted(less, key=lambda each: each.speed))


def _relative_speeds(speeds: np.ndarray) -> np.ndarray:
    """Each speed ÷ the median of the others, float64 `(ranks,)`; NaN if unknown."""
    known, relative = speeds > 0, np.full(len(speeds), np.nan)
    if known.sum() > 1:
        relative[known] = speeds[known] / median_of_others(speeds[known])
    return relative


def _largest(values: np.ndarray) -> float | None:
    return float(np.nanmax(values)) if np.isfinite(values).any() else None
