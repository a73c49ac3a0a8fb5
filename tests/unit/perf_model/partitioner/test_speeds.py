"""Plans for ranks of different speeds: the largest load ÷ speed is small, and no plan goes below the bound."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.shared.lengths import draw
from commons.perf_model.partitioner import partition, partition_grid
from commons.perf_model.shuffle_plan import GatheredRows, plan_shuffle


def is_even(assignment, k):
    counts = np.bincount(assignment, minlength=k)
    return counts.max() - counts.min() <= 1


@st.composite
def small_cases(draw):
    """Workloads, speeds, steps and whether counts are equal, so few that every plan can be tried."""
    ranks, steps, most = draw(st.sampled_from([(2, 1, 7), (3, 1, 7), (2, 2, 5), (1, 3, 6)]))
    workloads = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 50]), min_size=1, max_size=most))
    return workloads, draw(st.lists(st.integers(1, 100), min_size=ranks, max_size=ranks)), steps, draw(st.booleans())


@given(case=small_cases())
def test_no_plan_goes_below_the_bound_and_the_one_found_is_near_the_best(case):
    workloads, speeds, steps, equal_size = case
    ranks, rows = len(speeds), len(workloads)
    grid = partition_grid(workloads, ranks, steps, equal_size=equal_size, speeds=speeds)

    def judged(plans):
        """Whether each plan of `(plans, rows)` is allowed, and its total."""
        is_in = plans[:, :, None] == np.arange(ranks * steps)
        counts = is_in.sum(axis=1)
        has_rows = (counts.min(axis=1) >= min(1, rows // counts.shape[1])) | (steps == 1)
        loads = np.where(is_in, np.array(workloads)[:, None], 0).sum(axis=1).reshape(-1, steps, ranks)
        total = (-(-loads * max(speeds) // np.array(speeds))).max(axis=2).sum(axis=1)
        return np.ptp(counts, axis=1) <= 1 if equal_size else has_rows, total

    is_allowed, totals = judged(np.array(list(product(range(ranks * steps), repeat=rows))))
    (is_found_allowed,), (total,) = judged((grid.step * ranks + grid.assignment)[None])
    best = totals[is_allowed].min()
    assert is_found_allowed and grid.lower_bound <= best <= total == grid.sum_of_largest
    assert steps > 1 or total <= 2 * best


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("values", [[0, 1, 2, 3, 5, 8, 13, 50], range(1, 1000)])
def test_small_cases_are_mostly_optimal(values, equal_size):
    rng, excess = np.random.default_rng(0), []
    for _ in range(100):
        workloads, speeds = rng.choice(values, rng.integers(3, 8)), rng.integers(50, 101, 3)
        plan = partition(workloads, 3, equal_size=equal_size, speeds=speeds)
        is_in = np.array(list(product(range(3), repeat=len(workloads))))[:, :, None] == np.arange(3)
        is_allowed = (np.ptp(is_in.sum(axis=1), axis=1) <= 1) | (not equal_size)
        best = (np.where(is_in, workloads[:, None], 0).sum(axis=1) / speeds).max(axis=1)[is_allowed].min()
        excess.append((plan.loads / speeds).max() / best - 1 if best else 0)
    assert np.mean(np.array(excess) < 1e-9) >= 0.85 and np.mean(excess) <= 0.003


many = st.lists(st.integers(0, 10_000), min_size=1, max_size=80)


@given(workloads=many, speeds=st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=9), data=st.data())
def test_counts_caps_and_the_bound_are_kept(workloads, speeds, data):
    k, equal_size = len(speeds), data.draw(st.booleans())
    tokens = np.array([workload % 97 + 1 for workload in workloads])
    cap = int(partition(tokens, k, equal_size=equal_size).loads.max())
    plan = partition(workloads, k, equal_size=equal_size, tokens=tokens, max_tokens=cap, speeds=speeds)
    free = partition(workloads, k, equal_size=equal_size, speeds=speeds)
    for each in (plan, free):
        assert set(each.assignment.tolist()) <= set(range(k)) and each.times.max() >= each.lower_bound
        loads = [sum(w for w, part in zip(workloads, each.assignment) if part == p) for p in range(k)]
        assert each.loads.tolist() == loads
        assert not equal_size or is_even(each.assignment, k)
    assert np.bincount(plan.assignment, tokens, k).max() <= cap


def _first_to_finish(workloads, tokens, cap, speeds):
    """The largest time of LPT that keeps the cap; None if a row fits nowhere."""
    loads, held = np.zeros(len(speeds)), np.zeros(len(speeds))
    for row in np.argsort(-workloads, kind="stable"):
        ends = np.where(held + tokens[row] <= cap, (loads + workloads[row]) / speeds, np.inf)
        part = int(ends.argmin())
        if np.isinf(ends[part]):
            return None
        loads[part] += workloads[row]
        held[part] += tokens[row]
    return (loads / speeds).max() * speeds.max()


@pytest.mark.parametrize(("k", "rows", "cases"), [(4, 4, 150), (9, 32, 50), (128, 32, 2)])
def test_under_a_cap_refined_is_no_worse_than_lpt_that_keeps_it(k, rows, cases):
    """Swaps under a cap from plans without it ended at up to 1.8 times the time of LPT."""
    compared = 0
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        tokens = rng.choice([60, 1000], k * rows, p=[0.8, 0.2]) if seed % 2 else rng.integers(1, 500, k * rows)
        workloads, speeds = 2000 * tokens + tokens**2, rng.integers(512, 1025, k)
        cap = max(int(tokens.sum() / k * 1.1), int(tokens.max())) + 1
        limit = _first_to_finish(workloads, tokens, cap, speeds)
        arguments = {"equal_size": False, "tokens": tokens, "max_tokens": cap, "speeds": speeds}
        if limit is not None:
            compared += 1
            plan = partition(workloads, k, **arguments)
            assert plan.sum_of_largest <= max(limit + 1, plan.lower_bound * 1.0005), seed
    assert compared > cases / 2


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("has_speeds", [True, False])
def test_a_grid_is_no_worse_than_steps_of_sorted_rows(equal_size, has_speeds):
    """Each step planned alone, the first with the heaviest rows; grids took up to 1.5 times as long."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        ranks, steps, rows = (int(rng.integers(*between)) for between in ((2, 9), (2, 7), (2, 13)))
        lengths = np.minimum(rng.zipf(1.3, ranks * steps * rows).astype(float), 4096)
        workloads = np.sort(2000 * lengths + lengths**2)[::-1].astype(np.int64)
        arguments = {"equal_size": equal_size, "speeds": rng.integers(512, 1025, ranks) if has_speeds else None}
        alone = [partition(each, ranks, **arguments) for each in np.split(workloads, steps)]
        grid = partition_grid(workloads, ranks, steps, **arguments)
        has_rows = all(np.bincount(plan.assignment, minlength=ranks).all() for plan in alone)  # as in every cell
        limit = sum(plan.sum_of_largest for plan in alone)
        assert grid.sum_of_largest <= max(limit, grid.lower_bound * 1.001 + steps) or not has_rows, seed


