"""Problem: workloads in the form that every algorithm works on, sorted once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from commons.perf_model.loads import sum_by_rank

INT64_MAX = 2**63 - 1
# Most that workloads or tokens may sum up to: loads stay int64 when a slack of 1 doubles them.
MOST_LOAD = 2**62 - 1


class Limits(NamedTuple):
    """Fewest and most rows that a partition may have."""

    min_count: int
    max_count: int

    @classmethod
    def of(cls, num_rows: int, num_parts: int, equal_size: bool) -> Limits:
        """Within one of each other with equal sizes, anything otherwise."""
        if not equal_size:
            return cls(0, num_rows)
        quotient, remainder = divmod(num_rows, num_parts)
        return cls(quotient, quotient + (remainder > 0))

    def keep(self, counts: np.ndarray) -> bool:
        """Whether all `counts`, rows per partition `(k,)`, are within the limits."""
        return self.min_count <= int(counts.min()) and int(counts.max()) <= self.max_count


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Sorted workloads and what a plan has to keep.

    Algorithms see *rows*: row 0 is the heaviest sample, ties in the order of the samples. They return `parts`, int64
    `(n,)`, the partition of each row.

    Attributes:
        weights: int64 `(n,)`, workloads in descending order.
        order: int64 `(n,)`, the sample that each row is.
        num_parts: `k`, the number of partitions.
        equal_size: whether sizes of partitions differ by one at most.
        limits: the same as fewest and most rows per partition.
        base: int64 `(k,)`, the load of each partition before it has any rows; None if all begin with nothing.

    """

    weights: np.ndarray  # (n,)
    order: np.ndarray  # (n,)
    num_parts: int
    equal_size: bool
    limits: Limits
    base: np.ndarray | None = None  # (k,)

    @classmethod
    def of(cls, workloads: np.ndarray, num_parts: int, equal_size: bool, limits: Limits | None = None) -> Problem:
        """Sort `workloads`, int64 `(n,)`; `limits` where they are not those of `equal_size`."""
        order = np.argsort(-workloads, kind="stable")
        limits = limits or Limits.of(len(workloads), num_parts, equal_size)
        return cls(workloads[order], order, num_parts, equal_size, limits)

    def above(self, base: np.ndarray) -> Problem:
        """The same with partitions that begin with the loads `base`, int64 `(k,)`."""
        return replace(self, base=base)

    def by_sample(self, parts: np.ndarray) -> np.ndarray:
        """Turn the partition of each row into the partition of each sample."""
        assignment = np.empty_like(parts)
        assignment[self.order] = parts
        return assignment

    def loads(self, parts: np.ndarray) -> np.ndarray:
        """Load of each partition, int64 `(k,)`."""
        loads = sum_by_rank(parts, self.weights, self.num_parts)
        return loads if self.base is None else loads + self.base

    def largest_load(self, parts: np.ndarray) -> int:
        """Load of the heaviest partition."""
        return int(self.loads(parts).max())
