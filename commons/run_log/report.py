"""What balancing did in a run, in numbers: of one run's log the figures that a table, a page and JSON show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from commons.perf_model.loads import median_of_others
from commons.run_log.reading import RunLog, setting
from commons.run_log.step_time import StepTime, step_time_of
from commons.run_log.time_fit import TimeFit, time_fit_of

# What happened to the rows: trained where they were loaded, or planned and left there, or moved.
Balancing = Literal["off", "observed", "balanced"]

# A rank is slow below this part of the others' median speed, once so many steps have told its speed.
_SLOW, _FEWEST_STEPS = 1 / 1.25, 20


@dataclass(frozen=True)
class Speed:
    """How fast a run was, warm-up left out; None for what its log does not know.

    Attributes:
        step_ms: median over lines of their median step.
        rows_per_s: rows of all ranks per second of training.
        tokens_per_s: the same of tokens.
        tflops_per_rank: forward and backward operations per second, in 10^12.
        mfu: that divided by the peak rate of the device.
    """

    step_ms: float | None
    rows_per_s: float | None
    tokens_per_s: float | None
    tflops_per_rank: float | None
    mfu: float | None


@dataclass(frozen=True)
class Gain:
    """What balancing did to the loads, or in a run that only observes would do; None for what is not known.

    Attributes:
        imbalance_before: largest load ÷ mean − 1 as the rows were loaded, mean over steps.
        imbalance_after: the same as planned.
        worst_before: of the most uneven line.
        worst_after: of the most uneven line after balancing.
        work: largest load before ÷ after, both summed over steps: how much less the slowest rank has to compute.
        possible: largest load before ÷ lower bound: no plan gains more.
        step: what a step would take unbalanced ÷ what it takes, exchange and waiting included; where rows were only
            observed what it takes ÷ what it would take, exchange not included.
        predicted_step: the same by the calibration that the shuffler used.
        gated: fraction of steps in which a better plan was not worth it.
        gap: largest planned load ÷ lower bound − 1.
        tokens_moved: of a step, and `token_fraction_moved` of all.
        token_fraction_moved: as above.
        bytes_sent: of a step, by rank 0.
        lookups_before: most embedding lookups of a rank ÷ mean − 1, as loaded.
        lookups_after: the same as trained.
    """

    imbalance_before: float | None
    imbalance_after: float | None
    worst_before: float | None
    worst_after: float | None
    work: float | None
    possible: float | None
    step: float | None
    predicted_step: float | None
    gated: float | None
    gap: float | None
    tokens_moved: float | None
    token_fraction_moved: float | None
    bytes_sent: float | None
    lookups_before: float | None
    lookups_after: float | None


@dataclass(frozen=True)
class Background:
    """What the shuffler does beside the steps, in milliseconds of a step.

    Attributes:
        gather_ms: what ranks say of their rows.
        plan_ms: planning.
        exchange_ms: of windows, whose rows are exchanged beside the steps; None without.
        hidden: fraction of gather and plan that nobody waited for.
    """

    gather_ms: float
    plan_ms: float
    exchange_ms: float | None
    hidden: float


@dataclass(frozen=True)
class RankSpeed:
    """A slow rank: `speed` is its load per millisecond divided by the median of the others."""

    rank: int
    speed: float


@dataclass(frozen=True, eq=False)
class RunReport:
    """What a run's log says.

    Attributes:
        log: of the run.
        steps: the last step that the log knows.
        ranks: that share the data; the last number where it has changed, None where it is not known.
        rows_per_step: of all ranks together.
        balancing: what happened to the rows.
        by_work: whether the rows were read or dealt out by their work, so that nothing has to move.
        window: batches that were planned together; 1 without a window.
        speed: how fast it was.
        gain: what balancing did.
        step_time: where a step's time went; None where no line has times.
        time_fit: whether time follows the loads; None where the log cannot tell.
        background: what was done beside the steps; None without a shuffler that looks at the rows.
        slow_ranks: the slowest first.
        loss: of the last line.
        evaluation: the last one; empty for none.
    """

    log: RunLog
    steps: int
    ranks: int | None
    rows_per_step: float | None
    balancing: Balancing
    by_work: bool
    window: int
    speed: Speed
    gain: Gain
    step_time: StepTime | None
    time_fit: TimeFit | None
    background: Background | None
    slow_ranks: tuple[RankSpeed, ...]
    loss: float | None
    evaluation: Mapping[str, float]

    @classmethod
    def of(cls, log: RunLog) -> RunReport:
        """Compute it all."""
        balancing, window = _balancing_of(log), round(log.mean("window") or 1)
        step_time = step_time_of(log, as_loaded=balancing != "balanced")
        losses = log.column("loss")
        return cls(
            log=log,
            steps=int(log.step[-1]),
            ranks=log.num_ranks[-1] if log.num_ranks else None,
            rows_per_step=_rows_per_step(log),
            balancing=balancing,
            by_work=_is_by_work(log),
            window=window,
            speed=_speed_of(log),
            gain=_gain_of(log, balancing, step_time),
            step_time=step_time,
            time_fit=time_fit_of(log, as_loaded=balancing != "balanced"),
            background=_background_of(log, window),
            slow_ranks=_slow_ranks(log),
            loss=None if np.isnan(losses[-1]) else float(losses[-1]),
            evaluation=log.evaluations[-1][1] if log.evaluations else {},
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON, with None for what is not known."""
        evaluated = self.log.evaluations[-1][0] if self.log.evaluations else None
        return {
            "run": self.log.name,
            "steps": self.steps,
            "ranks": self.ranks,
            "rows_per_step": self.rows_per_step,
            "balancing": self.balancing,
            "by_work": self.by_work,
            "window": self.window,
            "speed": dataclasses.asdict(self.speed),
            "gain": dataclasses.asdict(self.gain),
            "step_time_ms": None if self.step_time is None else dataclasses.asdict(self.step_time),
            "time_fit": None if self.time_fit is None else dataclasses.asdict(self.time_fit),
            "background": None if self.background is None else dataclasses.asdict(self.background),
            "slow_ranks": [dataclasses.asdict(each) for each in self.slow_ranks],
            "loss": self.loss,
            "evaluation": None if evaluated is None else {"step": evaluated, **_without_nan(self.evaluation)},
        }


