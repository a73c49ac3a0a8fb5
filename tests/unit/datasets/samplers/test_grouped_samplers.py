"""Rows with the same group number come in one batch of one rank, in every epoch, behind every place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.samplers.epoch import EPOCH_START, Place
from tests.helpers.datasets.sampler_steps import steps_of


@st.composite
def groups_of(draw, least, same_size):
    """The group of every row, in any order; at least so many groups."""
    count = draw(st.integers(least, least + 9))
    sizes = [draw(st.integers(1, 4))] * count if same_size else [draw(st.integers(1, 4)) for _ in range(count)]
    numbers = draw(st.lists(st.sampled_from(range(-40, 40)), min_size=count, max_size=count, unique=True))
    return draw(st.permutations([number for number, size in zip(numbers, sizes) for _ in range(size)]))


def balanced(work, tokens, group_size, window, number, **options):
    return BalancedBatchSampler(work, number * group_size, window=window, **options)


def budget(work, tokens, group_size, window, number, **options):
    """At most so many groups on a rank or, with groups of several sizes, a cap on tokens."""
    limits = {"max_rows": number * group_size} if group_size else {"tokens": tokens, "max_tokens": 72}
    return BudgetBatchSampler(work, budget_per_rank=60 * number, **limits, **options)


@given(make=st.sampled_from([balanced, budget]), ranks=st.integers(1, 3), window=st.integers(1, 3), data=st.data())
def test_groups_are_planned_like_rows_with_their_sums(make, ranks, window, data):
    same_size = make is balanced or data.draw(st.booleans())
    groups = data.draw(groups_of(ranks, same_size))
    rows_of = [np.flatnonzero(np.array(groups) == number) for number in dict.fromkeys(groups)]  # by their first rows
    options = {"num_ranks": ranks} | {name: data.draw(st.booleans()) for name in ("shuffle", "drop_last")}
    values = np.random.default_rng(1).integers(1, 15, (2, len(groups)))  # workloads and tokens
    sums = np.stack([values[:, rows].sum(axis=1) for rows in rows_of], axis=1)
    number, size = data.draw(st.integers(1, 3)), len(rows_of[0]) if same_size else 0
    samplers = [make(*values, size, window, number, rank=rank, groups=groups, **options) for rank in range(ranks)]
    like_rows = [make(*sums, min(size, 1), window, number, rank=rank, **options) for rank in range(ranks)]
    for epoch in range(2):
        steps, expected = steps_of(samplers, epoch), steps_of(like_rows, epoch)
        expected = [[[row for group in batch for row in rows_of[group]] for batch in step] for step in expected]
        length = window if make is balanced else 1  # the steps of a window have a random order
        for begin in range(0, max(len(steps), len(expected)), length):
            assert sorted(steps[begin : begin + length]) == sorted(expected[begin : begin + length])
        counts = [sum(map(len, step)) for step in steps]
        assert list(samplers[0].step_rows(epoch, EPOCH_START)) == counts
        assert make is budget or (len(samplers[0]), samplers[0].num_rows) == (len(steps), sum(counts))
        for done in range(len(steps) + 1):
            place = samplers[0].place_after(done, epoch, EPOCH_START)
            assert steps_of(samplers, epoch, place) == steps[done:]
            assert samplers[0].place_after(1, epoch, place) == samplers[0].place_after(done + 1, epoch, EPOCH_START)


def test_groups_of_a_rank_that_are_few_come_again(caplog):
    """A place that leaves one group for two ranks begins a group earlier."""
    groups = [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    sampler = BudgetBatchSampler([1] * 10, budget_per_rank=4, num_ranks=2, rank=None, groups=groups, shuffle=False)
    rows = [row for batch in sampler.items(0, Place(9)) for row in batch]
    assert sorted(rows) == [5, 6, 7, 8, 9]
    assert "row 9 leaves 1 groups for 2 ranks" in caplog.text


def test_another_grouping_is_another_sampler():
    options = {"num_ranks": 2, "rank": 0}
    groupings = ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3])
    first, other = (BalancedBatchSampler([1] * 8, 2, groups=groups, **options).identity() for groups in groupings)
    assert first != other


@pytest.mark.parametrize(
    "options, said",
    [
        ({"groups": [0, 0, 1]}, "groups have different numbers of rows; .*: use a BudgetBatchSampler"),
        ({"groups": [0, 0, 1, 1], "batch_size": 3}, "batch_size is 3, groups have 2 rows; .*: give a multiple of 2"),
        ({"groups": [0, 0, 1, 1], "padded": True}, "groups are given, padded is True; .*: leave out one of them"),
        ({"groups": [0, 0, 0, 0]}, "the data set has 1 groups, num_ranks is 2; .*: use fewer ranks or more groups"),
        ({"groups": [0, 1]}, r"groups has shape \(2,\), there are 4 rows"),
        (
            {"groups": [3, 3, 1, 1], "tokens": [1, 2, 3, 4], "max_tokens": 6},
            "group 1 has 7 tokens in 2 rows, max_tokens is 6; they stay together",
        ),
    ],
)
def test_groups_that_batches_cannot_hold(options, said):
    options = {"batch_size": 2, "num_ranks": 2, "rank": 0} | options
    rows = len(options["groups"]) if "shape" not in said else 4
    with pytest.raises(ValueError, match=said):
        BalancedBatchSampler([1] * rows, **options)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"max_rows": 2}, "max_rows is 2, groups have different numbers of rows; .*: leave it out, or cap memory"),
        ({"max_rows": 1, "groups": [0, 0, 1, 1]}, "max_rows is 1, groups have 2 rows, which stay together: raise it"),
        ({"budget_per_rank": 1}, "budget_per_rank is 1, the lightest group costs 2; .* allow several groups"),
    ],
)
def test_limits_that_groups_cannot_keep(options, said):
    options = {"budget_per_rank": 8, "num_ranks": 1, "rank": 0, "groups": [0, 0, 1, 1, 1]} | options
    with pytest.raises(ValueError, match=said):
        BudgetBatchSampler([1] * len(options["groups"]), **options)
