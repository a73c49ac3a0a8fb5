"""The remedies that a report advises are settings that can change the run."""

import pytest

from commons.run_log.advice import advice_of
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from tests.helpers.jobs.run_logs import AS_LOADED, SIZES, config_of, report_of, write_unlooked

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


def test_the_gain_of_an_unbalanced_run_is_no_bound(tmp_path):
    """Uneven steps that have most of the work gain more than the mean imbalance of all steps says."""
    report = RunReport(RunLog(write_unlooked(tmp_path, AS_LOADED, SIZES)))
    largest, mean = (sum(f(step["loads_before"]) for step in AS_LOADED) for f in (max, lambda loads: sum(loads) / 4))
    assert largest / mean > 1 + report.gain.imbalance_before + 0.01
    assert f"about {1 + report.gain.imbalance_before:.2f}× faster" in advice_of(report)
    assert "at most" not in advice_of(report)
