"""What a report says of a run, against what its steps were made of."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest

from commons.cli.report import answer_of
from commons.run_log.advice import advice_of, verdict_on
from commons.run_log.comparison import compare_runs, median_interval
from commons.run_log.reading import RunLog
from commons.run_log.report import Background, RunReport
from commons.run_log.step_time import PARTS
from tests.helpers.jobs.run_logs import (
    AS_LOADED,
    BALANCED,
    BY_STEP,
    EXCHANGE_MS,
    FIXED_MS,
    MS_PER_LOAD,
    SIZES,
    WAIT_MS,
    config_of,
    lines_of,
    make_steps,
    report_of,
    write_run,
    write_unlooked,
)


def unbalanced(folder, steps=AS_LOADED, config=None):
    """The report of a run without a shuffler."""
    return RunReport(RunLog(write_unlooked(folder, steps, SIZES, config=config)))


def changed(figures, **changes):
    """A report or comparison with other numbers."""
    other = copy.copy(figures)
    vars(other).update(changes)
    return other


def rows_of(reports):
    """The table by label."""
    return {label: tuple(cells) for label, *cells in answer_of(reports).sections[0].tables[0].rows}


def sums(name, steps=BALANCED):
    return sum(step[name] for step in steps)


def test_a_balanced_run(tmp_path):
    lines, timed = lines_of(BALANCED, SIZES), BALANCED[SIZES[0] :]
    lines[0] |= {"wait_ms": 99.0, "exchange_ms": 99.0, "gather_ms": 99.0, "hidden_fraction": 0.0}  # in the warm-up
    lines[1] |= {"ms_per_load": None}  # not yet known
    report = RunReport(RunLog(write_run(tmp_path, lines)))
    assert (report.steps, report.ranks, report.rows_per_step, report.balancing) == (60, 4, 32, "balanced")
    gain = report.gain
    assert gain.work == pytest.approx(sums("largest_load_before") / sums("largest_load_after"))
    assert gain.possible == pytest.approx(sums("largest_load_before") / sums("lower_bound"))
    assert gain.worst_before >= gain.imbalance_before > gain.imbalance_after
    # A step without balancing would have had the time of AS_LOADED, whose rows are the same.
    unbalanced, balanced = sums("step_ms", AS_LOADED[SIZES[0] :]), sums("step_ms", timed)
    assert gain.step == pytest.approx(unbalanced / balanced)
    time = report.step_time
    assert time.total == pytest.approx(balanced / len(timed))
    assert list(time.parts()) == list(PARTS[:-1]) and sum(time.parts().values()) == pytest.approx(time.total)
    assert time.work == pytest.approx(MS_PER_LOAD * sums("lower_bound", timed) / len(timed))
    assert (time.exchange, time.waiting, time.rest) == pytest.approx((EXCHANGE_MS, WAIT_MS, FIXED_MS))
    assert report.background == Background(lines[1]["gather_ms"], report.background.plan_ms, None, 0.75)
    gained = f"{gain.work:.2f}× faster, of {gain.possible:.2f}× possible, and a step {gain.step:.2f}×"
    assert advice_of(report).startswith(f"Balancing makes the slowest rank {gained}")


def test_a_run_that_observes(tmp_path):
    report = report_of(tmp_path, AS_LOADED, config=config_of(shuffler={"mode": "observe"}))
    assert report.balancing == "observed"
    timed = AS_LOADED[SIZES[0] :]
    saved = MS_PER_LOAD * (sums("largest_load_before", timed) - sums("largest_load_after", timed))
    assert report.gain.step == pytest.approx(sums("step_ms", timed) / (sums("step_ms", timed) - saved))
    assert report.step_time.rest == pytest.approx(FIXED_MS) and report.step_time.exchange is None
    would = (
        f"the slowest rank {report.gain.work:.2f}× faster and a step {report.gain.step:.2f}× without the time of the "
    )
    assert advice_of(report) == f"Balancing would make {would}exchange: leave --trainer.shuffler.mode observe out."
    (against,) = compare_runs([unbalanced(tmp_path / "base"), report])
    assert against.differences == () and against.work is None  # a gain that is only predicted
    shown = rows_of([report])
    assert (
        shown["balanced"] == ("observed",) and "tokens moved" not in shown and "→" not in shown["imbalance of keys"][0]
    )
    assert report_of(tmp_path, AS_LOADED, config={}).balancing == "observed"  # without config.json, by its numbers


BY_WORK = config_of(balance_sampler=True, enable_balanced_shuffler=False)


def as_read(step):
    """As a sampler's run was logged before it knew the rows dealt in turn: even as they are read."""
    return step | {"imbalance_before": 0.0, "largest_load_before": step["largest_load_after"]}


