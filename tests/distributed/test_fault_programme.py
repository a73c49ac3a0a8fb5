"""The fault programme works: a few faults of every sort in real ranks, and a trial depends on its number alone."""

from __future__ import annotations

import json
import sys

import pytest

from tests.faults import acts
from tests.faults.__main__ import Arguments, main
from tests.faults.kinds import KINDS
from tests.faults.page import BEGIN, END, rewrite_page
from tests.faults.supervisor import Result
from tests.faults.trials import draw, kinds_for
from tests.helpers.programs import ROOT, run_program

# Their outcome does not hang on how fast the machine is.
QUICK = ("aborted", "other options", "packed", "corrupted digest", "clocks", "workloads: negative")


@pytest.mark.slow
def test_a_few_faults_end_as_expected(tmp_path):
    command = [sys.executable, "-m", "tests.faults", "--trials", str(len(QUICK)), "--store", "agent"]
    command += ["--timeout", "10", "--out", str(tmp_path / "out.jsonl"), "--kinds", *QUICK]
    run = run_program(*command)
    assert run.returncode == 0, run.stdout + run.stderr
    results = [Result.from_json(json.loads(line)) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len({result.trial.kind for result in results}) == len(QUICK)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rewrite_page(page, results)
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert "clocks that jump | agent | 1 | all go on; every row is trained" in page.read_text()


@pytest.mark.parametrize("arguments", [("--trials", "-1"), ("--only", "-1"), ("--kinds", "nothing")])
def test_a_mistake_on_the_command_line_is_one_line(capsys, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["faults", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kinds": ("the store's host",), "store": "rank0"}, "are part of no name; store 'rank0' has"),
        ({"timeout": 60.0}, "timeout is 60; it is above 0 and below 60"),
        ({"merge": (ROOT / "README.md",)}, "does not hold one JSON line for each trial"),
        ({"page": ROOT / "README.md"}, "README.md has not one"),
        ({"out": ROOT / "missing" / "out.jsonl"}, "there is no folder"),
    ],
)
def test_mistakes_are_told_before_any_trial(wrong, said):
    with pytest.raises(ValueError, match=said):
        Arguments(**wrong)


def test_a_trial_depends_on_the_seed_and_its_number_alone():
    for store in ("agent", "rank0", "both"):
        names = kinds_for(store)
        drawn = [draw(7, number, store, 3.0, names) for number in range(len(names))]
        assert {trial.kind for trial in drawn} == set(names)  # every kind has its turn
        assert draw(7, 5, store, 3.0, names) == drawn[5]


def test_every_kind_has_its_act():
    assert not [kind.name for kind in KINDS.values() if not callable(getattr(acts, kind.act, None))]
