"""Comparison of runs with the first run: speed-up, differences in loss, and settings that make runs incomparable."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from commons.run_log.files import flat
from commons.run_log.reading import RunLog, setting
from commons.run_log.report import RunReport, ratio
from commons.run_log.standard_error import with_errors

# Settings that runs may differ in, because they change neither the model nor its data: of balancing and of output.
_FREE = (
    "trainer.enable_balanced_shuffler",
    "trainer.shuffle_eval",
    "trainer.shuffler.*",
    "trainer.shuffle_window",
    "trainer.balance_*",
    "trainer.budget_per_rank",
    "trainer.single_rank_load",
    "trainer.run_dir",
    "trainer.overwrite",
    "trainer.ckpt_*",
    "trainer.log_interval",
    "trainer.eval_interval",
    "trainer.max_train_iters",
    "trainer.num_epochs",
    "trainer.sinks",
    "trainer.sink_options.*",
    "trainer.profile*",
    "trainer.peak_tflops",
    "shuffler_type",
    "imports",
)
# Settings of the steps that runs may differ in too if either has a budget, which decides the rows of its steps.
_FREE_WITH_BUDGET = ("trainer.train_batch_size", "trainer.global_batch_size", "trainer.schedule_in")
# Most settings that a note names.
_MOST_NAMED = 4
# Fewest pairs of steps for a ratio of steps: even the whole range of five contains the median with only 94 %.
_FEWEST_PAIRS = 6


@dataclass(frozen=True)
class LossDifference:
    """The difference in loss over lines of the same steps in both runs."""

    largest: float  # over all these lines
    at_end: float  # of the last of these lines
    step: int  # step of the last of these lines
    lines: int  # number of these lines


@dataclass(frozen=True)
class StepRatio:
    """Time of a step in the first run ÷ time of the same step in the other, for runs that log every step."""

    median: float
    low: float  # the 95 % interval of the median
    high: float


class RunComparison:
    """A run compared with the first run; None for unknown values."""

    def __init__(self, base: RunReport, other: RunReport) -> None:
        self.run, self.base = other.log.name, base.log.name
        # rows per second ÷ rows per second of the first run: the speed-up
        self.rows_per_s = ratio(other.speed.rows_per_s, base.speed.rows_per_s)
        # Whether a step of one run is a step of the other; a budget changes the rows of a step, so that only rows per
        # second and loads per row compare.
        self.equal_steps = _have_equal_steps(base.log, other.log)
        # Whether the loads of both runs, if both have loads, have the same unit.
        self.equal_units = _have_equal_units(base, other)
        self.step_ms: float | None = None  # median step of the first run ÷ of this run
        self.each_step: StepRatio | None = None
        self.loss: LossDifference | None = None
        # Metrics minus the first run's metrics at the last step at which both runs were evaluated, and this step. The
        # standard errors of the differences, if both metrics have one, assume different users; with the same users, the
        # true errors are smaller.
        self.evaluation: dict[str, float] = {}
        self.standard_errors: dict[str, float] = {}
        self.evaluated_at: int | None = None
        if self.equal_steps:
            self.step_ms = ratio(base.speed.step_ms, other.speed.step_ms)
            self.evaluation, self.standard_errors, self.evaluated_at = _evaluations(base.log, other.log)
        # A window changes which rows share a step, so a single step compares only with one of an equal window.
        if self.equal_steps and _window_trained(base) == _window_trained(other):
            self.each_step = _step_ratio(base.log, other.log)
            self.loss = _loss_difference(base.log, other.log)
        self.differences = tuple(_differences(base, other))  # reasons why the runs cannot be compared
        # The slowest rank's load in the first run ÷ in this run, per row: the speed-up that the loads predict. If the
        # first run logged no loads, this run's loads before balancing are used. Loads of other rows or models, or in
        # another unit, cannot be compared.
        self.work: float | None = None
        if not self.differences and self.equal_units:
            self.work = ratio(_largest_per_row(base), _largest_per_row(other))
            loads_unknown = self.work is None and base.balancing == "off" and other.balancing == "balanced"
            if loads_unknown and self.equal_steps:
                self.work = other.gain.work

    @property
    def compares(self) -> bool:
        """Whether both speeds are known and the runs differ only in balancing."""
        return self.rows_per_s is not None and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """The comparison as data for JSON."""
        parts = {"each_step": self.each_step and asdict(self.each_step), "loss": self.loss and asdict(self.loss)}
        return {**vars(self), **parts}


def compare_runs(reports: Sequence[RunReport]) -> list[RunComparison]:
    """Compare every other run with the first."""
    return [RunComparison(reports[0], other) for other in reports[1:]]


def best_first(reports: Sequence[RunReport]) -> list[RunComparison]:
    """Compare all runs with a base run, the fastest first; the result does not depend on the order of the runs.

    The base is the fastest unbalanced run or, if all are balanced, the slowest run. Runs that cannot be compared with
    it, or whose speed is unknown, come last.
    """
    base = _fastest(each for each in reports if each.is_as_loaded) or _fastest(reports, sign=-1)
    if base is None:
        return []
    comparisons = [RunComparison(base, each) for each in reports if each is not base]
    return sorted(comparisons, key=lambda each: (not each.compares, -(each.rows_per_s or 0.0), each.run))


def _fastest(reports: Iterable[RunReport], sign: int = 1) -> RunReport | None:
    """The run with the most rows per second, or with sign −1 the fewest; None if no speed is known."""
    known = [each for each in reports if each.speed.rows_per_s is not None]
    return min(known, key=lambda each: (-sign * (each.speed.rows_per_s or 0.0), each.log.name), default=None)


def _largest_per_row(report: RunReport) -> float | None:
    """The slowest rank's load in a step ÷ the rows of a step, means over steps."""
    if setting(report.log.config, "trainer.shuffler.speeds") == "measured":
        return None  # these loads depend on the measured speeds, so other runs' loads are not comparable
    return ratio(report.log.mean(f"largest_load_{report.trained}"), report.rows_per_step)


