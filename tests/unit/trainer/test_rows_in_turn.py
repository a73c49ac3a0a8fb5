"""What a sampler's rows would have cost, dealt in turn: of the very rows that each step trains, from any place on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.samplers.epoch import Place
from commons.trainer.data import RowsInTurn


@pytest.mark.parametrize("kind", ["balanced", "budget"])
@given(rows=st.integers(4, 40), ranks=st.integers(1, 4), data=st.data(), drop_last=st.booleans())
def test_each_step_is_that_of_the_plan(kind, rows, ranks, data, drop_last):
    workloads = np.array(data.draw(st.lists(st.integers(1, 50), min_size=rows, max_size=rows)))
    place = Place(data.draw(st.integers(0, rows)))  # also where fewer rows than ranks are left
    options = {"num_ranks": ranks, "rank": 0, "drop_last": drop_last}
    if kind == "balanced":
        sampler = BalancedBatchSampler(workloads, 3, window=2, **options)
    else:
        sampler = BudgetBatchSampler(workloads, budget_per_rank=80, **options)
    in_turn = list(RowsInTurn(sampler, workloads, ranks).loads(1, place))
    planned = list(sampler.plan(1, place))
    assert len(in_turn) == len(planned)
    assert sum(int(each.sum()) for each in in_turn) == sum(int(workloads[step.rows].sum()) for step in planned)
    if kind == "budget":  # its steps are parts of the order
        assert [int(each.sum()) for each in in_turn] == [int(workloads[step.rows].sum()) for step in planned]
