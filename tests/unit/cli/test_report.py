"""`evenrank report`: its table, JSON, page and pictures, and what it says of folders that are no runs."""

import html
import itertools
import re

import pytest
from matplotlib.figure import Figure

from commons.cli.pictures import WIDTH
from commons.cli.report_pictures import curve_of, pictures_of
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from commons.run_log.step_time import PARTS
from tests.helpers.documents.documented import ROOT
from tests.helpers.documents.pages import read_page
from tests.helpers.jobs.run_logs import config_of, line_of, lines_of, make_steps, write_run, write_unlooked

SIZES = [10] * 5


@pytest.fixture
def runs(here):
    """Two runs of the same rows in the working directory, without and with balancing."""
    write_unlooked(here / "runs" / "a", make_steps(balances=False), SIZES)
    lines = [*lines_of(make_steps(), SIZES), {"schema": 1, "step": 60, "eval_auc": 0.75, "eval_none": None}]
    write_run(here / "runs" / "b", lines)
    return here / "runs"


def test_one_run(runs, told, asked):
    printed = told("report", "runs/b")
    assert max(map(len, printed.splitlines())) <= 120
    for shown in ("runs/b", "each batch", "ranks", "work at the bound", "hidden", "75.0%", "eval auc", "0.7500"):
        assert shown in printed
    assert "beside" not in printed.replace("beside the steps", "") and "eval none" not in printed
    content = asked("report", "runs/b")
    (run,) = content["runs"]
    assert run["run"] == "runs/b" and run["gain"]["work"] > 1.2 and content["beside_the_first"] == []
    assert run["evaluation"] == {"step": 60, "auc": 0.75, "none": None}
    speed, gain, time = run["speed"], run["gain"], run["step_time_ms"]
    cells = {
        "median step, ms": f"{speed['step_ms']:,.1f}",
        "rows per second": f"{speed['rows_per_s']:,.1f}",
        "tokens per second": f"{speed['tokens_per_s']:,.0f}",
        "imbalance, mean": f"{gain['imbalance_before']:.1%} → {gain['imbalance_after']:.1%}",
        "imbalance, worst line": f"{gain['worst_before']:.1%} → {gain['worst_after']:.1%}",
        "speed-up of the slowest rank": f"{gain['work']:.2f}×",
        "possible": f"{gain['possible']:.2f}×",
        "speed-up of a step, measured": f"{gain['step']:.2f}×",
        "tokens moved": f"{gain['token_fraction_moved']:.1%}",
        "imbalance of keys": f"{gain['lookups_before']:.1%} → {gain['lookups_after']:.1%}",
        "kB sent by rank 0 in a step": "2.0",
        "work at the bound": f"{time['work']:,.1f} ({time['work'] / time['total']:.0%})",
        "all of it": f"{time['total']:,.1f}",
        "balancing takes off": f"{time['saved']:,.1f}",
        "gather": "1.5",
        "plan": "0.5",
    }
    assert cells.items() <= {tuple(re.split(r" {2,}", line.strip())) for line in printed.splitlines()}


def test_runs_beside_each_other(runs, told, asked):
    write_run(runs / "c", lines_of(make_steps(ranks=2), SIZES), config_of(seed=7))
    printed = " ".join(told("report", "runs/a", "runs/b", "runs/c").split())
    assert "beside the first" in printed and "speed-up, rows per second" in printed
    assert "runs/c and runs/a differ in ranks: 4 and 2; rows per step: 32 and 16; trainer.seed: 1 and 7" in printed
    content = asked("report", "runs/a", "runs/b", "runs/c")
    beside = content["beside_the_first"]
    assert not any("turn on" in line for line in content["advice"])  # it is on in runs/b
    assert [run["evaluation"] for run in content["runs"]] == [None, {"step": 60, "auc": 0.75, "none": None}, None]
    assert [each["run"] for each in beside] == ["runs/b", "runs/c"] and beside[0]["loss"]["largest"] == 0
    assert f"{beside[0]['rows_per_s']:.2f}×" in printed


def test_long_names_leave_room_for_the_numbers(runs, told):
    folder = runs.rename(runs.parent / ("of_a_long_name" * 8))
    printed = told("report", str(folder / "a"), str(folder / "b"))
    assert re.search(r"^  rows per second +[\d.]+ +[\d.]+$", printed, re.MULTILINE)


def test_two_runs_on_unlike_machines_are_compared_in_one_sentence(runs, asked):
    write_run(runs / "c", lines_of([step | {"step_ms": 2 * step["step_ms"]} for step in make_steps()], SIZES))
    (sentence,) = (line for line in asked("report", "runs/a", "runs/c")["advice"] if "the rows per second of" in line)
    assert "but its own steps show a speed-up of" in sentence