def test_rows_read_by_their_work_gain_over_the_rows_dealt_in_turn(tmp_path):
    steps = make_steps(exchanges=False)
    report = report_of(tmp_path, steps, config=BY_WORK, before_in_turn=1)
    assert (report.balancing, report.by_work) == ("balanced", True)
    assert report.gain.work == pytest.approx(sums("largest_load_before") / sums("largest_load_after"))
    unbalanced, balanced = (sums("step_ms", each[SIZES[0] :]) for each in (AS_LOADED, steps))
    assert report.gain.step == pytest.approx(unbalanced / balanced)
    # Also if the shuffler, which only logs, takes long.
    for run in (report, report_of(tmp_path, steps, config=BY_WORK, before_in_turn=1, **SLOW_EXCHANGE)):
        assert f"Reading the rows by their work makes the slowest rank {report.gain.work:.2f}× fas" in advice_of(run)
    uneven = report_of(tmp_path, steps, config=BY_WORK, before_in_turn=1, imbalance_after=0.3, optimality_gap=0.3)
    assert advice_of(uneven).endswith("is 30%: use a window (--trainer.shuffle-window 2) or more rows per step.")


@pytest.mark.parametrize("in_turn", [None, 1])
@pytest.mark.parametrize("config", [BY_WORK, config_of(balance_batch=True, single_rank_load=True)])
def test_a_run_whose_rows_were_dealt_by_work_is_compared_with_the_baseline(tmp_path, in_turn, config):
    # They take the time of balanced ones, and look even; the runs differ in nothing else.
    steps = [as_read(step) for step in make_steps(exchanges=False)]
    config = config | {"trainer": config["trainer"] | {"single_rank_load": None}}
    base = unbalanced(tmp_path / "a")
    own = report_of(tmp_path / "b", steps, config=config, before_in_turn=in_turn)
    for run in (own, unbalanced(tmp_path / "c", steps, config)):  # the second one's shuffler is in mode "off"
        is_gain_known = run is own and in_turn == 1
        shown = rows_of([run])
        assert ("→" in shown["imbalance, mean"][0]) is ("  possible" in shown) is is_gain_known
        assert (run.gain.work is not None) is (run.step_time.saved is not None) is is_gain_known
        names = [name for _, name in answer_of([run]).figures]
        assert f"imbalance as {'loaded' if is_gain_known else 'trained'}" in names
        left = f": the imbalance is {run.gain.imbalance_before:.1%}. To measure the gain, train a run without it and "
        assert (left in advice_of(run)) is not is_gain_known
        (against,) = compare_runs([base, run])
        assert against.rows_per_s > 1.1
        for reports in ([base, run], [run, base]):
            said = " ".join(answer_of(reports).content["advice"])
            assert f"it trains {against.rows_per_s:.2f}× the rows per second of {base.log.name}" in said
            assert "leave it off" not in said and "turn on" not in said


@pytest.mark.parametrize("changes", [{"exchange_ms": 1e6}, {"ms_per_load": 1.0}, {"lower_bound": 1e12}])
def test_the_parts_of_a_step_are_no_more_than_the_step(tmp_path, changes):
    report = report_of(tmp_path, **changes)
    parts = report.step_time.parts().values()
    assert sum(parts) == pytest.approx(report.step_time.total) and min(parts) >= 0
    assert "exchange_ms" not in changes or report.gain.step == pytest.approx(0, abs=1e-9)
    assert report.gain.possible == report.gain.work or "lower_bound" not in changes
    steep = report.step_time.rest == 0 and 1 < report.gain.step <= report.gain.work  # no more than the loads
    assert steep or "ms_per_load" not in changes
    assert "rows per second" in answer_of([unbalanced(tmp_path / "base"), report]).answer  # a gain of 0 divides nothing


