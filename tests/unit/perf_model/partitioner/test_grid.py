"""What every grid keeps: each sample once, counts, caps, the bound, and never worse than without a window."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.shared.lengths import COSTS, draw
from commons.perf_model.partitioner import METHODS, Grid, karmarkar_karp, lower_bound, partition, partition_grid

# Few distinct values, so that ties are common; or anything up to sums near 2^62.
workload_lists = st.one_of(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 10_000), max_size=60),
    st.lists(st.sampled_from([1, 2, 50, 1000, 1001]), max_size=60),
    st.lists(st.integers(0, 2**56), max_size=60),
    st.lists(st.sampled_from([0, 1, 2**61]), max_size=40).filter(lambda values: sum(values) < 2**62),
)
rank_counts, step_counts = st.integers(1, 6), st.integers(1, 5)


def sums_of(values: list[int], step: list[int], rank: list[int], shape: tuple[int, int]) -> np.ndarray:
    """By step and rank, the sum of the values there."""
    sums = np.zeros(shape, np.int64)
    np.add.at(sums, tuple(np.array([step, rank], np.int64)), np.array(values, np.int64))
    return sums


def loads_of(values: list[int], grid: Grid) -> np.ndarray:
    return sums_of(values, grid.step, grid.assignment, grid.loads.shape)


def counts_of(grid: Grid) -> np.ndarray:
    return loads_of([1] * len(grid.step), grid)


def check(grid: Grid, workloads: list[int], ranks: int, steps: int) -> None:
    assert grid.step.dtype == grid.assignment.dtype == grid.loads.dtype == np.int64
    assert grid.step.shape == grid.assignment.shape == (len(workloads),) and grid.loads.shape == (steps, ranks)
    assert grid.loads.tolist() == loads_of(workloads, grid).tolist()
    assert grid.sum_of_largest == sum(grid.loads.max(axis=1).tolist())
    assert grid.lower_bound <= grid.sum_of_largest
    assert grid.optimality_gap >= 0 and grid.imbalance >= -1e-12


@given(workload_lists, rank_counts, step_counts, st.booleans())
def test_every_method_keeps_loads_counts_and_bound_and_none_is_below_refined(workloads, ranks, steps, equal_size):
    grids = {each: partition_grid(workloads, ranks, steps, method=each, equal_size=equal_size) for each in METHODS}
    for grid in grids.values():
        check(grid, workloads, ranks, steps)
        counts = counts_of(grid)
        if equal_size:
            assert counts.max() - counts.min() <= 1
        elif len(workloads) >= ranks * steps and steps > 1:
            assert counts.min() >= 1
    refined = grids["refined"]
    # Over several steps, refined stops where it is within a thousandth of the bound.
    near_bound = refined.lower_bound * 1001 // 1000 if steps > 1 else 0
    for method in ("karmarkar_karp", "lpt"):
        assert refined.sum_of_largest <= max(grids[method].sum_of_largest, near_bound)


def optimum(workloads: list[int], ranks: int, steps: int, equal_size: bool) -> int:
    """Smallest sum over all plans, cell by cell: plans that differ in names only, or end in like loads, are one."""
    cells, number = ranks * steps, len(workloads)
    least, most = (number // cells, -(-number // cells)) if equal_size else (min(1, number // cells), number)
    plans = {tuple(tuple((0, 0) for _ in range(ranks)) for _ in range(steps))}
    for left, workload in zip(range(number - 1, -1, -1), sorted(workloads, reverse=True), strict=True):
        longer = set()
        for plan in plans:
            for at, rank in product(range(steps), range(ranks)):
                load, count = plan[at][rank]
                if count == most:
                    continue
                step = tuple(sorted([*plan[at][:rank], (load + workload, count + 1), *plan[at][rank + 1 :]]))
                grown = tuple(sorted([*plan[:at], step, *plan[at + 1 :]]))
                if sum(max(0, least - rows) for each in grown for _, rows in each) <= left:
                    longer.add(grown)
        plans = longer
    return min(sum(max(load for load, _ in step) for step in plan) for plan in plans)


@given(
    st.sampled_from([(3, 1, 9), (1, 3, 6), (2, 2, 12), (3, 2, 12), (2, 3, 12), (4, 2, 8), (3, 3, 9)]).flatmap(
        lambda case: st.tuples(
            st.just(case[:2]),
            st.sampled_from([(100, 100), (100, 99), (40, 13), (5, 4)]),
            st.lists(st.integers(0, 5), min_size=1, max_size=case[2]),
        )
    ),
    st.booleans(),
)
@example(((2, 2), (100, 100), [0, 0, 0, 2, 2, 3, 3, 3]), True)
@example(((3, 2), (100, 99), [0, 0, 0, 0, 2, 3, 3, 3, 3, 3, 3, 3]), True)
def test_the_optimum_lies_between_the_bound_and_the_plan(case, equal_size):
    """Heavy rows of one weight or two, ties, and light ones; the kinds of a row are 0 and 1, or its small weight."""
    (ranks, steps), heavy, kinds = case
    workloads = [heavy[kind] if kind < 2 else kind for kind in kinds]
    if not equal_size:
        workloads = workloads[:8]
    grid = partition_grid(workloads, ranks, steps, equal_size=equal_size)
    best = optimum(workloads, ranks, steps, equal_size)
    assert grid.lower_bound <= best <= grid.sum_of_largest <= 2 * max(best, 1)


@given(workload_lists, rank_counts, step_counts)
@example([8, 26, 3, 2, 17, 11, 22, 7], 2, 2)
def test_free_counts_are_no_worse_than_equal_ones(workloads, ranks, steps):
    free, equal = (partition_grid(workloads, ranks, steps, equal_size=equal_size) for equal_size in (False, True))
    # A sum within a thousandth of the bound is good enough.
    assert free.sum_of_largest <= max(equal.sum_of_largest, free.lower_bound + free.lower_bound // 1000)


def test_the_bound_counts_the_room_beside_heavy_rows_that_light_ones_cannot_fill():
    # The fourth cell has the two rows of 3 at most, so that the three cells with 100 have the others: 102 and 101.
    assert partition_grid([100, 100, 100, 3, 3, 2, 2, 1], 2, 2).lower_bound == 203


@given(
    st.sampled_from([(2, 3), (3, 4), (4, 8), (8, 4), (5, 5)]),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_a_window_is_never_worse_than_its_halves(case, rows, seed, equal_size):
    (ranks, steps), rng = case, np.random.default_rng(seed)
    number = ranks * rows
    workloads = np.where(rng.random(steps * number) < 0.2, 1000, rng.integers(0, 60, steps * number))
    batches = np.arange(len(workloads)) // number

    def plan(first: int, last: int) -> Grid:
        rows = (first <= batches) & (batches < last)
        home_step = batches[rows] - first
        return partition_grid(workloads[rows], ranks, last - first, home_step=home_step, equal_size=equal_size)

    whole, halves = plan(0, steps), plan(0, steps // 2).sum_of_largest + plan(steps // 2, steps).sum_of_largest
    assert whole.sum_of_largest <= max(halves, whole.lower_bound * 1001 // 1000)


@st.composite
def loaded_batches(draw):
    """Workloads, tokens, ranks, steps, and where each row is: even, or with ragged and empty batches."""
    ranks, steps = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        rows = draw(st.integers(1, 4))
        places = [(step, rank) for step in range(steps) for rank in range(ranks) for _ in range(rows)]
    else:
        places = draw(st.lists(st.tuples(st.integers(0, steps - 1), st.integers(0, ranks - 1)), max_size=40))
    largest = draw(st.sampled_from([3, 1000, 2**50]))
    heavy = st.one_of(st.integers(0, largest), st.sampled_from([largest, 0, 1]))
    workloads = draw(st.lists(heavy, min_size=len(places), max_size=len(places)))
    tokens = draw(
        st.one_of(st.just(workloads), st.lists(st.integers(0, 50), min_size=len(places), max_size=len(places)))
    )
    return workloads, tokens, ranks, steps, [step for step, _ in places], [rank for _, rank in places]


@given(
    loaded_batches(),
    st.booleans(),
    st.sampled_from(METHODS),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([None, 1.0, 1.5]),
)
@example(([], [], 3, 1, [], []), True, "refined", False, None, 0.0, None)
def test_one_step_is_a_partition(case, equal_size, method, stay, ranks_per_node, slack, room):
    """What grids keep, partitions do: loads, counts, homes, caps and bounds."""
    workloads, tokens, ranks, _, _, home = case
    options = {"method": method, "equal_size": equal_size, "tokens": tokens, "best_effort": True}
    options |= {"home": home, "ranks_per_node": ranks_per_node, "slack": slack} if stay else {}
    options |= {"max_tokens": max(1, int(sum(tokens) / ranks * room))} if room else {}
    grid, plan = partition_grid(workloads, ranks, 1, **options), partition(workloads, ranks, **options)
    assert grid.assignment.tolist() == plan.assignment.tolist() and not grid.step.any()
    assert grid.lower_bound == plan.lower_bound and grid.loads[0].tolist() == plan.loads.tolist()
    assert plan.assignment.dtype == plan.loads.dtype == np.int64
    groups = [np.flatnonzero(plan.assignment == part).tolist() for part in range(ranks)]
    assert plan.groups() == groups
    plain = partition(workloads, ranks, method="karmarkar_karp", equal_size=equal_size)
    assert karmarkar_karp(workloads, ranks, equal_size) == plain.groups()
    assert plan.imbalance == pytest.approx(grid.imbalance) and plan.optimality_gap == grid.optimality_gap >= 0
    if not stay and not room:
        assert plan.lower_bound == lower_bound(workloads, ranks, equal_size)


def batches_alone(workloads, tokens, ranks, steps, home_step, home, **keywords) -> float:
    """Sum over the batches of the largest load of each planned by itself; infinite if nothing is promised of it."""
    total, counts = 0, []
    for step in range(steps):
        rows = [row for row, loaded in enumerate(home_step) if loaded == step]
        if home is not None:
            keywords["home"] = [home[row] for row in rows]
        batch = partition([workloads[row] for row in rows], ranks, tokens=[tokens[row] for row in rows], **keywords)
        total += int(batch.loads.max())
        counts += np.bincount(batch.assignment, minlength=ranks).tolist()
    return total if home is not None or keeps_counts(np.array(counts), keywords["equal_size"]) else float("inf")


def keeps_counts(counts: np.ndarray, equal_size: bool) -> bool:
    """Whether steps and ranks have equally many rows, to within one; free counts, only if there are too few rows."""
    if equal_size or counts.sum() < len(counts):
        return bool(counts.max() - counts.min() <= 1)
    return bool(counts.min() > 0)


@given(
    loaded_batches(),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from(METHODS),
)
@example(([5, 5, 5, 5, 5, 5, 0, 0], [1] * 8, 2, 2, [0] * 6 + [1] * 2, [0] * 8), True, None, 0.0, "refined")
@example(([9, 9, 0], [1] * 3, 2, 2, [0, 0, 1], [0] * 3), False, None, 0.0, "refined")
@example(([9, 1, 1], [1] * 3, 2, 2, [0, 0, 1], [0, 1, 0]), False, None, 0.0, "refined")
@example(([13, 592, 7], [1] * 3, 2, 3, [0, 2, 0], [1, 0, 1]), False, None, 0.3, "karmarkar_karp")
@example(([16, 14, 13, 16, 15], [1] * 5, 2, 2, [0, 1, 0, 1, 0], [1, 0, 0, 0, 0]), True, None, 0.3, "refined")
def test_a_window_is_never_worse_than_none_and_has_the_counts_that_were_asked_for(
    case, equal_size, ranks_per_node, slack, method
):
    check_window(case, equal_size, ranks_per_node, slack, method)


def check_window(case, equal_size, ranks_per_node, slack, method="refined"):
    workloads, tokens, ranks, steps, home_step, home = case
    keywords = {"method": method, "equal_size": equal_size}
    free = partition_grid(workloads, ranks, steps, home_step=home_step, **keywords)
    check(free, workloads, ranks, steps)
    assert keeps_counts(counts_of(free).ravel(), equal_size)
    assert free.sum_of_largest <= batches_alone(workloads, tokens, ranks, steps, home_step, None, **keywords)

    keywords.update(ranks_per_node=ranks_per_node, slack=slack)
    grid = partition_grid(workloads, ranks, steps, tokens=tokens, home=home, home_step=home_step, **keywords)
    check(grid, workloads, ranks, steps)
    total = grid.sum_of_largest
    assert total <= batches_alone(workloads, tokens, ranks, steps, home_step, home, **keywords)
    loaded_total = sum(sums_of(workloads, home_step, home, (steps, ranks)).max(axis=1).tolist())
    stays = grid.step.tolist() == home_step and grid.assignment.tolist() == home
    assert total <= loaded_total
    assert total < loaded_total or stays
    assert stays or steps > 1 or not equal_size or keeps_counts(counts_of(grid).ravel(), equal_size)
    assert total <= free.sum_of_largest * (1 + Fraction(slack))
    if free.sum_of_largest >= loaded_total:
        assert stays


@given(loaded_batches(), st.booleans(), st.sampled_from([0.0, 0.01, 1.0]))
def test_rows_change_their_step_before_their_rank(case, equal_size, slack):
    workloads, tokens, ranks, steps, _, home = case
    free = partition_grid(workloads, ranks, steps, equal_size=equal_size)
    grid = partition_grid(workloads, ranks, steps, equal_size=equal_size, tokens=tokens, home=home, slack=slack)
    check(grid, workloads, ranks, steps)
    if steps > 1:
        assert grid.sum_of_largest <= free.sum_of_largest * (1 + Fraction(slack))
    if equal_size and steps > 1:
        assert keeps_counts(counts_of(grid), equal_size)
    # Rank by rank a heavy and a light row: in a step with all heavy ones, none of them needs another rank.
    for home in ([0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0]):
        grid = partition_grid([9, 1] * 3, 3, 2, home=home)
        assert grid.assignment.tolist() == home and grid.sum_of_largest == 10


@given(loaded_batches(), st.booleans(), st.floats(1.0, 2.0), st.booleans(), st.booleans())
def test_a_cap_is_kept_or_refused(case, equal_size, room, stay, known):
    workloads, tokens, ranks, steps, home_step, home = case
    max_tokens = max(1, int(sum(tokens) / (ranks * steps) * room))
    keywords = {"equal_size": equal_size, "tokens": tokens, "max_tokens": max_tokens}
    if stay:
        keywords.update(home=home, slack=0.01)
    if known:
        keywords.update(home_step=home_step)
    effort = partition_grid(workloads, ranks, steps, best_effort=True, **keywords)
    check(effort, workloads, ranks, steps)
    most = loads_of(tokens, effort).max()
    try:
        grid = partition_grid(workloads, ranks, steps, **keywords)
    except ValueError as error:
        assert most > max_tokens
        assert "max_tokens" in str(error)
        if equal_size:
            with pytest.raises(ValueError, match="max_tokens"):
                partition(workloads, ranks * steps, tokens=tokens, max_tokens=max_tokens)
        return
    assert loads_of(tokens, grid).max() <= max_tokens
    assert grid.assignment.tolist() == effort.assignment.tolist()
    if stay and steps == 1:
        tokens_at_home, loads_at_home = (sums_of(values, home_step, home, (1, ranks)) for values in (tokens, workloads))
        assert tokens_at_home.max() > max_tokens or grid.sum_of_largest <= loads_at_home.max()


def test_a_cap_that_only_the_batches_keep_is_no_error():
    # Batches of 4 and 8 rows of one token: equal counts over both would need 3 in a cell.
    arguments = {"tokens": [5, 5, 1, 1, 1, 1], "max_tokens": 5}
    grid = partition_grid([5, 5, 1, 1, 1, 1], 2, 2, home_step=[0, 0, 1, 1, 1, 1], **arguments)
    assert loads_of(arguments["tokens"], grid).max() <= 5


@pytest.mark.parametrize(
    ("rows", "steps", "most"), [(32, 2, 1.01), (32, 4, 1.01), (32, 8, 1.01), (8, 4, 1.9), (8, 8, 1.2)]
)
def test_a_window_fills_up_what_a_heavy_history_leaves_over(rows, steps, most):
    lengths = draw("user-like", 64 * rows * steps, seed=rows + steps)
    grid = partition_grid(COSTS["HSTU"](lengths), 64, steps)
    assert 1 + grid.imbalance <= most and grid.optimality_gap <= 0.05


@given(st.integers(0, 2**64 - 1), st.integers(1, 8))
def test_the_seed_changes_the_order_of_the_steps_and_nothing_else(seed, steps):
    workloads = [(7 * row) % 50 for row in range(6 * steps)]
    one, other = partition_grid(workloads, 2, steps), partition_grid(workloads, 2, steps, seed=seed)
    assert one.assignment.tolist() == other.assignment.tolist()
    assert sorted(one.loads.tolist()) == sorted(other.loads.tolist())
    assert len({(a, b) for a, b in zip(one.step.tolist(), other.step.tolist(), strict=True)}) == steps


def test_the_order_of_the_steps_is_the_same_everywhere():
    def order(steps, seed):
        """The steps of rows that snake order deals to steps 0, 1, ... as they come."""
        return np.argsort(partition_grid(range(steps, 0, -1), 1, steps, method="snake", seed=seed).step).tolist()

    assert order(8, 0) == [1, 2, 6, 5, 4, 0, 3, 7]
    assert order(8, 2**63) == [6, 4, 3, 0, 1, 7, 5, 2]
    first = [order(4, seed)[0] for seed in range(400)]
    assert min(first.count(step) for step in range(4)) > 70


def test_steps_as_loaded_keep_their_order():
    for seed in range(8):
        grid = partition_grid([1, 1, 5, 5, 3, 3], 2, 3, home_step=[0, 0, 1, 1, 2, 2], seed=seed)
        assert grid.step.tolist() == [0, 0, 1, 1, 2, 2]


def test_no_rows_are_a_grid_too():
    grid = partition_grid([], 3, 2, home=[], home_step=[])
    assert grid.loads.tolist() == [[0, 0, 0], [0, 0, 0]] and len(grid.step) == 0
    assert (grid.sum_of_largest, grid.lower_bound, grid.imbalance, grid.optimality_gap) == (0, 0, 0.0, 0.0)
    assert repr(grid) == "Grid(0 samples in 2 steps of 3 ranks, largest loads 1 × the mean, 1 × the bound)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, r"ranks is 0; it must be an integer of at least 1"),
        ({"steps": 0}, r"steps is 0; it must be an integer of at least 1"),
        ({"steps": 2**31}, r"ranks × steps is 2 × 2147483648; there must be fewer than 2\^31 cells"),
        (
            {"ranks": 2**64 + 2, "steps": 1},
            r"ranks × steps is 18446744073709551618 × 1; there must be fewer than 2\^31",
        ),
        ({"home_step": [0, 0, 0, 2]}, r"home_step\[3\] is 2; a home is a step in \[0, 2\)"),
        ({"home_step": [0, 0, 0]}, r"home_step has 3 entries, there are 4 rows"),
        ({"seed": -1}, r"seed is -1; it must be an integer of at least 0"),
        (
            {"tokens": [6] * 4, "steps": 1, "max_tokens": 11},
            "max_tokens is 11; no plan was found that keeps it for 24 tokens in 2 partitions, one was found for 12, 1",
        ),
        ({"tokens": [6] * 4, "ranks": 1, "max_tokens": 11}, "for 24 tokens in 2 steps of 1 ranks, one was"),
    ],
)
def test_mistakes_are_named(arguments, message):
    """Of what `partition` takes too, one stands for all, which the same function checks."""
    with pytest.raises(ValueError, match=message):
        partition_grid(**{"workloads": [1, 2, 3, 4], "ranks": 2, "steps": 2, **arguments})
