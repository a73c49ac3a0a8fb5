"""Where the time of a step goes, and what balancing takes off it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.run_log.reading import RunLog

# What tables and pictures call the parts of a step.
PARTS = ("work at the bound", "unevenness that is left", "exchange of rows", "waiting for the plan", "the rest")


@dataclass(frozen=True)
class StepTime:
    """A mean step in milliseconds; the parts add up to the whole.

    Attributes:
        total: of the step.
        work: the slowest rank's work if the plan were as even as can be; None without a slope.
        uneven: what it works longer than that; None without a slope.
        exchange: of rows, as seen by the host; None where nobody exchanges, or beside the steps.
        waiting: for the plan; None without a shuffler.
        rest: everything else, which does not grow with the slowest rank's load.
        saved: what balancing takes off the slowest rank's work (in a run that only observes: would take), at the
            milliseconds per load that the steps of the run have shown; None without a slope.
    """

    total: float
    work: float | None
    uneven: float | None
    exchange: float | None
    waiting: float | None
    rest: float
    saved: float | None

    @property
    def overhead(self) -> float:
        """What balancing costs the main thread."""
        return (self.exchange or 0.0) + (self.waiting or 0.0)

    def parts(self) -> dict[str, float]:
        """The known ones by their names in PARTS, in that order."""
        values = (self.work, self.uneven, self.exchange, self.waiting, self.rest)
        return {name: value for name, value in zip(PARTS, values) if value is not None}


def step_time_of(log: RunLog, *, as_loaded: bool) -> StepTime | None:
    """Of the lines that know what a load takes; where none does, of all whose times count. None without times.

    Args:
        log: of the run.
        as_loaded: whether rows are trained where they were loaded.
    """
    before, planned = log.column("largest_load_before"), log.column("largest_load_after")
    trained = before if as_loaded else planned
    slope = _slopes(log)
    known = log.timed & np.isfinite(slope) & np.isfinite(trained) & np.isfinite(log.column("lower_bound"))
    lines = known if known.any() else log.timed
    total = log.mean_step_ms(lines)
    if total is None:
        return None
    beside = (log.mean("window") or 1.0) > 1  # windows are exchanged on a thread of their own
    exchange = None if as_loaded or beside else log.mean("exchange_ms", lines)
    waiting = log.mean("wait_ms", lines)
    overhead = (exchange or 0.0) + (waiting or 0.0)
    if not known.any():
        return StepTime(total, None, None, exchange, waiting, max(0.0, total - overhead), None)

    def milliseconds(loads: np.ndarray) -> float:
        return float(np.average((slope * loads)[known], weights=log.steps[known]))

    slowest = milliseconds(trained)
    # Noisy steps may show a slope that is steeper than all of a step.
    scale = min(1.0, max(0.0, total - overhead) / slowest) if slowest > 0 else 0.0
    work = min(scale * milliseconds(log.column("lower_bound")), scale * slowest)
    uneven = scale * slowest - work
    saved = scale * milliseconds(before - planned) if np.isfinite((before - planned)[known]).all() else None
    return StepTime(total, work, uneven, exchange, waiting, max(0.0, total - overhead - work - uneven), saved)


def _slopes(log: RunLog) -> np.ndarray:
    """float64 `(lines,)`, milliseconds per load; NaN where they are not known."""
    told = log.column("ms_per_load")
    taken = log.column("largest_load_before") - log.column("largest_load_after")
    derived = np.divide(log.column("measured_saving_ms"), taken, out=np.full(len(taken), np.nan), where=taken > 0)
    found = np.where(np.isnan(told), derived, told)
    return np.where(found > 0, found, np.nan)