@given(many, st.lists(st.integers(50, 100), min_size=1, max_size=9), st.integers(1, 3))
@example([682, 461, 965, 120, 7, 300], [100, 71], 1)
def test_free_counts_take_no_longer_than_equal_ones(workloads, speeds, steps):
    free, equal = (
        partition_grid(workloads, len(speeds), steps, equal_size=equal_size, speeds=speeds)
        for equal_size in (False, True)
    )
    # A time within 1/2,000 of the bound is good enough, and times are rounded up.
    assert free.sum_of_largest <= max(equal.sum_of_largest, free.lower_bound * 1.001 + steps)


@given(workloads=many, k=st.integers(1, 8), speed=st.integers(1, 10**6), steps=st.integers(1, 2), even=st.booleans())
def test_equal_speeds_change_nothing(workloads, k, speed, steps, even):
    plan = partial(partition_grid, workloads, k, steps, equal_size=even)
    without, equal = plan(), plan(speeds=[speed] * k)
    assert (without.step == equal.step).all() and (without.assignment == equal.assignment).all()
    assert without.lower_bound == equal.lower_bound and without.sum_of_largest == equal.sum_of_largest
    assert equal.imbalance == without.imbalance and equal.speeds is None


@pytest.mark.parametrize("kind", ["zipf", "lognormal"])
@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize(("ranks", "rows"), [(8, 64), (64, 32)])
def test_usual_lengths_come_within_a_five_hundredth_of_the_bound(kind, equal_size, ranks, rows):
    for seed in range(3):
        lengths = draw(kind, ranks * rows, seed)
        speeds = np.random.default_rng(seed).integers(500, 1001, ranks)
        plan = partition(lengths * (lengths + 500), ranks, equal_size=equal_size, speeds=speeds)
        assert plan.optimality_gap <= 0.002


