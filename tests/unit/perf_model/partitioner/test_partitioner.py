"""What every plan keeps, whatever the input: each sample once, counts, caps, bounds, and the same plan everywhere."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model.partitioner import Partition, karmarkar_karp, lower_bound, partition

METHODS = ["karmarkar_karp", "lpt", "refined", "snake"]

# Few distinct values, so that ties are common; or anything up to sums near 2^62.
workload_lists = st.one_of(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 10_000), max_size=60),
    st.lists(st.integers(0, 2**56), max_size=60),
    st.lists(st.sampled_from([0, 1, 2**61]), max_size=40).filter(lambda values: sum(values) < 2**62),
)
part_counts = st.integers(1, 12)


def loads_of(workloads: list[int], assignment: np.ndarray, k: int) -> list[int]:
    loads = [0] * k
    for workload, part in zip(workloads, assignment.tolist(), strict=True):
        loads[part] += workload
    return loads


def check(plan: Partition, workloads: list[int], k: int) -> None:
    assert plan.assignment.dtype == np.int64 and plan.assignment.shape == (len(workloads),)
    assert plan.loads.dtype == np.int64
    assert plan.loads.tolist() == loads_of(workloads, plan.assignment, k)
    assert max(plan.loads) >= plan.lower_bound
    assert plan.optimality_gap >= 0 and plan.imbalance >= 0


def largest_count_difference(assignment: np.ndarray, k: int) -> int:
    counts = np.bincount(assignment, minlength=k)
    return int(counts.max() - counts.min())


@given(workload_lists, part_counts, st.sampled_from(METHODS), st.booleans())
def test_every_method_keeps_loads_counts_and_bound(workloads, k, method, equal_size):
    plan = partition(workloads, k, method=method, equal_size=equal_size)
    check(plan, workloads, k)
    assert plan.lower_bound == lower_bound(workloads, k, equal_size)
    if equal_size or method == "snake":
        assert largest_count_difference(plan.assignment, k) <= 1


@given(workload_lists, part_counts, st.booleans())
def test_karmarkar_karp_holds_every_index_once(workloads, k, equal_size):
    groups = karmarkar_karp(workloads, k, equal_size)
    assert len(groups) == k
    assert sorted(index for group in groups for index in group) == list(range(len(workloads)))
    if equal_size:
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


@given(workload_lists, part_counts, st.booleans())
def test_refined_is_never_above_its_starts(workloads, k, equal_size):
    refined = partition(workloads, k, equal_size=equal_size)
    for method in ("karmarkar_karp", "lpt"):
        assert refined.loads.max() <= partition(workloads, k, method=method, equal_size=equal_size).loads.max()


def optimum(workloads: list[int], k: int, equal_size: bool) -> int:
    """Smallest largest load over all assignments, by trying them all."""
    n = len(workloads)
    best = sum(workloads)
    for assignment in product(range(k), repeat=n):
        counts = [assignment.count(part) for part in range(k)]
        if not equal_size or max(counts) - min(counts) <= 1:
            best = min(best, max(loads_of(workloads, np.array(assignment), k)))
    return best


@given(
    st.one_of(
        st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=10), st.just(2)),
        st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.just(3)),
    ),
    st.booleans(),
)
def test_bound_and_plan_enclose_the_optimum(case, equal_size):
    workloads, k = case
    plan = partition(workloads, k, equal_size=equal_size)
    best = optimum(workloads, k, equal_size)
    assert plan.lower_bound <= best <= plan.loads.max()
    assert plan.loads.max() <= best * (1 + plan.optimality_gap) * (1 + 1e-12)


def test_counting_bound_sees_what_the_mean_does_not():
    # Five large samples in four partitions: one partition holds two of them.
    workloads = [100] * 5 + [1] * 7
    assert lower_bound(workloads, 4, equal_size=False) == 200
    assert lower_bound(workloads, 4, equal_size=True) == 201
    assert partition(workloads, 4).loads.max() == 201


def test_empty_input_gives_empty_partitions():
    plan = partition([], 3)
    assert plan.assignment.shape == (0,) and plan.loads.tolist() == [0, 0, 0]
    assert (plan.lower_bound, plan.imbalance, plan.optimality_gap) == (0, 0.0, 0.0)
    assert karmarkar_karp([], 3, True) == [[], [], []]
    assert lower_bound([], 3) == 0


def test_ties_go_to_the_lower_index():
    assert partition([3, 3, 3, 3], 2, method="lpt").assignment.tolist() == [0, 1, 0, 1]
    assert partition([3, 3, 3, 3], 2, method="snake").assignment.tolist() == [0, 1, 1, 0]


def test_a_partition_has_a_short_repr():
    assert repr(partition(range(1, 1000), 2)) == (
        "Partition(999 samples in 2 parts, largest load 1 × the mean, 1 × the bound)"
    )
    assert "3 parts, largest load 1.5 × the mean, 1 × the bound" in repr(partition([4, 2, 2], 3))
    assert repr(partition([0], 1)) == "Partition(1 samples in 1 parts, largest load 1 × the mean, 1 × the bound)"


@pytest.mark.parametrize("rows", [1, 64, 65, 300, 5000])
@pytest.mark.parametrize("largest", [1, 3, 2**20, 2**41, 2**61 + 1])
@pytest.mark.parametrize("zeros", [0, 5])
def test_rows_are_sorted_by_weight_and_then_by_index(rows, largest, zeros):
    """Snake order shows the order of the rows: they go to partitions 0, ..., k - 1, k - 1, ..., 0, 0, ... in turn."""
    workloads = np.random.default_rng(rows).integers(0, min(largest, 2**46) + 1, rows) >> zeros << zeros
    workloads[rows // 2] = largest >> zeros << zeros
    places = np.arange(rows) % 14
    dealt = np.empty(rows, np.int64)
    dealt[np.lexsort((np.arange(rows), -workloads))] = np.where(places < 7, places, 13 - places)
    assert partition(workloads, 7, method="snake").assignment.tolist() == dealt.tolist()
