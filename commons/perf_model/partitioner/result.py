"""Partition: a plan, with the proof of how good it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.perf_model.loads import imbalance


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Which partition each sample goes to."""

    assignment: np.ndarray  # int64 `(n,)`, the partition of each sample, in `[0, k)`
    loads: np.ndarray  # int64 `(k,)`, the sum of the workloads in each partition
    lower_bound: int  # no plan of this kind has a smaller largest load

    def __repr__(self) -> str:
        return (
            f"Partition({len(self.assignment)} samples in {len(self.loads)} parts, largest load "
            f"{1 + self.imbalance:.5g} × the mean, {1 + self.optimality_gap:.5g} × the bound)"
        )

    @property
    def imbalance(self) -> float:
        """Largest load ÷ mean load − 1; 0.0 if there is no load."""
        return imbalance(self.loads)

    @property
    def optimality_gap(self) -> float:
        """Largest load ÷ lower bound − 1: at most this far from the optimum; 0.0 if there is no load."""
        return int(self.loads.max()) / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def groups(self) -> list[list[int]]:
        """The samples of each partition, ascending: `k` lists that hold every index once."""
        num_parts = len(self.loads)
        # numpy sorts 16 bits by radix, several times faster than 64.
        small = self.assignment.astype(np.uint16) if num_parts <= 1 << 16 else self.assignment
        samples = np.argsort(small, kind="stable").tolist()
        ends = np.cumsum(np.bincount(self.assignment, minlength=num_parts)).tolist()
        return [samples[start:end] for start, end in zip([0, *ends[:-1]], ends)]