def test_notes_say_what_is_missing(runs, told):
    (runs / "b" / "summary.json").unlink()
    (runs / "b" / "config.json").unlink()
    with (runs / "b" / "log.jsonl").open("a") as log:
        log.write('{"schema": 1, "st')
    printed = " ".join(told("report", "runs/b").split())
    for note in ("the last line of the log is incomplete", "no readable config.json", "no readable summary.json"):
        assert f"runs/b: {note}" in printed


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["runs/a"], marks=pytest.mark.slow),
        pytest.param(["runs/b"], marks=pytest.mark.slow),
        ["runs/a", "runs/b"],
    ],
)
def test_a_page_and_pictures(runs, told, asked, names):
    assert "written: r.html\nwritten: r.png\n" in told("report", *names, "--html", "r.html", "--figure", "r.png")
    assert (runs.parent / "r.png").stat().st_size > 20_000
    text, words = read_page(runs.parent / "r.html")
    pictures = {("runs/a",): 3, ("runs/b",): 6, ("runs/a", "runs/b"): 3}
    assert text.count("<svg") == pictures[tuple(names)]
    assert f"evenrank report {' '.join(names)} --html r.html --figure r.png" in words
    content = asked("report", *names)
    assert all("".join(line.split()) in "".join(words.split()) for line in content["advice"])  # flags are apart
    for run in content["runs"]:
        assert f"{run['speed']['rows_per_s']:,.1f}" in words


def test_several_runs_are_compared_best_first_in_any_order(runs, told, asked):
    fast = [step | {"step_ms": 0.8 * step["step_ms"]} for step in make_steps()]
    write_run(runs / "c", lines_of(fast, SIZES))
    write_run(runs / "d", lines_of(make_steps(ranks=2), SIZES), config_of(seed=7))
    # Of two unbalanced runs, the faster one is the base.
    slow = [step | {"step_ms": 2 * step["step_ms"]} for step in make_steps(balances=False)]
    write_unlooked(runs / "0", slow, SIZES)
    names = [f"runs/{name}" for name in "0abcd"]
    contents = [asked("report", *order) for order in list(itertools.permutations(names))[::25]]
    (answer,) = {content["advice"][-1] for content in contents}
    rate = {run["run"]: run["speed"]["rows_per_s"] for run in contents[0]["runs"]}
    best, other = (rate[name] / rate["runs/a"] for name in ("runs/c", "runs/b"))
    assert best > other > 1
    assert answer == (
        f"runs/c trains {best:.2f}× the rows per second of runs/a, runs/b {other:.2f}×, runs/0 0.50×; "
        "runs/d cannot be compared with it."
    )
    # Of balanced runs, the slowest one is the base.
    of_balanced = f"runs/c trains {best / other:.2f}× the rows per second of runs/b."
    assert {asked("report", *order)["advice"][-1] for order in itertools.permutations(names[2:4])} == {of_balanced}
    for order in (names[1:] + names[:1], names[::-1]):
        told("report", *order, "--html", "r.html")
        text, words = read_page(runs.parent / "r.html")
        assert text.count("<svg") == 3 and text.index("<table") < text.index("<svg")
        flat = " ".join(words.split())
        assert answer in flat and flat.index(answer) < flat.index("All numbers")
        first = re.findall(r"rows per second of \w ÷ \w", flat)
        assert first == [f"rows per second of {name} ÷ a" for name in "cb0"]


@pytest.mark.parametrize("letter", ["i", "n", "W"])
def test_names_in_a_legend_are_whole(runs, letter):
    logs = [RunLog((runs / name).rename(runs / (23 * letter + name))) for name in "ab"]
    for picture in pictures_of([RunReport(log) for log in (*logs, *logs[1:] * 8)]):
        figure = Figure(figsize=(WIDTH / 96, picture.height / 96), layout="constrained")
        axes = figure.subplots()
        picture.draw(axes)
        figure.draw_without_rendering()
        assert axes.get_legend().get_window_extent().x1 <= figure.bbox.x1 < 1.4 * axes.bbox.width
        assert axes.bbox.height > 100


def test_the_baseline_stands_where_a_steps_time_goes(runs):
    reports = [RunReport(RunLog(runs / name)) for name in "ab"]
    imbalance, parts, loss = pictures_of(reports)
    assert (imbalance.title, loss.title) == ("Imbalance as trained", "Loss")
    axes = Figure().subplots()
    parts.draw(axes)
    shown = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {*PARTS} <= shown
    assert [each.get_text() for each in axes.texts] == ["a", "b"]
    total = max(bar.get_x() + bar.get_width() for bar in axes.patches if bar.get_y() > 0.5)
    assert total == pytest.approx(reports[0].step_time.total)


