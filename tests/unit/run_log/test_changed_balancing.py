"""A run that is resumed with another balancing is reported from there on."""

import numpy as np
import pytest

from commons.cli.report import answer_of
from commons.run_log.comparison import compare_runs
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from tests.helpers.jobs.run_logs import (
    AS_LOADED,
    BALANCED,
    BY_STEP,
    config_of,
    lines_of,
    make_steps,
    report_of,
    write_run,
    write_unlooked,
)

OBSERVE = config_of(shuffler={"mode": "observe"})
# As rank 0 assigns rows by their work: the shuffler, which only logs, finds nothing better.
AS_TRAINED = {"moved": 0.0, "before_in_turn": 0}
EVEN = [step | AS_TRAINED | {"imbalance_before": step["imbalance_after"]} for step in BALANCED]
LOADS = ("largest_load_after", "imbalance_after", "moved")


def without_loads(lines):
    return [{name: value for name, value in line.items() if name not in LOADS} for line in lines]


def report_of_resumed(folder, first, second, config, at=20):
    """The report of a run whose steps are `first` and, after the checkpoint of a step, `second`."""
    begin, end = lines_of(first, BY_STEP)[:at], lines_of(second, BY_STEP)[at:]
    end = [{**end[0], "resumed": 1}, *end[1:]]
    begin = without_loads(begin) if config["trainer"].get("first") == "off" else begin
    return RunReport(RunLog(write_run(folder, [*begin, *end], config)))


@pytest.mark.parametrize(
    ("first", "second", "config"),
    [
        (AS_LOADED, BALANCED, config_of()),
        (AS_LOADED, BALANCED, config_of(first="off")),
        (AS_LOADED, EVEN, config_of(first="off", enable_balanced_shuffler=False, balance_batch=True)),
        (BALANCED, EVEN, config_of(enable_balanced_shuffler=False, balance_batch=True)),
        (EVEN, BALANCED, config_of()),
        (BALANCED, AS_LOADED, OBSERVE),
        (BALANCED, [step | {"window": 4} for step in BALANCED], config_of(shuffle_window=4)),
    ],
    ids=["observed", "off", "off, then by rank 0", "balanced, then by rank 0", "by rank 0", "balanced", "window"],
)
def test_the_steps_before_are_left_out(tmp_path, first, second, config):
    report = report_of_resumed(tmp_path, first, second, config)
    trained = [max(step["loads_after"]) / np.mean(step["loads_after"]) - 1 for step in second[20:]]
    as_trained = report.gain.imbalance_after if report.balancing == "balanced" else report.gain.imbalance_before
    assert as_trained == pytest.approx(np.mean(trained))
    assert report.step_time.total == pytest.approx(np.mean([step["step_ms"] for step in second[21:]]))
    (note,) = answer_of([report]).content["notes"]
    assert "up to step 20 the run was balanced in another way, and these steps are left out" in note
    assert report.steps == 60 and report.log.step[0] == 21


def test_a_run_resumed_with_the_same_balancing_is_reported_whole(tmp_path):
    even = [step | {"moved": 0.0, "imbalance_after": step["imbalance_before"]} for step in BALANCED]
    for second in (BALANCED, even, make_steps(ranks=2)):  # no row has to move, another number of ranks
        assert report_of_resumed(tmp_path, BALANCED, second, config_of()).log.step[0] == 1


def test_the_last_window_of_an_epoch_may_have_one_batch(tmp_path):
    """As in a run that was resumed before it, and trains only this step."""
    windows = [step | {"window": 4} for step in BALANCED[:-1]] + [BALANCED[-1] | {"window": 1}]
    report = report_of_resumed(tmp_path, windows, windows, config_of(shuffle_window=4), at=len(windows) - 1)
    assert report.log.step[0] == 1 and not any("balanced in another way" in note for note in report.log.notes)


@pytest.mark.parametrize(
    ("mode", "by_sampler", "is_step_for_step"),
    [("balance", False, False), ("observe", False, True), ("off", False, True), ("off", True, False)],
)
def test_the_steps_of_a_window_have_other_rows_unless_it_is_not_trained(tmp_path, mode, by_sampler, is_step_for_step):
    config = config_of(shuffle_window=4, balance_sampler=by_sampler, shuffler={"mode": mode})
    base, other = report_of(tmp_path / "base", AS_LOADED, BY_STEP, OBSERVE), tmp_path / "other"
    if mode == "off":
        write_unlooked(other, BALANCED, BY_STEP, config=config)
    else:
        report_of(other, BALANCED, BY_STEP, config)
    (beside,) = compare_runs([base, RunReport(RunLog(other))])
    assert (beside.each_step is not None) is (beside.loss is not None) is is_step_for_step
    assert beside.step_ms is not None
