"""partition_grid: assigns rows of several batches to steps and ranks so that the steps together take little time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.perf_model.partitioner.arguments import CheckedArguments, plan_of
from commons.perf_model.partitioner.partitioning import Dealt


@dataclass(frozen=True, slots=True, eq=False)
class Grid(Dealt):
    """The step and the rank of each sample; `imbalance` and `optimality_gap` are those of `sum_of_largest`."""

    step: np.ndarray  # int64 `(n,)`, the step of each sample, in `[0, steps)`
    assignment: np.ndarray  # int64 `(n,)`, the rank of each sample, in `[0, ranks)`
    loads: np.ndarray  # int64 `(steps, ranks)`, the sum of the workloads of each rank in each step
    lower_bound: int  # no such plan has a smaller sum over the steps of the largest load; with speeds, of times
    speeds: np.ndarray | None = None  # int64 `(ranks,)`; None if all ranks are equally fast

    def __repr__(self) -> str:
        steps, ranks = self.loads.shape
        return f"Grid({self._summary(f'{len(self.step)} samples in {steps} steps of {ranks} ranks')})"


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
    groups: Any = None,
    speeds: Any = None,
) -> Grid:
    """Assign the samples of several batches to steps and ranks so that the steps together take little time.

    Ranks wait for each other in every step, so a step takes as long as its largest load; the plan minimises the sum
    over the steps of the largest load. A very heavy sample makes one step slow on all ranks; the other ranks then get
    further heavy samples in the same step, so that the other steps are fast.

    Deterministic: the same arguments give the same plan on every rank and every CPU. Ties go to the lower index, and
    all decisions are made in integers. With one step this is `partition`.

    Args:
        workloads: cost of each sample: list, array or CPU tensor `(n,)` of non-negative integers.
        ranks: number of ranks, at least 1.
        steps: number of steps, at least 1.
        method: "refined" (near-optimal), or "karmarkar_karp", "lpt" or "snake": partitions of that algorithm, sorted
            by load and cut into steps; with speeds, for each rank separately.
        equal_size: whether the sample counts of all ranks and steps differ by at most one; otherwise counts are free,
            but each rank has a sample in each of several steps, at most one if there are too few, unless the samples
            as they were loaded or separate plans of the batches are no worse. Without `home` and `max_tokens`, free
            counts are no worse in a small grid, beyond 1 / 1,000.
        tokens: memory that each sample takes, `(n,)`; for `max_tokens`, and as the cost of moving a sample.
        max_tokens: most tokens that a rank may hold in a step.
        home: the rank of each sample now, `(n,)`. Given, few tokens leave their rank; moving a sample between the steps
            of its rank is free.
        home_step: the step (batch) in which each sample was loaded, `(n,)`. Given, the sum is never above that of
            `partition` for each batch separately with the same arguments (with `home`, `slack` applies to both).
            Without `home` this holds only if those plans have the counts that `equal_size` requires, as with batches of
            one size. With `home`, the sum is also never above that of the samples as they were loaded, unless these
            break `max_tokens` or split a group. If no plan lowers these sums, the separate plans or the loaded samples
            are the plan, even if their counts differ.
        ranks_per_node: ranks `[0, r)`, `[r, 2r)`, … share a node; tokens that leave it count four times.
        slack: with `home`, by which fraction the sum may exceed that of the plan without `home`, in [0, 1].
        best_effort: if no plan keeps `max_tokens`, return the one found that exceeds it least.
        seed: of the order of the steps, which is random so that slow steps are not always first. If all samples stay in
            the step in which they were loaded, its order is kept.
        groups: integers `(n,)`; samples with equal numbers stay on one rank and in one step, and are planned like one
            sample with the sum of their workloads and tokens; see `partition`.
        speeds: positive integers `(ranks,)`, for "refined" and "lpt": a step takes as long as its largest load ÷ speed;
            see `partition`.

    Returns:
        The plan, with its loads and a lower bound that proves how good it is.

    Raises:
        ValueError: an argument out of its range, of the wrong length or an unknown method; `max_tokens` that no plan
            keeps (the message names a sample that is too large, or by how much to raise it); groups of different sizes
            with `equal_size`; speeds as for `partition`.

    Examples:
        >>> grid = partition_grid([9, 1, 1, 1, 9, 1, 1, 1], 2, 2)  # both nines in one step
        >>> grid.sum_of_largest, grid.lower_bound, sorted(grid.loads.max(axis=1).tolist())
        (12, 12, [2, 10])
        >>> batch = [0, 0, 0, 0, 1, 1, 1, 1]
        >>> partition_grid([9, 1, 1, 1, 3, 3, 3, 3], 2, 2, home_step=batch).sum_of_largest
        14
    """
    given = CheckedArguments(
        workloads,
        ranks,
        method=method,
        equal_size=equal_size,
        tokens=tokens,
        max_tokens=max_tokens,
        home=home,
        ranks_per_node=ranks_per_node,
        slack=slack,
        parts_name="ranks",
        steps=steps,
        home_step=home_step,
        seed=seed,
        groups=groups,
        speeds=speeds,
    )
    assignment, loads, bound = plan_of(given, best_effort)
    rank, step = np.divmod(assignment, given.num_steps)
    loads = np.ascontiguousarray(loads.reshape(given.num_parts, given.num_steps).T)
    return Grid(step, rank, loads, bound, given.arrays["speeds"])
