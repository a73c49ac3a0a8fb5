"""partition_grid: rows of several batches to steps and ranks, so that the steps together take as little as they can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.checks import as_count
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.partitioning import partition


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Which step and which rank trains each sample.

    Attributes:
        step: int64 `(n,)`, in `[0, steps)`.
        assignment: int64 `(n,)`, the rank, in `[0, ranks)`.
        loads: int64 `(steps, ranks)`, summed workloads.
        lower_bound: no plan of this kind has a smaller sum over the steps of the largest load.

    """

    step: np.ndarray  # (n,)
    assignment: np.ndarray  # (n,)
    loads: np.ndarray  # (steps, ranks)
    lower_bound: int

    @property
    def sum_of_largest(self) -> int:
        """Sum over the steps of the largest load: what the steps together take."""
        return int(self.loads.max(axis=1).sum())

    @property
    def imbalance(self) -> float:
        """That sum ÷ the sum of the mean loads − 1; 0.0 if there is no load."""
        total = int(self.loads.sum())
        return self.sum_of_largest * self.loads.shape[1] / total - 1.0 if total else 0.0

    @property
    def optimality_gap(self) -> float:
        """That sum ÷ its lower bound − 1: at most this far from the optimum; 0.0 if there is no load."""
        return self.sum_of_largest / self.lower_bound - 1.0 if self.lower_bound else 0.0


def partition_grid(
    workloads: Any,
    ranks: int,
    steps: int,
    *,
    method: str = "refined",
    equal_size: bool = True,
    tokens: Any = None,
    max_tokens: int | None = None,
    home: Any = None,
    home_step: Any = None,
    ranks_per_node: int | None = None,
    slack: float = 0.0,
    best_effort: bool = False,
    seed: int = 0,
) -> Grid:
    """Deal samples to steps and ranks so that the sum over the steps of the largest load is small."""
    num_ranks, num_steps = as_count(ranks, "ranks", 1), as_count(steps, "steps", 1)
    plan = partition(
        workloads,
        num_ranks * num_steps,
        method=method,
        equal_size=equal_size,
        tokens=tokens,
        max_tokens=max_tokens,
        best_effort=best_effort,
    )
    place = np.empty(num_ranks * num_steps, np.int64)
    place[np.argsort(-plan.loads, kind="stable")] = np.arange(num_ranks * num_steps)
    step, rank = np.divmod(place[plan.assignment], num_ranks)
    step = np.random.default_rng(seed).permutation(num_steps)[step]
    loads = sum_by_rank(step * num_ranks + rank, np.asarray(workloads, np.int64), num_ranks * num_steps)
    bound = -(-int(loads.sum()) // num_ranks)
    return Grid(step, rank, loads.reshape(num_steps, num_ranks), bound)
