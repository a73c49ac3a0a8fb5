"""Partition: a plan, with the proof of how good it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.perf_model.loads import imbalance, times_of


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Which partition each sample goes to."""

    assignment: np.ndarray  # int64 `(n,)`, the partition of each sample, in `[0, k)`
    loads: np.ndarray  # int64 `(k,)`, the sum of the workloads in each partition
    lower_bound: int  # no plan of this kind has a smaller largest load; with speeds, a smaller largest time
    speeds: np.ndarray | None = None  # int64 `(k,)`; None where all partitions are equally fast

    def __repr__(self) -> str:
        largest = "largest load" if self.speeds is None else "largest time"
        return (
            f"Partition({len(self.assignment)} samples in {len(self.loads)} parts, {largest} "
            f"{1 + self.imbalance:.5g} × the mean, {1 + self.optimality_gap:.5g} × the bound)"
        )

    @property
    def imbalance(self) -> float:
        """Largest load ÷ mean load − 1; 0.0 if there is no load.

        With speeds, largest time ÷ the time at which all would be done at once − 1.
        """
        return imbalance(self.loads, self.speeds)

    @property
    def times(self) -> np.ndarray:
        """int64 `(k,)`: load × largest speed ÷ own speed, rounded up, in loads of the fastest; `loads` without speeds."""
        return times_of(self.loads, self.speeds)

    @property
    def optimality_gap(self) -> float:
        """Largest load (with speeds, time) ÷ lower bound − 1: at most this far from the optimum; 0.0 without load."""
        return int(self.times.max()) / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def groups(self) -> list[list[int]]:
        """The samples of each partition, ascending: `k` lists that hold every index once."""
        num_parts = len(self.loads)
        # numpy sorts 16 bits by radix, several times faster than 64.
        small = self.assignment.astype(np.uint16) if num_parts <= 1 << 16 else self.assignment
        samples = np.argsort(small, kind="stable").tolist()
        ends = np.cumsum(np.bincount(self.assignment, minlength=num_parts)).tolist()
        return [samples[start:end] for start, end in zip([0, *ends[:-1]], ends)]
