"""The remedies that a report advises are settings that can change the run."""

import pytest

from commons.run_log.advice import advice_of
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from tests.helpers.jobs.run_logs import (
    AS_LOADED,
    BY_STEP,
    SIZES,
    config_of,
    lines_of,
    make_steps,
    report_of,
    write_run,
    write_unlooked,
)

UNLOOKED = ("schema", "step", "loss", "rows_per_s", "imbalance_before", "ranks", "steps", "total_ms")
UNEVEN = {"imbalance_after": 0.3, "optimality_gap": 0.3}


@pytest.mark.parametrize(
    ("shuffler", "changes", "remedy"),
    [
        ({}, {}, "free row counts (--trainer.shuffler.no-equal-size)"),
        ({"equal_size": False}, {}, "more rows per step"),
        ({"min_gain": 0.3}, {"gated": 0.85}, "a smaller --trainer.shuffler.min-gain"),
        ({"max_tokens_per_rank": 1500}, {}, "a larger --trainer.shuffler.max-tokens-per-rank"),
        ({"slack": 0.2}, {}, "a smaller --trainer.shuffler.slack"),
        ({"partitioner": "snake", "slack": 0.3}, {}, "--trainer.shuffler.partitioner refined or a smaller --trainer"),
    ],
)
def test_an_imbalance_that_remains_is_reduced_by_a_setting_that_causes_it(tmp_path, shuffler, changes, remedy):
    report = report_of(tmp_path, config=config_of(shuffler={"slack": 0.01} | shuffler), **UNEVEN, **changes)
    assert f"the remaining imbalance is 30%: {remedy}" in advice_of(report)


@pytest.mark.parametrize(
    ("shuffler", "gap", "advice"),
    [
        ({"slack": 0.3}, 0.2, "is 60%: a smaller --trainer.shuffler.slack may reduce it"),
        ({"min_gain": 0.02}, 0.2, "of 60% comes from rows that no plan can split: use a window"),
        ({"slack": 0.3}, 0.01, "of 60% comes from rows that no plan can split: use a window"),
    ],
)
def test_a_setting_that_costs_much_is_advised_before_a_window(tmp_path, shuffler, gap, advice):
    config = config_of(shuffler={"slack": 0.01} | shuffler)
    report = report_of(tmp_path, config=config, imbalance_after=0.6, optimality_gap=gap, gated=0.1)
    assert f"the remaining imbalance {advice}" in advice_of(report)


@pytest.mark.parametrize(("given", "rows"), [({}, "train"), ({"global_batch_size": 32}, "global")])
def test_a_budget_gains_over_its_own_steps_and_grows_with_the_room_for_its_rows(tmp_path, given, rows):
    config = config_of(balance_sampler=True, budget_per_rank=4.0, **given)
    advice = advice_of(report_of(tmp_path, config=config, before_in_turn=1, **UNEVEN))
    assert "× faster than the same steps with rows in turn, of " in advice
    assert advice.endswith(f"use a larger --trainer.budget-per-rank, and --trainer.{rows}-batch-size, its most rows.")


@pytest.mark.parametrize(
    ("min_gain", "end"), [(0.0, "unbalanced (--trainer.shuffler.min-gain 0.05), or"), (0.05, "ms;")]
)
def test_a_gate_is_advised_to_a_run_without_it(tmp_path, min_gain, end):
    dear = {"exchange_ms": 400.0, "total_ms": 9000.0, "largest_load_before": 5.15e8, "largest_load_after": 5e8}
    report = report_of(tmp_path, config=config_of(shuffler={"min_gain": min_gain}), **dear)
    assert advice_of(report).endswith(f"{end} leave it off.")


def test_rows_without_workloads_have_no_better_plan(tmp_path):
    """Such as those of a `get_workloads` that returns zeros."""
    loads = ("largest_load_before", "largest_load_after", "lower_bound", "imbalance_before", "imbalance_after")
    for config in (config_of(), config_of(shuffler={"mode": "observe"})):
        advice = advice_of(report_of(tmp_path, config=config, **dict.fromkeys(loads, 0.0)))
        assert advice.endswith("every row has workload 0, so there is nothing to balance: check get_workloads.")


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (config_of(enable_balanced_shuffler=False), "turn on --trainer.enable-balanced-shuffler"),
        (config_of(shuffler={"mode": "off"}), "leave --trainer.shuffler.mode off out"),
        (config_of() | {"shuffler_type": "identity"}, "choose the shuffler of the model (--shuffler-type)"),
    ],
)
def test_balancing_is_turned_on_by_the_setting_that_turned_it_off(tmp_path, config, remedy):
    report = RunReport(RunLog(write_unlooked(tmp_path, AS_LOADED, SIZES, config=config)))
    assert f"faster: {remedy}; with --trainer.shuffler.mode observe it reports" in advice_of(report)


@pytest.mark.parametrize("sizes", [BY_STEP, SIZES], ids=["a line per step", "lines of several steps"])
def test_the_gain_of_an_unbalanced_run_weighs_steps_by_their_work(tmp_path, sizes):
    """Uneven steps that have most of the work gain more, such as those of the heaviest rows."""
    work = [sum(step["loads_before"]) / 4 for step in AS_LOADED]
    gain = sum(max(step["loads_before"]) for step in AS_LOADED) / sum(work)
    steps = [step | {"work": each} for step, each in zip(AS_LOADED, work)]
    lines = [
        {name: line[name] for name in UNLOOKED}
        | {"tflops_per_rank": line["work"] * line["steps"] / line["total_ms"]}  # as the meter counts them
        for line in lines_of(steps, sizes)
    ]
    report = RunReport(RunLog(write_run(tmp_path, lines)))
    mean, weighed = 1 + report.gain.imbalance_before, 1 + report.gain.uneven_before
    assert report.balancing == "off" and mean + 0.01 < weighed <= gain + 1e-9
    assert weighed == pytest.approx(gain) or sizes is not BY_STEP
    assert f"at most about {weighed:.2f}× faster" in advice_of(report)


def test_small_steps_at_the_ends_of_epochs_change_no_advice(tmp_path):
    """Two rows on three ranks are uneven, and take next to no time."""
    small = {"imbalance_before": 0.5, "imbalance_after": 0.5}
    small |= dict.fromkeys(("largest_load_before", "largest_load_after", "lower_bound"), 1000.0)
    steps = [step | (small if step["step"] % 5 == 0 else {}) for step in make_steps(sigma=0.3)]
    report = report_of(tmp_path, steps, BY_STEP)
    assert report.gain.imbalance_after > 0.1 > 0.02 > report.gain.uneven_after
    assert "remaining" not in advice_of(report)
