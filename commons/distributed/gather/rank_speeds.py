"""SPEEDS: measures how fast each rank works, warns of slow hardware, and gives plans the ranks' speeds.

Each rank reports how long its own work on a batch took, without waiting for other ranks, and its load. The reports are
gathered with the comparison of plans. With `ShufflerOptions.speeds`, each rank also sends the speed that it has
computed for itself (perf_model/speed_control.py), and the next plan uses the gathered speeds, equal on all ranks.

A step takes a fixed time plus a time per load. So a rank with the same or a smaller load than the others should take no
longer than they do, and a rank with a larger load no longer than the others' time per load times its own load. Each
time is divided by that limit. The median over several steps separates slow hardware from single slow steps, and uneven
data raise the limit, not the ratio.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from commons.perf_model.loads import SLOW, SLOW_STEPS, median_of_others
from commons.perf_model.speed_control import FASTEST, SpeedControl

logger = logging.getLogger(__name__)

# How many steps of a median may lack a rank's report, and after how many steps the median is taken again.
_MOST_UNKNOWN, _EVERY = 5, 5
# Below this ratio a slow rank counts as healthy again.
_WELL = 1.1
# Steps without any report after which a warning says that speeds cannot be measured.
_SILENT_STEPS = 50
_HOUR_MS = 3.6e6


class StepTimes:
    """Collects this rank's step times between two gathers, and keeps the speeds of all ranks.

    Attributes:
        speeds: of all ranks, from the last gather or an earlier run; empty with "equal".
        is_in_use: whether a run has started, after which speeds cannot be loaded.
    """

    def __init__(self) -> None:
        self.speeds: list[int] = []
        self.is_in_use = False
        self._lock = threading.Lock()
        self._reports: list[tuple[float, int]] = []  # milliseconds and load of each step
        self._has_warned = False

    def load(self, speeds: Sequence[int]) -> None:
        """Start with the speeds of an earlier run; see the shuffler's `load_state_dict`."""
        if self.is_in_use:
            raise RuntimeError("this shuffler has already shuffled; speeds are its starting values: load them before")
        if not all(isinstance(each, int) for each in speeds):
            raise ValueError(f"speeds is {speeds!r}; they are integers: load a result of state_dict()")
        self.speeds = list(speeds)

    def add(self, milliseconds: float, load: int) -> None:
        """Add a step; a time that is not positive, or not below an hour, is ignored, with one warning."""
        if 0 < milliseconds < _HOUR_MS:
            with self._lock:
                self._reports.append((milliseconds, load))
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a step time of %s ms is ignored, as will be later ones like it; a rank's own work takes more than 0 "
                "ms and less than an hour: correct the argument of report_step_time",
                milliseconds,
            )

    def take(self) -> tuple[int, int]:
        """Mean nanoseconds and mean load of the steps since the last call; zeros if there were none."""
        with self._lock:
            reports, self._reports = self._reports, []
        if not reports:
            return 0, 0
        count = len(reports)
        return round(sum(ms for ms, _ in reports) * 1e6 / count), sum(load for _, load in reports) // count


