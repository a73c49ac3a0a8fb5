"""Data or hardware: how fast every rank works, which one is slower than its load explains, and what plans make of it.

Ranks say how long their own work on a batch took, without what they wait for others, and how large its load was. Both
travel with the comparison of plans; with `ShufflerOptions.speeds`, so does the speed that each rank has computed for
itself (perf_model/speed_control.py), and the next plan is made with those of that one table.

A step costs a fixed time and a time per load. So a rank with the load of the others, or less, should take no longer
than they do, and one with a larger load no longer than their time per load times its own. Each time is divided by that;
the median over some steps tells slow hardware from slow steps, and uneven data explain themselves.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commons.perf_model.loads import SLOW, SLOW_STEPS, median_of_others
from commons.perf_model.speed_control import FASTEST, LOOK_STEPS, SpeedControl

logger = logging.getLogger(__name__)

# How many of the steps of a median a rank may miss, and how often the median is taken.
_MOST_UNKNOWN, _EVERY = 5, 5
# Below this ratio a rank is no longer slow.
_WELL = 1.1
# Steps without any report, after which speeds that should be measured are warned of.
_SILENT_STEPS = 50
_HOUR_MS = 3.6e6


class StepTimes:
    """What this rank has reported of its own work since it last told the others; and the speeds of all ranks.

    Attributes:
        speeds: that the ranks have agreed on, or those of an earlier run; empty with "equal".
        is_in_use: whether they come from this run.
    """

    def __init__(self) -> None:
        self.speeds: list[int] = []
        self.is_in_use = False
        self._lock = threading.Lock()
        self._said: list[tuple[float, int]] = []
        self._has_warned = False

    def load(self, speeds: Sequence[int]) -> None:
        """Begin with the speeds of an earlier run; see `load_state_dict` of the shuffler."""
        if self.is_in_use:
            raise RuntimeError("this shuffler has shuffled; it begins with the speeds it is given: load them before")
        if not all(isinstance(each, int) for each in speeds):
            raise ValueError(f"speeds is {speeds!r}; they are integers: load what state_dict() has given")
        self.speeds = list(speeds)

    def add(self, milliseconds: float, load: int) -> None:
        """Take a step; a time that is none is dropped, with one warning."""
        if 0 < milliseconds < _HOUR_MS:
            with self._lock:
                self._said.append((milliseconds, load))
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a step time of %s ms is dropped, as later ones like it will be; a rank's own work takes more than "
                "nothing and less than an hour: look at what report_step_time is given",
                milliseconds,
            )

    def take(self) -> tuple[int, int]:
        """Mean nanoseconds and mean load of the steps since the last call; zeros for none."""
        with self._lock:
            said, self._said = self._said, []
        if not said:
            return 0, 0
        return round(sum(ms for ms, _ in said) * 1e6 / len(said)), sum(load for _, load in said) // len(said)


class RankSpeeds:
    """The speeds of the ranks of a group, step by step; warns of a slow one.

    Args:
        names: how messages call the ranks.
        rank: this one, in the group; the first one warns.
        times: of this rank.
        option: `ShufflerOptions.speeds`.
        settle: makes a speed of this rank the same on its tensor-parallel peers; is given the step too.

    Attributes:
        to_plan_with: int64 `(num_ranks,)`, as of the latest step; None for equal ones, and unless "measured".
    """

    def __init__(
        self,
        names: Sequence[int],
        rank: int,
        times: StepTimes,
        option: str = "equal",
        settle: Callable[[int, int], int] = lambda speed, step: speed,
    ) -> None:
        self.to_plan_with: np.ndarray | None = None
        self._names, self._rank, self._times, self._option, self._settle = names, rank, times, option, settle
        self._control = None if option == "equal" else SpeedControl(len(names), times.speeds)
        # This rank's speed, as the others know it, and as its latest look has found it.
        self._own = self._found = FASTEST if self._control is None else int(self._control.speeds[rank])
        self._warns = rank == 0
        self._awaits_times = self._warns and option != "equal"
        self._steps = 0
        self._ratios: deque[np.ndarray] = deque(maxlen=SLOW_STEPS)
        self._judged = 0
        self._slow: set[int] = set()
        times.is_in_use = True

    def report(self) -> tuple[int, int, int]:
        """What the others need: nanoseconds and load of this rank's own work, and its speed."""
        # By the number of steps: tensor-parallel peers wait for one another here, and may look at other steps.
        if self._steps % LOOK_STEPS == 0:
            measured = self._option == "measured"
            self._own = self._settle(self._found, self._steps) if measured else self._found
        self._steps += 1
        return *self._times.take(), self._own

    def look(self, step: int, reports: np.ndarray) -> dict[str, Any]:
        """Take the reports of the ranks.

        Args:
            step: number of the step with which they came.
            reports: int64 `(num_ranks, n)`, whose first columns are what `report` gives of each: nanoseconds of its own
                work, 0 where it has not reported any; the load of the rows that it worked on; and its speed.

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
                self._found = int(self._control.speeds[self._rank])
        if not busy_ns.any():  # nobody reports
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
                "own work, and after each step add shuffler.report_step_time(milliseconds, pipeline.last_stats)",
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
                    "by the times of the other ranks, so that it is not the data: look at the clocks and the "
                    "temperature of its device, and at what else its machine does",
                    self._names[rank],
                    step,
                    SLOW_STEPS,
                    usual[rank],
                )


def over_explained(time: np.ndarray, load: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Of every rank, its time divided by the most that its load explains, by what the others took.

    Args:
        time: float64 `(n,)`, of each rank's own work, in any unit.
        load: float64 `(n,)`.
        known: bool `(n,)`, at least two ranks.

    Returns:
        float64 `(n,)`; NaN where it is not known.

    >>> times, loads = np.array([2.0, 3.0, 2.0, 4.0]), np.array([5.0, 5.0, 5.0, 10.0])
    >>> over_explained(times, loads, np.full(4, True)).round(2).tolist()
    [0.67, 1.5, 0.67, 1.0]
    """
    ratios = np.full(len(time), np.nan)
    time, load = time[known], load[known]
    explained = np.maximum(median_of_others(time), load * median_of_others(time / load))
    ratios[known] = time / explained
    return ratios
