"""SplitMix64: random numbers that depend only on the state, not on the version of numpy or Python.

Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15  # the increment: 2^64 ÷ the golden ratio, odd


def mix64(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values of any shape, one to one.

    >>> mix64(np.array([GOLDEN], dtype=np.uint64))  # the first number of the stream that begins at 0
    array([16294208416658607535], dtype=uint64)
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def splitmix64(places: np.ndarray) -> np.ndarray:
    """The numbers at these positions of the stream that begins at 0; uint64 of any shape in and out."""
    return mix64((places + np.uint64(1)) * np.uint64(GOLDEN))


def as_fraction(numbers: np.ndarray) -> np.ndarray:
    """The upper 53 bits of uint64 numbers, as float64 in [0, 1)."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53