class RankSpeeds:
    """The speeds of the ranks of a group, step by step; its first rank warns of a slow one, by its number in `names`.

    Attributes:
        own: this rank's speed, which is sent with its reports; the caller sets it, see `found`.
        found: this rank's speed as computed last, or an earlier run's.
        to_plan_with: int64 `(num_ranks,)`, from the last step; None if all are equal, and unless
            `ShufflerOptions.speeds` is "measured".
    """

    def __init__(self, names: Sequence[int], rank: int, times: StepTimes, option: str = "equal") -> None:
        self.to_plan_with: np.ndarray | None = None
        self._names, self._rank, self._times, self._option = names, rank, times, option
        self._control = None if option == "equal" else SpeedControl(len(names), times.speeds)
        self.own = self.found = FASTEST if self._control is None else int(self._control.speeds[rank])
        self._warns = rank == 0
        self._awaits_times = self._warns and option != "equal"
        self._ratios: deque[np.ndarray] = deque(maxlen=SLOW_STEPS)
        self._judged = 0
        self._slow: set[int] = set()
        times.is_in_use = True

    def report(self) -> tuple[int, int, int]:
        """Numbers to gather: nanoseconds of this rank's own work, 0 without a report, its load, and its speed."""
        return *self._times.take(), self.own

    def look(self, step: int, reports: np.ndarray) -> dict[str, Any]:
        """Update the speeds from the gathered reports, and warn of slow ranks.

        Args:
            step: number of the step of the gather.
            reports: int64 `(num_ranks, n)`, whose first columns are each rank's `report`.

        Returns:
            `rank_speeds`, `speeds` and `speed_saving` of ShuffleStats.
        """
        found: dict[str, Any] = {}
        busy_ns, loads = reports[:, 0], reports[:, 1]
        if self._control is not None:
            speeds = np.ascontiguousarray(reports[:, 2])
            self._control.speeds, self._times.speeds = speeds, speeds.tolist()
            if self._option == "measured":
                self.to_plan_with = None if (speeds == speeds[0]).all() else speeds
            found = {"speeds": tuple(self._times.speeds), "speed_saving": self._control.saving}
            if self._control.take(busy_ns, loads):
                self.found = int(self._control.speeds[self._rank])
        if not busy_ns.any():  # no rank has reported a time
            self._warn_of_silence(step)
            return {"rank_speeds": (None,) * len(busy_ns), **found}
        self._awaits_times = False
        time, load = np.array([busy_ns, loads], dtype=np.float64)
        known = (time > 0) & (load > 0)
        if self._warns and known.sum() > 1:
            self._ratios.append(over_explained(time, load, known))
            self._judged += 1
            if len(self._ratios) == SLOW_STEPS and self._judged % _EVERY == 0:
                self._judge(step)
        per_ms = np.divide(load * 1e6, time, out=np.zeros_like(load), where=known).tolist()
        per_ms = tuple(speed if is_known else None for speed, is_known in zip(per_ms, known.tolist()))
        return {"rank_speeds": per_ms, **found}

    def _warn_of_silence(self, step: int) -> None:
        if self._awaits_times and step >= _SILENT_STEPS:
            self._awaits_times = False
            logger.warning(
                "speeds is %r and no rank has reported a time in %d steps, so that speeds stay equal: time a rank's "
                "own work, and call shuffler.report_step_time(milliseconds, pipeline.last_stats) after each step",
                self._option,
                _SILENT_STEPS,
            )

    def _judge(self, step: int) -> None:
        ratios = np.stack(self._ratios)
        often = np.isnan(ratios).sum(axis=0) <= _MOST_UNKNOWN
        usual = np.nanmedian(np.where(often, ratios, 1.0), axis=0)
        self._slow -= set(np.flatnonzero(usual < _WELL).tolist())
        for rank in np.flatnonzero(usual > SLOW).tolist():
            if rank not in self._slow:
                self._slow.add(rank)
                logger.warning(
                    "rank %d is slow: at step %d the median of its last %d steps is %.2f times what its load explains "
                    "by the times of the other ranks, so the data are not the reason: check its device's clocks and "
                    "temperature, and the other processes on its machine",
                    self._names[rank],
                    step,
                    SLOW_STEPS,
                    usual[rank],
                )


def over_explained(time: np.ndarray, load: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Each rank's time divided by the longest time that its load explains, by the other ranks' times.

    All arrays are `(n,)`, times in any unit, of which at least two ranks are known; the result is NaN for the others.

    >>> times, loads = np.array([2.0, 3.0, 2.0, 4.0, 0.0]), np.array([5.0, 5.0, 5.0, 10.0, 0.0])
    >>> over_explained(times, loads, times > 0).round(2).tolist()
    [0.67, 1.5, 0.67, 1.0, nan]
    """
    ratios = np.full(len(time), np.nan)
    time, load = time[known], load[known]
    explained = np.maximum(median_of_others(time), load * median_of_others(time / load))
    ratios[known] = time / explained
    return ratios
