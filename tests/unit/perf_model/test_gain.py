"""What a shuffle is worth: predicted before a run, measured in it, and said in the table of stats."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from commons.datasets.random.distribution import LengthDistribution
from commons.distributed.stats import ShuffleStats, stats_of_plan
from commons.perf_model.gain import (
    SLACKS,
    TRAINED_SLACK,
    Budget,
    Comparison,
    DealtRows,
    LoadedRows,
    StepCost,
    compare_ways,
    deal,
)
from commons.perf_model.measured_saving import MeasuredSaving
from commons.perf_model.peak_rates import peak_flops, peak_flops_of
from commons.perf_model.shuffle_plan import GatheredRows, plan_shuffle
from commons.perf_model.task_estimator import HSTUAttentionTask

ROOT = Path(__file__).parents[3]


def gathered(*ranks):
    rows = np.array([len(rank) for rank in ranks])
    workloads = np.array([value for rank in ranks for value in rank])
    return GatheredRows(rows, rows, workloads, workloads.copy())


def test_stats_of_a_plan():
    plan = plan_shuffle(gathered([40, 4], [3, 3], [2, 2], [1, 9]), ranks_per_node=2)
    (stats,) = stats_of_plan(plan, 7, gather_ms=1.0, plan_ms=0.0, bytes_sent=12, ranks_per_node=2, units_per_ms=8)
    stats = dataclasses.replace(stats, plan_ms=3.0).carried_out(wait_ms=1.0, exchange_ms=2.0)
    assert (stats.largest_load_before, stats.largest_load_after, stats.lower_bound) == (44, 41, 41)
    assert stats.predicted_saving == pytest.approx(3 / 44) and stats.predicted_saving_ms == pytest.approx(3 / 8)
    assert stats.hidden_fraction == pytest.approx(0.75)
    assert stats.carried_out(wait_ms=5.0, exchange_ms=2.0).hidden_fraction == 0.0  # it waited for longer than both take
    crossing = plan.destination // 2 != plan.gathered.home // 2
    assert stats.rows_moved_across_nodes == crossing.sum() > 0
    assert stats.tokens_moved_across_nodes == plan.gathered.tokens[crossing].sum()
    assert stats.largest_load_trained == 41 and stats.moved and not stats.gated
    unknown = stats_of_plan(plan, 7, gather_ms=0.0, plan_ms=0.0, bytes_sent=0)[0].carried_out(0.0, 0.0)
    assert unknown.predicted_saving_ms is None and unknown.rows_moved_across_nodes is None
    assert unknown.hidden_fraction == 1.0
    assert stats.to_dict()["loads_before"] == (44, 6, 4, 10)


def test_stats_of_a_window_add_up_to_those_of_its_plan():
    (gathered,) = rows_of([40, 2], [2, 2], [2, 2], [40, 2]).windows(2)
    stats = stats_of_plan(plan_shuffle(gathered), 3, gather_ms=4.0, plan_ms=2.0, bytes_sent=10)
    assert [each.step for each in stats] == [3, 4] and [each.largest_load_before for each in stats] == [42, 42]
    assert sorted(each.largest_load_after for each in stats) == [4, 42]
    assert [each.imbalance_before for each in stats] == [pytest.approx(42 / 23 - 1)] * 2
    for name, of_plan in (("lower_bound", 46), ("gather_ms", 4.0), ("plan_ms", 2.0), ("bytes_sent", 10)):
        assert sum(getattr(each, name) for each in stats) == of_plan
    for each in stats:
        assert not each.moved and each.optimality_gap == 0.0 and each.predicted_saving == pytest.approx((84 - 46) / 84)


def test_what_moves_in_a_window_is_counted_by_step():
    (gathered,) = rows_of([40, 40], [2, 2], [2, 2], [2, 2]).windows(2)
    lookups = np.array([[80, 4, 42, 4], [4, 4, 42, 4]])
    plan = plan_shuffle(gathered)
    stats = stats_of_plan(plan, 3, gather_ms=0.0, plan_ms=0.0, bytes_sent=0, units_per_ms=2, lookups=lookups)
    heavy, light = sorted(stats, key=lambda each: -each.num_tokens)
    assert heavy.moved and light.moved and heavy.tokens_moved >= 40 > light.tokens_moved
    for each in stats:
        assert each.token_fraction_moved == each.tokens_moved / each.num_tokens
        assert each.predicted_saving_ms == (80 + 4 - 42 - 4) / 2 / 2
    assert [each.lookups_before for each in stats] == [(80, 4), (4, 4)]
    assert [each.lookups_after for each in stats] == [(42, 42), (4, 4)]
    assert [each.lookup_imbalance_before for each in stats] == pytest.approx([80 / 42 - 1, 0.0])
    assert [each.lookup_imbalance_after for each in stats] == [0.0, 0.0]


def test_with_speeds_a_load_counts_as_the_load_that_the_fastest_rank_does_meanwhile():
    plan = plan_shuffle(gathered([10] * 3, [10] * 3), speeds=np.array([2, 1]), equal_size=False)
    (stats,) = stats_of_plan(plan, 0, gather_ms=0.0, plan_ms=0.0, bytes_sent=0)
    assert (stats.loads_before, stats.loads_after) == ((30, 30), (40, 20))
    assert (stats.largest_load_before, stats.largest_load_after) == (60, 40)
    assert (stats.imbalance_before, stats.imbalance_after) == (60 / 40 - 1, 0.0)


def test_a_gate_leaves_the_load_where_it_is():
    rows = gathered([40, 4], [3, 3], [2, 2], [1, 9])
    plan = plan_shuffle(rows, min_gain=0.1)
    (stats,) = stats_of_plan(plan, 0, gather_ms=0.0, plan_ms=0.0, bytes_sent=0)
    assert stats.gated and not stats.moved
    assert stats.largest_load_trained == stats.largest_load_after == 44
    assert stats.predicted_saving == 0 and stats.imbalance_after == stats.imbalance_before
    assert plan_shuffle(rows, min_gain=0.05).num_moved


def test_every_number_is_in_the_table():
    table = (ROOT / "docs" / "stats.md").read_text()
    for field in dataclasses.fields(ShuffleStats):
        assert f"| `{field.name}` " in table


def test_the_saving_is_what_the_steps_show():
    generator = np.random.default_rng(0)
    saving = MeasuredSaving()
    for step in range(19):
        saving.add(10**14 + step * 10**12, 5.0 + step)
    assert saving.ms_per_load() is None
    for _ in range(300):
        load = int(generator.integers(10**14, 2 * 10**14))
        slow = 500.0 if generator.random() < 0.05 else 0.0  # a few steps that something else held up
        saving.add(load, 20 + 3e-13 * load + generator.normal() + slow)
    assert saving.ms_per_load() == pytest.approx(3e-13, rel=0.1, abs=0)


def test_the_work_takes_at_most_the_step():
    saving = MeasuredSaving()
    for load in range(100, 200):
        saving.add(load, 5.0 * load - 400)  # a step without load would take less than no time
    assert saving.ms_per_load() == pytest.approx((5.0 * 149.5 - 400) / 149.5)


def test_no_saving_is_claimed_without_evidence():
    generator = np.random.default_rng(1)
    flat, even = MeasuredSaving(), MeasuredSaving()
    for _ in range(100):
        flat.add(int(generator.integers(100, 200)), float(generator.normal(50)))
        even.add(1000, float(generator.normal(50)))
    assert flat.ms_per_load() is None
    assert even.ms_per_load() is None


def rows_of(*batches, num_ranks=2):
    """Rows that cost and weigh as much, of the ranks of the first step, of the second, and so on."""
    step, rank = (
        np.concatenate([np.full(len(batch), place) for batch, place in zip(batches, places)])
        for places in zip(*(divmod(number, num_ranks) for number in range(len(batches))))
    )
    values = np.concatenate(batches).astype(np.int64)
    return LoadedRows(values, values, step, rank, num_ranks)


def compared(rows, *, window=1, cost=None, **options):
    """As loaded and balanced."""
    way = deal(rows, "balanced", window, **options)
    return Comparison(rows, (rows.as_loaded, way), cost), way


def test_steps_are_dealt_as_they_are_planned():
    rows = rows_of([40, 4], [3, 3], [10, 10], [10, 10])
    result, way = compared(rows)
    assert rows.as_loaded.loads.tolist() == [[44, 6], [20, 20]]
    assert way.loads.tolist() == [[43, 7], [20, 20]]  # counts stay equal: the 4 goes, a 3 comes
    assert result.speed_up(way) == result.possible(way) == pytest.approx(64 / 63)  # no less than 43 with two rows each
    assert result.equal == pytest.approx(64 / 45) and rows.as_loaded.imbalance == pytest.approx((44 / 25 - 1) / 2)
    assert rows.largest_share.tolist() == [40 / 25, 10 / 20] and result.dominated == 1
    assert way.moved == {0.0: pytest.approx(7 / 90)} and way.sent_tokens == 4 / 2
    _, sent = compared(rows_of([9, 4, 4], [1], [1], num_ranks=3), equal_size=False)
    assert sent.loads.tolist() == [[9, 5, 5]] and sent.sent_tokens == 8  # by one rank, to two
    result, free = compared(rows, equal_size=False)
    assert free.loads.max(axis=1).tolist() == [40, 20] and result.possible(free) == pytest.approx(64 / 60)


def test_windows_are_planned_together():
    # In each step a heavy row holds one rank up; together the two heavy rows hold both up at once.
    rows = rows_of([40, 2], [2, 2], [2, 2], [40, 2], [9, 1], [1, 1])
    alone, together = (compared(rows, window=window) for window in (1, 2))
    assert alone[1].loads.max(axis=1).tolist() == [42, 42, 10]
    assert sorted(together[1].loads[:2].max(axis=1).tolist()) == [4, 42] and together[1].loads[2].max() == 10
    result, way = together
    assert result.possible(way) == pytest.approx(94 / sum(plan_shuffle(each).lower_bound for each in rows.windows(2)))
    assert result.speed_up(way) == pytest.approx(94 / 56) and 94 / 56 <= result.possible(way) <= result.equal
    assert way.imbalance == pytest.approx((0 + 0 + 10 / 6 - 1) / 3)
    assert result.median_speed_up(way) is None  # steps have other rows
    of_all = Comparison(rows, (rows.as_loaded, alone[1], way))
    assert of_all.possible_of_batches == of_all.possible(alone[1]) < of_all.possible(way)


def test_steps_without_work_do_not_count():
    loads = np.array([[0, 0], [6, 2], [4, 4], [8, 0]])
    loaded = DealtRows("as loaded", loads, tokens=loads)
    dealt = DealtRows("balanced", np.array([[0, 0], [4, 4], [4, 4], [8, 0]]), tokens=loads)
    assert loaded.imbalance == pytest.approx((6 / 4 + 4 / 4 + 8 / 4) / 3 - 1) and loaded.fullest == 8 / 3
    result = Comparison(rows_of([0], [0], [6], [2]), (loaded, dealt))
    assert result.median_speed_up(dealt) == 1  # of 6 / 4, 4 / 4 and 8 / 8
    assert result.median_speed_up(dataclasses.replace(dealt, budget=Budget(rows=2, most_rows=2))) is None
    assert result.dominated == 1  # 0 and 6 of means of 0 and 4


def test_nothing_is_possible_where_one_row_is_all_there_is_or_rows_stay_at_unequal_counts():
    rows = rows_of([1000, 1], [1, 1], [1, 1], [1, 1], num_ranks=4)
    result, way = compared(rows)
    assert result.possible(way) == pytest.approx(1001 / 1001, abs=1e-3) and rows.largest_share[0] > 3.9
    result, way = compared(rows_of([5, 5, 5], [15]))
    assert result.speed_up(way) == result.possible(way) == 1


@pytest.mark.parametrize("slack", [0.0, 0.01])
def test_lengths_of_the_published_benchmark(slack):
    """16 ranks × 32 rows, Zipf 1.2 to 4,096 items: all that is possible is gained, but for the slack."""
    generator = torch.Generator().manual_seed(0)
    lengths = LengthDistribution("zipf", alpha=1.2).within(4096).sample(16 * 32 * 8, generator=generator)
    tokens = 2 * lengths.numpy() + 2
    work = HSTUAttentionTask(1024, 4, 256, 8).get_workloads(tokens)
    result, way = compared(LoadedRows.in_turn(work, tokens, 16, 32), slack=slack)
    assert 1.4 < result.possible(way) < 1.8
    assert result.speed_up(way) >= (0.99 if slack else 0.995) * result.possible(way)


def test_milliseconds_have_the_fixed_cost_of_a_step():
    rows = rows_of([40, 4], [3, 3])
    result, way = compared(rows, cost=StepCost(per_load=0.5, per_step=100.0))
    assert result.step_ms(rows.as_loaded) == 122 and result.step_ms(way) == 121.5
    assert result.speed_up(way) == result.possible(way) == pytest.approx(122 / 121.5)
    assert result.equal == pytest.approx(122 / 112.5)
    result, way = compared(rows_of([40, 4], [3, 3], [10, 10], [10, 10]), cost=StepCost(per_load=0.5, per_step=100.0))
    assert result.speed_up(way) == result.possible(way) == pytest.approx(232 / 231.5)


def test_larger_steps_of_constant_cost_gain_no_fixed_costs():
    """A budget is at least the costliest row, so its steps may have many batches of usual rows."""
    even = rows_of(*[[10, 10]] * 8, num_ranks=2)
    whole = DealtRows("constant cost", np.full((2, 2), 40), np.full((2, 2), 40), budget=Budget(rows=4, most_rows=4))
    result = Comparison(even, (even.as_loaded, whole), StepCost(per_load=0.5, per_step=100.0))
    assert result.speed_up(whole) == result.equal == pytest.approx(1) and result.step_ms(whole) == 120


def test_every_way_deals_all_rows():
    lengths = np.random.default_rng(1).integers(1, 500, 4 * 4 * 12)
    rows = LoadedRows.in_turn(lengths**2, lengths, 4, 4)
    ways = list(compare_ways(rows, (2, 12, 64)))
    assert [way.name for way in ways][1:] == ["Karmarkar-Karp", "refined", "free counts", "window of 2", "window of 12"]
    for way, options in zip(ways[2:], ({}, {"equal_size": False}, {"window": 2}, {"window": 12}), strict=True):
        near = {slack: deal(rows, "near home", slack=slack, **options) for slack in SLACKS}
        assert way.moved == {slack: each.moved[slack] for slack, each in near.items()}
        assert way.sent_tokens == near[TRAINED_SLACK].sent_tokens and (way.loads == near[0.0].loads).all()
    assert ways[1].bound == ways[2].bound > 0 and (first := rows.first_steps(5)).num_steps == 5
    assert first.as_loaded.loads.tolist() == rows.as_loaded.loads[:5].tolist()
    for way in ways:
        assert way.loads.shape == (12, 4) and way.loads.sum() == (lengths**2).sum()
        assert way.tokens.sum() == lengths.sum()
        assert way.bound is None or way.bound <= way.loads.max(axis=1).sum()


def test_peak_rates():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16, allow_tf32=True) == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", torch.float16) == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 3g.40gb", torch.bfloat16) is None  # three sevenths of the GPU
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32, allow_tf32=True) == 156e12
    assert peak_flops("NVIDIA L40S", torch.float16) != peak_flops("NVIDIA L40", torch.float16)
    assert peak_flops("NVIDIA H200", torch.float64) is None
    assert peak_flops("NVIDIA H200 NVL", torch.bfloat16) == 835.5e12
    assert peak_flops("Tesla V100-PCIE-16GB", torch.float16) == 112e12
    assert peak_flops("Tesla V100-SXM2-32GB", torch.bfloat16) is None
    assert peak_flops("Tesla V100-SXM2-32GB", torch.float32, allow_tf32=True) == 15.7e12
    assert peak_flops("Some Accelerator", torch.float16) is None
    assert peak_flops_of(torch.device("cpu"), torch.float32) is None
