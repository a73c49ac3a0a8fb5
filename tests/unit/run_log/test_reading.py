"""What a log says when it is read: every number, and every line that is none in one sentence."""

import json
import math
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.run_log.comparison import compare_runs
from commons.run_log.files import write_summary
from commons.run_log.reading import RunLog, read_runs
from commons.run_log.report import RunReport
from tests.helpers.jobs.run_logs import CONFIG, line_of, lines_of, make_steps, write_run

STEPS = make_steps()
LINES = lines_of(STEPS, [5] * 11)


def test_a_log_is_read_as_columns(tmp_path):
    evaluation = {"schema": 1, "step": 30, "eval_auc": 0.7, "eval_rows": 64, "eval_unknown": None}
    log = RunLog(write_run(tmp_path, [*LINES[:6], evaluation, *LINES[6:]]))
    assert log.step.tolist() == list(range(5, 61, 5)) and set(log.steps) == {5}
    assert log.column("loss").tolist() == [line["loss"] for line in LINES]
    assert np.isnan(log.column("mfu")).all() and log.mean("mfu") is None
    assert [each.tolist() for each in log.of_ranks["loads_after"]] == [line["loads_after"] for line in LINES]
    ((step, metrics),) = log.evaluations
    assert step == 30 and metrics["auc"] == 0.7 and math.isnan(metrics["unknown"])
    assert log.num_ranks == (4,) and log.notes == () and log.config == CONFIG
    assert log.timed.tolist() == [False] + [True] * 11


@given(st.lists(st.integers(1, 9), max_size=20), st.sampled_from(["imbalance_before", "largest_load_after", "gated"]))
def test_means_do_not_depend_on_how_steps_were_put_into_lines(tmp_path_factory, sizes, name):
    log = RunLog(write_run(tmp_path_factory.mktemp("run"), lines_of(STEPS, sizes)))
    assert log.steps.sum() == 60
    assert log.mean(name) == pytest.approx(np.mean([step[name] for step in STEPS]))
    timed = slice(int(log.steps[0]) if len(log.steps) > 2 else 0, None)  # without the first line, which has the warm-up
    times = [step["step_ms"] for step in STEPS[timed]]
    assert log.mean(log.mean_step_ms, log.timed) == pytest.approx(np.mean(times))
    assert log.rate("rows_per_s") == pytest.approx(32e3 / np.mean(times))
    tokens = sum(step["num_tokens"] for step in STEPS[timed])
    assert log.rate("tokens_per_s") == pytest.approx(tokens / sum(times) * 1e3)


