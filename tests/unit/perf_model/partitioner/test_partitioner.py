"""Plans: every index once, bounds by counting, ties, caps, and what is accepted. What all plans keep: test_grid.py."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.shared.lengths import draw
from benchmarks.shared.plain import plain_karmarkar_karp
from commons.perf_model.partitioner import Partition, as_int64_workloads, karmarkar_karp, lower_bound, partition


def test_counting_bound_sees_what_the_mean_does_not():
    # Five large samples in four partitions: one partition holds two of them.
    workloads = [100] * 5 + [1] * 7
    assert lower_bound(workloads, 4, equal_size=False) == 200
    assert lower_bound(workloads, 4, equal_size=True) == 201
    assert partition(workloads, 4).loads.max() == 201


def test_ties_go_to_the_lower_index():
    assert partition([3, 3, 3, 3], 2, method="lpt").assignment.tolist() == [0, 1, 0, 1]
    assert partition([3, 3, 3, 3], 2, method="snake").assignment.tolist() == [0, 1, 1, 0]


def test_a_partition_has_a_short_repr():
    shown = "Partition(999 samples in 2 parts, largest load 1 × the mean, 1 × the bound)"
    assert repr(partition(range(1, 1000), 2)) == shown
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


@pytest.mark.parametrize("kind", ["zipf", "lognormal", "bimodal", "few values"])
def test_a_plan_is_never_above_plain_differencing(kind):
    """As the pages for users of projects that ship it say; costs are verl's."""
    rng = np.random.default_rng(0)
    for seed in range(60):
        num_parts, each = (int(number) for number in rng.integers(1, 9, 2))
        rows = num_parts * each
        lengths = rng.integers(1, 10, rows) * 400 if kind == "few values" else draw(kind, rows, seed)
        workloads = (24576 * lengths + lengths**2).tolist()
        for equal_size in (True, False):
            plain = plain_karmarkar_karp(workloads, num_parts, equal_size)
            largest = max(sum(workloads[row] for row in part) for part in plain)
            assert partition(workloads, num_parts, equal_size=equal_size).loads.max() <= largest


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64), st.integers(1, 24))
@example([29, 18, 15, 12, 10, 9, 3], 3)
def test_free_counts_are_no_worse_than_equal_ones(workloads, num_parts):
    free, equal = (partition(workloads, num_parts, equal_size=equal_size) for equal_size in (False, True))
    # A plan within 1 / 10,000 of the bound is good enough.
    assert free.loads.max() <= max(equal.loads.max(), free.lower_bound + free.lower_bound // 10_000)


def test_best_effort_exceeds_the_cap_by_the_token_balanced_plan_at_most():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, 128).astype(np.int64)
    cap = int(lengths.sum()) // 8 - 50
    plan = partition(lengths**2, 8, tokens=lengths, max_tokens=cap, best_effort=True)
    by_tokens = partition(lengths, 8)
    assert np.bincount(plan.assignment, weights=lengths).max() <= by_tokens.loads.max()