def test_rows_stay_at_home_where_that_costs_little():
    lengths = draw("lognormal", 16 * 32, 0)
    home, speeds = np.repeat(np.arange(16), 32), np.array([1000] * 15 + [600])
    far, near = (partition(lengths, 16, home=home, slack=slack, speeds=speeds) for slack in (0.0, 0.05))
    assert (near.assignment != home).mean() < (far.assignment != home).mean() < 1
    assert near.times.max() <= 1.06 * far.times.max()
    nodes = partition(lengths, 16, home=home, slack=0.05, ranks_per_node=4, speeds=speeds)
    assert nodes.times.max() <= 1.06 * far.times.max()
    # The slow rank has work for as long as the others, that is less of it.
    assert near.loads[-1] < 0.7 * near.loads[:-1].mean()


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ([1, 2, 3], "speeds has shape (3,), k_partitions is 2; each has one speed: pass 2 positive integers"),
        ([[1, 2]], "speeds has shape (1, 2), k_partitions is 2"),
        ([1, 0], "speeds[1] is 0; a speed is a positive integer below 2^31: scale all of them by one factor and round"),
        ([-1, 1], "speeds[0] is -1; "),
        ([1.5, 1], "speeds[0] is 1.5; "),
        ([float("nan"), 1], "speeds[0] is nan; "),
        ([1, float("inf")], "speeds[1] is inf; "),
        ([True, 1], "speeds[0] is True; "),
        ([2**31, 1], f"speeds[0] is {2**31}; "),
        (["fast", 1], "speeds[0] is fast; "),
    ],
)
def test_speeds_that_are_refused(speeds, message):
    with pytest.raises(ValueError) as caught:
        partition([1, 2, 3], 2, speeds=np.array(speeds, dtype=object))  # a list of True and 1 is one of integers
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_follow_speeds_is_refused():
    with pytest.raises(ValueError, match="method is 'snake', speeds are given; .* choose one of these"):
        partition([1, 2], 2, method="snake", speeds=[1, 2])
    with pytest.raises(ValueError, match="speeds go from 1 to 2147483647; .* scale the workloads down"):
        partition([2**50, 1], 2, speeds=[1, 2**31 - 1])
    with pytest.raises(ValueError, match="speeds has shape"):
        partition_grid([1, 2], 2, 1, speeds=[1])
    for wrong in (0, 2**31):
        with pytest.raises(ValueError, match=rf"speeds\[1\] is {wrong}; "):
            partition([1, 2], 2, speeds=[1, wrong])


def test_the_shuffler_takes_the_same_largest_workloads_at_speeds():
    rows, speeds, most = np.array([1, 0]), np.array([2, 3]), (2**62 - 1) // 3  # × 3 ÷ 2 is just below 2^61
    for total in (most, most + 1):
        known = GatheredRows(rows, rows, np.array([total]), np.array([1]))
        for plan in (partial(partition, [total], 2, speeds=speeds), partial(plan_shuffle, known, speeds=speeds)):
            with nullcontext() if total == most else pytest.raises(ValueError, match=r"2\^61( or more)?: scale"):
                plan()


def test_what_a_plan_says_of_times():
    plan = partition([7, 5, 4, 4, 3, 1], 2, speeds=[2, 1])  # its times: the docstring
    assert plan.imbalance == 0.0 and plan.optimality_gap == 0.0 and "largest time" in repr(plan)
    alone = partition([6, 0], 2, speeds=[2, 1])
    assert alone.times.tolist() == [6, 0] and alone.imbalance == pytest.approx(6 * 1.5 / 6 - 1)
