"""The allocators: what always holds, how good they are, what they say about a mistake, and the metrics."""

import math
import sys
from itertools import chain, combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.shared.plain import plain_first_fit, plain_karmarkar_karp
from commons.micro_batching import (
    ffd_allocate,
    get_allocate_fn,
    kk_allocate,
    packing_metrics,
    refined_allocate,
    repacking,
)
from commons.micro_batching.first_fit import first_fit_equal, l2_bound
from commons.micro_batching.leveling import level
from tests.helpers.batches.groupings import groupings

ALLOCATORS = (ffd_allocate, kk_allocate, refined_allocate)
NAMES = ("ffd", "kk", "refined")


@st.composite
def problems(draw, max_rows=60):
    """Values, capacity, min_groups, divisor, equal_size; values up to the capacity, zeros and ties among them."""
    num_rows = draw(st.integers(1, max_rows))
    largest = draw(st.sampled_from([1, 3, 40, 4096, 2**50]))
    values = draw(st.lists(st.integers(0, largest), min_size=num_rows, max_size=num_rows))
    capacity = max(1, *values) * draw(st.sampled_from([10, 10, 11, 15, 20, 40, 500])) // 10
    min_groups = draw(st.one_of(st.just(1), st.integers(1, num_rows)))
    divisor = min(draw(st.sampled_from([1, 1, 2, 3, 4, 8])), num_rows)
    return values, capacity, min_groups, divisor, draw(st.booleans())


def loads_of(values, groups):
    return [sum(values[index] for index in group) for group in groups]


def bound_of(values, capacity):
    return l2_bound(np.sort(np.array(values))[::-1], capacity)


@settings(max_examples=100)
@given(problems())
def test_what_always_holds(problem):
    values, capacity, min_groups, divisor, equal_size = problem
    counts = {}
    for allocate in ALLOCATORS:
        try:
            groups = allocate(values, capacity, min_groups, divisor, equal_size=equal_size)
        except ValueError as error:
            # Without a divisor the rows can always go one by one.
            assert divisor > 1 and "n_groups_divisor" in str(error)
            counts[allocate] = math.inf
            continue
        loads, sizes = loads_of(values, groups), [len(group) for group in groups]
        assert max(loads) <= capacity
        assert sorted(chain(*groups)) == list(range(len(values)))
        assert all(group == sorted(group) for group in groups)
        assert min(sizes) >= 1 and len(groups) >= max(min_groups, bound_of(values, capacity))
        assert len(groups) % divisor == 0
        assert not equal_size or max(sizes) - min(sizes) <= 1
        keys = [(-load, group[0]) for load, group in zip(loads, groups)]
        assert keys == sorted(keys)  # heaviest first, then by the first index
        counts[allocate] = len(groups)
    assert counts[refined_allocate] <= min(counts.values())
    assert not equal_size or counts[ffd_allocate] == counts[refined_allocate]


@settings(max_examples=100)
@given(problems())
def test_first_fit_is_first_fit_and_refined_takes_no_more_groups_than_plain_differencing(problem):
    values, capacity, *_ = problem
    assert sorted(map(sorted, plain_first_fit(values, capacity))) == sorted(ffd_allocate(values, capacity))
    for fewer in range(1, len(refined_allocate(values, capacity))):  # into which differencing puts too much
        assert max(loads_of(values, plain_karmarkar_karp(values, fewer, equal_size=False))) > capacity


def test_equal_sizes_of_heavy_tailed_values_need_few_groups():
    """First fit puts the light rows into the last groups, and would need 201 groups of 5 rows."""
    values = np.random.default_rng(0).lognormal(5, 1, 1000).clip(1, 8192).astype(np.int64)
    for groups in (ffd_allocate(values, 8192, equal_size=True), refined_allocate(values, 8192, equal_size=True)):
        assert len(groups) == bound_of(values, 8192) == 28
        assert set(map(len, groups)) == {35, 36} and max(loads_of(values, groups)) <= 8192


GROUPINGS = {num_rows: [np.array(each) for each in groupings(num_rows)] for num_rows in range(1, 8)}


@settings(max_examples=100)
@given(problems(max_rows=7))
def test_refined_is_the_optimum_of_few_rows(problem):
    values, capacity, min_groups, divisor, equal_size = problem
    weights = np.array(values)
    fewest = math.inf
    for parts in GROUPINGS[len(values)]:
        number = int(parts.max()) + 1
        sizes = np.bincount(parts)
        fits = all(int(weights[parts == group].sum()) <= capacity for group in range(number))
        if number >= min_groups and number % divisor == 0 and fits and (not equal_size or np.ptp(sizes) <= 1):
            fewest = min(fewest, number)
    assume(fewest < math.inf)
    assert bound_of(values, capacity) <= fewest
    groups = refined_allocate(values, capacity, min_groups, divisor, equal_size=equal_size)
    # A heuristic: nothing but luck keeps it from missing the optimum, yet on 7 rows it has not been seen to.
    assert len(groups) == fewest


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_refined_is_at_the_bound_and_even(capacity):
    rng = np.random.default_rng(capacity)
    spreads, at_bound = {name: [] for name in NAMES}, []
    for num_rows in (64, 256) * 10:
        long, short = 4096 - rng.integers(0, 500, num_rows), rng.normal(128, 32, num_rows).clip(1).astype(np.int64)
        values = np.where(rng.random(num_rows) < 0.2, long, short)
        counts = {}
        for name in NAMES:
            groups = get_allocate_fn(name)(values, capacity * int(values.max()))
            metrics = packing_metrics(values, groups, capacity * int(values.max()))
            spreads[name].append(metrics["imbalance_ratio"])
            counts[name] = metrics["n_groups"]
        assert counts["refined"] <= min(counts.values())
        at_bound.append(counts["refined"] == metrics["lower_bound"])
    assert sum(at_bound) >= 19
    assert np.mean(spreads["refined"]) <= min(0.5 * np.mean(spreads["ffd"]), np.mean(spreads["kk"]))


