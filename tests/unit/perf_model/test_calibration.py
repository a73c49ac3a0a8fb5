"""Calibrations: what is fitted, saved, matched and turned into workloads."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from commons.perf_model import measurement
from commons.perf_model.calibration import CalibratedTask, describe_device, is_calibration, load_calibration
from commons.perf_model.calibration_fit import StepMeasurement, fit_calibration, judge_calibration
from commons.perf_model.measurement import RowTokens, draw_mixes, measure_steps
from commons.perf_model.task_estimator import HSTUAttentionTask, SelfAttentionTask
from tests.helpers.models.calibrations import DEVICE, TASK, make_calibration


def measured(cost, num=80, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    found = []
    for lengths in draw_mixes(num, 16, 512, seed):
        tokens, pairs = TASK.tokens_and_pairs(lengths)
        size = len(lengths), int(tokens.sum()), int(pairs.sum())
        ms = np.dot(cost.coefficients, (1, *size)) * (1 + noise * generator.standard_normal())
        found.append(StepMeasurement(*size, float(ms)))
    return found


def test_the_fit_finds_what_a_step_costs():
    cost = make_calibration()
    found = fit_calibration(measured(cost), TASK, DEVICE)
    np.testing.assert_allclose(found.coefficients, cost.coefficients, rtol=1e-6)
    assert found.quality.r2 > 0.999999 and found.quality.held_out_worst_error < 1e-6
    assert found.quality.flops_mean_error > 0.001  # operations alone do not know what a row costs


def test_every_fourth_measurement_is_left_to_judge_the_fit():
    cost = make_calibration()
    measurements = measured(cost, num=200, noise=0.03)
    noisy = fit_calibration(measurements, TASK, DEVICE)
    np.testing.assert_allclose(noisy.per_pair, cost.per_pair, rtol=0.05)
    numbers = np.array([(1, each.rows, each.tokens, each.pairs, each.ms) for each in measurements[3::4]])
    predicted, ms = numbers[:, :4] @ noisy.coefficients, numbers[:, 4]
    errors, quality = np.abs(predicted - ms) / ms, noisy.quality
    assert (quality.held_out_mean_error, quality.held_out_worst_error) == pytest.approx((errors.mean(), errors.max()))
    assert quality.held_out_r2 == pytest.approx(1 - np.sum((ms - predicted) ** 2) / np.sum((ms - ms.mean()) ** 2))
    assert quality.num_measurements == 200 and 0.01 < errors.mean() < 0.04
    measurements[3::4] = [dataclasses.replace(each, ms=1.2 * each.ms) for each in measurements[3::4]]
    assert fit_calibration(measurements, TASK, DEVICE).coefficients == noisy.coefficients


def test_measurements_that_show_too_little_are_refused():
    good = measured(make_calibration())
    with pytest.raises(ValueError, match="there are 15 measurements; a fit needs at least 16"):
        fit_calibration(good[:15], TASK, DEVICE)
    assert fit_calibration(good[:16], TASK, DEVICE).quality.num_measurements == 16
    with pytest.raises(ValueError, match="too alike to separate the cost"):
        fit_calibration([good[0]] * 40, TASK, DEVICE)
    same_length = [StepMeasurement(n, 10 * n, 55 * n, 1.0 + n) for n in range(1, 40)]
    with pytest.raises(ValueError, match="too alike to separate the cost"):
        fit_calibration(same_length, TASK, DEVICE)
    noise = [dataclasses.replace(m, ms=5.0 + (index * 7919 % 11) / 10) for index, m in enumerate(good)]
    with pytest.raises(ValueError, match="explain [0-9]+% of the variation of the times; a fit needs 50%"):
        fit_calibration(noise, TASK, DEVICE)
    with pytest.raises(ValueError, match="explain 0% of the variation"):
        fit_calibration([dataclasses.replace(m, ms=5.0) for m in good], TASK, DEVICE)
    for wrong in (0.0, float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="measurement 3 took"):
            fit_calibration([*good[:3], dataclasses.replace(good[3], ms=wrong), *good[4:]], TASK, DEVICE)


def test_a_file_says_what_was_measured(tmp_path):
    calibration = make_calibration(task=SelfAttentionTask(32, 4, 8, 3, gated_ffn=True))
    calibration.save(tmp_path / "folder" / "c.toml")
    assert load_calibration(tmp_path / "folder" / "c.toml") == calibration


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text.replace("version = 1", "version = 2"), "has version 2; this release reads version 1"),
        (lambda text: text.replace("per_token", "per_word"), "lacks 'per_token'"),
        (lambda text: text.replace("per_token = 0.008", "per_token = -1"), "per_token is -1; a cost"),
        (lambda text: text.replace("per_token = 0.008", "per_token = nan"), "per_token is nan; a cost"),
        (lambda text: text.replace("per_token = 0.008", "per_token = true"), "per_token is True; a cost"),
        (lambda text: text.replace("per_token = 0.008", "per_token = 'slow'"), "per_token is 'slow'; a cost"),
        (lambda text: text.replace("threads", "fibres"), "is not a calibration"),
        (lambda text: text[: len(text) // 2] + "[", "is not TOML"),
        (lambda text: "title = 'something else'", "has version None"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "c.toml"
    make_calibration().save(path)
    assert is_calibration(path) and not is_calibration(tmp_path)
    path.write_text(damage(path.read_text()))
    assert not is_calibration(path)
    with pytest.raises(ValueError, match=message):
        load_calibration(path)
    with pytest.raises(FileNotFoundError, match="evenrank calibrate"):
        load_calibration(tmp_path / "none.toml")


def test_a_file_that_is_older_than_an_option_holds_for_its_default(tmp_path):
    path = tmp_path / "c.toml"
    make_calibration().save(path)
    text = path.read_text()
    assert "concat_ux = false" in text
    path.write_text(text.replace("concat_ux = false\n", ""))
    CalibratedTask(TASK, load_calibration(path))
    for other in ({"concat_ux": True}, {"value_dim": 32}):
        with pytest.raises(ValueError, match=rf"model\.{next(iter(other))} = .*, here it is"):
            CalibratedTask(dataclasses.replace(TASK, **other), load_calibration(path))


def test_another_model_or_device_is_named():
    calibration = make_calibration()
    with pytest.raises(ValueError, match=r"model\.num_layers = 2, here it is 3"):
        CalibratedTask(dataclasses.replace(TASK, num_layers=3), calibration)
    with pytest.raises(ValueError, match=r"model\."):
        CalibratedTask(SelfAttentionTask(64, 4, 16, 2), calibration)
    with pytest.raises(ValueError, match=r"device\.threads = 1, here it is 8"):
        calibration.require_match(TASK, dataclasses.replace(DEVICE, threads=8))
    equal = SelfAttentionTask(64, 4, 16, ffn_hidden_size=256, num_query_groups=4)
    CalibratedTask(equal, make_calibration(task=SelfAttentionTask(64, 4, 16)))
    here = describe_device(torch.device("cpu"))
    assert here.type == "cpu" and here.name and here.threads == torch.get_num_threads()


terms = st.one_of(st.just(0.0), st.floats(-25, 3).map(lambda exponent: 10.0**exponent))


@given(terms, terms, terms, st.lists(st.integers(0, 2**17), min_size=1, max_size=20))
def test_workloads_are_times_in_whole_units_whose_sums_fit(per_row, per_token, per_pair, lengths):
    """The sum over 1024 ranks × 32 rows in windows of 8 fits into int64, however long the rows are."""
    longest_ms = per_row + per_token * 2**17 + per_pair * 2**34
    assume(1e-4 < longest_ms < 1e13)  # beyond, a calibration may be refused
    plain = SelfAttentionTask(64, 4, 16, causal=False)
    task = CalibratedTask(plain, make_calibration(0.0, per_row, per_token, per_pair, task=plain))
    exact = np.array([per_row + per_token * length + per_pair * length**2 for length in lengths])
    workloads = task.get_workloads(lengths)
    assert workloads.dtype == np.int64 and task.units_per_ms >= 1
    np.testing.assert_allclose(workloads / task.units_per_ms, exact, rtol=1.5e-3, atol=0.5 / task.units_per_ms)
    assert task.get_workloads(torch.tensor(lengths)).tolist() == workloads.tolist()
    assert task.get_workloads(lengths[0]) == workloads[0]
    assert int(task.get_workloads(2**17)) * 1024 * 32 * 8 < 2**63


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ((1e-30, 0.0, 0.0), "no device takes .* ms for a row of 131,072 tokens: measure again"),
        ((0.0, 0.0, 1e290), "no device takes .* ms for a row of 131,072 tokens: measure again"),
        ((0.0, 0.0, 1e308), "no device takes .* ms for a row of 131,072 tokens: measure again"),
        ((0.0, 0.0, 0.0), "per_row, per_token and per_pair are all 0; .*: measure again"),
    ],
)
def test_costs_that_no_device_has_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        make_calibration(0.0, *costs)


def test_a_row_beyond_all_time_units_is_refused():
    small = HSTUAttentionTask(1, 1, 1)  # few operations a row: their own limit lies beyond
    task = CalibratedTask(small, make_calibration(task=small))
    with pytest.raises(ValueError, match=f"a row of {2**30} tokens takes more than .*: check seqlen"):
        task.get_workloads([3, 2**30])
    with pytest.raises(ValueError, match="holds -1"):
        task.get_workloads([-1])
    on_device = torch.empty(3, dtype=torch.int64, device="meta")  # has no values that a check could read
    assert task.get_workloads(on_device).device.type == "meta"


def judged(cost, num, noise, seed=0):
    measurements = measured(cost, num, noise, seed)
    return judge_calibration(fit_calibration(measurements, TASK, DEVICE), measurements, TASK)


def test_a_verdict_says_how_many_mixes_would_tell():
    at_once = judged(make_calibration(per_row=0.5), 80, noise=0.02)
    assert at_once.better and at_once.measurements < 80 and at_once.operations_error > 10 * at_once.error
    too_few = judged(make_calibration(), 80, noise=0.02)
    assert not too_few.better and too_few.measurements > 80
    assert judged(make_calibration(), 2 * too_few.measurements, noise=0.02).better


@pytest.mark.parametrize("seed", range(4))
def test_where_operations_are_the_cost_more_mixes_are_not_asked_for(seed):
    per_token, per_pair = (TASK.forward_flops(np.array([1.0, 0.0]), np.array([0.0, 1.0])) * 2e-8).tolist()
    verdict = judged(make_calibration(0.5, 0.0, per_token, per_pair), 400, noise=0.03, seed=seed)
    assert not verdict.better and verdict.measurements <= 400


def test_mixes_spread_over_rows_and_lengths():
    mixes = draw_mixes(200, 16, 512, seed=1)
    assert mixes == draw_mixes(200, 16, 512, seed=1) != draw_mixes(200, 16, 512, seed=2)
    assert all(1 <= len(mix) <= 32 and min(mix) >= 1 and max(mix) <= 512 for mix in mixes)
    assert all(sum(mix) <= 16 * 512 // 2 for mix in mixes)
    assert len({len(mix) for mix in mixes}) > 15
    with pytest.raises(ValueError, match="batch_size is 0"):
        draw_mixes(5, 0, 10, seed=0)


def test_every_mix_is_measured_in_turn_and_its_median_is_used(monkeypatch):
    trained, mixes, seconds = [], [[1, 2], [3], [30, 30]], [1, 2, 3, 9, 9, 9, 2, 3, 4]
    clock = iter([now for taken in seconds for now in (0, taken)])
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    target = SimpleNamespace(task=TASK, device=torch.device("cpu"), make_batch=torch.tensor, row_tokens=RowTokens)
    target.train_step = lambda batch: trained.append(batch.tolist())
    found = measure_steps(target, mixes, repeats=3)
    assert trained == [[30, 30]] * 2 + mixes * 3
    assert [(m.rows, m.tokens, m.pairs) for m in found] == [(2, 3, 4), (1, 3, 6), (2, 60, 930)]
    assert [m.ms for m in found] == [2_000, 3_000, 4_000]
    with pytest.raises(ValueError, match="there are 3 mixes and repeats is 0; both are at least 1: raise them"):
        measure_steps(target, mixes, repeats=0)