def _without_nan(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if np.isnan(value) else value for name, value in numbers.items()}


def _balancing_of(log: RunLog) -> Balancing:
    """As the numbers tell: the settings alone do not, since a sampler that balances is observed by the shuffler."""
    if log.mean("largest_load_after") is None:
        return "off"
    if log.mean("before_in_turn"):
        return "balanced"  # by a sampler: "before" is of the same rows dealt in turn
    if setting(log.config, "trainer.shuffler.mode") == "observe" or _is_by_work(log):
        return "observed"
    if not log.config and not log.mean("moved") and log.mean("imbalance_before") != log.mean("imbalance_after"):
        return "observed"
    return "balanced"


def _is_by_work(log: RunLog) -> bool:
    """Whether a sampler or the first rank has dealt the rows by their work."""
    return any(setting(log.config, f"trainer.{name}") is True for name in ("balance_sampler", "balance_batch"))


def _rows_per_step(log: RunLog) -> float | None:
    """Real rows of all ranks together, mean over steps."""
    rows = log.column("rows_per_s") * log.total_ms / 1e3
    known = np.isfinite(rows)
    if np.isfinite(log.column("total_ms")).any() and known.any():
        return float(rows[known].sum() / log.steps[known].sum())
    counted = log.mean("num_rows")
    per_rank = setting(log.config, "trainer.train_batch_size")
    if counted is not None or not isinstance(per_rank, int) or not log.num_ranks:
        return counted
    return float(per_rank * log.num_ranks[-1])


