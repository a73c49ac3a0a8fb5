"""Groups of padded rows: every row once, limits kept, and no grouping of any kind is cheaper."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.micro_batching import padded_allocate
from commons.perf_model.partitioner import padded_groups
from tests.helpers.batches.groupings import groupings

WORK = st.lists(st.integers(0, 30), min_size=1, max_size=60)


def costs_of(work, groups):
    return [len(of_group) * max(of_group) for of_group in rows_of(work, groups)]


def rows_of(work, groups):
    return [[work[row] for row in np.flatnonzero(groups == group)] for group in range(max(groups) + 1)]


@given(work=st.lists(st.integers(0, 12), min_size=1, max_size=6), data=st.data())
def test_no_grouping_at_all_is_cheaper(work, data):
    num_groups = data.draw(st.integers(1, len(work)))
    found = max(costs_of(work, padded_groups(work, num_groups=num_groups)))
    best = min(max(costs_of(work, np.array(each))) for each in groupings(len(work), num_groups))
    assert found == best
    # As few groups as that cost allows, in any way to put rows into groups.
    fewest = padded_groups(work, max_cost=max(1, found)).max() + 1
    assert fewest == min(
        max(each) + 1 for each in groupings(len(work)) if max(costs_of(work, np.array(each))) <= max(1, found)
    )


@given(work=WORK, data=st.data())
def test_every_row_once_and_every_limit_kept(work, data):
    num_groups = data.draw(st.integers(1, len(work)))
    max_rows = data.draw(st.integers(-(-len(work) // num_groups), len(work) + 3))
    groups = padded_groups(work, num_groups=num_groups, max_rows=max_rows)
    sizes = np.bincount(groups, minlength=num_groups)
    assert len(groups) == len(work) and len(sizes) == num_groups and sizes.min() >= 1 and sizes.max() <= max_rows
    # Contiguous in the rows by weight, the heaviest first.
    assert np.array_equal(groups[np.argsort(-np.array(work), kind="stable")], np.sort(groups))
    cheapest = max(costs_of(work, groups))
    same = padded_groups(work, num_groups=num_groups, max_rows=max_rows, max_cost=max(1, cheapest))
    assert np.array_equal(same, groups)
    if cheapest > max(max(work), 1):
        with pytest.raises(ValueError, match=rf"the cheapest {num_groups} groups cost up to {cheapest}: raise one"):
            padded_groups(work, num_groups=num_groups, max_rows=max_rows, max_cost=cheapest - 1)


def sum_of_steps(work, groups, steps):
    costs = costs_of(work, groups)
    return sum(max(costs[at : at + len(costs) // steps]) for at in range(0, len(costs), len(costs) // steps))


def least_sum(work, per_step, steps, limit):
    """The least sum over steps of the costliest group, of groups that follow one another and keep the limit."""
    ordered = sorted(work, reverse=True)
    count = len(ordered)

    @functools.cache
    def costliest(begin, end, groups):
        if groups == 1:
            return (end - begin) * ordered[begin]
        return min(
            max((middle - begin) * ordered[begin], costliest(middle, end, groups - 1))
            for middle in range(begin + 1, end - groups + 2)
        )

    @functools.cache
    def rest(begin, left):
        if left == 0:
            return 0 if begin == count else math.inf
        found = [
            costliest(begin, end, per_step) + rest(end, left - 1)
            for end in range(begin + per_step, count + 1)
            if costliest(begin, end, per_step) <= limit
        ]
        return min(found, default=math.inf)

    return rest(0, steps)


@settings(max_examples=60)
@given(steps=st.integers(2, 3), per_step=st.integers(1, 3), data=st.data())
def test_steps_take_little_and_no_group_is_above_the_optimum(steps, per_step, data):
    costs = data.draw(st.sampled_from([st.integers(1, 98), st.sampled_from([*range(1, 30), *[300] * 7])]))
    work = data.draw(st.lists(costs, min_size=steps * per_step, max_size=steps * per_step + 12))
    alone = padded_groups(work, num_groups=steps * per_step)
    groups = padded_groups(work, num_groups=steps * per_step, steps=steps)
    assert np.bincount(groups, minlength=steps * per_step).min() >= 1
    assert np.array_equal(groups[np.argsort(-np.array(work), kind="stable")], np.sort(groups))
    limit = max(costs_of(work, alone))
    assert max(costs_of(work, groups)) == limit
    sums = [sum_of_steps(work, each, steps) for each in (groups, alone)]
    assert least_sum(work, per_step, steps, limit) <= sums[0] <= sums[1]


def test_steps_are_near_the_least_sum():
    """Of 20 draws as in practice the mean is within 1 %, the worst within 10 %."""
    over = []
    for seed in range(20):
        drawn = np.random.default_rng(seed)
        work = np.clip(drawn.lognormal(4, 1, 36), 1, 2000).astype(int).tolist()
        groups = padded_groups(work, num_groups=12, steps=3)
        limit = max(costs_of(work, groups))
        assert limit == least_sum(work, 12, 1, math.inf)
        over.append(sum_of_steps(work, groups, 3) / least_sum(work, 4, 3, limit))
    assert min(over) >= 1 and np.mean(over) < 1.01 and max(over) < 1.1
    # Here the groups of the least largest cost, cut into steps as they are, take the least time.
    drawn = "575 366 319 141 112 107 91 72 58 41 36 33 32 32 31 30 28 25 25 25 24 23 23 22 22 21 21 19 19"
    work = list(map(int, drawn.split()))
    groups = padded_groups(work, num_groups=8, steps=4)
    assert sum_of_steps(work, groups, 4) == least_sum(work, 2, 4, max(costs_of(work, groups)))


@given(work=WORK, extra=st.integers(0, 100), max_rows=st.none() | st.integers(1, 9))
def test_groups_within_a_cost(work, extra, max_rows):
    limit = max(1, max(work)) + extra
    groups = padded_groups(work, max_cost=limit, max_rows=max_rows)
    assert max(costs_of(work, groups)) <= limit
    assert max_rows is None or np.bincount(groups).max() <= max_rows
    # First fit over the sorted rows, which a greedy loop in plain Python makes, needs as many.
    count, rest = 0, sorted(work, reverse=True)
    while rest:
        size = 1
        while size < len(rest) and (size + 1) * rest[0] <= limit and size + 1 <= (max_rows or len(work)):
            size += 1
        count, rest = count + 1, rest[size:]
    assert groups.max() + 1 == count


def test_an_allocation_costs_what_its_longest_row_costs():
    lengths = [3, 1, 10, 9, 2, 2]
    # By tokens the rows of 10 and 9 cost 20, and so would any five rows; by squares these two cost 2 × 100.
    assert padded_allocate(lengths, num_groups=2, cost=lambda length: length**2) == [[2, 3], [0, 1, 4, 5]]
    assert padded_allocate(lengths, max_cost=199, cost=lambda length: length**2) == [[2], [3], [0, 1, 4, 5]]
    # A cost in steps of 8 does not tell 1 from 8 tokens, but the rows of a group still have similar lengths.
    groups = padded_allocate([1, 8, 2, 7, 9, 9], num_groups=3, cost=lambda length: -(-length // 8))
    assert groups == [[4, 5], [1, 3], [0, 2]]


def test_huge_costs_are_exact():
    work = [2**60 + 1, 2**60, 5]
    groups = padded_groups(work, num_groups=2)
    assert costs_of(work, groups) == [2**60 + 1, 2 * 2**60]
    assert padded_groups(work, max_cost=2**64, max_rows=2**64).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("work", "given", "message"),
    [
        ([], {"num_groups": 1}, "there are no rows; a group has at least one row: leave out empty batches"),
        ([1], {}, "num_groups and max_cost are None; one of the two sets how rows are grouped: give one"),
        ([1, 2], {"num_groups": 3}, "num_groups is 3, there are 2 rows; every group has a row: lower num_groups"),
        ([1, 2], {"num_groups": 0}, "num_groups is 0; it must be an integer of at least 1: correct it"),
        ([1, 2], {"max_cost": 0}, "max_cost is 0; it must be an integer of at least 1: correct it"),
        ([1, 7], {"max_cost": 6}, "row 1 alone costs 7, max_cost is 6; a row is never split: raise max_cost, or"),
        ([1] * 5, {"num_groups": 2, "max_rows": 2}, "num_groups is 2, max_rows 2; 5 rows do not fit into these groups"),
        ([3 * 2**60, 1, 1, 1, 1], {"num_groups": 2}, r"have up to 3 rows; the product must be below 2\^63: scale"),
        ([1] * 6, {"num_groups": 3, "steps": 2}, "steps is 2, num_groups 3; all steps have equally many groups: make"),
        ([1] * 6, {"max_cost": 3, "steps": 2}, "steps is 2, num_groups None; all steps have equally many groups: make"),
        ([1.5], {"num_groups": 1}, r"workloads\[0\] is 1.5; values must be non-negative integers"),
    ],
)
def test_bad_input(work, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        padded_groups(work, **given)
    assert "\n" not in str(caught.value)


def test_a_cost_that_falls_is_refused():
    with pytest.raises(ValueError, match="cost is -?9 for 1 tokens and 1 for 9; a padded row costs as much"):
        padded_allocate([9, 1], num_groups=1, cost=lambda length: 10 - length)
    with pytest.raises(ValueError, match=r"cost\(lengths\) has 1 entries, there are 2 rows"):
        padded_allocate([9, 1], num_groups=1, cost=lambda length: length[:1])