def plain_first_fit_equal(weights, capacity, num_groups):
    (size, num_larger), groups, parts = divmod(len(weights), num_groups), [[] for _ in range(num_groups)], []
    for weight in weights:
        longest = size + (sum(len(group) > size for group in groups) < num_larger)
        fits = [len(group) < longest and sum(group) + weight <= capacity for group in groups]
        if not any(fits):
            return None
        parts.append(fits.index(True))
        groups[parts[-1]].append(weight)
    return parts


@given(problems())
def test_first_fit_into_equal_groups_is_first_fit(problem):
    values, capacity, num_groups, *_ = problem
    weights = np.sort(np.array(values))[::-1]
    parts = first_fit_equal(weights, capacity, num_groups)
    assert (None if parts is None else parts.tolist()) == plain_first_fit_equal(weights.tolist(), capacity, num_groups)


def test_leveling_ends_where_nothing_from_another_group_helps_the_lightest():
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = np.sort(rng.integers(1, 100, 12))[::-1]
        parts = level(weights, rng.permutation(12) % 4, 4, equal_size=False)
        loads, lightest = np.bincount(parts, weights), int(np.bincount(parts, weights).argmin())
        gap = loads[parts] - loads[lightest]
        for given_away in (0, *weights[parts == lightest]):
            taken = weights - given_away
            assert np.minimum(taken, gap - taken)[parts != lightest].max() <= 0


def test_hard_packings_that_first_fit_and_differencing_miss():
    # Triples that must fill every group to within three tokens.
    rng = np.random.default_rng(3)
    values = []
    for _ in range(40):
        first, second = int(rng.integers(380, 490)), int(rng.integers(260, 300))
        values += [first, second, 1000 - first - second]
    assert len(ffd_allocate(values, 1003)) > 41 and len(kk_allocate(values, 1003)) > 40
    assert len(refined_allocate(values, 1003)) == 40


@given(st.lists(st.integers(1, 12), max_size=7), st.integers(0, 30))
def test_a_filling_is_the_best_of_all(weights, room):
    weights.sort(reverse=True)
    subsets = sorted(chain(*(combinations(range(len(weights)), size) for size in range(len(weights) + 1))))
    load = {subset: sum(weights[row] for row in subset) for subset in subsets}
    best = max((subset for subset in subsets if load[subset] <= room), key=load.__getitem__)
    assert repacking.best_filling([-weight for weight in weights], room, 0, sys.maxsize) == list(best)
    # Rows that fit nowhere go to the lightest groups, and rows without weight are in one group too.
    assert repacking.fill_groups([5, 5, 5, 5, 0], range(5), 2, 5, 10) == [[0, 2, 4], [1, 3]]


def test_packings_that_only_repacking_finds(monkeypatch):
    rng = np.random.default_rng(8)
    values = rng.lognormal(np.log(90), 0.35, 64) + rng.lognormal(np.log(200), 0.5, 64)
    values = values.clip(1, 1024).astype(np.int64)
    capacity = int(values.max())
    assert len(ffd_allocate(values, capacity)) == 30 and len(kk_allocate(values, capacity)) > 30
    assert len(refined_allocate(values, capacity)) == 29
    monkeypatch.setattr(repacking, "MOST_REPACKS", 0)
    assert len(refined_allocate(values, capacity)) == 30


def test_one_row_and_rows_without_tokens():
    for allocate in ALLOCATORS:
        assert allocate(torch.tensor([7, 5, 4, 4, 3, 1]), np.int64(12)) == allocate([7, 5, 4, 4, 3, 1], 12)
        assert allocate([3], 3) == [[0]]
        assert allocate([0], 1) == [[0]]
        assert allocate([0, 0, 0], 1, 2) in ([[0, 2], [1]], [[0], [1, 2]], [[0, 1], [2]])
        assert allocate([2**61, 2**61 - 1], 2**62) == [[0, 1]]
        assert allocate([2**61, 2**61 - 1], 2**80) == [[0, 1]]


