"""Data or hardware: how fast every rank works, and which one is slower than its load explains.

Ranks say how long their own work on a batch took, without what they wait for others, and how large its load was. Both
travel with the comparison of plans, which has then been made: nothing that is planned depends on them.

A step costs a fixed time and a time per load. So a rank with the load of the others, or less, should take no longer
than they do, and one with a larger load no longer than their time per load times its own. Each time is divided by that;
the median over some steps tells slow hardware from slow steps, and uneven data explain themselves.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from commons.perf_model.loads import SLOW, SLOW_STEPS, median_of_others

logger = logging.getLogger(__name__)

# How many of the steps of a median a rank may miss, and how often the median is taken.
_MOST_UNKNOWN, _EVERY = 5, 5
# Below this ratio a rank is no longer slow.
_WELL = 1.1


class StepTimes:
    """What this rank has said of its own work since it last told the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: list[tuple[float, int]] = []

    def add(self, milliseconds: float, load: int) -> None:
        """Take a step."""
        with self._lock:
            self._said.append((milliseconds, load))

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
        warns: whether this process does; one of the group is enough.
    """

    def __init__(self, names: Sequence[int], *, warns: bool) -> None:
        self._names, self._warns = names, warns
        self._ratios: deque[np.ndarray] = deque(maxlen=SLOW_STEPS)
        self._looks = 0
        self._slow: set[int] = set()

    def look(self, step: int, busy_ns: np.ndarray, loads: np.ndarray) -> tuple[float | None, ...]:
        """Take the reports of the ranks.

        Args:
            step: number of the step with which they came.
            busy_ns: int64 `(num_ranks,)`, nanoseconds of each rank's own work; 0 where it has not reported any.
            loads: int64 `(num_ranks,)`, of the rows that it worked on.

        Returns:
            Load per millisecond of each rank; None where it is not known.
        """
        if not busy_ns.any():  # nobody reports
            return (None,) * len(busy_ns)
        time, load = np.array([busy_ns, loads], dtype=np.float64)
        known = (time > 0) & (load > 0)
        if self._warns and known.sum() > 1:
            self._ratios.append(over_explained(time, load, known))
            self._looks += 1
            if len(self._ratios) == SLOW_STEPS and self._looks % _EVERY == 0:
                self._judge(step)
        speeds = np.divide(load * 1e6, time, out=np.zeros_like(load), where=known).tolist()
        return tuple(speed if is_known else None for speed, is_known in zip(speeds, known.tolist()))

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
