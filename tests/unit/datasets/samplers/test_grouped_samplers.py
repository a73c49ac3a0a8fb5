"""Rows with the same group number come in one batch of one rank, in every epoch, behind every place."""

from __future__ import annotations

from collections import Counter

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


def check_whole_groups(steps, groups):
    """Every batch has whole groups, and all have every row once."""
    sizes = Counter(groups)
    trained = Counter(row for step in steps for batch in step for row in batch)
    assert set(trained.values()) <= {1}
    for batch in (batch for step in steps for batch in step):
        assert batch and all(sizes[number] == count for number, count in Counter(groups[row] for row in batch).items())
    return set(trained)


@given(ranks=st.integers(1, 3), window=st.integers(1, 3), shuffle=st.booleans(), data=st.data())
def test_balanced_batches_hold_whole_groups(ranks, window, shuffle, data):
    groups = data.draw(groups_of(ranks, same_size=True))
    size, per_batch = Counter(groups)[groups[0]], data.draw(st.integers(1, 3))
    work = np.random.default_rng(1).integers(0, 100, len(groups))
    drop_last = data.draw(st.booleans())
    options = {"window": window, "shuffle": shuffle, "drop_last": drop_last, "num_ranks": ranks, "groups": groups}
    samplers = [BalancedBatchSampler(work, size * per_batch, rank=rank, **options) for rank in range(ranks)]
    for epoch in range(2):
        steps = steps_of(samplers, epoch)
        assert len(steps) == len(samplers[0])
        rows = check_whole_groups(steps, groups)
        assert len(rows) == samplers[0].num_rows and (drop_last or len(rows) == len(groups))
        done = data.draw(st.integers(0, len(steps)))
        place = samplers[0].place_after(done, epoch, EPOCH_START)
        assert steps_of(samplers, epoch, place) == steps[done:]
    if not drop_last:  # batches differ by one group at most, within a window
        first = [len(batch) for step in steps[:window] for batch in step]
        assert max(first) - min(first) in (0, size)


@given(ranks=st.integers(1, 3), shuffle=st.booleans(), same_size=st.booleans(), data=st.data())
def test_budgeted_steps_hold_whole_groups(ranks, shuffle, same_size, data):
    groups = data.draw(groups_of(ranks, same_size))
    rng = np.random.default_rng(2)
    work, tokens = rng.integers(1, 50, len(groups)), rng.integers(1, 9, len(groups))
    of_groups = [sum(work[np.array(groups) == number].tolist()) for number in set(groups)]
    budget = data.draw(st.integers(max(of_groups), 4 * max(of_groups)))
    options = {"budget_per_rank": budget, "num_ranks": ranks, "shuffle": shuffle, "groups": groups}
    if same_size and data.draw(st.booleans()):
        options["max_rows"] = Counter(groups)[groups[0]] * data.draw(st.integers(1, 3))
    elif data.draw(st.booleans()):
        options |= {"tokens": tokens, "max_tokens": 72}
    samplers = [BudgetBatchSampler(work, rank=rank, **options) for rank in range(ranks)]
    for epoch in range(2):
        steps = steps_of(samplers, epoch)
        assert check_whole_groups(steps, groups) == set(range(len(groups)))
        for step in steps[:-1]:  # the last one may exceed the limits, with a warning
            assert all(work[batch].sum() <= budget for batch in step)
            assert all(len(batch) <= options.get("max_rows", 99) for batch in step)
            assert "max_tokens" not in options or all(tokens[batch].sum() <= 72 for batch in step)
        done = data.draw(st.integers(0, len(steps)))
        place = samplers[0].place_after(done, epoch, EPOCH_START)
        assert steps_of(samplers, epoch, place) == steps[done:]


def test_one_row_per_group_is_as_without_groups():
    work = np.random.default_rng(3).integers(1, 100, 50)
    for make in (
        lambda **more: BalancedBatchSampler(work, 4, num_ranks=2, rank=0, window=2, **more),
        lambda **more: BudgetBatchSampler(work, budget_per_rank=300, num_ranks=2, rank=0, max_rows=5, **more),
    ):
        assert list(make(groups=np.arange(50))) == list(make())


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
