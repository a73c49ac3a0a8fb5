"""Rows that stay together are planned as one row with the sums of their workloads and tokens."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.shared.one_of_many_ranks import packed_rows
from commons.perf_model.partitioner import partition, partition_grid
from commons.perf_model.shuffle_plan import plan_shuffle

INT64 = st.sampled_from([0, 1, -5, 7, 2**40, -(2**63), 2**63 - 1])


@st.composite
def grouped_rows(draw, same_size=False):
    """Workloads, tokens and the group of each row, in any order."""
    if same_size:
        size, count = draw(st.integers(1, 4)), draw(st.integers(1, 8))
        numbers = draw(st.lists(st.integers(-100, 100), min_size=count, max_size=count, unique=True))
        groups = draw(st.permutations(numbers * size))
    else:
        groups = draw(st.lists(INT64, min_size=1, max_size=24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = len(groups)
    tokens = rng.integers(0, draw(st.sampled_from([2, 50])), count)  # few values, so that places tie
    return rng.integers(0, 1000, count), tokens, np.array(groups, np.int64)


def merged(groups, *columns):
    """Sums by group in the order of the groups' first rows, in Python's integers; and the group of each row."""
    names = list(dict.fromkeys(groups.tolist()))
    of_row = np.array([names.index(number) for number in groups.tolist()])
    return *(
        np.array([sum(column[of_row == each].tolist()) for each in range(len(names))]) for column in columns
    ), of_row


def home_of_groups(home, tokens, of_row):
    """By group the first of the places that hold most of its tokens."""
    homes = []
    for group in range(of_row.max() + 1):
        at = {place: int(tokens[(of_row == group) & (home == place)].sum()) for place in home[of_row == group].tolist()}
        homes.append(min(at, key=lambda place: (-at[place], place)))
    return np.array(homes)


@given(rows=grouped_rows(), ranks=st.integers(1, 5), method=st.sampled_from(["refined", "lpt"]), data=st.data())
def test_a_plan_of_groups_is_that_of_the_merged_rows(rows, ranks, method, data):
    workloads, tokens, groups = rows
    home = np.array(data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(groups), max_size=len(groups))))
    with_home = data.draw(st.booleans())
    sums, token_sums, of_row = merged(groups, workloads, tokens)
    cap = int(token_sums.max() + token_sums.sum() // ranks) + 1  # that LPT keeps
    options = {"method": method, "equal_size": False, "slack": 0.01}
    options["max_tokens"] = data.draw(st.sampled_from([None, cap]))
    where = {"home": home, "tokens": tokens} if with_home else {"tokens": tokens}
    plan = partition(workloads, ranks, groups=groups, **options, **where)
    at_home = {"home": home_of_groups(home, tokens, of_row)} if with_home else {}
    expected = partition(sums, ranks, **options, **at_home, tokens=token_sums)
    assert plan.assignment.tolist() == expected.assignment[of_row].tolist()
    assert plan.loads.tolist() == expected.loads.tolist() and plan.lower_bound == expected.lower_bound


@given(
    rows=grouped_rows(same_size=True), ranks=st.integers(2, 5), slack=st.sampled_from([0, 0.01, 0.5]), data=st.data()
)
def test_counts_are_equal_if_home_splits_a_group(rows, ranks, slack, data):
    """The place of most of a group's tokens is not where its rows are, so it does not excuse other counts."""
    workloads, tokens, groups = rows
    home = np.array(data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(groups), max_size=len(groups))))
    size = int((groups == groups[0]).sum())
    assume(any(len(set(home[groups == group].tolist())) > 1 for group in groups))
    plan = partition(workloads, ranks, groups=groups, home=home, tokens=tokens, slack=slack)
    counts = np.bincount(plan.assignment, minlength=ranks) // size
    assert counts.max() - counts.min() <= 1
    best = partition(workloads, ranks, groups=groups).loads.max()
    assert plan.loads.max() <= best * (1 + slack)
    sums, token_sums, of_row = merged(groups, workloads, tokens)
    homes = home_of_groups(home, tokens, of_row)
    at_home, is_even = np.bincount(homes, weights=sums).max(), np.ptp(np.bincount(homes, minlength=ranks)) <= 1
    assert best >= at_home or plan.loads.max() < at_home + is_even
    assert all(len(set(plan.assignment[groups == group].tolist())) == 1 for group in groups)


