"""The time that balancing saves in a run, estimated from the run's own steps.

A step takes as long as its slowest rank, so its time rises with the largest trained load. The slope of time over load,
over the last steps, is the time of a unit of load in this run. The measured saving is this slope times the reduction of
the largest load. The slope is Theil and Sen's (Sen 1968), the median over all pairs of steps, which a few slow steps do
not change. It is at most the median time ÷ the median load.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from scipy.stats import theilslopes

_WINDOW = 256
_MIN_STEPS = 20


class MeasuredSaving:
    """The slope over the last 256 steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def add(self, largest_load: int, step_ms: float) -> None:
        """Add a step.

        Args:
            largest_load: of the fullest rank, as the batch was trained.
            step_ms: milliseconds of the step.
        """
        self._steps.append((float(largest_load), step_ms))

    def ms_per_load(self) -> float | None:
        """Milliseconds per unit of load; None before 20 steps, or unless the slope is positive with 95 % confidence."""
        loads, times = np.array(self._steps, dtype=np.float64).reshape(-1, 2).T
        if len(loads) < _MIN_STEPS or np.ptp(loads) == 0:
            return None
        # Scaled, because loads may be as large as 10^15.
        scale = loads.max()
        slope, fixed, low, _ = theilslopes(times, loads / scale, alpha=0.95)
        if fixed < 0:  # a step without load would take less than no time: the work is the whole step
            slope = np.median(times) / np.median(loads / scale)
        return float(slope / scale) if low > 0 else None