def test_a_run_without_a_shuffler(tmp_path):
    report = unbalanced(tmp_path)
    gain = report.gain
    assert report.balancing == "off" and gain.work is gain.worst_after is None and report.background is None
    assert report.gain.imbalance_before == pytest.approx(np.mean([step["imbalance_before"] for step in AS_LOADED]))
    assert list(report.step_time.parts()) == ["not split"] and rows_of([report])["balanced"] == ("no",)
    assert "turn on --trainer.enable-balanced-shuffler" in advice_of(report)


def test_windows_are_exchanged_beside_the_steps(tmp_path):
    report = report_of(tmp_path, window=4)
    assert report.window == 4 and report.step_time.exchange is None
    assert report.background.exchange_ms == pytest.approx(EXCHANGE_MS)
    by_work = config_of(balance_sampler=True, enable_balanced_shuffler=False, shuffle_window=4)
    read = report_of(tmp_path, make_steps(exchanges=False), config=by_work, before_in_turn=1)
    assert read.window == 4 and read.gain.possible is None and "exchange of windows" not in rows_of([read])


@pytest.mark.parametrize("config", [config_of(shuffle_window=8), {}], ids=["config", "no config"])
def test_a_shorter_last_window_does_not_change_the_window(tmp_path, config):
    # Two epochs of 11 steps, in windows of 8 and 3, and a line per step.
    windows = ([8] * 8 + [3] * 3) * 2
    lines = [line | {"window": window} for line, window in zip(lines_of(BALANCED, BY_STEP), windows)]
    report = RunReport(RunLog(write_run(tmp_path, lines, config)))
    assert report.window == 8 and rows_of([report])["balanced"] == ("windows of 8",)


@pytest.mark.parametrize("slope", [None, 0.0])
def test_without_a_slope_a_step_has_only_what_was_measured(tmp_path, slope):
    report = report_of(tmp_path, ms_per_load=slope)
    assert list(report.step_time.parts()) == [*PARTS[2:4], "not split"] and report.gain.step is None


def test_the_prediction_of_a_calibration(tmp_path):
    report = report_of(tmp_path, predicted_saving_ms=20.0)
    total = report.step_time.total
    assert report.gain.predicted_step == pytest.approx((total + 20 - EXCHANGE_MS - WAIT_MS) / total)


def test_slow_ranks_are_named_by_the_others(tmp_path):
    speeds = [100.0, 110.0, 60.0, None, 79.0, 105.0, 100.0]
    steps = make_steps(ranks=7, speeds=speeds)
    del steps[6]["rank_speeds"]  # the first line has no speeds
    report = report_of(tmp_path, steps)
    assert [each.rank for each in report.slow_ranks] == [2, 4]
    assert report.slow_ranks[0].speed == pytest.approx(0.6)
    (note,) = answer_of([report]).content["notes"]
    assert "median of the others: rank 2 at 0.60, rank 4 at 0.79; the data are not the reason" in note
    assert report_of(tmp_path, make_steps(count=19, ranks=7, speeds=speeds), [5]).slow_ranks == ()
    assert report_of(tmp_path, make_steps(ranks=2, speeds=[1.0, None])).slow_ranks == ()


def test_what_speeds_save_is_shown_with_the_rank_that_is_given_least(tmp_path):
    steps = [step | {"speed_saving": 0.2, "speeds": [1024, 512, 768, 1024]} for step in make_steps()]
    del steps[6]["speeds"]
    report = report_of(tmp_path, steps)
    assert report.gain.speeds == pytest.approx(0.2)
    assert [(each.rank, each.speed) for each in report.given_less] == [(1, 0.5), (2, 0.75)]
    observed = report_of(tmp_path, steps, config=config_of(shuffler={"speeds": "observe"}))
    row = rows_of([report, observed, report_of(tmp_path)])["saved by speeds, of own work"]
    assert row == ("20.0%, rank 1 at 0.50, 1 more", "20.0% if measured, rank 1 at 0.50, 1 more", "")
    assert report.to_dict()["given_less"][0] == {"rank": 1, "speed": 0.5}


