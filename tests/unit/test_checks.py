"""Checks of integers."""

from __future__ import annotations

import numpy as np
import pytest

from commons.checks import as_count


def test_any_integer_counts_and_a_switch_does_not():
    assert [as_count(value, "window", 1) for value in (3, np.int32(3))] == [3, 3]
    for value in (True, np.True_, 2.0, 0, "3"):
        with pytest.raises(ValueError, match=r"^window is .*; it must be an integer of at least 1: correct it$"):
            as_count(value, "window", 1)
