"""Samplers of known workloads: a batch for every rank, groups in one batch, and arguments that are refused."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.samplers.epoch import EPOCH_START, Place, ShardedBatchSampler
from commons.perf_model.partitioner.core import SOURCES
from tests.helpers.datasets.sampler_steps import steps_of


def test_steps_before_the_last_leave_a_row_for_every_rank(caplog):
    """Nine rows for two ranks of at most two rows: 4 + 4 + 1 would leave a rank without one."""

    def counts(work, **options):
        samplers = [BudgetBatchSampler(work, num_ranks=2, rank=rank, shuffle=False, **options) for rank in range(2)]
        return [[len(batch) for batch in step] for step in steps_of(samplers, 0)]

    with caplog.at_level(logging.WARNING):
        assert sorted(map(sum, counts([1] * 9, budget_per_rank=2))) == [2, 3, 4]
        assert counts([1] * 9, budget_per_rank=2, drop_last=True) == [[2, 2], [2, 2]]
        assert not caplog.records
        assert list(map(sum, counts([5] * 5, budget_per_rank=5))) == [2, 3]
        assert list(map(sum, counts([5] * 5, budget_per_rank=5, drop_last=True))) == [2, 2]
    assert [record.getMessage()[:94] for record in caplog.records] == [
        "the last 3 rows of an epoch make no steps in which each of 2 ranks has a row and keeps budget_"
    ]


def test_a_place_with_fewer_rows_than_ranks(caplog):
    for make in (
        lambda rank: BalancedBatchSampler([1] * 10, 3, num_ranks=4, rank=rank, shuffle=False),
        lambda rank: BudgetBatchSampler([1] * 10, budget_per_rank=9, num_ranks=4, rank=rank, shuffle=False),
    ):
        with caplog.at_level(logging.WARNING):
            (step,) = steps_of([make(rank) for rank in range(4)], 0, Place(9))
        assert sorted(row for batch in step for row in batch) == [6, 7, 8, 9]
        assert make(1).place_after(1, 0, Place(9)) == Place(10)
        (record,) = caplog.records
        assert record.getMessage().startswith("row 9 leaves 1 rows for 4 ranks, and every rank needs one; the 3 rows")
        caplog.clear()


@given(
    work=st.lists(st.integers(1, 50), min_size=4, max_size=70),
    size=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    window=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_the_batches_of_all_ranks_in_turn(work, size, num_ranks, window, drop_last):
    """Each W-th batch, as Accelerate gives it to a rank, is that of the rank's own sampler, in every epoch."""
    for make in (
        lambda rank: BalancedBatchSampler(
            work, size, num_ranks=num_ranks, rank=rank, window=window, drop_last=drop_last
        ),
        lambda rank: BudgetBatchSampler(
            work, budget_per_rank=50 * size, num_ranks=num_ranks, rank=rank, drop_last=drop_last
        ),
    ):
        whole, parts = make(None), [make(rank) for rank in range(num_ranks)]
        for _ in range(2):
            assert len(whole) == num_ranks * len(parts[0])
            batches = list(whole)
            assert len(batches) % num_ranks == 0
            assert [batches[rank::num_ranks] for rank in range(num_ranks)] == [list(part) for part in parts]
        assert whole.drop_last is drop_last and not hasattr(whole, "batch_size")  # what Accelerate looks at


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda ranks: BalancedBatchSampler([1] * 40, 4, num_ranks=ranks, rank=0), "make it with rank=None"),
        (lambda ranks: BudgetBatchSampler([1] * 40, budget_per_rank=4, num_ranks=ranks, rank=0), "make it with rank="),
        (lambda ranks: ShardedBatchSampler(40, 4, world_size=ranks), "use torch's BatchSampler"),
    ],
    ids=["balanced", "budget", "sharded"],
)
def test_batches_of_one_rank_are_not_dealt_again(make, remedy):
    """Accelerate reads drop_last where it wraps a sampler; alone there is nothing to deal."""
    assert make(1).drop_last is False
    with pytest.raises(ValueError, match=f"has only the batches of rank 0 of 2, .*{remedy}"):
        make(2).drop_last  # noqa: B018


@pytest.mark.parametrize(
    ("rows", "rank", "message"),
    [
        (40, None, "rank is None, num_ranks is 2; this loader reads the batches of one rank"),
        (39, 0, "workloads has 39 entries, the data set has 40 rows"),
    ],
)
def test_our_loader_reads_the_batches_of_one_rank_and_of_its_own_data_set(rows, rank, message):
    with pytest.raises(ValueError, match=message):
        ResumableLoader(range(40), BalancedBatchSampler([1] * rows, 4, num_ranks=2, rank=rank))
    assert len(ResumableLoader(range(40), BalancedBatchSampler([1] * 40, 4, num_ranks=1, rank=None))) == 10


def balanced_of(**changes):
    options = {"workloads": [1] * len(changes.get("groups", "123")), "batch_size": 2, "num_ranks": 2, "rank": 0}
    return BalancedBatchSampler(**options | changes)


def budget_of(**changes):
    options = {"workloads": [1] * len(changes.get("groups", "123")), "budget_per_rank": 4, "num_ranks": 2, "rank": 0}
    return BudgetBatchSampler(**options | changes)


BALANCED, BUDGET, EITHER = [balanced_of], [budget_of], [balanced_of, budget_of]
ODD = {"groups": [0, 0, 1, 1, 1]}


