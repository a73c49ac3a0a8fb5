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
    """Of the lines whose times count; None without times.

    Args:
        log: of the run.
        as_loaded: whether rows are trained where they were loaded.
    """
    lines, before, planned = log.timed, log.column("largest_load_before"), log.column("largest_load_after")
    total = log.mean_step_ms(lines)
    if total is None:
        return None
    beside = (log.mean("window") or 1.0) > 1  # windows are exchanged on a thread of their own
    exchange = None if as_loaded or beside else log.mean("exchange_ms", lines)
    waiting = log.mean("wait_ms", lines)
    overhead = (exchange or 0.0) + (waiting or 0.0)
    if overhead > total:
        # A batch is exchanged while the step before it goes on, which may stand in the line before.
        exchange, waiting = (None if each is None else each * total / overhead for each in (exchange, waiting))
        overhead = total
    slope = _ms_per_load(log)
    slowest = log.mean_of(slope * (before if as_loaded else planned), lines)
    bound = log.mean_of(slope * log.column("lower_bound"), lines)
    if slowest is None or bound is None or slowest <= 0:
        return StepTime(total, None, None, exchange, waiting, total - overhead, None)
    # Noisy steps may show a slope that is steeper than all of a step.
    scale = min(1.0, (total - overhead) / slowest)
    work = scale * min(bound, slowest)
    uneven = scale * slowest - work
    saved = log.mean_of(slope * (before - planned), lines)
    rest = max(0.0, total - overhead - work - uneven)
    return StepTime(total, work, uneven, exchange, waiting, rest, None if saved is None else scale * saved)


def _ms_per_load(log: RunLog) -> np.ndarray:
    """float64 `(lines,)`, milliseconds per load; of lines that do not know it, the median of the others; else NaN."""
    told = log.column("ms_per_load")
    taken = log.column("largest_load_before") - log.column("largest_load_after")
    derived = np.divide(log.column("measured_saving_ms"), taken, out=np.full(len(taken), np.nan), where=taken > 0)
    found = np.where(np.isnan(told), derived, told)
    known = found > 0
    return np.where(known, found, np.median(found[known]) if known.any() else np.nan)
