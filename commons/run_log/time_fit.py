"""Whether measured time follows the loads: a line through both by least squares.

Balancing gains what the loads say only where time follows them. A model that pads to its longest row takes the time of
rows × longest, whatever the rows' work adds up to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.run_log.reading import RunLog

# Fewer points, or loads that vary less (standard deviation ÷ mean), say nothing.
_FEWEST_POINTS, _LEAST_SPREAD = 20, 0.1
# Below this the loads explain less than half of how the times vary.
_FOLLOWS = 0.5
# Points this many standard deviations off the line are stalls of the machine, as long as they are few.
_STALL, _MOST_STALLS = 4.0, 0.05


@dataclass(frozen=True)
class TimeFit:
    """Times against loads.

    Attributes:
        of: "ranks": each rank's own forward time against its own load; "steps": the mean step of each line against
            its mean largest load, where the log does not have the ranks' times.
        points: as many of these as the line was laid through.
        r_squared: the part of the times' variance that the loads explain, 0 to 1; 0 also where times fall with loads.
    """

    of: str
    points: int
    r_squared: float

    @property
    def follows(self) -> bool:
        """Whether time follows the loads well enough to trust what they say."""
        return self.r_squared >= _FOLLOWS


def time_fit_of(log: RunLog, *, as_loaded: bool) -> TimeFit | None:
    """The fit of the lines whose times count; None where they are too few, or the loads vary too little.

    Args:
        log: of the run.
        as_loaded: whether rows are trained where they were loaded.
    """
    loads, times = _of_ranks(log)
    if len(loads):
        return _fit("ranks", loads, times)
    largest = log.column(f"largest_load_{'before' if as_loaded else 'after'}")
    known = log.timed & np.isfinite(largest) & np.isfinite(log.total_ms)
    return _fit("steps", largest[known], (log.total_ms / log.steps)[known])


def _of_ranks(log: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Load and own milliseconds of every rank in the last step of each line, float64 `(points,)` each."""
    loads, times = [np.empty(0)], [np.empty(0)]
    for is_timed, load, own in zip(
        log.timed, log.of_ranks.get("loads_after", ()), log.of_ranks.get("own_ms", ()), strict=False
    ):
        if is_timed and load is not None and own is not None and len(load) == len(own):
            known = np.isfinite(load) & np.isfinite(own)
            loads.append(load[known])
            times.append(own[known])
    return np.concatenate(loads), np.concatenate(times)


def _fit(of: str, loads: np.ndarray, times: np.ndarray) -> TimeFit | None:
    if not _varies(loads):
        return None
    loads = loads / loads.mean()  # up to 2^62: their squares would lose digits
    fit = TimeFit(of, len(loads), _r_squared(loads, times))
    if fit.follows:
        return fit
    off = np.abs(_residuals(loads, times))
    stalls = off > _STALL * 1.4826 * np.median(off)  # the standard deviation, of normal residuals
    kept = ~stalls if stalls.sum() <= _MOST_STALLS * len(loads) else np.ones_like(stalls)
    return TimeFit(of, int(kept.sum()), _r_squared(loads[kept], times[kept])) if _varies(loads[kept]) else None


def _varies(loads: np.ndarray) -> bool:
    """Whether there are enough points, and their loads differ enough."""
    return len(loads) >= _FEWEST_POINTS and bool(loads.mean() > 0 and loads.std() >= _LEAST_SPREAD * loads.mean())


def _r_squared(loads: np.ndarray, times: np.ndarray) -> float:
    """The part of the variance of times that a rising line explains."""
    if np.cov(loads, times)[0, 1] <= 0:
        return 0.0
    return float(1.0 - np.var(_residuals(loads, times)) / np.var(times))


def _residuals(loads: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Times minus those of the line of least squares."""
    slope = np.cov(loads, times, bias=True)[0, 1] / np.var(loads)
    return np.asarray(times - times.mean() - slope * (loads - loads.mean()))
