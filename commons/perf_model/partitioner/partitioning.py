"""partition, refine, karmarkar_karp and lower_bound: the public functions for the plan of one step, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.perf_model.loads import imbalance, sum_by_rank, times_of
from commons.perf_model.partitioner import core
from commons.perf_model.partitioner.arguments import CheckedArguments, plan_of
from commons.perf_model.partitioner.inputs import as_home


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
        return imbalance(self.loads, self.speeds)

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


def partition(
    workloads: Any,
    k_partitions: int,
    *,
    method: str = "refined",
    equal_size: bool = True,
    tokens: Any = None,
    max_tokens: int | None = None,
    home: Any = None,
    ranks_per_node: int | None = None,
    slack: float = 0.0,
    best_effort: bool = False,
    groups: Any = None,
    speeds: Any = None,
) -> Partition:
    """Assign samples to partitions so that the largest load is small.

    Deterministic: the same arguments give the same plan on every rank and every CPU. Ties go to the lower index, and
    all decisions are made in integers.

    Args:
        workloads: cost of each sample: list, array or CPU tensor `(n,)` of non-negative integers.
        k_partitions: number of partitions, at least 1.
        method: "refined", "karmarkar_karp", "lpt" or "snake".
        equal_size: whether sizes of partitions differ by at most one; otherwise they are free. Without `home`
            and `max_tokens` the refined plan with free sizes is no worse, beyond 1 / 10,000, than the one with equal
            sizes; with `speeds` beyond 1 / 1,000, and only up to 2^16 samples · partitions.
        tokens: memory that each sample takes, `(n,)`; for `max_tokens`, and as the cost of moving a sample.
        max_tokens: most tokens that a partition may hold. Without `home`, "refined" is no worse under it than the other
            methods, beyond 1 / 10,000, up to 2^16 samples · partitions; above, than "snake".
        home: the partition of each sample now, `(n,)`. Given, few tokens leave their partition, and the largest load is
            never above that of `home`: if no plan lowers it, `home` is the plan, even if its sizes differ. This does
            not hold for a `home` that breaks `max_tokens` or splits a group: there, with `equal_size`, sizes differ
            only if that lowers the tokens above `max_tokens`.
        ranks_per_node: partitions `[0, r)`, `[r, 2r)`, … share a node; tokens that leave it count four times.
        slack: with `home`, by which fraction the largest load may exceed that of the plan without `home`, in [0, 1].
        best_effort: if no plan keeps `max_tokens`, return the one found that exceeds it least.
        groups: integers `(n,)`; samples with equal numbers stay together, and are planned like one sample with the sum
            of their workloads and tokens, whose home is where most of its tokens are. With `equal_size` all groups have
            the same size, and the group counts of partitions differ by at most one.
        speeds: positive integers `(k,)`; a partition takes the time load ÷ speed, and the plan minimises the largest
            time, also compared with `home`. Only ratios matter, and equal speeds change nothing. Only for "refined" and
            for "lpt", which gives the next sample to the partition that would finish it first.

    Returns:
        The plan, with its loads and a lower bound that proves how good it is. With speeds, times are counted in loads
        of the fastest partition: load × largest speed ÷ own speed, rounded up.

    Raises:
        ValueError: an argument out of its range, of the wrong length or an unknown method; `max_tokens` that no plan
            keeps (the message names a sample that is too large, or by how much to raise it); groups of different sizes
            with `equal_size`; speeds that are not positive integers below 2^31, or too far apart for workloads of this
            size.

    Examples:
        >>> plan = partition([7, 5, 4, 4, 3, 1], 2)
        >>> plan.assignment.tolist(), plan.loads.tolist(), plan.lower_bound
        ([0, 1, 1, 0, 1, 0], [12, 12], 12)
        >>> partition([7, 5, 4, 4, 3, 1], 2, home=[0, 0, 0, 1, 1, 1]).assignment.tolist()
        [0, 1, 0, 1, 1, 0]
        >>> partition([7, 5, 4, 4, 3, 1], 2, equal_size=False, groups=[0, 0, 1, 1, 2, 2]).assignment.tolist()
        [0, 0, 1, 1, 1, 1]
        >>> plan = partition([7, 5, 4, 4, 3, 1], 2, speeds=[2, 1])
        >>> plan.loads.tolist(), plan.times.tolist(), plan.lower_bound
        ([16, 8], [16, 16], 16)
    """
    given = CheckedArguments(
        workloads,
        k_partitions,
        method=method,
        equal_size=equal_size,
        tokens=tokens,
        max_tokens=max_tokens,
        home=home,
        ranks_per_node=ranks_per_node,
        slack=slack,
        groups=groups,
        speeds=speeds,
    )
    return Partition(*plan_of(given, best_effort), given.arrays["speeds"])


def refine(
    workloads: Any,
    assignment: Any,
    k_partitions: int,
    *,
    tokens: Any = None,
    max_tokens: int | None = None,
) -> np.ndarray:
    """Swap samples of a plan until its largest load is near the lower bound, or no swap lowers it.

    Args:
        workloads: cost of each sample, `(n,)`, as for `partition`.
        assignment: the partition of each sample, `(n,)`; must satisfy `max_tokens`. Sizes of partitions are free.
        k_partitions: number of partitions, at least 1.
        tokens: memory that each sample takes, `(n,)`.
        max_tokens: most tokens that a partition may hold, before and after.

    Returns:
        int64 `(n,)`, the partition of each sample; the largest load is never above that of `assignment`.

    Raises:
        ValueError: as for `partition`; a partition outside `[0, k)`; or an assignment that breaks `max_tokens`.

    Examples:
        >>> refine([5, 4, 3, 2], [0, 0, 1, 1], 2).tolist()
        [1, 0, 0, 1]
    """
    given = CheckedArguments(workloads, k_partitions, equal_size=False, tokens=tokens, max_tokens=max_tokens)
    home = as_home(assignment, given.num_rows, given.num_parts, "assignment")
    given.home = core.address(home)
    if len(home) == 0:
        return home
    sizes = given.arrays["tokens"]
    if sizes is not None and given.has_cap:
        most = int(sum_by_rank(home, sizes, given.num_parts).max())
        if most > given.max_tokens:
            raise ValueError(
                f"assignment has a partition of {most} tokens, max_tokens is {given.max_tokens}; the assignment must "
                "keep it: pass one that does, or raise max_tokens"
            )
    return core.refine(given)


def karmarkar_karp(workloads: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Plain Karmarkar-Karp (largest differencing).

    Args:
        workloads: cost of each sample: list, array or CPU tensor `(n,)` of non-negative integers.
        k_partitions: number of partitions, at least 1.
        equal_size: whether sizes of partitions differ by at most one; otherwise they are free. The number of samples
            need not be a multiple of `k_partitions`, unlike in AReaL and verl.

    Returns:
        `k` lists with every index once, each ascending; the heaviest partition comes first.

    Raises:
        ValueError: as for `partition`.

    Examples:
        >>> karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)
        [[1, 3, 4], [0, 2]]
    """
    return partition(workloads, k_partitions, method="karmarkar_karp", equal_size=equal_size).groups()


def lower_bound(workloads: Any, k_partitions: int, equal_size: bool = True) -> int:
    """A lower bound of the largest load of every plan.

    The largest of the mean load, the heaviest sample with its lightest companions, and the counting bound
    (`native/bounds.hpp`).

    Raises:
        ValueError: as for `partition`.

    Examples:
        >>> lower_bound([9, 9, 9, 1], 2)  # one partition holds two of the nines
        18
    """
    given = CheckedArguments(workloads, k_partitions, equal_size=equal_size)
    return core.lower_bound(given) if given.num_rows else 0
