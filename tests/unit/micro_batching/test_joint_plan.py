"""The joint plan of all ranks' micro-batches, without ranks: what always holds, how even it is, mistakes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commons.micro_batching import MicroBatchSpec, packing_metrics
from commons.micro_batching.block_packing import BlockPacking, RowBlocks
from commons.micro_batching.joint_plan import plan_jointly
from commons.perf_model.loads import sum_by_rank


@st.composite
def rows_of_ranks(draw):
    """Lengths, workloads or None, rows of each rank, and a spec that all rows together keep."""
    num_ranks = draw(st.integers(1, 4))
    granularity = draw(st.sampled_from([1, 1, 2]))
    blocks = draw(st.lists(st.integers(0, 8), min_size=num_ranks, max_size=num_ranks).filter(lambda b: sum(b) >= 4))
    rows = granularity * sum(blocks)
    lengths = np.array(draw(st.lists(st.integers(0, 30), min_size=rows, max_size=rows)))
    largest = int(lengths.reshape(-1, granularity).sum(1).max())
    n_mbs = draw(st.integers(1, max(1, sum(blocks) // num_ranks)))
    spec = MicroBatchSpec(
        n_mbs=n_mbs,
        granularity=granularity,
        max_tokens_per_mb=draw(st.sampled_from([None, max(1, largest), 2 * largest + 1])),
        n_mbs_divisor=draw(st.sampled_from([1, 1, n_mbs])),
        packing_algorithm=draw(st.sampled_from(["kk", "refined"])),
        order=draw(st.sampled_from(["heaviest_first", "light_ends"])),
    )
    workloads = np.array(draw(st.lists(st.integers(0, 900), min_size=rows, max_size=rows)))
    return lengths, draw(st.sampled_from([None, workloads])), granularity * np.array(blocks), spec


def _own_packing(spec, lengths, workloads, rows_per_rank, groups=None):
    """What each rank makes by itself, as pack_micro_batches does without joint=True; None where they cannot."""
    ends = np.cumsum(rows_per_rank)
    own = [slice(end - rows, end) for end, rows in zip(ends, rows_per_rank)]
    try:
        blocks = [RowBlocks.of(spec, len(lengths[at]), None if groups is None else groups[at]) for at in own]
        packed = [
            BlockPacking.of(spec, each, lengths[at], None if workloads is None else workloads[at])
            for at, each in zip(own, blocks)
        ]
    except ValueError:
        return None
    number = max(each.num_fewest for each in packed)
    if number > min(len(each.tokens) for each in packed):
        return None
    result = np.empty(len(lengths), np.int64)
    for at, each in zip(own, packed):
        result[at] = each.into(number)[each.blocks.of_row]
    return result


def _costs(rank, micro_batch, costs, num_ranks):
    number = int(micro_batch.max()) + 1
    return sum_by_rank(rank * number + micro_batch, costs, num_ranks * number).reshape(num_ranks, number)


# First fit needs two micro-batches per rank, the grid only one.
@example((np.array([6, 10, 6, 10, 6, 12]), None, np.array([4, 2]), MicroBatchSpec(max_tokens_per_mb=26)))
@settings(max_examples=80)
@given(rows_of_ranks())
def test_what_always_holds(case):
    lengths, workloads, rows_per_rank, spec = case
    num_ranks, home = len(rows_per_rank), np.repeat(np.arange(len(rows_per_rank)), rows_per_rank)
    own = _own_packing(spec, lengths, workloads, rows_per_rank)
    try:
        plan = plan_jointly(spec, lengths, workloads, rows_per_rank, own)
    except ValueError as error:
        assert own is None and str(error).startswith(("the ", "n_mbs"))
        return
    costs = lengths if workloads is None else workloads
    number = plan.costs.shape[1]
    assert number >= spec.n_mbs and number % spec.n_mbs_divisor == 0
    # Every rank has a row in each, under the budget; blocks stay whole; and the costs are what they are said to be.
    assert sorted(set(zip(plan.rank.tolist(), plan.micro_batch.tolist()))) == [
        (rank, index) for rank in range(num_ranks) for index in range(number)
    ]
    if spec.max_tokens_per_mb is not None:
        assert _costs(plan.rank, plan.micro_batch, lengths, num_ranks).max() <= spec.max_tokens_per_mb
    for values in (plan.rank, plan.micro_batch):
        blocks = values.reshape(-1, spec.granularity)
        assert (blocks == blocks[:, :1]).all()
    assert np.array_equal(plan.costs, _costs(plan.rank, plan.micro_batch, costs, num_ranks))
    by_index = plan.costs.sum(axis=0).tolist()
    if spec.order == "heaviest_first":
        assert by_index == sorted(by_index, reverse=True)
    # Never worse than what each rank makes of its own rows.
    if own is not None:
        separate = _costs(home, own, costs, num_ranks)
        assert number <= separate.shape[1]
        if number == separate.shape[1]:
            assert plan.costs.max(axis=0).sum() <= separate.max(axis=0).sum()
    again = plan_jointly(spec, lengths, workloads, rows_per_rank, own)
    assert np.array_equal(again.rank, plan.rank) and np.array_equal(again.micro_batch, plan.micro_batch)


@settings(max_examples=60)
@given(rows_of_ranks(), st.data())
def test_groups_come_together_from_all_ranks(case, data):
    lengths, workloads, rows_per_rank, spec = case
    spec = dataclasses.replace(spec, granularity=1, max_tokens_per_mb=None)
    groups = np.array(data.draw(st.lists(st.integers(-2, 5), min_size=len(lengths), max_size=len(lengths))))
    own = _own_packing(spec, lengths, workloads, rows_per_rank, groups)
    try:
        plan = plan_jointly(spec, lengths, workloads, rows_per_rank, own, groups=groups)
    except ValueError as error:
        assert f"{len(lengths)} rows" in str(error)
        return
    places = {number: set() for number in groups.tolist()}
    for number, place in zip(groups.tolist(), zip(plan.rank.tolist(), plan.micro_batch.tolist())):
        places[number].add(place)
    assert all(len(each) == 1 for each in places.values())
    num_ranks, costs = len(rows_per_rank), lengths if workloads is None else workloads
    assert len(set().union(*places.values())) == plan.costs.size == num_ranks * plan.costs.shape[1]
    assert np.array_equal(plan.costs, _costs(plan.rank, plan.micro_batch, costs, num_ranks))


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_micro_batches_of_one_index_are_even(num_ranks, uneven):
    spec = MicroBatchSpec(max_tokens_per_mb=8192, packing_algorithm="refined")
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows_per_rank = np.full(num_ranks, 48) + (rng.integers(-24, 24, num_ranks) if uneven else 0)
        lengths = (20 + rng.lognormal(np.log(400), 1.0, rows_per_rank.sum())).astype(np.int64).clip(1, 4096)
        workloads = 5120 * lengths + lengths**2
        own = _own_packing(spec, lengths, workloads, rows_per_rank)
        plan = plan_jointly(spec, lengths, workloads, rows_per_rank, own)
        possible = int(workloads.sum()) / num_ranks
        assert plan.costs.max(axis=0).sum() <= 1.025 * possible  # seed 3: 99.8 % of the budget is used


@pytest.mark.parametrize(
    ("lengths", "rows_per_rank", "budget", "sum_of_largest", "without_own"),
    [
        ([8, 6, 5, 3] * 4, [4] * 4, 11, 22, 22),
        ([12, 17, 4, 11, 21, 6, 19], [4, 3], 45, 46, 46),  # where the grid would move rows
        ([395, 770, 405, 122, 746, 637], [3, 3], 1165, 1570, 1559),  # 0.7 % costlier than the grid
    ],
)
def test_rows_stay_where_their_own_packing_is_as_good(lengths, rows_per_rank, budget, sum_of_largest, without_own):
    lengths, spec = np.array(lengths), MicroBatchSpec(max_tokens_per_mb=budget, packing_algorithm="refined")
    own = _own_packing(spec, lengths, None, rows_per_rank)
    plan = plan_jointly(spec, lengths, None, np.array(rows_per_rank), own)
    assert np.array_equal(plan.rank, np.repeat(np.arange(len(rows_per_rank)), rows_per_rank))
    assert plan.costs.max(axis=0).sum() == sum_of_largest
    plan = plan_jointly(spec, lengths, None, np.array(rows_per_rank))
    assert plan.costs.max(axis=0).sum() == without_own


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [([10, 0, 0], [0, 1, 0]), ([5, 0, 0], None)],
    ids=["all rows of rank 1 are in a group of rank 0", "a rank without tokens"],
)
def test_no_rank_is_left_without_a_row(lengths, groups):
    groups = None if groups is None else np.array(groups)
    plan = plan_jointly(
        MicroBatchSpec(), np.array(lengths), None, np.array([2, 1]), np.zeros(3, np.int64), groups=groups
    )
    assert set(plan.rank.tolist()) == {0, 1}
    assert groups is None or plan.rank[0] == plan.rank[2]


def test_all_ranks_together_take_fewer_micro_batches():
    # By themselves ranks 0 and 1 would need 3 and 1, and rank 1 has too few rows for that.
    lengths, rows_per_rank = np.array([6, 6, 6, 2, 2, 2]), np.array([5, 1])
    spec = MicroBatchSpec(max_tokens_per_mb=8)
    plan = plan_jointly(spec, lengths, None, rows_per_rank)
    assert plan.costs.shape == (2, 2) and plan.costs.max() <= 8


def test_the_number_is_a_multiple_also_above_the_bound():
    # Three micro-batches are needed, where the bound is two.
    spec = MicroBatchSpec(max_tokens_per_mb=10, n_mbs_divisor=2)
    assert plan_jointly(spec, np.array([4] * 5), None, np.array([5])).costs.shape == (1, 4)


@pytest.mark.parametrize(
    ("lengths", "rows_per_rank", "options", "message"),
    [
        ([], [0, 0], {}, "no rank has a row; every micro-batch has at least one"),
        ([3], [1], {"n_mbs": 2}, "n_mbs is 2, the one rank has 1 rows; "),
        ([3], [1, 0], {}, "n_mbs is 1, the 2 ranks have 1 rows together; .*: use fewer ranks or pass more rows"),
        ([3] * 5, [1, 4], {"n_mbs": 3}, "n_mbs is 3, the 2 ranks have 5 rows together; .*: lower n_mbs or pass more"),
        ([3] * 4, [2, 2], {"n_mbs": 2, "granularity": 2}, "n_mbs is 2, the 2 ranks have 4 rows in 2 blocks together"),
        ([3] * 4, [4, 0], {"n_mbs_divisor": 4}, "n_mbs_divisor is 4, the 2 ranks have 4 rows together"),
        (
            [6] * 5,
            [3, 2],
            {"max_tokens_per_mb": 8},
            "the 2 ranks have 5 rows together, which need 5 or more micro-batches of at most 8 tokens, in number a "
            "multiple of 2 .*: raise max_tokens_per_mb",
        ),
        (
            [3] * 5,
            [3, 2],
            {"n_mbs": 2, "n_mbs_divisor": 2, "max_tokens_per_mb": 4},
            "which need 5 or more micro-batches of at most 4 tokens, in number a multiple of 4 .*: raise max_tokens_",
        ),
        ([3] * 7, [3, 4], {"n_mbs": 3, "n_mbs_divisor": 2}, "need 6 or more micro-batches, in number a multiple of 4 "),
    ],
)
def test_mistakes(lengths, rows_per_rank, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan_jointly(MicroBatchSpec(**options), np.array(lengths, np.int64), None, np.array(rows_per_rank))
    assert "\n" not in str(caught.value)


def test_metrics_over_ranks():
    metrics = packing_metrics([7, 5, 4, 4], [[0, 1], [2, 3]], 14, costs_of_ranks=[[12, 8], [10, 8], [2, 8]])
    assert metrics["rank_load_ratios"] == [1.5, 1.0] and metrics["sum_of_largest"] == 20
    assert "rank_load_ratios" not in packing_metrics([7, 5], [[0, 1]], 14)
    assert packing_metrics([7, 5], [[0, 1]], 14, costs_of_ranks=[[0], [0]])["rank_load_ratios"] == [1.0]
    with pytest.raises(ValueError, match=r"costs_of_ranks have shape \(1, 3\), there are 2 groups"):
        packing_metrics([7, 5, 4, 4], [[0, 1], [2, 3]], 14, costs_of_ranks=[[1, 2, 3]])
