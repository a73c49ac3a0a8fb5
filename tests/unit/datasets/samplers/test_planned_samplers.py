"""Samplers of known workloads: every row once, limits kept, and exactly the rest from any place."""

import copy
import logging
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from benchmarks.shared.lengths import COSTS, draw
from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.samplers import budget
from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.perf_model.partitioner import padded_groups
from tests.helpers.datasets.sampler_steps import steps_of

WORK = st.lists(st.integers(0, 50), max_size=70)
SPEEDS = st.none() | st.lists(st.integers(1, 9), min_size=4, max_size=4)  # of as many ranks as there are


def work_of_users(num_rows):
    return COSTS["HSTU"](draw("user-like", num_rows, 0))


def rows_of(steps):
    return Counter(row for step in steps for batch in step for row in batch)


def require_rest(found, rest, order, num_ranks, drop_last):
    """The rest of the order was read; rows before come again where there are too few for the ranks."""
    if drop_last:
        assert found <= Counter(list(rest))
    else:
        assert found == Counter(list(order[len(order) - max(len(rest), num_ranks) :] if len(rest) else []))


@given(
    work=WORK,
    batch_size=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    window=st.integers(1, 4),
    switches=st.fixed_dictionaries({name: st.booleans() for name in ("shuffle", "drop_last", "padded")}),
    speeds=SPEEDS,
    data=st.data(),
)
def test_balanced_epochs_and_places(work, batch_size, num_ranks, window, switches, speeds, data):
    drop_last, padded = switches["drop_last"], switches["padded"]
    speeds = None if padded else speeds

    def make(ranks, window=window):
        options = {"num_ranks": ranks, "window": window, "speeds": speeds and speeds[:ranks], "seed": 3, **switches}
        return [BalancedBatchSampler(work, batch_size, rank=rank, **options) for rank in range(ranks)]

    if 0 < len(work) < num_ranks and not drop_last:
        with pytest.raises(ValueError, match=f"the data set has {len(work)} rows, num_ranks is {num_ranks}; every"):
            make(num_ranks)
        return
    samplers = make(num_ranks)
    steps = steps_of(samplers, 2)
    order = samplers[0].order(len(work), 2)
    kept = len(work) - (len(work) % (num_ranks * batch_size) if drop_last else 0)
    assert rows_of(steps) == Counter(order[:kept].tolist())
    assert [len(sampler) for sampler in samplers] == [
        sum(bool(step[rank]) for step in steps) for rank in range(num_ranks)
    ]
    counts = [sum(map(len, step)) for step in steps]
    for sampler in samplers:
        assert sampler.num_rows == kept and list(sampler.step_rows(2, EPOCH_START)) == counts
    rows_of_window, done = window * num_ranks * batch_size, 0
    for begin in range(0, len(steps), window):
        of_window = steps[begin : begin + window]
        count = rows_of(of_window).total()
        assert rows_of(of_window) == Counter(order[done : done + count].tolist())
        sizes = [len(batch) for step in of_window for batch in step]
        if padded:
            costs = [[len(batch) * max(work[row] for row in batch) for batch in step] for step in of_window]
            of_rows = np.array(work)[order[done : done + count]]
            groups = padded_groups(of_rows, num_groups=len(sizes))
            of_groups = [of_rows[groups == number] for number in range(len(sizes))]
            assert max(map(max, costs)) == max(len(group) * group.max() for group in of_groups)
        else:
            assert max(sizes) - min(sizes) <= 1 and max(sizes) <= max(batch_size, 2 if kept % num_ranks else 1)
        done, left = done + count, kept - done - rows_of_window
        if left >= num_ranks or left == 0:
            assert count == rows_of_window
        elif left > 0 and batch_size > 1:  # rows that are missing in the last window
            assert count == rows_of_window - (num_ranks - left)
    assert len(steps) == -(-kept // (num_ranks * batch_size)) - (batch_size == 1 and kept % num_ranks > 0)

    stop = data.draw(st.integers(0, len(steps)))
    places = {sampler.place_after(stop, 2, EPOCH_START) for sampler in samplers}
    assert len(places) == 1
    (place,) = places
    assert steps_of(make(num_ranks), 2, place) == steps[stop:]
    further = data.draw(st.integers(0, len(steps) - stop))
    assert samplers[0].place_after(further, 2, place) == samplers[0].place_after(stop + further, 2, EPOCH_START)
    # To other ranks and windows the place is the beginning of the window that has not been finished.
    if len(work) < 4 and not drop_last:
        return
    others = make(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    require_rest(rows_of(steps_of(others, 2, Place(place.row))), order[place.row :], order, len(others), drop_last)


@given(
    work=WORK,
    budget=st.integers(1, 90),
    num_ranks=st.integers(1, 4),
    max_rows=st.none() | st.integers(1, 6),
    max_tokens=st.none() | st.integers(9, 30),
    switches=st.fixed_dictionaries({name: st.booleans() for name in ("shuffle", "drop_last", "padded")}),
    speeds=SPEEDS,
    data=st.data(),
)
@settings(max_examples=60)
def test_budget_epochs_and_places(work, budget, num_ranks, max_rows, max_tokens, switches, speeds, data):
    drop_last, padded = switches["drop_last"], switches["padded"]
    tokens, speeds = [value % 10 for value in work], None if padded else speeds
    max_tokens = None if padded else max_tokens
    limits = {"max_rows": max_rows, "max_tokens": max_tokens, "tokens": tokens, "budget_per_rank": budget, **switches}

    def cost_of(batch):
        return len(batch) * max(work[row] for row in batch) if padded else sum(work[row] for row in batch)

    def make(ranks):
        options = {"num_ranks": ranks, "speeds": speeds and speeds[:ranks], "seed": 5, **limits}
        return [BudgetBatchSampler(work, rank=rank, **options) for rank in range(ranks)]

    if (0 < len(work) < num_ranks and not drop_last) or (work and min(work) > budget):
        with pytest.raises(ValueError, match="rows, num_ranks is|budget_per_rank is .*, the lightest row costs"):
            make(num_ranks)
        return
    samplers = make(num_ranks)
    steps = steps_of(samplers, 1)
    counts = [sum(map(len, step)) for step in steps]
    for sampler in samplers:
        sampler.set_epoch(1)
        assert len(sampler) == len(steps) and sampler.num_rows == sum(counts)
        assert list(sampler.step_rows(1, EPOCH_START)) == counts
    order = samplers[0].order(len(work), 1).tolist()
    done, above = 0, 0
    own_speeds = speeds[:num_ranks] if speeds else [1] * num_ranks
    for step, size in zip(steps, counts):
        assert sorted(row for batch in step for row in batch) == sorted(order[done : done + size])
        done += size
        keeps = all(
            (cost_of(batch) * max(own_speeds) <= budget * speed or len(batch) == 1)
            and len(batch) <= (max_rows or len(batch))
            and (max_tokens is None or sum(tokens[row] for row in batch) <= max_tokens)
            for batch, speed in zip(step, own_speeds)
        )
        above += not keeps
        assert keeps or (done == len(work) and size < 2 * num_ranks and not drop_last)
    assert above <= 1 and (done == len(work) or (drop_last and len(work) - done < num_ranks))
    stop = data.draw(st.integers(0, len(steps)))
    place = samplers[0].place_after(stop, 1, EPOCH_START)
    assert place == (sum(counts[:stop]) if stop < len(steps) or not stop else len(work), 0)
    assert steps_of(make(num_ranks), 1, place) == steps[stop:]
    if len(work) < 4 and not drop_last:
        return
    others = make(data.draw(st.integers(1, 4)))
    rest = rows_of(steps_of(others, 1, place))
    require_rest(rest, order[place.row :], order, len(others), drop_last)
    assert len(work) - place.row - rest.total() < len(others)


def sums_of(sampler, values, num_ranks):
    """By step and rank the sum over its rows; the last step may be an incomplete one, and is left out."""
    return np.array([np.bincount(step.ranks, values[step.rows], num_ranks) for step in sampler.plan(0)][:-1])


def waiting(loads, speeds):
    """What the steps take ÷ what they would take if all ranks were always busy."""
    return (loads / speeds).max(axis=1).sum() * speeds.sum() / loads.sum()


def test_a_window_evens_the_steps_and_a_budget_their_tokens():
    lengths, ranks = draw("user-like", 16 * 64 * 8, 0), {"num_ranks": 16, "rank": 0}
    work = COSTS["HSTU"](lengths)
    one, eight = (BalancedBatchSampler(work, 32, window=window, **ranks) for window in (1, 8))
    # Of no less room: steps of a row above the budget cost what that row does.
    constant = BudgetBatchSampler(work, budget_per_rank=int(work.max()), **ranks)
    waits = [waiting(sums_of(each, work, 16), np.ones(16)) for each in (one, eight, constant)]
    assert max(waits[1:]) < 1.01 < 1.2 < waits[0]
    tokens = [sums_of(each, lengths, 16) for each in (one, eight, constant)]
    most = [each.max() / each.mean() for each in tokens]
    assert most[2] < 1.15 < min(most[:2])


def test_slow_ranks_get_less_work():
    """On mixed devices, steps come within a hundredth of what all ranks' speeds allow, where equal work waits."""
    work, speeds, ranks = work_of_users(8 * 16 * 40), np.array([10] * 4 + [6] * 4), {"num_ranks": 8, "rank": 0}
    for make in (
        lambda **options: BalancedBatchSampler(work, 16, window=8, **ranks, **options),
        lambda **options: BudgetBatchSampler(work, budget_per_rank=int(work.mean() * 60), **ranks, **options),
    ):
        by_speed, equal = (waiting(sums_of(make(**each), work, 8), speeds) for each in ({"speeds": speeds}, {}))
        assert by_speed < 1.01 < 1.25 < equal


def test_padded_batches_cost_less_than_batches_of_equal_work():
    """The sum over all steps of the slowest rank's rows × heaviest row."""
    work, num_ranks, batch_size = work_of_users(64 * 32 * 16), 64, 32

    def slowest(sampler):
        return sum(
            max(len(rows) * work[rows].max() for rank in range(num_ranks) for rows in [step.rows[step.ranks == rank]])
            for step in sampler.plan(0)
        )

    def balanced(**options):
        return slowest(BalancedBatchSampler(work, batch_size, num_ranks=num_ranks, rank=0, window=4, **options))

    as_loaded = batch_size * int(work.reshape(-1, num_ranks * batch_size).max(1).sum())
    unpadded, padded = balanced(), balanced(padded=True)
    plan = BalancedBatchSampler(work, batch_size, num_ranks=num_ranks, rank=0, window=4, padded=True).plan(0)
    most_rows = max(np.bincount(step.ranks).max() for step in plan)
    of_budget = {"budget_per_rank": int(work.max()), "padded": True}
    budget = slowest(BudgetBatchSampler(work, num_ranks=num_ranks, rank=0, **of_budget))
    # docs/beyond_one_batch.md has all but the last.
    assert (round(padded / as_loaded, 3), round(unpadded / as_loaded, 2), most_rows) == (0.024, 0.44, 232)
    assert round(budget / as_loaded, 2) == 0.03


def test_the_same_for_every_rank_and_epoch_and_another_order_in_the_next():
    work = work_of_users(500)
    for make in (
        lambda **options: BalancedBatchSampler(work, 4, window=3, **options),
        lambda **options: BudgetBatchSampler(work, budget_per_rank=8 * int(work.mean()), **options),
    ):
        plans = [
            [step.rows.tolist() for step in make(num_ranks=4, rank=rank, seed=7).plan(epoch)]
            for rank in (0, 3)
            for epoch in (0, 1)
        ]
        assert plans[0] == plans[2] != plans[1] == plans[3]
        sampler = make(num_ranks=4, rank=1)
        assert list(sampler) != list(sampler) and sampler.epoch == 2


@pytest.mark.parametrize("padded", [False, True])
def test_without_shuffle_every_epoch_is_the_same(padded):
    """The steps of a window came in another order in every epoch."""
    sampler = BalancedBatchSampler(
        work_of_users(64), 2, num_ranks=2, rank=1, window=4, shuffle=False, seed=1, padded=padded
    )
    assert list(sampler) == list(sampler) == list(sampler)


@pytest.mark.parametrize("huge", [2**62, 2**63, 10**30])
def test_limits_that_nothing_reaches(huge):
    work = [5, 6, 3, 2]
    limits = [{}, {"tokens": work, "max_tokens": huge}, {"max_rows": huge}]
    for limit in limits:
        samplers = [
            BudgetBatchSampler(work, budget_per_rank=huge, num_ranks=2, rank=rank, shuffle=False, **limit)
            for rank in range(2)
        ]
        assert sorted(row for sampler in samplers for (batch,) in [list(sampler)] for row in batch) == [0, 1, 2, 3]
    assert len(list(BalancedBatchSampler(work, 4, num_ranks=1, rank=0, tokens=work, max_tokens=huge))) == 1


def test_rows_above_the_budget_are_told_once(caplog):
    work = [1, 90, 2, 3, 80, 1]
    with caplog.at_level(logging.WARNING):
        for rank in (1, 0):
            sampler = BudgetBatchSampler(work, budget_per_rank=5, num_ranks=2, rank=rank, shuffle=False)
        assert sorted(row for step in sampler.plan(0) for row in step.rows.tolist()) == list(range(6))
        list(sampler)
        BudgetBatchSampler(work, budget_per_rank=5, num_ranks=1, rank=0, groups=[3, 7, 7, 3, 9, 9])
    assert caplog.records.pop().getMessage().startswith("group 7 costs 92, budget_per_rank is 5; it is alone on a rank")
    assert [record.getMessage() for record in caplog.records] == [
        "row 1 costs 90, budget_per_rank is 5; it is alone on a rank in its step, as are all 2 rows above the budget, "
        "and their steps take longer than others: truncate them, or raise the budget, at best to the heaviest, 90 (4 "
        "average rows)"
    ]


def test_a_loop_recognises_its_last_step_where_epochs_have_different_numbers_of_steps():
    work = np.random.default_rng(0).integers(1, 30, 60)
    loader = DataLoader(range(60), batch_sampler=BudgetBatchSampler(work, budget_per_rank=60, num_ranks=2, rank=0))
    found = [[number == len(loader) for number, _ in enumerate(loader, 1)] for _ in range(4)]
    assert [len(steps) for steps in found] == [8, 9, 9, 9]
    assert all(steps.index(True) == len(steps) - 1 for steps in found)


def test_a_cap_that_no_plan_keeps_is_told_once(caplog):
    options = {"tokens": [6, 6, 6, 1, 1, 1], "max_tokens": 7, "shuffle": False, "window": 1}
    with caplog.at_level(logging.WARNING):
        sampler = BalancedBatchSampler([1] * 6, 2, num_ranks=1, rank=0, **options)
        assert len(list(sampler)) == 3 and len(list(sampler)) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "a batch has 5 tokens more than max_tokens, which is 7; the plan that exceeds it least is used, here and in "
        "later steps: raise max_tokens, or lower batch_size"
    ]
    with_room = options | {"window": 3}  # a light row beside every heavy one
    rows = BalancedBatchSampler([1] * 6, 2, num_ranks=1, rank=0, **with_room).plan(0)
    assert sorted(sum(options["tokens"][row] for row in step.rows) for step in rows) == [7, 7, 7]
    assert len(list(BalancedBatchSampler([1] * 6, 1, num_ranks=2, rank=0, **with_room))) == 3  # a row in each batch
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_epoch_whose_planning_was_interrupted_is_planned_again(error, monkeypatch):
    """A cell of a notebook that is run again, with the same epoch: it had only the steps before the interrupt."""
    for make, planner in (
        (lambda: BalancedBatchSampler([1] * 40, 4, num_ranks=2, rank=0), "balanced.partition_grid"),
        (lambda: BudgetBatchSampler([1] * 40, budget_per_rank=4, num_ranks=2, rank=0), "budget.partition"),
    ):
        expected, interrupted = list(make()), make()
        with monkeypatch.context() as patch:
            planned, also_open = iter(interrupted), interrupted.items(0, EPOCH_START)
            next(planned)
            patch.setattr(f"commons.datasets.samplers.{planner}", mock.Mock(side_effect=error))
            with pytest.raises(error):
                list(planned)
        assert list(also_open) == expected
        interrupted.set_epoch(0)
        assert list(interrupted) == expected


def test_iterators_on_several_threads_plan_each_step_once(monkeypatch):
    """A pipeline's thread reads batches while the main thread finds the place of a checkpoint."""
    interval = sys.getswitchinterval()
    sampler = BudgetBatchSampler([1] * 400, budget_per_rank=4, num_ranks=2, rank=0)
    expected, planned = [*sampler.items(0, EPOCH_START)], mock.Mock(wraps=budget.partition)
    monkeypatch.setattr(budget, "partition", planned)
    list(copy.copy(sampler).items(0, EPOCH_START))
    once = planned.call_count
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as pool:
            for _ in range(20):
                again = copy.copy(sampler)
                iterators = [again.items(0, EPOCH_START) for _ in range(4)]
                assert [*pool.map(list, iterators)] == [expected] * 4
    finally:
        sys.setswitchinterval(interval)
    assert planned.call_count == 21 * once


def test_places_of_checkpoints_do_not_plan_the_epoch_again(monkeypatch):
    """Lightning looks for a step behind every place."""
    sampler = BudgetBatchSampler([1] * 400, budget_per_rank=4, num_ranks=2, rank=0)
    begun = []
    monkeypatch.setattr(
        sampler, "plan", lambda epoch, start: begun.append(start) or BudgetBatchSampler.plan(sampler, epoch, start)
    )
    steps = sampler.step_rows(0, EPOCH_START)
    for done in range(1, 9):
        next(steps)
        assert next(sampler.step_rows(0, sampler.place_after(done, 0, EPOCH_START)))
    assert Counter(begun)[EPOCH_START] == 1 and len(sampler._kept) == 2


@pytest.mark.parametrize("groups", [None, np.arange(40) // 2, np.repeat(np.arange(20), [1, 3] * 10)])
def test_a_place_between_steps_that_were_read_needs_no_order_of_all_rows(groups, monkeypatch):
    """A trainer finds one at every checkpoint and evaluation, and the order of ten million rows takes seconds."""
    sampler = BudgetBatchSampler(np.full(40, 3), budget_per_rank=12, num_ranks=2, rank=0, groups=groups)
    ends = np.cumsum([*sampler.step_rows(0, EPOCH_START)]).tolist()
    assert len(ends) >= 5 and ends[-1] == 40
    monkeypatch.setattr(sampler, "_unit_order", None)
    places = [sampler.place_after(steps, 0, EPOCH_START) for steps in range(len(ends) + 2)]
    assert places == [Place(row) for row in (0, *ends, 40)]
