"""`make test` and `make test-slow` run every test once, together; `make test-repeat` stops at the first failure."""

from __future__ import annotations

import re

import pytest

from tests.helpers.jobs.programs import ROOT, run_program

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