def _have_equal_units(base: RunReport, other: RunReport) -> bool:
    """Whether both runs have loads in operations, or in the time of one calibration; or one run has no loads."""
    names = ("shuffler_type", "trainer.shuffler.calibration")
    equal = all(setting(base.log.config, name) == setting(other.log.config, name) for name in names)
    return equal or "off" in (base.balancing, other.balancing)


def _window_trained(report: RunReport) -> int:
    return 1 if report.is_as_loaded else report.window


def _has_budget(*logs: RunLog) -> bool:
    return any(setting(log.config, "trainer.budget_per_rank") is not None for log in logs)


def _have_equal_steps(base: RunLog, other: RunLog) -> bool:
    names = ("trainer.budget_per_rank", "trainer.train_batch_size", "trainer.global_batch_size")
    same = all(setting(base.config, name) == setting(other.config, name) for name in names)
    return same or not _has_budget(base, other)


def _same_lines(base: RunLog, other: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the lines of both logs that cover the same steps."""
    _, first, second = np.intersect1d(base.step, other.step, return_indices=True)
    same = base.steps[first] == other.steps[second]
    return first[same], second[same]


def _step_ratio(base: RunLog, other: RunLog) -> StepRatio | None:
    first, second = _same_lines(base, other)
    slow, fast = base.column("step_ms")[first], other.column("step_ms")[second]
    known = base.timed[first] & other.timed[second] & (slow > 0) & (fast > 0)
    if known.sum() < _FEWEST_PAIRS or (base.steps[first] > 1).any():
        return None
    ratios = slow[known] / fast[known]
    return StepRatio(float(np.median(ratios)), *median_interval(ratios))


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """A 95 % interval of the median, from the order of the values (normal approximation of the binomial).

    >>> median_interval(np.arange(100.0))
    (39.0, 60.0)
    """
    ordered = np.sort(values)
    half_width = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(math.floor((len(ordered) - 1) / 2 - half_width), 0)
    return float(ordered[low]), float(ordered[len(ordered) - 1 - low])


def _loss_difference(base: RunLog, other: RunLog) -> LossDifference | None:
    first, second = _same_lines(base, other)
    apart = np.abs(base.column("loss")[first] - other.column("loss")[second])
    if not len(apart) or not np.isfinite(apart).all():
        return None
    return LossDifference(float(apart.max()), float(apart[-1]), int(base.step[first[-1]]), len(apart))


def _evaluations(base: RunLog, other: RunLog) -> tuple[dict[str, float], dict[str, float], int | None]:
    """Differences of metrics, their standard errors, and the step: the last at which both runs were evaluated."""
    first, second = dict(base.evaluations), dict(other.evaluations)
    common = sorted(set(first) & set(second))
    if not common:
        return {}, {}, None
    before, after = first[common[-1]], second[common[-1]]
    errors_after = {name: error for name, _, error in with_errors(after)}
    apart, errors = {}, {}
    for name, value, error in with_errors(before):
        if name != "rows" and name in after and np.isfinite(after[name] - value):
            apart[name] = after[name] - value
            if error is not None and (other_error := errors_after.get(name)) is not None:
                errors[name] = float(np.hypot(error, other_error))
    return apart, errors, common[-1]


def _differences(base: RunReport, other: RunReport) -> Iterator[str]:
    """Reasons why two runs cannot be compared, one text each."""
    has_budget = _has_budget(base.log, other.log)
    sizes: list[tuple[str, float | None, float | None]] = [("ranks", base.ranks, other.ranks)]
    if not has_budget:
        sizes.append(("rows per step", base.rows_per_step, other.rows_per_step))
    for what, first, second in sizes:
        if first is not None and second is not None and abs(first - second) > 0.01 * max(first, second):
            yield f"{what}: {_number(first)} and {_number(second)}"
    if not (base.log.config and other.log.config):
        yield "settings, which are unknown for one run"
        return
    free = _FREE + (_FREE_WITH_BUDGET if has_budget else ())
    first_settings, second_settings = dict(flat(base.log.config)), dict(flat(other.log.config))
    named = [
        f"{name}: {_shown(first_settings[name])} and {_shown(second_settings[name])}"
        for name in first_settings  # releases have different settings, so only common names are compared
        if name in second_settings
        and first_settings[name] != second_settings[name]
        and not any(fnmatch.fnmatchcase(name, each) for each in free)
    ]
    yield from named[:_MOST_NAMED]
    if len(named) > _MOST_NAMED:
        yield f"{len(named) - _MOST_NAMED} more settings"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-6 else f"{value:,.1f}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
