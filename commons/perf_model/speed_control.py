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
# Reports between two looks; how many of the `SLOW_STEPS` latest a rank may lack; looks whose differences are fitted.
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
        self._reports: deque[np.ndarray] = deque(maxlen=SLOW_STEPS)
        self._num_new = 0  # reports since the last look
        self._sums: deque[np.ndarray] = deque(maxlen=_LOOKS)
        self._found = np.zeros(num_ranks)  # sign of the difference that the last look has found; 0 for none
        self._moves = np.zeros(num_ranks, dtype=bool)

    @property
    def saving(self) -> float:
        """The part of the slowest rank's own work that these speeds take away, compared with equal loads."""
        return self.follows * (1.0 - float(self.speeds.min() / self.speeds.mean()))

    def take(self, times: np.ndarray, loads: np.ndarray) -> bool:
        """Take a step's reports; with every `LOOK_STEPS`-th that any rank has made, look at the latest ones.

        Args:
            times: `(num_ranks,)`, of each rank's own work, in any unit; 0 where it has not reported any.
            loads: `(num_ranks,)`, of the rows that it worked on.

        Returns:
            Whether it has looked.
        """
        known = (times > 0) & (loads > 0)
        if not known.any():
            return False
        self._reports.append(np.where(known, [times, loads], np.nan))
        self._num_new += 1
        if self._num_new < LOOK_STEPS or len(self._reports) <= LOOK_STEPS:
            return False
        self._look()
        self._num_new = 0
        return True

    def _look(self) -> None:
        times, loads = np.stack(self._reports, axis=1)  # (steps, num_ranks)
        known = np.isnan(times).sum(axis=0) <= _MOST_UNKNOWN
        if known.sum() < 2:
            return
        times, loads = times[:, known], loads[:, known]
        self._sums.append(_sums_of_differences(times, loads, self._num_new))
        slope, error = _slope(np.concatenate(self._sums, axis=1))
        if len(times) < SLOW_STEPS or slope is None:
            return
        target = self.speeds.copy()
        if slope - error > _FOLLOWS:
            self.follows = min(slope, 1.0)
            target[known] = _speeds_to_end_together(times, loads, self.follows)
        elif slope + error < _FOLLOWS:
            target[:] = FASTEST
        self._move(target)

    def _move(self, target: np.ndarray) -> None:
        """Change the speeds that are far from their target, and were so at the look before, until they are there."""
        off = target / self.speeds - 1.0
        is_far = (np.abs(off) > _DIFFERENCE) | (target == FASTEST)  # a rank as fast as the fastest gets all of its work
        found = np.sign(off) * is_far
        self._moves |= (found != 0) & (found == self._found)
        self._found = found
        limit = self.speeds // _CHANGE
        self.speeds = self.speeds + self._moves * np.clip(target - self.speeds, -limit, limit)
        self._moves &= self.speeds != target


def _sums_of_differences(times: np.ndarray, loads: np.ndarray, latest: int) -> np.ndarray:
    """float64 `(2, steps)`: of the latest differences between steps Σx² and Σxy over the ranks.

    x are of loads and y of times, each ÷ the median of its rank.

    Args:
        times: float64 `(steps, ranks)`, NaN where not known.
        loads: the same.
        latest: how many differences, as far as there are so many.
    """
    y, x = (np.diff(each[-latest - 1 :] / _median(each), axis=0) for each in (times, loads))
    far, near = np.abs(y), np.abs(x)
    # NaN, pauses and changes of speed are left out.
    usual = far <= near + 5 * np.nanmedian(far) if not np.isnan(far).all() else np.zeros_like(far, dtype=bool)
    x, y = np.where(usual, x, 0.0), np.where(usual, y, 0.0)
    return np.array([(x * x).sum(axis=1), (x * y).sum(axis=1)])


def _slope(sums: np.ndarray) -> tuple[float | None, float]:
    """The slope of y over x, and its error: `_ERRORS` standard errors; None while nothing shows it.

    The ranks of a step may be disturbed alike, and neighbouring differences share a step. So the error is that of
    steps as clusters (Liang and Zeger 1986) with neighbours' products (Newey and West 1987).

    Args:
        sums: float64 `(2, n)`, of each difference between steps Σx² and Σxy.
    """
    xx, xy = sums
    if len(xx) < SLOW_STEPS or not xx.sum() > 0:
        return None, np.inf
    slope = xy.sum() / xx.sum()
    scores = xy - slope * xx
    variance = scores @ scores + max(0.0, 2 * scores[1:] @ scores[:-1])
    return float(slope), float(_ERRORS * np.sqrt(variance) / xx.sum())


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