@pytest.mark.parametrize("equal_size", [True, False])
def test_under_a_cap_refined_is_no_worse_than_the_other_methods(equal_size):
    for seed in range(40):
        lengths = np.random.default_rng(seed).lognormal(6, 1, 256).astype(np.int64)
        arguments = {"equal_size": equal_size, "tokens": lengths, "best_effort": True}
        arguments["max_tokens"] = cap = int(max(lengths.max(), lengths.sum() / 8) * 1.01)
        plans = [
            partition(2048 * lengths + lengths**2 // 2, 8, method=method, **arguments)
            for method in ("refined", "lpt", "snake", "karmarkar_karp")
        ]
        above = [max(0, np.bincount(plan.assignment, lengths).max() - cap) for plan in plans]
        refined, *others = ((excess, plan.loads.max()) for excess, plan in zip(above, plans))
        assert refined <= min(others) or refined <= (0, plans[0].lower_bound * 1.0001), seed


@pytest.mark.parametrize("equal_size", [True, False])
def test_under_a_cap_refined_is_no_worse_than_snake_with_many_rows(equal_size):
    lengths = np.random.default_rng(1).lognormal(5, 1.4, 8192).clip(1, 8192).astype(np.int64)
    arguments = {"equal_size": equal_size, "tokens": lengths, "max_tokens": int(lengths.sum() / 128 * 1.02)}
    refined, snake = (
        partition(2048 * lengths + lengths**2 // 2, 128, method=method, **arguments) for method in ("refined", "snake")
    )
    assert refined.loads.max() <= snake.loads.max()


def test_a_sample_above_the_cap_is_named_or_let_through():
    arguments = {"tokens": [3, 99, 3, 3], "max_tokens": 50}
    with pytest.raises(ValueError, match="sample 1 alone has 99 tokens, max_tokens is 50"):
        partition([1, 1, 1, 1], 2, **arguments)
    plan = partition([1, 1, 1, 1], 2, best_effort=True, **arguments)
    assert np.bincount(plan.assignment, arguments["tokens"]).max() == 102
    at_the_cap = partition([1, 1, 1, 1], 2, equal_size=False, tokens=[3, 99, 3, 3], max_tokens=99)
    assert sorted(at_the_cap.groups()) == [[0, 2, 3], [1]]


def test_groups_of_more_partitions_than_16_bits_count():
    groups = Partition(np.array([2**16, 0]), np.zeros(2**16 + 1, np.int64), 0).groups()
    assert (groups[0], groups[-1], sum(map(len, groups))) == ([1], [0], 2)


def test_a_cap_that_only_the_way_back_home_keeps_is_no_error():
    values = [3, 5, 11, 13, 15, 17]  # without a home, swaps get to 33 tokens
    plan = partition(values, 2, equal_size=False, tokens=values, max_tokens=32, home=[0, 0, 0, 0, 0, 1])
    assert plan.loads.tolist() == [32, 32]


@pytest.mark.parametrize(
    "values",
    [
        [3, 1, 2],
        (3, 1, 2),
        range(3, 0, -1),
        [3.0, 1.0, 2.0],
        np.array([3, 1, 2], np.int32),
        np.array([3, 1, 2], np.uint8),
        np.array([3, 1, 2], np.uint64),
        np.array([3.0, 1.0, 2.0], np.float16),
        np.array([9, 3, 9, 1, 9, 2])[1::2],
        np.array([3, 1.0, 2], dtype=object),
        np.ma.array([3, 1, 2]),
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        torch.tensor([3, 1, 2], dtype=torch.uint8),
        torch.tensor([3.0, 1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([3.0, 1.0, 2.0], requires_grad=True),
    ],
    ids=lambda values: f"{type(values).__name__}-{getattr(values, 'dtype', '')}",
)
def test_lists_arrays_and_tensors_of_integers_become_int64(values):
    array = as_int64_workloads(values)
    assert array.dtype == np.int64 and array.flags.c_contiguous
    assert array.tolist() == list(values) or array.tolist() == [3, 1, 2]
    assert partition(values, 2).loads.max() == 3
    assert np.shares_memory(as_int64_workloads(array), array)  # what is int64 is not copied


def test_values_up_to_the_limit_are_exact():
    assert partition([2**61, 2**61 - 1], 1).loads.tolist() == [2**62 - 1]
    home = partition([2**61, 2**61 - 1], 2, home=[0, 0], slack=1.0)  # a load of twice as much would do
    assert sorted(home.loads.tolist()) == [2**61 - 1, 2**61]
    assert partition([2**53 + 1, 2**53 + 3], 2).loads.max() == 2**53 + 3
    for dtype in (np.float64, np.uint64, object):
        assert as_int64_workloads(np.array([0, 2**62 - 1024], dtype=dtype)).tolist() == [0, 2**62 - 1024]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, -3], r"workloads\[2\] is -3; values must be non-negative integers"),
        ([1.0, float("nan")], r"workloads\[1\] is nan; values must be non-negative integers"),
        ([float("inf"), 1.0], r"workloads\[0\] is inf; values must be non-negative integers"),
        ([1.0, 2.5], r"workloads\[1\] is 2.5; values must be non-negative integers"),
        ([1, 2**63], r"workloads\[1\] is 9.223372036854776e\+18; values must be at most 9223372036854775807"),
        ([1, 2**70], r"workloads\[1\] is 1180591620717411303424; values must be at most"),
        ([1, -(2**70)], r"workloads\[1\] is -1180591620717411303424; values must be non-negative"),
        (np.array([1, 2**63], np.uint64), r"workloads\[1\] is 9223372036854775808; values must be at most"),
        ([1.0, 1e300], r"workloads\[1\] is 1e\+300; values must be at most"),
        ([2**61, 2**61], r"the sum of workloads is 4611686018427387904; it must be below 2\^62, .*: scale"),
        ([[1, 2], [3, 4]], r"workloads has shape \(2, 2\); one value per row is needed: flatten"),
        (7, "workloads is 7; one value per row is needed: pass a list"),
        (None, "workloads is None; one value per row is needed: pass a list"),  # the remedy was to flatten it
        ({0: 1}, "workloads is a dict; one value per row"),
        (torch.tensor(7), "workloads is a Tensor; one value per row"),
        ([[1, 2], [3]], r"workloads is not a one-dimensional list of integers"),
        *(
            (torch.nested.nested_tensor([torch.arange(3)], layout=kind), "workloads is a nested tensor")
            for kind in (torch.strided, torch.jagged)
        ),
        (np.ma.array([3, 7], mask=[False, True]), r"workloads\[1\] is masked; every row needs a value: fill the array"),
        (["a", "b"], r"workloads has dtype <U1; values must be non-negative integers: convert"),
        ([None, 1], r"workloads\[0\] is None; values must be non-negative integers"),
        (torch.tensor([0.5]), r"workloads\[0\] is 0.5; values must be non-negative integers"),
        (torch.empty(3, device="meta"), r"workloads is on meta; the planner works on the CPU: pass workloads.cpu\(\)"),
    ],
)
@pytest.mark.parametrize(
    "function", [lambda w: partition(w, 2), lambda w: karmarkar_karp(w, 2, True), lambda w: lower_bound(w, 2)]
)
def test_bad_workloads(function, values, message):
    with pytest.raises(ValueError, match=message) as error:
        function(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"k_partitions": 0}, "k_partitions is 0; it must be an integer of at least 1"),
        ({"tokens": np.ma.masked_greater([1, 2, 9], 8)}, r"tokens\[2\] is masked; every row needs a value: fill"),
        ({"groups": np.ma.masked_greater([1, 9, 9], 8)}, r"groups\[1\] is masked; every row needs a value: fill"),
        ({"method": "greedy"}, "method is 'greedy'; it must be one of karmarkar_karp, lpt, refined, snake"),
        ({"tokens": [1, 2]}, "tokens has 2 entries, there are 3 rows; one per row is needed"),
        ({"tokens": [1, 2, -1]}, r"tokens\[2\] is -1"),
        ({"tokens": [1, 2, 3], "max_tokens": 0}, "max_tokens is 0; it must be an integer of at least 1"),
        ({"max_tokens": 5}, "max_tokens is 5, tokens is None; a cap needs the tokens of each row"),
        (  # not that the tokens do not fit: of 20,000 tight caps 24 can be kept, and no plan was found
            {"tokens": [6, 6, 6], "max_tokens": 10},
            "max_tokens is 10; no plan was found that keeps it for 18 tokens in 2 partitions, one was found for 12, 2 "
            "more: raise max_tokens, use more partitions or fewer samples",
        ),
        ({"home": [0, 1]}, "home has 2 entries, there are 3 rows"),
        ({"home": [0, 1, 2]}, r"home\[2\] is 2; a home is a partition in \[0, 2\)"),
        ({"home": np.array([0, -1, 1], np.int32)}, r"home\[1\] is -1; a home is a partition in \[0, 2\)"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0; it must be an integer of at least 1"),
        ({"slack": -0.1}, "slack is -0.1; it must be at least 0 and at most 1"),
        ({"slack": float("nan")}, "slack is nan; it must be at least 0 and at most 1"),
        ({"slack": 1.01}, "slack is 1.01; it must be at least 0 and at most 1"),
        ({"slack": "much"}, "slack is 'much'; it must be a number"),
    ],
)
def test_bad_arguments(keywords, message):
    arguments = {"workloads": [3, 2, 1], "k_partitions": 2, **keywords}
    with pytest.raises(ValueError, match=message) as error:
        partition(**arguments)
    assert "\n" not in str(error.value)


def test_a_cap_raised_by_what_the_error_says_is_kept():
    """Under 96 the best plan found holds 103, which is not found under 103."""
    options = {"k_partitions": 3, "equal_size": False, "tokens": [47, 22, 51, 83, 52, 31]}
    with pytest.raises(ValueError, match="max_tokens is 96; no plan .* one was found for 105, 9 more"):
        partition([69, 48, 78, 99, 30, 85], **options, max_tokens=96)
    assert partition([69, 48, 78, 99, 30, 85], **options, max_tokens=105)


def test_arguments_are_checked_without_rows_and_for_a_bound_too():
    with pytest.raises(ValueError, match="method is 'greedy'"):
        partition([], 2, method="greedy")
    with pytest.raises(ValueError, match="home has 1 entries, there are 0 rows"):
        partition([], 2, home=[0])
    with pytest.raises(ValueError, match="k_partitions × steps is 18446744073709551618 × 1; there must be fewer"):
        lower_bound([5, 5, 5], 2**64 + 2)  # was the bound of two partitions
