"""The results of the planner: a plan with its loads and lower bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.perf_model.loads import ranks_of_fastest, times_of


class Dealt:
    """The common properties of Partition and Grid."""

    __slots__ = ()

    loads: np.ndarray  # int64, parts last
    lower_bound: int
    speeds: np.ndarray | None

    @property
    def times(self) -> np.ndarray:
        """Int64, shape of `loads`: load × largest speed ÷ own speed, rounded up; without speeds, `loads`."""
        return times_of(self.loads, self.speeds)

    @property
    def sum_of_largest(self) -> int:
        """Sum over the steps of the largest load (with speeds, of the largest time): the cost of all steps."""
        return int(self.times.max(axis=-1).sum())

    @property
    def imbalance(self) -> float:
        """`sum_of_largest` ÷ the sum of mean loads, − 1; for one step largest ÷ mean − 1. 0.0 if there is no load."""
        total = int(self.loads.sum())
        return self.sum_of_largest * ranks_of_fastest(self.loads.shape[-1], self.speeds) / total - 1.0 if total else 0.0

    @property
    def optimality_gap(self) -> float:
        """`sum_of_largest` ÷ its lower bound, − 1: an upper limit of the distance to the optimum; 0.0 without load."""
        return self.sum_of_largest / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def _summary(self, parts: str) -> str:
        largest = "largest load" if self.speeds is None else "largest time"
        plural = "s" * (self.loads.ndim > 1)
        return (
            f"{parts}, {largest}{plural} {1 + self.imbalance:.5g} × the mean, {1 + self.optimality_gap:.5g} × the bound"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Partition(Dealt):
    """The partition of each sample; `imbalance` and `optimality_gap` are those of the largest load."""

    assignment: np.ndarray  # int64 `(n,)`, the partition of each sample, in `[0, k)`
    loads: np.ndarray  # int64 `(k,)`, the sum of the workloads in each partition
    lower_bound: int  # no such plan has a smaller largest load; with speeds, a smaller largest time
    speeds: np.ndarray | None = None  # int64 `(k,)`; None if all partitions are equally fast

    def __repr__(self) -> str:
        return f"Partition({self._summary(f'{len(self.assignment)} samples in {len(self.loads)} parts')})"

    def groups(self) -> list[list[int]]:
        """The samples of each partition: `k` lists with every index once, each ascending."""
        num_parts = len(self.loads)
        # numpy sorts 16 bits by radix, several times faster than 64.
        small = self.assignment.astype(np.uint16) if num_parts <= 1 << 16 else self.assignment
        samples = np.argsort(small, kind="stable").tolist()
        ends = np.cumsum(np.bincount(self.assignment, minlength=num_parts)).tolist()
        return [samples[start:end] for start, end in zip([0, *ends[:-1]], ends)]