def test_counts_are_equal_if_home_splits_a_group_of_many_ranks():
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(600), 2))
    workloads = np.where(np.arange(1200) == 0, 10**6, 7)
    plan = partition(workloads, 600, groups=groups, home=np.arange(1200) // 2, slack=0.01)
    assert np.bincount(plan.assignment).tolist() == [2] * 600


def test_counts_are_equal_if_a_window_as_loaded_splits_a_group():
    groups, step = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]), np.repeat([0, 1], 6)
    home = np.array([1, 0, 1, 2, 0, 2, 1, 2, 0, 1, 2, 0])  # groups as they tie: 0, 1, 0, then 1, 0, 0
    grid = partition_grid(np.where(groups == 0, 10**6, 0), 3, 2, groups=groups, home=home, home_step=step)
    assert np.bincount(grid.assignment * 2 + grid.step).tolist() == [2] * 6
    known, _ = gathered(np.where(groups == 0, 10**6, 0), np.ones(12), groups, home * 2 + step, 3, 2)
    assert np.bincount(plan_shuffle(known, has_groups=True, slack=0.01).destination).tolist() == [2] * 6
    # Groups on one rank, but in two steps; all of them count as loaded in the first.
    groups, home = np.arange(12) % 6, [0, 0, 0, 1, 1, 2] * 2
    grid = partition_grid(np.where(groups == 0, 10**6, 0), 3, 2, groups=groups, home=home, home_step=step)
    assert not np.ptp(np.bincount(grid.assignment * 2 + grid.step, minlength=6).reshape(3, 2), axis=0).any()


def test_a_cap_that_equal_counts_of_split_groups_cannot_keep_wins():
    groups, home = np.repeat(range(4), 2), [0, 1, 1, 1, 1, 1, 1, 1]
    options = {"tokens": [3, 3, 1, 1, 1, 1, 1, 1], "max_tokens": 6, "groups": groups}
    assert partition([1] * 8, 2, home=home, **options).assignment.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    grid = partition_grid([1] * 8, 1, 2, home=[0] * 8, home_step=home, **options)
    assert sorted(np.bincount(grid.step).tolist()) == [2, 6]


