"""What a shuffle is worth: predicted before a run, measured in it, and said in the table of stats."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from commons.datasets.random_distribution import LengthDistribution
from commons.distributed.stats import ShuffleStats, stats_of_plan
from commons.perf_model.measured_saving import MeasuredSaving
from commons.perf_model.peak_rates import peak_flops, peak_flops_of
from commons.perf_model.shuffle_plan import GatheredRows, plan_shuffle
from commons.perf_model.simulation import RowCosts, simulate_steps
from commons.perf_model.task_estimator import HSTUAttentionTask
from tests.helpers.calibrations import make_calibration

ROOT = Path(__file__).parents[3]


def gathered(*ranks):
    rows = np.array([len(rank) for rank in ranks])
    workloads = np.array([value for rank in ranks for value in rank])
    return GatheredRows(rows, rows, workloads, workloads.copy())


def test_stats_of_a_plan():
    plan = plan_shuffle(gathered([40, 4], [3, 3], [2, 2], [1, 9]))
    (stats,) = stats_of_plan(plan, 7, gather_ms=1.0, plan_ms=0.0, bytes_sent=12, ranks_per_node=2, units_per_ms=8)
    stats = dataclasses.replace(stats, plan_ms=3.0).carried_out(wait_ms=1.0, exchange_ms=2.0)
    assert (stats.largest_load_before, stats.largest_load_after, stats.lower_bound) == (44, 41, 41)
    assert stats.predicted_saving == pytest.approx(3 / 44) and stats.predicted_saving_ms == pytest.approx(3 / 8)
    assert stats.hidden_fraction == pytest.approx(0.75)
    crossing = plan.destination // 2 != plan.gathered.home // 2
    assert stats.rows_moved_across_nodes == crossing.sum() > 0
    assert stats.tokens_moved_across_nodes == plan.gathered.tokens[crossing].sum()
    assert stats.largest_load_trained == 41 and stats.moved and not stats.gated
    unknown = stats_of_plan(plan, 7, gather_ms=0.0, plan_ms=0.0, bytes_sent=0)[0].carried_out(0.0, 0.0)
    assert unknown.predicted_saving_ms is None and unknown.rows_moved_across_nodes is None
    assert unknown.hidden_fraction == 1.0
    assert stats.to_dict()["loads_before"] == (44, 6, 4, 10)


def test_a_gate_leaves_the_load_where_it_is():
    rows = gathered([40, 4], [3, 3], [2, 2], [1, 9])
    for gate in ({"min_gain": 0.1}, {"min_gain_load": 4}):
        plan = plan_shuffle(rows, **gate)
        (stats,) = stats_of_plan(plan, 0, gather_ms=0.0, plan_ms=0.0, bytes_sent=0)
        assert stats.gated and not stats.moved
        assert stats.largest_load_trained == stats.largest_load_after == 44
        assert stats.predicted_saving == 0 and stats.imbalance_after == stats.imbalance_before
    for gate in ({"min_gain": 0.05}, {"min_gain_load": 3}):
        assert plan_shuffle(rows, **gate).num_moved


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
    assert saving.ms_per_load() == pytest.approx(3e-13, rel=0.1)


def test_no_saving_is_claimed_without_evidence():
    generator = np.random.default_rng(1)
    flat, even = MeasuredSaving(), MeasuredSaving()
    for _ in range(100):
        flat.add(int(generator.integers(100, 200)), float(generator.normal(50)))
        even.add(1000, float(generator.normal(50)))
    assert flat.ms_per_load() is None
    assert even.ms_per_load() is None


def costs(*workloads):
    values = np.array(workloads, dtype=np.int64)
    return RowCosts(values, values, values * values)


def test_simulated_steps():
    batches = [costs(40, 4), costs(3, 3), costs(10, 10), costs(10, 10), costs(7, 7)]
    result = simulate_steps(batches, 2)
    assert result.cost_before.tolist() == [44, 20] and result.cost_mean.tolist() == [25, 20]
    assert result.cost_after.tolist() == [43, 20]  # counts stay equal: the 4 goes, a 3 comes
    # No rank has less than 40 in the first step, or 20 in the second; with two rows each, not less than 43.
    assert result.speed_up == result.possible_speed_up == pytest.approx(64 / 63)
    assert result.largest_share.tolist() == [40 / 25, 10 / 20]
    assert result.tokens_moved == pytest.approx(7 / 90) and not result.in_ms
    assert result.loads_before.tolist() == [44, 6] and result.loads_after.tolist() == [43, 7]
    free = simulate_steps(batches, 2, equal_size=False)
    assert free.cost_after.tolist() == [40, 20] and free.possible_speed_up == pytest.approx(64 / 60)


def test_simulated_windows():
    # In each step a heavy row holds one rank up; together the two heavy rows hold both up at once.
    batches = [costs(40, 2), costs(2, 2), costs(2, 2), costs(40, 2), costs(9, 1), costs(1, 1)]
    alone, together = (simulate_steps(batches, 2, window=window) for window in (1, 2))
    assert (alone.window, together.window) == (1, 2)
    assert alone.cost_after.tolist() == [42, 42, 10] and together.cost_before.tolist() == [42, 42, 10]
    assert sorted(together.cost_after[:2].tolist()) == [4, 42] and together.cost_after[2] == 10  # a window of one step
    assert together.cost_bound.shape == (2,) and together.cost_bound.sum() <= together.cost_after.sum()
    assert together.speed_up == pytest.approx(94 / 56) and together.speed_up <= together.possible_speed_up
    assert together.imbalance_before == alone.imbalance_before
    assert together.imbalance_after == pytest.approx((0 + 0 + 10 / 6 - 1) / 3)
    assert together.total_imbalance_before == pytest.approx(94 / 52 - 1)
    assert together.total_imbalance_after == pytest.approx(56 / 52 - 1)
    assert together.largest_share.tolist() == alone.largest_share.tolist()
    assert together.loads_before.tolist() == [42, 4] and together.loads_after.max() / together.loads_after.mean() == 1
    calibration = make_calibration(per_step=100.0, per_row=1.0, per_token=0.5, per_pair=0.25)
    in_ms = simulate_steps(batches, 2, window=2, calibration=calibration)
    assert in_ms.cost_before.tolist() == [100 + 2 + 21 + 0.25 * 1604] * 2 + [100 + 2 + 5 + 0.25 * 82]
    assert in_ms.cost_after.sum() < in_ms.cost_before.sum() and in_ms.cost_bound.min() >= 100
    for window in (0, 4):
        with pytest.raises(ValueError, match=f"window is {window}, there are 3 steps of 2 ranks"):
            simulate_steps(batches, 2, window=window)


def test_larger_windows_gain_more_of_user_like_lengths():
    rng = np.random.default_rng(0)
    lengths = (20 + rng.lognormal(np.log(130), 1.4, (16 * 8, 8))).clip(max=8192).astype(np.int64)
    batches = [RowCosts(5120 * row + row**2, row, row**2) for row in lengths]
    gains = [simulate_steps(batches, 16, window=window, slack=0.01).speed_up for window in (1, 2, 4, 8)]
    assert gains == sorted(gains) and gains[-1] > 1.5 * gains[0]


def test_no_gain_is_possible_where_one_row_is_all_there_is():
    result = simulate_steps([costs(1000, 1), costs(1, 1), costs(1, 1), costs(1, 1)], 4)
    assert result.possible_speed_up == pytest.approx(1001 / 1001, abs=1e-3) and result.largest_share[0] > 3.9


def test_rows_that_stay_at_unequal_counts_are_no_worse_than_possible():
    result = simulate_steps([costs(5, 5, 5), costs(15)], 2)
    assert result.speed_up == result.possible_speed_up == 1


@pytest.mark.parametrize("slack", [0.0, 0.01])
def test_lengths_of_the_published_benchmark(slack):
    """16 ranks × 32 rows, Zipf 1.2 to 4,096 items: all that is possible is gained, but for the slack."""
    lengths = (
        LengthDistribution("zipf", alpha=1.2)
        .within(4096)
        .sample(16 * 32 * 8, generator=torch.Generator().manual_seed(0))
    )
    task = HSTUAttentionTask(1024, 4, 256, 8)
    tokens, pairs = task.tokens_and_pairs(2 * lengths.view(-1, 32) + 2)
    batches = [
        RowCosts(task.get_workloads(row).numpy(), row.numpy(), of_row.numpy()) for row, of_row in zip(tokens, pairs)
    ]
    result = simulate_steps(batches, 16, slack=slack)
    assert 1.4 < result.possible_speed_up < 1.8
    assert result.speed_up >= (0.99 if slack else 0.995) * result.possible_speed_up


def test_simulated_milliseconds_have_the_fixed_cost():
    calibration = make_calibration(per_step=100.0, per_row=1.0, per_token=0.5, per_pair=0.25)
    result = simulate_steps([costs(40, 4), costs(3, 3)], 2, calibration=calibration)
    assert result.in_ms
    assert result.cost_before.tolist() == [100 + 2 + 22 + 0.25 * (1600 + 16)]
    assert result.cost_after.tolist() == [100 + 2 + 21.5 + 0.25 * (1600 + 9)]


def test_a_simulation_needs_a_batch_per_rank():
    with pytest.raises(ValueError, match="there are 1 batches for 2 ranks"):
        simulate_steps([costs(1)], 2)
    with pytest.raises(ValueError, match="all workloads are 0"):
        simulate_steps([costs(0), costs(0)], 2)


def test_peak_rates():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", torch.float16) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32, allow_tf32=True) == 156e12
    assert peak_flops("NVIDIA L40S", torch.float16) != peak_flops("NVIDIA L40", torch.float16)
    assert peak_flops("NVIDIA H200", torch.float64) is None
    assert peak_flops("NVIDIA H200 NVL", torch.bfloat16) == 835.5e12
    assert peak_flops("Tesla V100-PCIE-16GB", torch.float16) == 112e12
    assert peak_flops("Tesla V100-SXM2-32GB", torch.bfloat16) is None
    assert peak_flops("Some Accelerator", torch.float16) is None
    assert peak_flops_of(torch.device("cpu"), torch.float32) is None
