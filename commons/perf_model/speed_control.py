"""How much work each rank should get, by the times that its work has taken: reports in, integers out, nothing else.

A step takes rank r the time f_r · (a + b · load): a fixed part, a part that follows the load, and a factor of its
hardware. The second part comes from the differences between one step and the next, rank by rank, so that neither slow
ranks nor jumps nor the speeds in force disturb it. With it, times are converted to those of equal loads, and the median
over steps of a rank's time relative to the others' is its factor. The loads with which all ranks end together follow
from the factors alone. So the estimate does not depend on the speeds in force, and the loop cannot oscillate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from commons.perf_model.loads import SLOW_STEPS

# The speed of the fastest rank, and the least of any.
FASTEST, SLOWEST = 1024, 512
# Steps between two looks; how many of the `SLOW_STEPS` latest a rank may lack; looks whose differences are fitted.
LOOK_STEPS, _MOST_UNKNOWN, _LOOKS = 5, 5, 20
# The difference that two looks in a row must find; a look changes a speed by one part in so many.
_DIFFERENCE, _CHANGE = 0.10, 20
# The part of a time that must follow the load, and by how many standard errors it must be known to.
_FOLLOWS, _ERRORS = 0.3, 3.0
# Ranks this close to the fastest count as the fastest.
_AS_FAST = 0.95


class SpeedControl:
    """The speeds of the ranks of a group, step by step.

    Args:
        num_ranks: of the group.
        speeds: to begin with; those of another number of ranks are ignored.

    Attributes:
        speeds: int64 `(num_ranks,)`, from `SLOWEST` to `FASTEST`; may be replaced by what ranks have agreed on.
        follows: the part of a time that follows the load, up to 1, as far as known.
    """

    def __init__(self, num_ranks: int, speeds: Sequence[int] = ()) -> None:
        begin = np.asarray(speeds if len(speeds) == num_ranks else [FASTEST] * num_ranks, dtype=np.int64)
        self.speeds = np.clip(begin, SLOWEST, FASTEST)
        self.follows = 1.0
        self._steps = 0
        self._reports: deque[np.ndarray] = deque(maxlen=SLOW_STEPS)
        self._sums: deque[np.ndarray] = deque(maxlen=_LOOKS)
        self._found = np.zeros(num_ranks)  # sign of the difference that the last look has found; 0 for none
        self._moves = np.zeros(num_ranks, dtype=bool)

    @property
    def saving(self) -> float:
        """The part of a step that these speeds take away, compared with equal loads."""
        return self.follows * (1.0 - float(self.speeds.min() / self.speeds.mean()))

    def take(self, times: np.ndarray, loads: np.ndarray) -> bool:
        """Take a step's reports; with every `LOOK_STEPS`-th, look at the latest ones.

        Args:
            times: `(num_ranks,)`, of each rank's own work, in any unit; 0 where it has not reported any.
            loads: `(num_ranks,)`, of the rows that it worked on.

        Returns:
            Whether it has looked.
        """
        known = (times > 0) & (loads > 0)
        if known.any():
            self._reports.append(np.where(known, [times, loads], np.nan))
        self._steps += 1
        if looks := self._steps % LOOK_STEPS == 0 and len(self._reports) > LOOK_STEPS:
            self._look()
        return looks

    def _look(self) -> None:
        times, loads = np.stack(self._reports, axis=1)  # (steps, num_ranks)
        known = np.isnan(times).sum(axis=0) <= _MOST_UNKNOWN
        if known.sum() < 2:
            return
        times, loads = times[:, known], loads[:, known]
        self._sums.append(_sums_of_differences(times, loads))
        count, xx, xy, yy = np.sum(self._sums, axis=0)
        if len(times) < SLOW_STEPS or count < SLOW_STEPS or not xx > 0:
            return
        slope = xy / xx
        error = _ERRORS * np.sqrt(max(yy - slope * xy, 0.0) / count / xx)
        target = self.speeds.copy()
        if slope - error > _FOLLOWS:
            self.follows = min(float(slope), 1.0)
            target[known] = _speeds_to_end_together(times, loads, self.follows)
        elif slope + error < _FOLLOWS:
            target[:] = FASTEST
        self._move(target)

    def _move(self, target: np.ndarray) -> None:
        """Change the speeds that are far from their target, and were so at the look before, until they are there."""
        off = target / self.speeds - 1.0
        found = np.sign(off) * (np.abs(off) > _DIFFERENCE)
        self._moves |= (found != 0) & (found == self._found)
        self._found = found
        limit = self.speeds // _CHANGE
        self.speeds = self.speeds + self._moves * np.clip(target - self.speeds, -limit, limit)
        self._moves &= self.speeds != target


def _sums_of_differences(times: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Count, Σx², Σxy, Σy² of the latest differences between steps, x of loads and y of times ÷ their rank's median.

    Args:
        times: float64 `(steps, ranks)`, NaN where not known.
        loads: the same.
    """
    y, x = (np.diff(each[-LOOK_STEPS - 1 :] / _median(each), axis=0) for each in (times, loads))
    known = ~np.isnan(y)
    y, x = y[known], x[known]
    if known.any():
        usual = np.abs(y) <= np.abs(x) + 5 * np.median(np.abs(y))  # neither a pause nor a change of speed
        y, x = y[usual], x[usual]
    return np.array([len(y), x @ x, x @ y, y @ y])


def _speeds_to_end_together(times: np.ndarray, loads: np.ndarray, follows: float) -> np.ndarray:
    """int64 `(ranks,)`: loads in this proportion take all ranks equally long; arguments as above."""
    for_equal_loads = times / (1.0 - follows + follows * loads / np.nanmedian(loads))
    some = ~np.isnan(for_equal_loads).all(axis=1)
    factors = _median(for_equal_loads[some] / _median(for_equal_loads[some].T)[:, None])
    together = 1.0 / np.mean(1.0 / factors)
    shares = 1.0 + (together / factors - 1.0) / follows
    fastest = shares[shares > (1.0 - _DIFFERENCE) * shares.max()].mean()  # the largest alone is also the luckiest
    relative = np.where(shares > _AS_FAST * fastest, 1.0, shares / fastest)
    return np.clip(np.rint(relative * FASTEST), SLOWEST, FASTEST).astype(np.int64)


def _median(values: np.ndarray) -> np.ndarray:
    """Of every column, without NaN."""
    return np.nanmedian(values, axis=0) if np.isnan(values).any() else np.median(values, axis=0)