def test_loads_of_a_run_by_speeds_are_not_compared_with_those_of_another(tmp_path):
    runs = [report_of(tmp_path / each, config=config_of(shuffler={"speeds": each})) for each in ("equal", "measured")]
    assert [each.work for each in compare_runs([runs[0], *runs])] == [pytest.approx(1.0), None]


def test_loads_in_different_units_are_not_compared(tmp_path):
    configs = [config_of(), config_of(shuffler={"calibration": "h200.toml"}), config_of() | {"shuffler_type": "tokens"}]
    runs = [report_of(tmp_path / str(number), config=config) for number, config in enumerate(configs)]
    assert [each.work for each in compare_runs([runs[0], *runs])] == [pytest.approx(1.0), None, None]
    assert sum("have different units" in note for note in answer_of([runs[0], *runs]).content["notes"]) == 2
    against = compare_runs([unbalanced(tmp_path / "base"), *runs])  # whose loads are each run's own as loaded
    assert all(each.work == report.gain.work and each.compares for each, report in zip(against, runs))


def test_a_run_whose_ranks_have_changed(tmp_path):
    """As after a lost host has come back; speeds are those of the lines with the last number of ranks."""
    two = make_steps(ranks=2, speeds=[3.0, 1.0])
    steps = [*two, *make_steps(speeds=[1.0] * 4), *two]
    steps = [step | {"step": number} for number, step in enumerate(steps, 1)]
    report = report_of(tmp_path, steps, [10] * 18)
    assert report.log.num_ranks == (2, 4, 2) and report.ranks == 2 and report.steps == 180
    assert [(each.rank, each.speed) for each in report.slow_ranks] == [(1, pytest.approx(1 / 3))]
    changed, slow = answer_of([report]).content["notes"]
    assert "the number of ranks has changed: 2, 4, 2; " in changed and "rank 1 at 0.33; the data are" in slow


SAME = {"largest_load_after": 5e8, "largest_load_before": 5e8}
UNEVEN = SAME | {"imbalance_before": 1.2}
SLOW_EXCHANGE = {"exchange_ms": 400.0, "step_ms": 900.0, "total_ms": 9000.0}
LITTLE_GAIN = {"largest_load_before": 5.15e8, "largest_load_after": 5e8}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (SAME | {"gated": 0.9}, "in 90% of the steps the gain was below --trainer.shuffler.min-gain."),
        (SAME | {"imbalance_before": 0.01}, "the ranks have even loads without balancing, leave it off."),
        (UNEVEN | {"lower_bound": 5e8, "window": 4}, "no plan can split: use a window (--trainer.shuffle-window 8)"),
        (UNEVEN | {"lower_bound": 3e8}, "no plan within the settings"),
        (SLOW_EXCHANGE, "Balancing costs more than it saves: 400.5 ms"),
        (SLOW_EXCHANGE, " ms; leave it off."),  # a gate would have no effect on steps that gain much
        (SLOW_EXCHANGE | LITTLE_GAIN, "gain unbalanced (--trainer.shuffler.min-gain 0.05), or leave it off."),
        ({"imbalance_after": 0.01}, "×."),  # nothing after the gain
        ({"imbalance_after": 0.3, "window": 4}, "×."),
        ({"imbalance_after": 0.3, "optimality_gap": 0.0}, "imbalance of 30% comes from rows that no plan can split"),
        ({"imbalance_after": 0.3, "optimality_gap": 0.3}, "the remaining imbalance is 30%: free row counts (--tr"),
    ],
)
def test_why_a_run_gains_less(tmp_path, changes, expected):
    assert expected in advice_of(report_of(tmp_path, **changes))
    assert "shuffle-window" not in advice_of(report_of(tmp_path, config=config_of(budget_per_rank=4.0), **changes))
    by_work = advice_of(report_of(tmp_path, config=BY_WORK, before_in_turn=1, **changes))
    assert not any(f"--trainer.shuffler.{name}" in by_work for name in ("slack", "min-gain", "no-equal-size"))


