"""The parts of a step's time, the time that balancing saves, and whether time follows the loads.

Balancing gains as much as the loads predict only if time follows the loads. A model that pads to its longest row takes
the time of rows × longest row, whatever the sum of the rows' workloads is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from commons.run_log.reading import RunLog

# Names of the parts of a step in tables and pictures; without a slope, the work is part of the last one.
PARTS = (
    *("work at the bound", "unevenness that is left", "exchange of rows", "waiting for the plan", "the rest"),
    "not split",
)
# Fewest points, and least spread of loads (standard deviation ÷ mean), for a fit.
_FEWEST_POINTS, _LEAST_SPREAD = 20, 0.1
# Least R²: below it, the loads explain less than half of the variance of the times.
_FOLLOWS = 0.5
# Points this many standard deviations off the line are stalls of the machine, if they are at most this fraction.
_STALL, _MOST_STALLS = 4.0, 0.05


@dataclass(frozen=True)
class StepTime:
    """A mean step in milliseconds; the parts add up to the total."""

    total: float
    work: float | None  # the slowest rank's work if its load were the lower bound; None without a slope
    uneven: float | None  # the slowest rank's work in excess of that; None without a slope
    exchange: float | None  # of rows, as seen by the host; None if no rows move, or if it overlaps with the steps
    waiting: float | None  # for the plan; None without a shuffler
    rest: float  # everything else, which does not grow with the slowest rank's load; without a slope also the work
    # Reduction of the slowest rank's work by balancing (predicted, if rows were only observed), with the milliseconds
    # per load of the run's own steps; None without a slope.
    saved: float | None

    @property
    def overhead(self) -> float:
        """Time that balancing costs the main thread."""
        return (self.exchange or 0.0) + (self.waiting or 0.0)

    def parts(self) -> dict[str, float]:
        """The known parts by their names in PARTS, in this order."""
        rest = (None, self.rest) if self.work is None else (self.rest, None)
        values = (self.work, self.uneven, self.exchange, self.waiting, *rest)
        return {name: value for name, value in zip(PARTS, values) if value is not None}


def step_time_of(log: RunLog, trained: Literal["before", "after"]) -> StepTime | None:
    """The mean step of the lines whose times count; None without times. `trained`: see `RunReport.trained`."""
    lines, before, after = log.timed, log.column("largest_load_before"), log.column("largest_load_after")
    total = log.mean(log.mean_step_ms, lines)
    if total is None:
        return None
    overlaps = (log.mean("window") or 1.0) > 1  # another thread exchanges windows
    exchange = None if trained == "before" or overlaps else log.mean("exchange_ms", lines)
    waiting = log.mean("wait_ms", lines)
    overhead = (exchange or 0.0) + (waiting or 0.0)
    if overhead > total:
        # A batch is exchanged during an earlier step, which may be in another line, so the sum may exceed the total.
        exchange, waiting = (None if each is None else each * total / overhead for each in (exchange, waiting))
        overhead = total
    slope = log.column("ms_per_load")
    known = np.isfinite(slope)
    # Lines without a slope, such as the first, get the median of the others; one that most later lines lack is noise.
    is_known = known[known.argmax() :].mean() >= 0.5
    slope = np.where(known & is_known, slope, np.nanmedian(slope) if is_known else np.nan)
    slowest = log.mean(slope * (before if trained == "before" else after), lines)
    bound = log.mean(slope * log.column("lower_bound"), lines)
    if slowest is None or bound is None or slowest <= 0:
        return StepTime(total, None, None, exchange, waiting, total - overhead, None)
    # With noisy steps, the slope may be so steep that the work exceeds the step.
    scale = min(1.0, (total - overhead) / slowest)
    work = scale * min(bound, slowest)
    uneven = scale * slowest - work
    saved = log.mean(slope * (before - after), lines)
    rest = max(0.0, total - overhead - work - uneven)
    return StepTime(total, work, uneven, exchange, waiting, rest, None if saved is None else scale * saved)


@dataclass(frozen=True)
class TimeFit:
    """A least-squares line of times over loads."""

    # "ranks": each rank's own forward time over its own load; "steps", if the log does not have the ranks' times: the
    # mean step of each line over its mean largest load
    of: str
    points: int  # number of points of the fit
    # fraction of the times' variance that the loads explain, 0 to 1; 0 also if times fall with loads
    r_squared: float
    ms_per_load: float
    fixed_ms: float  # time at load 0

    @property
    def follows(self) -> bool:
        """Whether time follows the loads well enough to predict gains from loads."""
        return self.r_squared >= _FOLLOWS


def time_fit_of(log: RunLog, trained: Literal["before", "after"]) -> TimeFit | None:
    """The fit of the lines whose times count; None for too few points, or loads that vary too little."""
    none, of_ranks = (None,) * len(log.step), []
    lines = zip(log.timed, *(log.of_ranks.get(name, none) for name in ("loads_after", "own_ms", "speeds")))
    for is_timed, load, own, speeds in lines:
        if is_timed and load is not None and own is not None and len(load) == len(own):
            if speeds is not None and len(speeds) == len(load):
                load = load * speeds.max() / speeds  # the load that the fastest rank does in the same time
            of_ranks.append(np.stack([load, own]))
    if of_ranks:
        return fit_times("ranks", *np.concatenate(of_ranks, axis=1))
    largest = log.column(f"largest_load_{trained}")
    return fit_times("steps", largest[log.timed], log.mean_step_ms[log.timed])


def fit_times(of: str, loads: np.ndarray, times: np.ndarray) -> TimeFit | None:
    """Fit a line to times over loads, float64 `(n,)` each, NaN for unknown; without a few stalls.

    None for fewer than 20 points, and for loads that vary by less than a tenth (standard deviation ÷ mean).
    """
    known = np.isfinite(loads * times)
    loads, times = loads[known], times[known]
    fit = _fit(of, loads, times)
    if fit is None or fit.follows:
        return fit
    off = np.abs(times - fit.fixed_ms - fit.ms_per_load * loads)
    kept = off <= _STALL * 1.4826 * np.median(off)  # the standard deviation, of normal residuals
    return fit if np.count_nonzero(~kept) > _MOST_STALLS * len(loads) else _fit(of, loads[kept], times[kept])


def _fit(of: str, loads: np.ndarray, times: np.ndarray) -> TimeFit | None:
    if len(loads) < _FEWEST_POINTS or not loads.std() >= _LEAST_SPREAD * loads.mean() > 0:
        return None
    relative = loads / loads.mean()  # scaled, because squares of loads up to 2^62 would lose digits
    covariance, variance = np.cov(relative, times, bias=True)[0, 1], np.var(relative)
    r_squared = max(0.0, covariance) ** 2 / (variance * np.var(times)) if np.ptp(times) else 0.0
    slope = covariance / variance
    return TimeFit(of, len(loads), float(r_squared), float(slope / loads.mean()), float(times.mean() - slope))
