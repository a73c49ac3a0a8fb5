"""What planners answer: a plan, with the proof of how good it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.perf_model.loads import ranks_of_fastest, times_of


class Dealt:
    """Samples that were dealt to parts; of several steps, each with all parts."""

    __slots__ = ()

    loads: np.ndarray  # int64, parts last
    lower_bound: int
    speeds: np.ndarray | None

    @property
    def times(self) -> np.ndarray:
        """Int64, as `loads`: load × largest speed ÷ own speed, rounded up; `loads` where there are no speeds."""
        return times_of(self.loads, self.speeds)

    @property
    def sum_of_largest(self) -> int:
        """Sum over the steps of the largest load, with speeds of the largest time: what the steps together take."""
        return int(self.times.max(axis=-1).sum())

    @property
    def imbalance(self) -> float:
        """That sum ÷ what it would be if all were done at once, − 1: largest ÷ mean − 1; 0.0 if there is no load."""
        total = int(self.loads.sum())
        return self.sum_of_largest * ranks_of_fastest(self.loads.shape[-1], self.speeds) / total - 1.0 if total else 0.0

    @property
    def optimality_gap(self) -> float:
        """That sum ÷ its lower bound − 1: at most this far from the optimum; 0.0 if there is no load."""
        return self.sum_of_largest / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def _summary(self, parts: str) -> str:
        largest = "largest load" if self.speeds is None else "largest time"
        plural = "s" * (self.loads.ndim > 1)
        return (
            f"{parts}, {largest}{plural} {1 + self.imbalance:.5g} × the mean, {1 + self.optimality_gap:.5g} × the bound"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Partition(Dealt):
    """Which partition each sample goes to; `imbalance` and `optimality_gap` are of the largest load."""

    assignment: np.ndarray  # int64 `(n,)`, the partition of each sample, in `[0, k)`
    loads: np.ndarray  # int64 `(k,)`, the sum of the workloads in each partition
    lower_bound: int  # no plan of this kind has a smaller largest load; with speeds, a smaller largest time
    speeds: np.ndarray | None = None  # int64 `(k,)`; None where all partitions are equally fast

    def __repr__(self) -> str:
        return f"Partition({self._summary(f'{len(self.assignment)} samples in {len(self.loads)} parts')})"

    def groups(self) -> list[list[int]]:
        """The samples of each partition, ascending: `k` lists that hold every index once."""
        num_parts = len(self.loads)
        # numpy sorts 16 bits by radix, several times faster than 64.
        small = self.assignment.astype(np.uint16) if num_parts <= 1 << 16 else self.assignment
        samples = np.argsort(small, kind="stable").tolist()
        ends = np.cumsum(np.bincount(self.assignment, minlength=num_parts)).tolist()
        return [samples[start:end] for start, end in zip([0, *ends[:-1]], ends)]