def _speed_of(log: RunLog) -> Speed:
    times = log.column("step_ms")[log.timed]
    known = times[np.isfinite(times)]
    return Speed(
        step_ms=float(np.median(known)) if len(known) else None,
        rows_per_s=log.rate("rows_per_s"),
        tokens_per_s=log.rate("tokens_per_s"),
        tflops_per_rank=log.rate("tflops_per_rank"),
        mfu=log.rate("mfu"),
    )


def _gain_of(log: RunLog, balancing: Balancing, step_time: StepTime | None) -> Gain:
    step = predicted = None
    if step_time is not None and balancing != "off":
        step = _step_gain(step_time, step_time.saved, balancing)
        predicted = _step_gain(step_time, log.mean("predicted_saving_ms", log.timed), balancing)
    return Gain(
        imbalance_before=log.mean("imbalance_before"),
        imbalance_after=log.mean("imbalance_after"),
        worst_before=_largest(log.column("imbalance_before")),
        worst_after=_largest(log.column("imbalance_after")),
        work=_ratio(log.mean("largest_load_before"), log.mean("largest_load_after")),
        possible=_ratio(log.mean("largest_load_before"), log.mean("lower_bound")),
        step=step,
        predicted_step=predicted,
        gated=log.mean("gated"),
        gap=log.mean("optimality_gap"),
        tokens_moved=log.mean("tokens_moved"),
        token_fraction_moved=log.mean("token_fraction_moved"),
        bytes_sent=log.mean("bytes_sent"),
        lookups_before=log.mean("lookup_imbalance_before"),
        lookups_after=log.mean("lookup_imbalance_after"),
    )


def _step_gain(step_time: StepTime, saved: float | None, balancing: Balancing) -> float | None:
    """A step unbalanced ÷ balanced."""
    if saved is None:
        return None
    if balancing == "balanced":
        return _ratio(step_time.total + saved - step_time.overhead, step_time.total)
    return _ratio(step_time.total, step_time.total - saved)


def _background_of(log: RunLog, window: int) -> Background | None:
    gather, plan = log.mean("gather_ms"), log.mean("plan_ms")
    if gather is None or plan is None:
        return None
    exchange = log.mean("exchange_ms") if window > 1 else None
    return Background(gather, plan, exchange, log.mean("hidden_fraction") or 0.0)


def _slow_ranks(log: RunLog) -> tuple[RankSpeed, ...]:
    """Ranks whose work goes slower than that of the others, in the lines that have as many ranks as the last one."""
    told = [
        (speeds, steps) for speeds, steps in zip(log.of_ranks.get("rank_speeds", ()), log.steps) if speeds is not None
    ]
    if not told or len(told[-1][0]) < 2:
        return ()
    same = [(speeds, steps) for speeds, steps in told if len(speeds) == len(told[-1][0])]
    relative = np.stack([_relative_speeds(speeds) for speeds, _ in same])
    steps = np.array([steps for _, steps in same], dtype=np.int64)
    often = np.where(np.isnan(relative), 0, steps[:, None]).sum(axis=0) >= _FEWEST_STEPS
    usual = np.ones(relative.shape[1])
    usual[often] = np.nanmedian(relative[:, often], axis=0)
    slow = [RankSpeed(rank, float(usual[rank])) for rank in np.argsort(usual, kind="stable").tolist()]
    return tuple(each for each in slow if each.speed < _SLOW)


def _relative_speeds(speeds: np.ndarray) -> np.ndarray:
    """float64 `(ranks,)`, each divided by the median of the others; NaN where that is not known."""
    known = np.isfinite(speeds) & (speeds > 0)
    relative = np.full(len(speeds), np.nan)
    if known.sum() > 1:
        relative[known] = speeds[known] / median_of_others(speeds[known])
    return relative


def _largest(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None or under <= 0 else over / under