@given(rows=grouped_rows(same_size=True), ranks=st.integers(1, 4), steps=st.integers(1, 3), data=st.data())
def test_a_grid_of_groups_is_that_of_the_merged_rows(rows, ranks, steps, data):
    workloads, tokens, groups = rows
    count = len(groups)
    home, loaded = (
        np.array(data.draw(st.lists(st.integers(0, most - 1), min_size=count, max_size=count)))
        for most in (ranks, steps)
    )
    sums, token_sums, of_row = merged(groups, workloads, tokens)
    cell = home_of_groups(home * steps + loaded, tokens, of_row)
    options = {"tokens": tokens, "home": home, "home_step": loaded, "groups": groups}
    grid = partition_grid(workloads, ranks, steps, slack=0.01, **options)
    at_home = np.bincount(cell, minlength=ranks * steps)
    if at_home.max() - at_home.min() > 1 and not np.array_equal(cell[of_row], home * steps + loaded):
        # Rows of a group move, so loaded counts are not kept; batches may have different numbers of groups.
        counts = np.bincount(grid.assignment * steps + grid.step, minlength=ranks * steps).reshape(ranks, steps)
        assert max(np.ptp(counts * at_home.sum() // count, axis=0)) <= 1
        return
    options = {"tokens": token_sums, "home": cell // steps, "home_step": cell % steps}
    expected = partition_grid(sums, ranks, steps, slack=0.01, **options)
    step, loads = expected.step, expected.loads
    if np.array_equal(step, cell % steps) and not np.array_equal(step[of_row], loaded):
        # Merged rows that stay in their steps keep the order of the steps; here rows of a group came from several.
        drawn = partition_grid(range(steps, 0, -1), 1, steps, method="snake").step
        step, loads = drawn[step], loads[np.argsort(drawn)]
    assert grid.assignment.tolist() == expected.assignment[of_row].tolist()
    assert grid.step.tolist() == step[of_row].tolist()
    assert grid.loads.tolist() == loads.tolist() and grid.lower_bound == expected.lower_bound


def gathered(workloads, tokens, groups, place, ranks, steps):
    """Rows at places, as ranks pack them, and the positions of the rows in that order."""
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=ranks * steps).astype(np.int64)
    lengths = tokens[order][:, None].astype(np.int64)
    columns = (workloads[order].astype(np.int64), tokens[order].astype(np.int64), lengths, groups[order][:, None])
    return packed_rows(counts, counts, *columns, steps=steps), order


@given(rows=grouped_rows(), ranks=st.integers(1, 4), steps=st.sampled_from([1, 1, 2]), data=st.data())
def test_a_shuffle_brings_groups_together(rows, ranks, steps, data):
    """Whatever the gate; and if they are together, the plan is never worse than where they are."""
    workloads, tokens, groups = rows
    places = ranks * steps
    place = np.array(data.draw(st.lists(st.integers(0, places - 1), min_size=len(groups), max_size=len(groups))))
    known, order = gathered(workloads, tokens, groups, place, ranks, steps)
    plan = plan_shuffle(known, has_groups=True, equal_size=False, min_gain=data.draw(st.sampled_from([0.0, 1.0])))
    for number in set(groups.tolist()):
        assert len(set(plan.destination[groups[order] == number].tolist())) == 1
    assert plan.loads_after.tolist() == [int(workloads[order][plan.destination == at].sum()) for at in range(places)]
    # Every row where the first row of its group is.
    together = np.array([place[groups.tolist().index(number)] for number in groups.tolist()])
    known, order = gathered(workloads, tokens, groups, together, ranks, steps)
    plan = plan_shuffle(known, has_groups=True, equal_size=False)
    time = [loads.reshape(ranks, steps).max(axis=0).sum() for loads in (plan.loads_before, plan.loads_after)]
    assert time[1] <= time[0]
    for number in set(groups.tolist()):
        assert len(set(plan.destination[groups[order] == number].tolist())) == 1


@given(rows=grouped_rows())
def test_groups_of_different_sizes_and_equal_counts_are_refused(rows):
    workloads, tokens, groups = rows
    sizes = np.unique(groups, return_counts=True)[1]
    assume(sizes.min() != sizes.max())
    said = rf"groups have {sizes.min()} to {sizes.max()} rows, equal_size is True; .*: pass equal_size=False"
    with pytest.raises(ValueError, match=said):
        partition(workloads, 2, groups=groups)
    known, _ = gathered(workloads, tokens, groups, np.zeros(len(groups), np.int64), 2, 1)
    with pytest.raises(ValueError, match=said):
        plan_shuffle(known, has_groups=True)


def test_rows_without_a_column_of_groups_are_refused():
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match="a gathered table: a size or column is out of its range"):
        plan_shuffle(packed_rows(one, one, one, one, np.zeros((1, 0), np.int64)), has_groups=True)


@pytest.mark.parametrize(
    "groups, said",
    [
        ([1, 2], r"groups has shape \(2,\), there are 3 rows"),
        ([[1], [2], [3]], r"groups has shape \(3, 1\), there are 3 rows"),
        ([0.0, 1.0, 2.0], "groups has dtype float64"),
        (["a", "b", "c"], "groups has dtype"),
        (np.array([0, 1, 2**63], np.uint64), "groups has dtype uint64"),
        ([0, 0, 2**64], "groups has dtype object"),
    ],
)
def test_numbers_that_are_no_groups(groups, said):
    with pytest.raises(ValueError, match=said):
        partition([1, 2, 3], 2, groups=groups)


def test_a_group_above_the_cap_is_named_and_one_at_the_cap_is_not():
    said = "group 7 has 9 tokens in 2 samples, max_tokens is 8; they stay together: raise max_tokens"
    with pytest.raises(ValueError, match=said):
        partition([1, 2, 3], 2, tokens=[4, 5, 6], max_tokens=8, groups=[7, 7, 1], equal_size=False)
    plan = partition([1, 2, 3], 2, tokens=[4, 5, 6], max_tokens=9, groups=[7, 7, 1], equal_size=False)
    assert sorted(plan.groups()) == [[0, 1], [2]]
