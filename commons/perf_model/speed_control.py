"""SpeedControl: estimates from reported times how much work each rank should get.

The model: rank r takes the time f_r · (a + b · load) for a step, where a is fixed, b · load is proportional to load,
and f_r is a factor of the rank's hardware. The share of b · load is estimated from differences between consecutive
steps of each rank, which slow ranks, single jumps and the present speeds do not change. With it, times are converted to
those for equal loads; a rank's factor is the median over steps of its converted time relative to the other ranks'. The
factors determine the loads with which all ranks end together. So the estimate does not depend on the present speeds,
and the control loop cannot oscillate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from commons.perf_model.loads import SLOW_STEPS

# The speed of the fastest rank, and the smallest speed of a rank.
FASTEST, SLOWEST = 1024, 512
# Steps between two updates; how many of the last `SLOW_STEPS` reports a rank may lack; updates used in the fit.
LOOK_STEPS, _MOST_UNKNOWN, _LOOKS = 5, 5, 20
# The relative difference that two updates in a row must find; an update changes a speed by at most 1 ÷ _CHANGE.
_DIFFERENCE, _CHANGE = 0.10, 20
# The least fraction of a time that must be proportional to the load, and the confidence in standard errors.
_FOLLOWS, _ERRORS = 0.3, 3.0
# A rank counts as fast as the fastest above this ratio.
_AS_FAST = 0.95


class SpeedControl:
    """The speeds of the ranks of a group, step by step.

    Args:
        num_ranks: of the group.
        speeds: starting values; ignored if they are of another number of ranks.

    Attributes:
        speeds: int64 `(num_ranks,)`, from `SLOWEST` to `FASTEST`; the caller replaces them by the gathered speeds.
        follows: estimated fraction of a time that is proportional to the load, up to 1.
    """

    def __init__(self, num_ranks: int, speeds: Sequence[int] = ()) -> None:
        begin = np.asarray(speeds if len(speeds) == num_ranks else [FASTEST] * num_ranks, dtype=np.int64)
        self.speeds = np.clip(begin, SLOWEST, FASTEST)
        self.follows = 1.0
        self._reports: deque[np.ndarray] = deque(maxlen=SLOW_STEPS)
        self._num_new = 0  # reports since the last update
        self._sums: deque[np.ndarray] = deque(maxlen=_LOOKS)
        self._found = np.zeros(num_ranks)  # sign of the difference in the last update; 0 for none
        self._moves = np.zeros(num_ranks, dtype=bool)  # ranks whose speed is on the way to its target

    @property
    def saving(self) -> float:
        """The fraction by which these speeds shorten the slowest rank's own work, compared with equal loads."""
        return self.follows * (1.0 - float(self.speeds.min() / self.speeds.mean()))

    def take(self, times: np.ndarray, loads: np.ndarray) -> bool:
        """Add a step's reports; update the speeds after every `LOOK_STEPS` steps with reports.

        Args:
            times: `(num_ranks,)`, of each rank's own work, in any unit; 0 for a rank without a report.
            loads: `(num_ranks,)`, of that work.

        Returns:
            Whether the speeds were updated.
        """
        known = (times > 0) & (loads > 0)
        if not known.any():
            return False
        self._reports.append(np.where(known, [times, loads], np.nan))
        self._num_new += 1
        if self._num_new < LOOK_STEPS or len(self._reports) <= LOOK_STEPS:
            return False
        self._update()
        self._num_new = 0
        return True

    def _update(self) -> None:
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
        """Move speeds toward their targets: those that were far from it, on the same side, in two updates in a row."""
        off = target / self.speeds - 1.0
        is_far = (np.abs(off) > _DIFFERENCE) | (target == FASTEST)  # a target of FASTEST is always reached
        found = np.sign(off) * is_far
        self._moves |= (found != 0) & (found == self._found)
        self._found = found
        limit = self.speeds // _CHANGE
        self.speeds = self.speeds + self._moves * np.clip(target - self.speeds, -limit, limit)
        self._moves &= self.speeds != target


def _sums_of_differences(times: np.ndarray, loads: np.ndarray, latest: int) -> np.ndarray:
    """Σx² and Σxy over the ranks for each of the last differences between steps, float64 `(2, steps)`.

    x are differences of loads and y of times, each ÷ the median of its rank.

    Args:
        times: float64 `(steps, ranks)`, NaN where not known.
        loads: the same.
        latest: most differences to use.
    """
    y, x = (np.diff(each[-latest - 1 :] / _median(each), axis=0) for each in (times, loads))
    far, near = np.abs(y), np.abs(x)
    # Without NaN, pauses and changes of speed.
    usual = far <= near + 5 * np.nanmedian(far) if not np.isnan(far).all() else np.zeros_like(far, dtype=bool)
    x, y = np.where(usual, x, 0.0), np.where(usual, y, 0.0)
    return np.array([(x * x).sum(axis=1), (x * y).sum(axis=1)])


def _slope(sums: np.ndarray) -> tuple[float | None, float]:
    """The slope of y over x, and its error: `_ERRORS` standard errors; None without enough data.

    The ranks of a step may be disturbed together, and neighbouring differences share a step. So the error is computed
    with steps as clusters (Liang and Zeger 1986) and the products of neighbours (Newey and West 1987).

    Args:
        sums: float64 `(2, n)`, Σx² and Σxy of each difference between steps.
    """
    xx, xy = sums
    if len(xx) < SLOW_STEPS or not xx.sum() > 0:
        return None, np.inf
    slope = xy.sum() / xx.sum()
    scores = xy - slope * xx
    variance = scores @ scores + max(0.0, 2 * scores[1:] @ scores[:-1])
    return float(slope), float(_ERRORS * np.sqrt(variance) / xx.sum())


def _speeds_to_end_together(times: np.ndarray, loads: np.ndarray, follows: float) -> np.ndarray:
    """Speeds int64 `(ranks,)`, in proportion to the loads with which all ranks end together."""
    for_equal_loads = times / (1.0 - follows + follows * loads / np.nanmedian(loads))
    some = ~np.isnan(for_equal_loads).all(axis=1)
    factors = _median(for_equal_loads[some] / _median(for_equal_loads[some].T)[:, None])
    together = 1.0 / np.mean(1.0 / factors)
    shares = 1.0 + (together / factors - 1.0) / follows
    fastest = shares[shares > (1.0 - _DIFFERENCE) * shares.max()].mean()  # the maximum itself is biased by noise
    relative = np.where(shares > _AS_FAST * fastest, 1.0, shares / fastest)
    return np.clip(np.rint(relative * FASTEST), SLOWEST, FASTEST).astype(np.int64)


def _median(values: np.ndarray) -> np.ndarray:
    """The median of every column, ignoring NaN."""
    return np.nanmedian(values, axis=0) if np.isnan(values).any() else np.median(values, axis=0)