def test_warm_ups_of_resumed_runs_are_no_speed(tmp_path):
    slow = [step | {"step_ms": 50 * step["step_ms"]} if step["step"] in (1, 21, 41) else step for step in STEPS]
    lines = lines_of(slow, [5] * 12)
    log = RunLog(write_run(tmp_path / "run", [lines[0], *({**line, "resumed": 1} for line in lines[1:])]))
    assert log.timed.tolist() == [False] + [True] * 11  # a warm-up in every line
    for line in (4, 8):
        lines[line]["resumed"] = 1
    log = RunLog(write_run(tmp_path / "run", lines))
    times = [step["step_ms"] for number, step in enumerate(STEPS) if number // 5 not in (0, 4, 8)]
    assert log.rate("rows_per_s") == pytest.approx(32e3 / np.mean(times))
    assert RunLog(write_run(tmp_path / "run", lines[4:6])).timed.all()


def test_a_long_log_takes_at_most_four_times_its_size_of_memory(tmp_path):
    folder = write_run(tmp_path / "run", lines_of(STEPS, [1] * 60) * 20)
    tracemalloc.start()
    try:
        RunLog(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * (folder / "log.jsonl").stat().st_size


@pytest.mark.parametrize("cut", [2, 40])
def test_the_end_of_a_line_that_is_being_written_is_left_out(tmp_path, cut):
    folder = write_run(tmp_path, LINES)
    whole = (folder / "log.jsonl").read_bytes()
    (folder / "log.jsonl").write_bytes(whole[:-cut])
    log = RunLog(folder)
    assert len(log.step) == 11 and "incomplete" in log.notes[0]
    (folder / "log.jsonl").write_bytes(whole[:-1])  # all but the end of the line
    assert len(RunLog(folder).step) == 12


def test_settings_and_summary_may_be_missing(tmp_path):
    folder = write_run(tmp_path, LINES, config=None, summary=False)
    (folder / "config.json").write_text("{")
    (folder / "summary.json").write_text("[1]")
    log = RunLog(folder)
    assert [note.split(":")[0] for note in log.notes] == ["no readable config.json", "no readable summary.json"]
    assert RunReport(log).balancing == "balanced"


GOOD = json.dumps(LINES[0]) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "log.jsonl has no line of a training step; a line is written every 5 steps: wait for it"),
        (json.dumps({"schema": 1, "step": 3, "eval_auc": 1.0}) + "\n", "has no line of a training step; a line"),
        (GOOD + "{\n" + GOOD, "log.jsonl line 2 is not a line of a log .JSONDecodeError: .*; a line is an object"),
        (GOOD + "7\n", "line 2 is not a line of a log"),
        (GOOD + '{"schema": 1, "loss": 1.0}\n', "line 2 is not a line of a log \\(KeyError: 'step'\\)"),
        (GOOD + '{"step": 9, "schema": 2, "loss": 1.0}\n', "line 2 has schema 2; evenrank .* reads schema 1: use the"),
        (GOOD + f'{{"step": {10**30}, "schema": 1}}\n', "line 2 is not a line of a log .OverflowError"),
        (GOOD + '{"step": 9, "schema": 1, "loss": "low"}\n', "line 2 is not a line of a log .*'low'"),
        (GOOD + '{"step": 9, "schema": 1, "loads_before": [1, "a"]}\n', "line 2 is not a line of a log"),
        ("\x00\x01\xff\n", "line 1 is not a line of a log"),
    ],
)
def test_what_is_no_log_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "log.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        RunLog(tmp_path)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_runs_name_those_beside_or_within(tmp_path):
    run = write_run(tmp_path / "runs" / "a", LINES)
    (tmp_path / "other").mkdir()
    for name, such in (
        ("runs/no", f", such as {run}"),
        ("runs", f", such as {run}"),
        ("missing/no", ""),
        ("other", ""),
    ):
        with pytest.raises(FileNotFoundError, match=rf"{name} has no log.jsonl; .* with a log{re.escape(such)}$"):
            read_runs([tmp_path / name])
    (tmp_path / "link").symlink_to(run)
    for again in (run, tmp_path / "link"):
        with pytest.raises(ValueError, match="is given twice; a run cannot be compared with itself: leave one out"):
            read_runs([run, again])
    for number in range(12):
        write_run(tmp_path / "runs" / f"b{number:02d}", LINES)
    with pytest.raises(FileNotFoundError, match=r"such as .*b06$"):
        read_runs([tmp_path / "runs"])


def test_infinity_is_not_known(tmp_path):
    """A loss that diverges makes no number of the report infinite."""
    folder = write_run(tmp_path, LINES)
    text = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(re.sub('("loss": |"loads_after": .)[^,]*', r"\1Infinity", text))
    log = RunLog(folder)
    assert all(math.isnan(loads[0]) and loads[1:].all() for loads in log.of_ranks["loads_after"])
    json.dumps(RunReport(log).to_dict(), allow_nan=False)


def test_numbers_that_are_not_known_are_null(tmp_path):
    lines = [
        line | {"loss": None, "step_ms": None, "total_ms": None, "ranks": None}
        for line in map(line_of, [STEPS[:5], STEPS[5:]])
    ]
    report = RunReport(RunLog(write_run(tmp_path, lines)))
    assert report.loss is None and report.ranks is None and report.step_time is None
    assert report.speed.step_ms is None and report.speed.rows_per_s is None
    assert report.gain.work is not None and report.gain.step is None


def test_a_loss_that_is_not_finite_is_said_and_has_no_difference(tmp_path):
    lines = lines_of(STEPS, [1] * 60)
    base, other = (write_run(tmp_path / name, lines) for name in "ab")
    assert compare_runs([RunReport(RunLog(folder)) for folder in (base, other)])[0].loss.at_end == 0
    write_run(other, [line | ({"loss": None} if line["step"] > 7 else {}) for line in lines])
    reports = [RunReport(RunLog(folder)) for folder in (base, other)]
    said = f"the loss is NaN or infinite in {len(lines) - 7} of {len(lines)} lines, first at step 8"
    assert [report.log.notes for report in reports] == [(), (said,)] and compare_runs(reports)[0].loss is None


@pytest.mark.parametrize(
    ("earlier", "kept"),
    [('{"loss": 1.5, "steps": 8}', {"loss": 1.5}), ("{", {}), ("[1]", {}), ("null", {}), (None, {})],
    ids=["a summary", "an incomplete one", "a list", "null", "none"],
)
def test_a_run_that_trains_no_step_keeps_an_earlier_summary(earlier, kept, tmp_path):
    path = tmp_path / "summary.json"
    if earlier is not None:
        path.write_text(earlier)
    write_summary(path, {"steps": 0}, trained=False)
    assert json.loads(path.read_text()) == {**kept, "steps": 0}
    write_summary(path, {"steps": 3}, trained=True)
    assert json.loads(path.read_text()) == {"steps": 3}
