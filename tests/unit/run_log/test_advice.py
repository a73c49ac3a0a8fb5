"""The remedies that a report advises are settings that can change the run."""

import pytest

from commons.run_log.advice import advice_of
from tests.helpers.jobs.run_logs import config_of, report_of

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
