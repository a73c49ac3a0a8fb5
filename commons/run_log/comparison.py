"""Runs beside each other: how much faster than the first, the same losses, and whether they compare at all."""

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

# Settings that change neither the model nor its data: how it is balanced, and what is written where.
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
# Settings that a note names.
_MOST_NAMED = 4
# Lines of one step each that a ratio of steps takes.
_FEWEST_PAIRS = 5


@dataclass(frozen=True)
class LossDifference:
    """Of lines that both runs have, of the same steps."""

    largest: float  # of all lines
    at_end: float  # of the last one
    step: int  # that line's
    lines: int  # how many there are


@dataclass(frozen=True)
class StepRatio:
    """Step of the first run ÷ the same step of the other, in runs that log every step."""

    median: float
    low: float  # the 95 % interval of the median
    high: float


class RunComparison:
    """A run beside the first one; None for what is not known."""

    def __init__(self, base: RunReport, other: RunReport) -> None:
        self.run, self.base = other.log.name, base.log.name
        # rows per second ÷ those of the first: the speed-up
        self.rows_per_s = ratio(other.speed.rows_per_s, base.speed.rows_per_s)
        self.step_ms = ratio(base.speed.step_ms, other.speed.step_ms)  # median step of the first ÷ its own
        self.each_step = _step_ratio(base.log, other.log)
        self.work: float | None = None
        self.loss = _loss_difference(base.log, other.log)
        # Metric minus that of the first, after the last step that both were evaluated at; and that step. The standard
        # errors are of these differences, where both metrics have one, as if other users had been evaluated; of the
        # same users the differences are known better than that.
        self.evaluation, self.standard_errors, self.evaluated_at = _evaluations(base.log, other.log)
        self.differences = tuple(_differences(base, other))  # why the two do not compare, a sentence each
        # The slowest rank's load in the first ÷ its own, per step: what the loads predict. If the first run logged no
        # loads, those of this run as loaded stand for them. Loads of other rows or another model do not compare.
        if not self.differences:
            self.work = ratio(_largest_trained(base), _largest_trained(other))
            if self.work is None and base.balancing == "off" and other.balancing == "balanced":
                self.work = other.gain.work

    @property
    def compares(self) -> bool:
        """Whether both speeds are known, and the runs differ in balancing alone."""
        return self.rows_per_s is not None and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        parts = {"each_step": self.each_step and asdict(self.each_step), "loss": self.loss and asdict(self.loss)}
        return {**vars(self), **parts}


def compare_runs(reports: Sequence[RunReport]) -> list[RunComparison]:
    """Every run but the first beside the first."""
    return [RunComparison(reports[0], other) for other in reports[1:]]


def best_first(reports: Sequence[RunReport]) -> list[RunComparison]:
    """All runs but one beside that one, the fastest first, independent of the order of the runs.

    That one is the fastest unbalanced run or, where all are balanced, the slowest. Runs that do not compare
    with it, or whose speed is not known, come last.
    """
    base = _fastest(each for each in reports if each.is_as_loaded) or _fastest(reports, sign=-1)
    if base is None:
        return []
    beside = [RunComparison(base, each) for each in reports if each is not base]
    return sorted(beside, key=lambda each: (not each.compares, -(each.rows_per_s or 0.0), each.run))


def _fastest(reports: Iterable[RunReport], sign: int = 1) -> RunReport | None:
    """The run with the most rows per second, or with sign −1 the fewest; None where no speed is known."""
    known = [each for each in reports if each.speed.rows_per_s is not None]
    return min(known, key=lambda each: (-sign * (each.speed.rows_per_s or 0.0), each.log.name), default=None)


def _largest_trained(report: RunReport) -> float | None:
    if setting(report.log.config, "trainer.shuffler.speeds") == "measured":
        return None  # times of ranks, which other runs do not have
    return report.log.mean(f"largest_load_{report.trained}")


def _same_lines(base: RunLog, other: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the lines that are of the same steps; means over other steps do not compare."""
    _, first, second = np.intersect1d(base.step, other.step, return_indices=True)
    same = base.steps[first] == other.steps[second]
    return first[same], second[same]


def _step_ratio(base: RunLog, other: RunLog) -> StepRatio | None:
    first, second = _same_lines(base, other)
    slow, fast = base.column("step_ms")[first], other.column("step_ms")[second]
    single = (base.steps[first] == 1) & base.timed[first] & other.timed[second] & (slow > 0) & (fast > 0)
    if single.sum() < _FEWEST_PAIRS:
        return None
    ratios = slow[single] / fast[single]
    return StepRatio(float(np.median(ratios)), *median_interval(ratios))


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """A 95 % interval of the median, from the order of the values alone (normal approximation of the binomial).

    >>> median_interval(np.arange(100.0))
    (40.0, 59.0)
    """
    ordered = np.sort(values)
    half_width = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(math.floor((len(ordered) - 1) / 2 - half_width) + 1, 0)
    return float(ordered[low]), float(ordered[len(ordered) - 1 - low])


def _loss_difference(base: RunLog, other: RunLog) -> LossDifference | None:
    first, second = _same_lines(base, other)
    apart = np.abs(base.column("loss")[first] - other.column("loss")[second])
    known = np.flatnonzero(np.isfinite(apart))
    if not len(known):
        return None
    last = known[-1]
    return LossDifference(float(apart[known].max()), float(apart[last]), int(base.step[first[last]]), len(known))


def _evaluations(base: RunLog, other: RunLog) -> tuple[dict[str, float], dict[str, float], int | None]:
    """By metric the difference and its standard error at the last step that both were evaluated at; and that step."""
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
    """What keeps two runs from being compared."""
    for what, first, second in (
        ("ranks", base.ranks, other.ranks),
        ("rows per step", base.rows_per_step, other.rows_per_step),
    ):
        if first is not None and second is not None and abs(first - second) > 0.01 * max(first, second):
            yield f"{what}: {_number(first)} and {_number(second)}"
    if not (base.log.config and other.log.config):
        yield "the settings of one are not known"
        return
    first_settings, second_settings = dict(flat(base.log.config)), dict(flat(other.log.config))
    named = [
        f"{name}: {_shown(first_settings[name])} and {_shown(second_settings[name])}"
        for name in first_settings  # releases have different ones
        if name in second_settings
        and first_settings[name] != second_settings[name]
        and not any(fnmatch.fnmatchcase(name, each) for each in _FREE)
    ]
    yield from named[:_MOST_NAMED]
    if len(named) > _MOST_NAMED:
        yield f"{len(named) - _MOST_NAMED} more settings"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-6 else f"{value:,.1f}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