def test_axes_of_even_ranks_steps_and_losses_can_be_read(tmp_path):
    even = {"imbalance_before": 1e-9, "imbalance_after": 2e-10, "loss": 1e-9}
    lines = [
        line
        | even
        | {"loads_before": [10**9, 10**9 + 1], "loads_after": [10**9, 10**9], "step_ms": 90 + line["step"] / 100}
        for line in lines_of(make_steps(), SIZES)
    ]
    report = RunReport(RunLog(write_run(tmp_path, lines, config_of())))
    for several in ([report], [report, report]):
        for picture in pictures_of(several):
            figure = Figure()
            picture.draw(figure.subplots())
            figure.canvas.draw()
            (axes,) = figure.axes
            ticks = [each.get_text() for each in axes.get_yticklabels()]
            assert len(set(ticks)) == len(ticks) and axes.yaxis.get_offset_text().get_text() == ""
            if picture.title.startswith("Imbalance"):
                assert axes.get_ylim() == (0, 0.01) and "0.4%" in ticks
            if picture.title == "Time of a step":
                assert axes.get_ylim()[1] > 94  # with room above the line


def test_pictures_of_a_sampler_say_what_is_as_loaded_and_ticks_are_not_rounded(tmp_path):
    uneven = {"imbalance_before": 0.14, "imbalance_after": 0.01, "before_in_turn": 1}
    lines = [line | uneven for line in lines_of(make_steps(exchanges=False), SIZES)]
    config = config_of(balance_sampler=True, enable_balanced_shuffler=False)
    labels, ticks = {}, []
    for picture in pictures_of([RunReport(RunLog(write_run(tmp_path, lines, config)))]):
        axes = Figure().subplots()
        picture.draw(axes)
        labels[picture.title] = axes.get_legend_handles_labels()[1]
        if picture.title == "Imbalance":
            ticks = [(each.get_text(), at) for each, at in zip(axes.get_yticklabels(), axes.get_yticks())]
    assert labels["Load of each rank"] == ["as loaded", "balanced"] and labels["Keys of each rank"] == ["as trained"]
    assert all(float(text.removesuffix("%")) == pytest.approx(100 * at) for text, at in ticks) and len(ticks) > 3


@pytest.mark.slow
def test_names_are_no_markup_and_none_is_left_out_of_a_picture(here, told, recwarn):
    """Also those that matplotlib would leave out, or has no letters for."""
    names = ["[red]$x_1$ <b> & runs", "_first", r"$\foo$", "実行"]
    for name in names:
        write_run(here / name, [*lines_of(make_steps(20), [5] * 3), {"schema": 1, "step": 20, "eval_[/b]x": 0.25}])
    printed = told("report", *names, "--html", "r.html", "--figure", "r.svg")
    assert [str(each.message) for each in recwarn if issubclass(each.category, UserWarning)] == []
    assert names[0] in printed and "eval [/b]x" in printed
    text, words = read_page(here / "r.html")
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert all(html.escape(name) in drawn for name in names) and names[0] in words


def test_many_ranks_and_many_lines_are_drawn_together(tmp_path):
    steps = make_steps(count=20, ranks=80, rows=2)
    log = RunLog(write_run(tmp_path, [line_of([step]) for step in steps]))
    loads = next(each for each in pictures_of([RunReport(log)]) if each.title == "Load of each rank")
    assert "ranks sorted by it, the largest first" in loads.text
    lines = [line_of([steps[0]]) | {"step": number, "loss": number % 2} for number in range(1, 1001)]
    drawn, losses = curve_of(RunLog(write_run(tmp_path, lines)), "loss")
    assert 200 <= len(drawn) <= 300 and losses.mean() == pytest.approx(0.5, abs=0.01)
    assert drawn.min() >= 1 and drawn.max() <= 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run is given"),
        (
            ["runs/none"],
            "runs/none has no log.jsonl; report reads the folder of a run (trainer.run_dir), where rank 0 writes it",
        ),
        (["runs/a", "--figure", "linked.png"], "no command overwrites its input"),
    ],
)
def test_mistakes_are_one_line(runs, mistake, arguments, message):
    (runs.parent / "linked.png").symlink_to(runs / "a" / "log.jsonl")
    before = sorted(runs.parent.rglob("*"))
    assert message in mistake("report", *arguments)
    assert sorted(runs.parent.rglob("*")) == before


def test_the_documented_example_has_the_rows_of_the_table(here, told):
    """The runs of a demo: logged step by step, and evaluated."""
    page = (ROOT / "docs/report.md").read_text(encoding="utf-8")
    printed = re.search(r"```text\n\$ evenrank (report runs/demo/\S+ runs/demo/\S+)\n(.*?)```", page, re.DOTALL)
    _, base, other = printed[1].split()
    evaluated = {"schema": 1, "step": 60, "eval_loss": 0.5, "eval_rows": 9, "eval_auc_task_0": 0.5}
    write_unlooked(here / base, make_steps(balances=False), [1] * 59, evaluated)
    write_run(here / other, [*lines_of(make_steps(), [1] * 59), evaluated])
    made, documented = (
        [line.split("  ")[:2] for line in text.splitlines()] for text in (told(*printed[1].split()), printed[2])
    )
    labels = [[each for each in lines if each[0] == "" and len(each) > 1] for lines in (made, documented)]
    assert labels[0] == labels[1] and len(labels[0]) > 25
