"""Whether the times of a run's steps follow its loads, and the warning if they do not."""

import numpy as np
import pytest

from commons.cli.report import answer_of
from commons.run_log.advice import warning_of
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from commons.run_log.step_time import fit_times
from tests.helpers.jobs.run_logs import (
    AS_LOADED,
    BALANCED,
    BY_STEP,
    SIZES,
    config_of,
    line_of,
    lines_of,
    make_steps,
    report_of,
    write_run,
)

RNG = np.random.default_rng(5)


def with_own(steps, own_ms):
    return [step | {"own_ms": own_ms(step)} for step in steps]


def of_loads(step):
    return [2e-6 * load + RNG.uniform(-2, 2) for load in step["loads_after"]]


def test_times_that_follow_the_loads(tmp_path):
    report = report_of(tmp_path, with_own(make_steps(), of_loads), BY_STEP)
    fit, log = report.time_fit, report.log
    loads, times = (np.concatenate(log.of_ranks[name][1:]) for name in ("loads_after", "own_ms"))
    assert (fit.of, fit.points) == ("ranks", len(loads)) == ("ranks", 59 * 4)
    assert fit.r_squared == pytest.approx(np.corrcoef(loads, times)[0, 1] ** 2) and fit.follows
    assert (fit.ms_per_load, fit.fixed_ms) == pytest.approx(tuple(np.polyfit(loads, times, 1)))
    assert warning_of(report) == "" and report.to_dict()["time_fit"]["r_squared"] == fit.r_squared


def test_times_of_ranks_of_another_speed_follow_the_loads(tmp_path):
    steps = [step | {"speeds": [1024, 512, 1024, 1024]} for step in AS_LOADED]
    steps = with_own(steps, lambda step: [load / each for load, each in zip(step["loads_after"], step["speeds"])])
    fit = report_of(tmp_path, steps, BY_STEP).time_fit
    assert fit.of == "ranks" and (fit.r_squared, fit.ms_per_load) == pytest.approx((1.0, 1 / 1024))


def test_times_that_do_not_follow_the_loads(tmp_path):
    padded = with_own(make_steps(), lambda step: RNG.lognormal(3, 0.5, len(step["loads_after"])).tolist())
    report = report_of(tmp_path, padded, BY_STEP)
    assert report.time_fit.r_squared < 0.1
    warning = warning_of(report)
    fit = f"(R² {report.time_fit.r_squared:.2f}, {report.time_fit.points} points of ranks and steps)"
    assert warning.startswith(f"Time does not follow the loads {fit}, ")
    assert "the model pads to its longest row, other work ran on the machine. If " in warning
    assert answer_of([report]).content["advice"][0] == warning
    for slope in (-1e-6, 0.0):
        steps = with_own(make_steps(), lambda step: [1e3 + slope * load for load in step["loads_after"]])
        assert report_of(tmp_path, steps, BY_STEP).time_fit.r_squared == 0


def test_an_old_log_is_fitted_by_its_steps(tmp_path):
    for steps, mode in ((BALANCED[:40], "balance"), (AS_LOADED[:40], "observe")):
        fit = report_of(tmp_path, steps, BY_STEP, config_of(shuffler={"mode": mode})).time_fit
        assert (fit.of, fit.points) == ("steps", 39) and fit.r_squared == pytest.approx(1)
    slow = [step | {"step_ms": float(RNG.lognormal(3, 0.5))} for step in make_steps(count=40)]
    report = report_of(tmp_path, slow, BY_STEP)
    assert report.time_fit.r_squared < 0.3
    for said in ("39 points of lines of the log)", "or most of a step does not depend on the loads"):
        assert said in warning_of(report)


@pytest.mark.parametrize(
    ("count", "spread", "stalls", "points"),
    [(20, 0.11, 0, 20), (19, 0.11, 0, None), (20, 0.09, 0, None), (100, 0.5, 5, 95), (100, 0.5, 6, 100)],
)
def test_few_points_and_equal_loads_make_no_fit_and_few_stalls_are_left_out(count, spread, stalls, points):
    loads = 1 + spread * (-1.0) ** np.arange(count)
    times = 2 * loads + np.where(np.arange(count) < stalls, 6e4, 0) + RNG.normal(0, 1e-3, count)
    fit = fit_times("steps", loads, times)
    assert (fit and fit.points) == points


def test_ranks_and_lines_without_a_time(tmp_path):
    lines = [line_of([step]) for step in with_own(make_steps(), of_loads)]
    lines[10]["own_ms"] = [None] * 4
    lines[11]["own_ms"][3] = None
    lines[14]["own_ms"] = None
    del lines[12]["own_ms"], lines[13]["loads_after"]
    report = RunReport(RunLog(write_run(tmp_path, lines)))
    assert report.time_fit.points == 59 * 4 - 4 - 1 - 4 - 4 - 4


@pytest.mark.parametrize(("lines", "is_known"), [([2], False), ([2, 3, 5], True), ([6], True)])
def test_a_slope_that_most_later_lines_lack_is_noise(tmp_path, lines, is_known):
    written = [
        line | ({} if number in lines else {"ms_per_load": None})
        for number, line in enumerate(lines_of(BALANCED, SIZES))
    ]
    report = RunReport(RunLog(write_run(tmp_path, written)))
    assert (report.step_time.saved is not None) is (report.gain.step is not None) is is_known
