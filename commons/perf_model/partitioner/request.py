"""Request and Plan: what the planner is asked, checked, and what a core of it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The arguments of `partition` or `partition_grid`, checked.

    Attributes:
        workloads: int64 `(n,)`, at least one.
        num_parts: number of partitions.
        method: name of the algorithm.
        equal_size: whether sizes of partitions differ by one at most.
        tokens: int64 `(n,)`, or None.
        max_tokens: most tokens that a partition may hold, or None; there are tokens if it is given.
        home: int64 `(n,)`, the partition of each sample now, or None.
        ranks_per_node: partitions per node.
        slack: balance given up for staying home, as a fraction.
        num_steps: steps of a grid. Its partitions are ranks; the answer has `num_parts · num_steps` cells, that of
            rank `r` and step `s` at `r · num_steps + s`.
        home_step: int64 `(n,)`, the step each sample was loaded in, or None.

    """

    workloads: np.ndarray
    num_parts: int
    method: str = "refined"
    equal_size: bool = True
    tokens: np.ndarray | None = None
    max_tokens: int | None = None
    home: np.ndarray | None = None
    ranks_per_node: int = 1
    slack: float = 0.0
    num_steps: int = 1
    home_step: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The answer.

    Attributes:
        assignment: int64 `(n,)`, the partition (of a grid: the cell) of each sample.
        loads: int64 `(k,)`, sum of workloads per partition.
        bound: lower bound of the largest load of such a plan; of a grid, of the sum over the steps.
        most_tokens: `max_tokens`, or what came nearest to it where no plan was found that keeps it; 0 without a cap.

    """

    assignment: np.ndarray
    loads: np.ndarray
    bound: int
    most_tokens: int