def test_a_single_rank_and_even_ranks_have_nothing_to_gain(tmp_path):
    for run in (report_of(tmp_path, make_steps(ranks=1)), unbalanced(tmp_path, make_steps(ranks=1, balances=False))):
        assert "only one rank" in advice_of(run)
    observed = report_of(tmp_path, config=config_of(shuffler={"mode": "observe"}), **SAME | {"imbalance_before": 0.01})
    assert advice_of(observed).startswith("Nothing to gain: the ranks have even loads ")
    for imbalance, said in ((0.001, "leave it off"), (math.nan, "The log has no loads of the ranks: ")):
        assert said in advice_of(unbalanced(tmp_path, [step | {"imbalance_before": imbalance} for step in AS_LOADED]))


def test_runs_beside_each_other(tmp_path):
    base = unbalanced(tmp_path / "a")
    shifted = [step | {"loss": step["loss"] + 1e-3 * (step["step"] == 60)} for step in BALANCED]
    other = report_of(tmp_path / "b", shifted, config=config_of(run_dir="y", seed=1))
    (against,) = compare_runs([base, other])
    assert against.differences == () and against.work == other.gain.work
    timed = slice(SIZES[0], None)
    assert against.rows_per_s == pytest.approx(sums("step_ms", AS_LOADED[timed]) / sums("step_ms", BALANCED[timed]))
    assert against.step_ms == pytest.approx(base.speed.step_ms / other.speed.step_ms)
    assert against.loss.lines == 8 and against.loss.step == 60
    assert against.loss.largest == against.loss.at_end == pytest.approx(1e-4)
    trains = "trains {:.2f}× the rows per second of " + f"{base.log.name}."
    assert verdict_on(against, base, other).endswith(trains.format(against.rows_per_s))
    slower = changed(against, rows_per_s=0.8)
    assert "but its own steps show a speed-up of" in verdict_on(slower, base, other)
    # Against a run that is balanced, or dealt out by work, a run gains less than over its own rows as loaded.
    # Nor does a run gain in its steps if it only observes, or if its steps have other rows.
    same = changed(against, rows_per_s=1.0)
    pairs = [(other, other), (changed(base, by_work=True), other), (base, changed(other, balancing="observed"))]
    assert all(verdict_on(same, *pair).endswith(trains.format(1.0)) for pair in pairs)
    assert verdict_on(changed(same, equal_steps=False), base, other).endswith(trains.format(1.0))
    assert verdict_on(changed(against, rows_per_s=None), base, other) == ""
    for more, said in ((), "4."), (("rows per step: 8 and 16",), "4 and 1 more."):
        apart = changed(against, differences=("ranks: 2 and 4", *more))
        assert verdict_on(apart, base, other).endswith(f"besides balancing, they differ in ranks: 2 and {said}")
    even = changed(other, gain=dataclasses.replace(other.gain, work=1.0))
    assert [f"yet it trains {each.rows_per_s:.2f}×" in advice_of(even, each) for each in (against, slower, apart)] == [
        *(True, False, False)
    ]
    json.dumps(against.to_dict())
    # A measured speed-up counts more than the costs within its steps.
    dear = report_of(tmp_path / "c", **SLOW_EXCHANGE)
    assert ["costs more" in advice_of(dear, each) for each in (None, against)] == [True, False]


def test_runs_that_do_not_compare_say_why(tmp_path):
    base = report_of(tmp_path / "a")
    config = config_of(seed=2, train_batch_size=4, shuffle_window=2) | {"model": {"hidden_size": 32, "new": 1}}
    other = report_of(tmp_path / "b", make_steps(ranks=2, rows=4), [5, 5], config=config)
    (against,) = compare_runs([base, other])
    assert against.differences == (
        "ranks: 4 and 2",
        "rows per step: 32 and 8",
        "trainer.train_batch_size: 8 and 4",
        "trainer.seed: 1 and 2",
        "model.hidden_size: 64 and 32",
    )
    assert against.loss is against.work is None  # no line is of the same steps
    unknown = report_of(tmp_path / "c", config={})
    for pair in ([base, unknown], [unknown, base]):
        assert compare_runs(pair)[0].differences == ("settings, which are unknown for one run",)


