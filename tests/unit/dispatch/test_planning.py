"""Plans of rows that lie on the ranks: even work, a row for every rank, whole groups, no move without need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.dispatch.planning import as_int64_ids, plan_redistribution

weights = st.integers(0, 1000)
uneven_rows = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda rows: sum(rows) >= len(rows))


@given(uneven_rows, st.booleans(), st.sampled_from([0.0, 0.01, 0.5]), st.data())
def test_plans_of_rows_that_lie_on_the_ranks(rows_per_rank, equal_size, slack, data):
    num_rows, num_ranks = sum(rows_per_rank), len(rows_per_rank)
    workloads = np.array(data.draw(st.lists(weights, min_size=num_rows, max_size=num_rows)), dtype=np.int64)
    plan = plan_redistribution(workloads, np.array(rows_per_rank), equal_size=equal_size, slack=slack)
    counts = np.bincount(plan.destination, minlength=num_ranks)
    assert counts.min() >= 1 and (not equal_size or counts.max() - counts.min() <= 1)
    assert plan.loads_before.sum() == plan.loads_after.sum() == workloads.sum()
    if not equal_size and min(rows_per_rank) > 0:
        assert plan.loads_after.max() <= plan.loads_before.max()
    assert np.bincount(plan.gathered.home, minlength=num_ranks).tolist() == rows_per_rank
    assert plan.loads_after.max() >= plan.lower_bound


@given(uneven_rows, st.integers(1, 4), st.data())
def test_moved_groups_stay_whole(rows_per_rank, num_groups, data):
    num_rows = sum(rows_per_rank)
    groups = as_int64_ids(
        data.draw(st.lists(st.integers(0, num_groups), min_size=num_rows, max_size=num_rows)), num_rows
    )
    if len(set(groups.tolist())) < len(rows_per_rank):
        with pytest.raises(ValueError, match="number of groups is"):
            plan_redistribution(np.ones(num_rows, dtype=np.int64), np.array(rows_per_rank), groups=groups)
        return
    if len({np.count_nonzero(groups == group) for group in groups.tolist()}) > 1:
        with pytest.raises(ValueError, match="groups have .* equal_size is True; .*: pass equal_size=False"):
            plan_redistribution(np.ones(num_rows, dtype=np.int64), np.array(rows_per_rank), groups=groups)
    plan = plan_redistribution(np.arange(num_rows), np.array(rows_per_rank), groups=groups, equal_size=False)
    assert set(plan.destination.tolist()) == set(range(len(rows_per_rank)))
    for group in set(groups.tolist()):
        assert len(set(plan.destination[groups == group].tolist())) == 1


def test_rows_move_where_only_counts_are_uneven():
    workloads, rows = np.array([1, 1, 1, 1, 8, 4, 4, 4]), np.array([5, 3])
    assert np.bincount(plan_redistribution(workloads, rows).destination).tolist() == [4, 4]
    assert not plan_redistribution(workloads, rows, equal_size=False).moves.any()
    # No load falls, and yet no rank is left without a row.
    assert (
        np.bincount(plan_redistribution(np.array([0, 9, 0]), np.array([3, 0]), equal_size=False).destination).min() == 1
    )
