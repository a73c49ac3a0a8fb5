"""PackRequest: what an allocator is asked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PackRequest(NamedTuple):
    """The arguments of an allocator; not a dataclass, whose making would take longer than a small packing.

    Attributes:
        values: int64 `(n,)`, at least one.
        capacity: most that a group may hold.
        algorithm: "ffd", "kk" or "refined".
        min_groups: fewest groups, at most n.
        divisor: the number of groups is a multiple of it; at most n.
        equal_size: whether the groups' numbers of rows differ by one at most.

    """

    values: np.ndarray  # (n,)
    capacity: int
    algorithm: str
    min_groups: int = 1
    divisor: int = 1
    equal_size: bool = False

    @property
    def most_groups(self) -> int:
        """The largest multiple of the divisor that leaves a row for every group."""
        return len(self.values) // self.divisor * self.divisor

    def round_up(self, num_groups: int) -> int:
        """The smallest number of groups from `num_groups` and `min_groups` on that the divisor allows."""
        return -(-max(num_groups, self.min_groups) // self.divisor) * self.divisor
