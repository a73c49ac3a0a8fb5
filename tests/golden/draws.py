"""Random numbers that are the same on every machine and with every release of numpy: integers alone, no libm."""

import numpy as np

from commons.splitmix import GOLDEN, mix64

_MASK = 2**64 - 1


class Draws:
    """A stream of integers, fixed by its seed."""

    def __init__(self, seed: int) -> None:
        self._state = int(mix64(np.array([(seed + GOLDEN) & _MASK], np.uint64))[0])

    def integers(self, low: int, high: int, number: int) -> np.ndarray:
        """int64 `(number,)` in `[low, high)`."""
        steps = np.arange(1, number + 1, dtype=np.uint64) * GOLDEN + self._state
        self._state = (self._state + number * GOLDEN) & _MASK
        return low + (mix64(steps) % (high - low)).astype(np.int64)

    def integer(self, low: int, high: int) -> int:
        """One integer in `[low, high)`."""
        return int(self.integers(low, high, 1)[0])

    def choice(self, values):
        """One of `values`."""
        return values[self.integer(0, len(values))]

    def permutation(self, number: int) -> np.ndarray:
        """int64 `(number,)`, the integers below `number` in a random order."""
        return np.argsort(self.integers(0, 2**62, number), kind="stable")

    def lengths(self, kind: str, number: int) -> np.ndarray:
        """int64 `(number,)` lengths of one of `KINDS`."""
        any_of = self.integers(0, 2**40, number)
        high_power = 1 << self.integers(0, 14, number)
        few_powers = 1 << np.minimum(self.integers(0, 14, number), self.integers(0, 14, number))
        kinds = {
            "ties": lambda: any_of % 4,
            "zeros": lambda: any_of * 0,
            "uniform": lambda: any_of % 1000,
            "heavy": lambda: np.minimum(4096, 4096 // (1 + any_of % 4096)),
            "log-uniform": lambda: high_power + any_of % high_power,
            "user-like": lambda: np.minimum(8192, 20 + few_powers + any_of % few_powers),
            "bimodal": lambda: np.where(self.integers(0, 5, number) == 0, 4096 - any_of % 500, 100 + any_of % 60),
            "cut": lambda: np.where(self.integers(0, 50, number) == 0, 8000, 20 + any_of % 280),
            "one giant": lambda: np.where(np.arange(number) == number // 2, 100_000, any_of % 50),
            "huge": lambda: self.integers(0, (2**62 - 1) // max(1, number), number),
        }
        return kinds[kind]()


KINDS = ("ties", "zeros", "uniform", "heavy", "log-uniform", "user-like", "bimodal", "cut", "one giant", "huge")