@pytest.mark.parametrize("allocate", ALLOCATORS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4), "values is empty; a packing has at least one row"),
        (([3, 9, 2], 8), r"values\[1\] = 9 is above the capacity 8; a row is never split: raise the capacity"),
        (([9] * 7 + [1], 8), r"7 of 8 values are above the capacity 8 \(values\[0\] = 9, .*values\[4\] = 9, …\)"),
        (([1, 2, 3, 4], 8, 5), "min_groups is 5, there are 4 rows; every group has a row: lower min_groups"),
        (([1] * 5, 8, 1, 6), "n_groups_divisor is 6, there are 5 rows; every group has a row: lower n_groups_divisor"),
        (
            ([1] * 10, 8, 7, 6),
            "10 rows fit no number of groups that is a multiple of n_groups_divisor 6 and at least 7,",
        ),
        (([6] * 10, 8, 1, 6), "of n_groups_divisor 6 and at least 10, under capacity 8; every group has a row: lower"),
        (([5, 4, 4, 4, 1], 8, 1, 4), None),
        (([2, 2, 2, 4, 7, 4, 7], 7, 1, 4), "7 rows fit no number of groups .* 4 and at least 4, under capacity 7;"),
        (([1, -2], 8), r"values\[1\] is -2; values must be non-negative integers"),
        (([1], 0), "capacity is 0; it must be an integer of at least 1"),
        (([1], 2, 0), "min_groups is 0; it must be an integer of at least 1"),
        (([1], 2, 1, 0), "n_groups_divisor is 0; it must be an integer of at least 1"),
    ],
)
def test_mistakes_are_one_line(allocate, arguments, message):
    """Values are checked as workloads are: tests/unit/perf_model/partitioner/test_partitioner.py."""
    if message is None:
        assert len(allocate(*arguments)) == 4
        return
    with pytest.raises(ValueError, match=message) as caught:
        allocate(*arguments)
    assert "\n" not in str(caught.value)


def test_rows_that_fit_only_groups_of_other_sizes():
    for allocate in ALLOCATORS:
        assert len(allocate([10] * 7 + [1] * 4, 10, n_groups_divisor=8)) == 8
        with pytest.raises(ValueError, match="11 rows fit no number of groups of equal size that is a multiple of"):
            allocate([10] * 7 + [1] * 4, 10, n_groups_divisor=8, equal_size=True)


def test_metrics_by_hand():
    values, groups = [5, 4, 3, 2, 2], [[0, 1], [2, 3], [4]]
    metrics = packing_metrics(values, groups, 10, seconds=0.25)
    assert metrics == {
        "n_groups": 3,
        "group_sums": [9, 5, 2],
        "max_load": 9,
        "min_load": 2,
        "mean_load": pytest.approx(16 / 3),
        "spread": 7,
        "imbalance_ratio": pytest.approx(7 / (16 / 3)),
        "std_dev": pytest.approx(math.sqrt(((9 - 16 / 3) ** 2 + (5 - 16 / 3) ** 2 + (2 - 16 / 3) ** 2) / 3)),
        "cv": pytest.approx(math.sqrt(((9 - 16 / 3) ** 2 + (5 - 16 / 3) ** 2 + (2 - 16 / 3) ** 2) / 3) / (16 / 3)),
        "max_load_ratio": pytest.approx(9 / (16 / 3)),
        "utilization": pytest.approx(16 / 30),
        "wasted_tokens": 1 + 5 + 8,
        "lower_bound": 2,
        "seconds": 0.25,
    }
    assert "seconds" not in packing_metrics(values, groups, 10)


def test_metrics_without_load_and_of_packings_that_are_none():
    empty = packing_metrics([0, 0], [[0], [1]], 4)
    assert (empty["imbalance_ratio"], empty["cv"], empty["max_load_ratio"], empty["utilization"]) == (0, 0, 1, 0)
    # A packing above the capacity is measured too.
    over = packing_metrics([6, 1], [[0], [1]], 4)
    assert over["max_load"] == 6 and over["wasted_tokens"] == 3
    for groups in ([[0]], [[0, 1], [1]], [[0, 2]], [[0, -1]]):
        with pytest.raises(ValueError, match=r"every index in \[0, 2\) belongs to exactly one group"):
            packing_metrics([6, 1], groups, 8)
    for values, groups in (([], []), ([1], []), ([], [[0]])):
        with pytest.raises(ValueError, match="a packing has at least one of each"):
            packing_metrics(values, groups, 8)
    for group_of_each in ([0, 1], np.array([1, 0])):
        with pytest.raises(ValueError, match=r"groups\[0\] is .*; it is the list of the rows of a group"):
            packing_metrics([6, 1], group_of_each, 8)
    with pytest.raises(ValueError, match="capacity is 0"):
        packing_metrics([1], [[0]], 0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(60, 100))
def test_the_bound_is_the_definition(values, capacity):
    weights = np.sort(np.array(values))[::-1]
    best = 1
    for alpha in {0, *(value for value in values if 2 * value <= capacity)}:
        alone = [value for value in values if value > capacity - alpha]
        large = [value for value in values if capacity - alpha >= value and 2 * value > capacity]
        light = [value for value in values if 2 * value <= capacity and value >= alpha]
        beyond = sum(light) - (len(large) * capacity - sum(large))
        best = max(best, len(alone) + len(large) + max(0, -(-beyond // capacity)))
    assert l2_bound(weights, capacity) == best
