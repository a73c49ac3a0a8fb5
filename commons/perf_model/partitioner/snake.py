"""Snake order: deal the sorted rows forth and back. The cheapest plan, and a weak one."""

from __future__ import annotations

import numpy as np


def snake(num_rows: int, num_parts: int) -> np.ndarray:
    """Deal rows to partitions 0, 1, …, k−1, k−1, …, 1, 0, 0, … in turn.

    Returns:
        int64 `(num_rows,)`, the partition of each row; counts differ by at most one.

    """
    lap, place = np.divmod(np.arange(num_rows, dtype=np.int64), num_parts)
    return np.where(lap % 2 == 0, place, num_parts - 1 - place)