@pytest.mark.parametrize(
    ("makers", "changes", "message"),
    [
        (BALANCED, {"batch_size": 0}, "batch_size is 0; it must be an integer of at least 1"),
        (BALANCED, {"window": 0}, "window is 0; it must be an integer of at least 1"),
        (BALANCED, {"window": 1.5}, "window is 1.5; it must be an integer of at least 1"),
        (EITHER, {"num_ranks": 0}, "num_ranks is 0; it must be an integer of at least 1"),
        (EITHER, {"rank": 2}, "rank is 2, num_ranks is 2; ranks are counted from 0"),
        (EITHER, {"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        (EITHER, {"workloads": [1, -2]}, r"workloads\[1\] is -2; values must be non-negative"),
        (EITHER, {"max_tokens": 4, "padded": True}, "max_tokens is 4, padded is True; the tokens of a padded"),
        (EITHER, {"speeds": [1]}, r"speeds has shape \(1,\), num_ranks is 2; .*: pass 2 positive integers"),
        (EITHER, {"speeds": [1, 2], "padded": True}, "speeds are given, padded is True; .*: leave out one of them"),
        (EITHER, {"max_tokens": 4}, "max_tokens is 4, tokens is None; a cap needs the tokens of each row"),
        (EITHER, {"max_tokens": 4, "tokens": [1, 5, 2]}, "row 1 alone has 5 tokens, max_tokens is 4; no plan"),
        (BUDGET, {"budget_per_rank": 0}, "budget_per_rank is 0; it must be an integer of at least 1"),
        (BUDGET, {"workloads": [6, 5]}, "budget_per_rank is 4, the lightest row costs 5; .* several rows"),
        (BUDGET, {"max_rows": 0}, "max_rows is 0; it must be an integer of at least 1"),
        (BALANCED, ODD, "groups have different numbers of rows; .*: use a BudgetBatchSampler"),
        (BALANCED, {"groups": [0, 0, 1, 1], "batch_size": 3}, "batch_size is 3, groups .*: give a multiple of 2"),
        (EITHER, {"groups": [0, 0, 1, 1], "padded": True}, "groups are given, padded is True; .*: leave out one"),
        (EITHER, {"groups": [0] * 4}, "the data set has 1 groups, num_ranks is 2; .*: use fewer ranks or more groups"),
        (EITHER, {"groups": [0, 1], "workloads": [1] * 4}, r"groups has shape \(2,\), there are 4 rows"),
        (
            EITHER,
            {"groups": [3, 3, 1, 1], "tokens": [1, 2, 3, 4], "max_tokens": 6},
            "group 1 has 7 tokens in 2 rows, max_tokens is 6; they stay together",
        ),
        (BUDGET, ODD | {"max_rows": 2}, "max_rows is 2, groups have different .*: leave it out, or cap memory"),
        (BUDGET, {"groups": [0, 0, 1, 1], "max_rows": 1}, "max_rows is 1, groups have 2 rows, .*: raise it"),
        (BUDGET, ODD | {"budget_per_rank": 1}, "budget_per_rank is 1, the lightest group costs 2; .* several groups"),
    ],
)
def test_a_wrong_argument_is_refused(makers, changes, message):
    """Of what `partition` takes too, one stands for all, which the same functions check."""
    for make in makers:
        with pytest.raises(ValueError, match=message):
            make(**changes)


def test_a_place_is_within_a_window():
    message = "steps is 2, the window of this BalancedBatchSampler is 2; a place is after 0 to 1 steps of a window"
    with pytest.raises(ValueError, match=message):
        balanced_of(window=2).start_at(0, 2)


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


@pytest.mark.parametrize(
    ("makers", "changes", "names"),
    [
        (EITHER, {"workloads": [1, 1, 1, 1, 1, 1, 1, 2]}, {"workloads"}),
        (EITHER, {"workloads": [1] * 9}, {"workloads", "num_rows"}),
        (EITHER, {"rank": 1}, {"rank"}),
        (EITHER, {"num_ranks": 3}, {"world_size"}),
        (EITHER, {"seed": 1}, {"seed"}),
        (EITHER, {"shuffle": False}, {"shuffle"}),
        (EITHER, {"drop_last": True}, {"drop_last"}),
        (EITHER, {"padded": True}, {"padded"}),
        (EITHER, {"speeds": [1, 2]}, {"speeds"}),
        (EITHER, {"tokens": [1] * 8, "max_tokens": 7}, {"workloads", "max_tokens"}),
        (EITHER, {"groups": [0, 1, 0, 1, 2, 3, 2, 3]}, {"workloads", "groups"}),
        (BALANCED, {"batch_size": 4}, {"batch_size"}),
        (BALANCED, {"window": 2}, {"window"}),
        (BUDGET, {"budget_per_rank": 5}, {"budget_per_rank"}),
        (BUDGET, {"max_rows": 2}, {"max_rows"}),
    ],
)
def test_another_setting_is_another_sampler(makers, changes, names):
    """Places of one are refused by the other."""
    for make in makers:
        first, other = make(workloads=[1] * 8).identity(), make(**{"workloads": [1] * 8} | changes).identity()
        assert {name for name in first if first[name] != other[name]} == names and first["plans"] == SOURCES


def test_other_groups_are_another_sampler():
    groupings = ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3])
    first, other = (balanced_of(groups=groups).identity() for groups in groupings)
    assert first["groups"] != other["groups"]
