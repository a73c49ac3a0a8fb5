"""Whether a report sees that time does not follow the loads, with times made of loads, or of rows × longest."""

from __future__ import annotations

import numpy as np
import pytest

from commons.cli.report import answer_of
from commons.run_log.advice import warning_of
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from tests.helpers.jobs.run_logs import config_of, line_of, make_steps, write_run

RNG = np.random.default_rng(5)


def report_of(folder, steps):
    return RunReport(RunLog(write_run(folder, [line_of([step]) for step in steps], config_of())))


def with_own(steps, own_ms):
    return [step | {"own_ms": own_ms(step)} for step in steps]


def of_loads(step):
    return [2e-6 * load * RNG.normal(1, 0.05) for load in step["loads_after"]]


def padded(step):
    return RNG.lognormal(3, 0.5, len(step["loads_after"])).tolist()


def test_times_that_follow_the_loads(tmp_path):
    report = report_of(tmp_path, with_own(make_steps(), of_loads))
    fit, log = report.time_fit, report.log
    loads, times = (np.concatenate(log.of_ranks[name][1:]) for name in ("loads_after", "own_ms"))
    assert (fit.of, fit.points) == ("ranks", len(loads)) == ("ranks", 59 * 4)
    assert fit.r_squared == pytest.approx(np.corrcoef(loads, times)[0, 1] ** 2) and fit.follows
    assert warning_of(report) == "" and report.to_dict()["time_fit"]["r_squared"] == fit.r_squared


def test_times_that_do_not_follow_the_loads(tmp_path):
    report = report_of(tmp_path, with_own(make_steps(), padded))
    assert report.time_fit.r_squared < 0.1
    warning = warning_of(report)
    assert warning.startswith(f"Time does not follow the loads (R² {report.time_fit.r_squared:.2f}, ")
    assert (
        "the model pads to its longest row, other work" in warning
        and answer_of([report]).content["advice"][0] == warning
    )


def test_times_that_fall_with_the_loads_do_not_follow_them(tmp_path):
    falling = with_own(make_steps(), lambda step: [1e3 - 1e-6 * load for load in step["loads_after"]])
    assert report_of(tmp_path, falling).time_fit.r_squared == 0


def test_a_stall_is_left_out(tmp_path):
    steps = with_own(make_steps(), of_loads)
    steps[30]["own_ms"][2] = steps[40]["own_ms"][1] = 1e6
    fit = report_of(tmp_path, steps).time_fit
    assert fit.points == 59 * 4 - 2 and fit.r_squared > 0.9


def test_an_old_log_is_fitted_by_its_steps(tmp_path):
    fit = report_of(tmp_path, make_steps(count=40)).time_fit
    assert (fit.of, fit.points) == ("steps", 39) and fit.r_squared == pytest.approx(1)
    slow = [step | {"step_ms": float(RNG.lognormal(3, 0.5))} for step in make_steps(count=40)]
    report = report_of(tmp_path, slow)
    assert report.time_fit.r_squared < 0.3 and "most of a step does not depend on the loads" in warning_of(report)


@pytest.mark.parametrize("steps", [make_steps(count=20), make_steps(count=60, rows=400, sigma=0.2)])
def test_few_points_or_equal_loads_say_nothing(tmp_path, steps):
    assert report_of(tmp_path, steps).time_fit is None


def test_ranks_and_lines_without_a_time(tmp_path):
    lines = [line_of([step]) for step in with_own(make_steps(), of_loads)]
    lines[10]["own_ms"] = [None] * 4
    lines[11]["own_ms"][3] = None
    lines[14]["own_ms"] = None
    del lines[12]["own_ms"], lines[13]["loads_after"]
    report = RunReport(RunLog(write_run(tmp_path, lines, config_of())))
    assert report.time_fit.points == 59 * 4 - 4 - 1 - 4 - 4 - 4
