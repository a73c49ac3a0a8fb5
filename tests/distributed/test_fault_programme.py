"""The fault programme works: faults of every sort in real ranks, and a trial depends on its number alone."""

from __future__ import annotations

import re
import sys

import pytest

from tests.faults import acts, kinds, supervisor
from tests.faults.kinds import KINDS
from tests.faults.trials import Trial, draw, kinds_for
from tests.helpers.jobs.programs import run_program

# Their outcome does not hang on how fast the machine is.
QUICK = ("aborted", "other options", "packed", "corrupted digest", "clocks", "workloads: negative")


@pytest.mark.slow
def test_a_few_faults_end_as_expected():
    command = [sys.executable, "-m", "tests.faults", "--trials", len(QUICK), "--store", "agent", "--timeout", "10"]
    run = run_program(*command, "--kinds", *QUICK, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(QUICK)} trials in " in run.stdout and " s, 0 with problems" in run.stdout
    assert "| clocks that jump | agent | 1 | all go on; every row is trained |" in run.stdout
    assert run.stdout.count(" | agent | 1 | ") == len(QUICK)


AGENT = "the store does not answer; torchrun's agent on the first host hosts it and has stopped or is overloaded"
KILLED, STOPPED = "killed (SIGKILL)", "stopped for longer than the timeout (SIGSTOP)"
# Kind of fault, its place and the call of it, ranks and the faulty one, who hosts the store; and what the others say.
TRIALS = {
    "the agent stops, then a rank dies": (
        ("the store's host stopped, then a rank killed", kinds.BEFORE_GATHER, 2, 2, 1, "agent"),
        rf"the gather of step 2 failed on rank 0 and {AGENT}: see there",
    ),
    "the agent stops before a shuffler is made": (
        ("the store's host stopped before the groups are made", kinds.CONSTRUCTION, 0, 2, 0, "agent"),
        rf"the connection of step 0 failed on rank \d and {AGENT}: see there",
    ),
    "the host of the store stops before a shuffler is made": (
        ("rank 0 stopped, which hosts the store", kinds.CONSTRUCTION, 0, 2, 0, "rank0"),
        "the connection of step 0 failed on rank 1 and the store does not answer; rank 0 hosts it and has stopped or ",
    ),
    "the host of the store leaves after another rank": (
        (KILLED, kinds.BEFORE_GATHER, 1, 3, 1, "rank0"),
        "rank 1 did not take part in the gather of step 1",
    ),
    "the host of the store fails and leaves": (
        ("out of memory while rows are packed", kinds.PACK, 0, 4, 0, "rank0"),
        "rank 0 failed in the exchange of step 0: OutOfMemoryError: tried to allocate 7 GiB",
    ),
    "survivors are in different collectives": (
        (STOPPED, kinds.IN_EXCHANGE, 1, 4, 3, "agent"),
        r"rank 3 did not take part in the (exchange of step 1|gather of step 2) \(ranks \[0, 1, 2, 3\]\); ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_a_fault_is_told_in_these_words(monkeypatch, name):
    (kind, place, call, world_size, rank, store), said = TRIALS[name]
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 60.0)
    trial = Trial(0, kind, place, call, kinds.SHUFFLE, world_size, rank, store, 3.0)
    result = supervisor.run_trial(trial)
    assert result.problems == []
    texts = [end.text for end in result.ranks if not end.faulty]
    assert texts and all(re.match(f"RankMissingError: {said}", text) and "\n" not in text for text in texts), texts


def test_a_trial_depends_on_the_seed_and_its_number_alone():
    for store in ("agent", "rank0", "both"):
        names = kinds_for(store)
        drawn = [draw(7, number, store, 3.0, names) for number in range(len(names))]
        assert {trial.kind for trial in drawn} == set(names)  # every kind has its turn
        assert draw(7, 5, store, 3.0, names) == drawn[5]


def test_every_kind_has_its_act():
    assert not [kind.name for kind in KINDS.values() if not callable(getattr(acts, kind.act, None))]