def test_a_budget_is_compared_by_rows_and_not_by_steps(tmp_path):
    folder = write_unlooked(tmp_path / "a", AS_LOADED, SIZES)
    (folder / "config.json").write_text(json.dumps(config_of(schedule_in="steps", budget_per_rank=None)))
    budget = {"balance_sampler": True, "budget_per_rank": 4.0, "train_batch_size": 64, "schedule_in": "rows"}
    halved = ("num_rows", "largest_load_after", "step_ms")
    smaller = [step | {name: step[name] / 2 for name in halved} for step in BALANCED]
    base = RunReport(RunLog(folder))
    other = report_of(tmp_path / "b", smaller, config=config_of(**budget), before_in_turn=1)
    (against,) = compare_runs([base, other])
    assert against.differences == () and against.compares and not against.equal_steps
    assert (against.step_ms, against.each_step, against.loss, against.evaluated_at, against.work) == (None,) * 5
    assert "are not the same" in answer_of([base, other]).content["notes"][-1]
    sizes = ((BALANCED, 8.0), (smaller, 4.0))  # budgets log their loads, which compare by row
    configs = [config_of(**budget | {"budget_per_rank": rows}) for _, rows in sizes]
    two = [report_of(tmp_path / str(i), sizes[i][0], config=configs[i], before_in_turn=1) for i in (0, 1)]
    assert compare_runs(two)[0].work == pytest.approx(1.0)


def test_runs_that_log_every_step_are_compared_step_by_step(tmp_path):
    """A machine that becomes slower and slower: each pair of steps still has the same ratio."""
    base, other = (
        report_of(tmp_path / name, [step | {"step_ms": ratio * (9 + step["step"])} for step in BALANCED], BY_STEP)
        for name, ratio in (("a", 1.25), ("b", 1.0))
    )
    (beside,) = compare_runs([base, other])
    assert dataclasses.astuple(beside.each_step) == pytest.approx((1.25, 1.25, 1.25))
    assert json.loads(json.dumps(beside.to_dict()))["each_step"]["median"] == beside.each_step.median
    assert compare_runs([base, report_of(tmp_path / "c")])[0].each_step is None  # lines of several steps
    assert median_interval(np.array([1.0, 2.0, 9.0])) == (1.0, 9.0)
    for count in (6, 7):  # the first line is not timed; the whole range of five contains the median with 94 %
        short = [report_of(tmp_path / f"{name}{count}", BALANCED[:count], BY_STEP) for name in "ab"]
        assert (compare_runs(short)[0].each_step is None) == (count == 6)


@pytest.mark.parametrize("count", [6, 10, 20, 50, 84, 200, 1000])
def test_the_interval_of_a_median_has_its_confidence(count):
    """By the binomial distribution of the values below the median; a narrower interval would have less than 95 %."""
    low, high = median_interval(np.arange(float(count)))
    assert low + high == count - 1
    outside = [2 * sum(math.comb(count, below) for below in range(int(low) + more)) / 2**count for more in (1, 2)]
    assert outside[0] <= 0.05 < outside[1]


def test_metrics_are_compared_with_their_standard_errors(tmp_path):
    first = {"auc": 0.75, "auc_se": 0.03, "loss": 0.5, "loss_se": None, "log_se": 2.0, "HR@10": None}
    evaluated = (first, {"auc": 0.8, "auc_se": 0.04, "loss": 0.4, "loss_se": 0.1, "log_se": 2.0})
    reports = []
    for name, metrics in zip("ab", evaluated):
        line = {"schema": 1, "step": 60, **{f"eval_{metric}": value for metric, value in metrics.items()}}
        reports.append(RunReport(RunLog(write_run(tmp_path / name, [*lines_of(BALANCED, SIZES), line]))))
    (against,) = compare_runs(reports)
    assert against.evaluation == pytest.approx({"auc": 0.05, "loss": -0.1, "log_se": 0})
    assert against.standard_errors == pytest.approx({"auc": 0.05})  # of 3, 4, 5
    rows = rows_of(reports)
    assert rows["eval auc"] == ("0.7500 ± 0.0300", "0.8000 ± 0.0400") and rows["eval loss"] == (
        "0.5000",
        "0.4000 ± 0.1000",
    )
    assert rows["eval auc, difference"] == ("", "+5.0e-02 ± 5.0e-02") and "eval auc_se" not in rows
