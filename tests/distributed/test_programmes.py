"""The fault programme and the soak in short: they find what they are for, and a trial depends on its number alone."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from tests.faults import acts, kinds, supervisor
from tests.faults.trials import Trial, draw, kinds_for, own_ids
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.jobs.programs import run_program
from tests.helpers.models.torchrec_model import make_batch
from tests.helpers.ranks.on_ranks import on_two_ranks
from tests.soak import __main__ as soak
from tests.soak.accounts import Steps, require_equal, row_digests
from tests.soak.episodes import Totals
from tests.soak.footprint import Footprint, growth, per_10k
from tests.soak.ranks import RankReport, run
from tests.soak.streams import KINDS, Stream

# Their outcome does not hang on how fast the machine is.
QUICK = ("aborted", "other options", "packed", "planning", "corrupted digest", "clocks", "workloads: negative")


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


def run_of(kind, folder):
    """A trial of two ranks, of which rank 1 is the faulty one."""
    return supervisor._Run(Trial(0, kind, kinds.WORKLOADS, 0, kinds.SHUFFLE, 2, 1, "agent", 3.0), folder)


NEGATIVE, JUMPING = "workloads: negative", "clocks that jump"


@pytest.mark.parametrize(
    ("kind", "rank", "changes", "problem"),
    [
        (NEGATIVE, 0, {}, None),
        (NEGATIVE, 0, {"status": None}, "rank 0 hung, after it had said: ValueError"),
        (NEGATIVE, 0, {"status": -9}, "rank 0 ended with status -9 instead of 1, by its exception"),
        (NEGATIVE, 0, {"threads": ["evenrank-S"]}, "rank 0 has left the thread evenrank-S"),
        (NEGATIVE, 1, {"text": "ValueError: rank 0: workloads[0] is -3"}, "rank 1 said 'ValueError: rank 0"),
        (JUMPING, 0, {"status": 0, "text": ""}, None),
        (JUMPING, 1, {}, "rank 1 ended with status 1 instead of going on: ValueError"),
        (KILLED, 1, {"status": -9}, None),
        (KILLED, 1, {"status": 0}, "rank 1 ended with status 0 instead of by a signal"),
        (KILLED, 0, {"text": "RankMissingError: rank 1 did not take part in the gather of step 0"}, None),
        (KILLED, 0, {"text": "RankMissingError: rank 0 did not take part in the gather of step 0"}, "rank 0 said"),
    ],
)
def test_an_end_that_was_not_expected_is_a_problem(tmp_path, kind, rank, changes, problem):
    end = supervisor.RankEnd(rank, rank == 1, 1, "ValueError: rank 1: workloads[0] is -3", 1.0, [])
    problems = run_of(kind, tmp_path)._problems_of(dataclasses.replace(end, **changes))
    assert len(problems) == (problem is not None) and all(each.startswith(problem) for each in problems)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_row_that_nobody_has_trained_is_a_problem(tmp_path, lost):
    run, (own, other) = run_of(JUMPING, tmp_path), ([*itertools.chain(*own_ids(rank))] for rank in range(2))
    run._ranks = [SimpleNamespace(said={"trained": {"rows": rows}}) for rows in (own[lost:], other)]
    assert len(run._lost_rows()) == lost


def test_a_trial_depends_on_the_seed_and_its_number_alone():
    for store in ("agent", "rank0", "both"):
        names = kinds_for(store)
        drawn = [draw(7, number, store, 3.0, names) for number in range(8 * len(names))]
        assert {trial.kind for trial in drawn[: len(names)]} == set(names)  # every kind has its turn
        assert draw(7, 5, store, 3.0, names) == drawn[5]
        for trial in drawn:
            kind = trial.of_kind
            assert store in ("both", trial.store) and trial.store in kind.stores and trial.place in kind.places
            assert 0 <= trial.rank < (1 if kind.rank_0 else trial.world_size)
            assert trial.call in ((0,) if trial.place == kinds.CONSTRUCTION else kind.calls)


def test_every_kind_has_its_act():
    assert not [kind.name for kind in kinds.KINDS.values() if not callable(getattr(acts, kind.act, None))]


# ----------------------------------------------------------------------------------------------------------------- soak


# Seed 290 draws every way to train, and everything that can be in between, in its first steps.
@pytest.mark.parametrize(("steps", "seed"), [(30, 1), pytest.param(420, 290, marks=pytest.mark.slow)])
def test_some_steps(steps, seed):
    reports = run(steps, ranks=2, seed=seed, shufflers=5)
    assert reports[0].totals.steps >= steps and reports[0].totals.rows > 0
    assert seed == 1 or (len(reports[0].totals.episodes), len(reports[0].totals.events)) == (5, 6)
    assert dataclasses.replace(reports[0].totals, moved=0) == dataclasses.replace(reports[1].totals, moved=0)


def test_one_episode_is_run_without_the_shufflers_that_follow_all(monkeypatch):
    asked = []
    looks = [Footprint(30, 1, 1, 1, 1, 1, 1)]
    monkeypatch.setattr(
        soak, "run", lambda *args, **kwargs: asked.append((args, kwargs)) or [RankReport(Totals(), looks, [])]
    )
    monkeypatch.setattr(sys, "argv", ["soak", "--episode", "17"])
    assert soak.main() == 0 and asked == [((20_000, 4, 0, 0), {"episode": 17})]
    looks += [dataclasses.replace(looks[0], step=step, threads=step) for step in (80, 90)]
    assert soak.main() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_digests_tell_rows_apart_whatever_their_order(kind):
    batch = next(each for each in Stream(kind, 3, 0, 50, dtype=5).batches() if len(row_digests(each)) > 3)
    digests = row_digests(batch)
    assert digests.dtype == np.uint64 and len(set(digests.tolist())) == len(set(rows_as_values(batch))) > 3
    again = next(each for each in Stream(kind, 3, 0, 50, dtype=5).batches() if len(row_digests(each)) > 3)
    assert (row_digests(again) == digests).all()


def test_a_changed_weight_and_a_changed_value_change_their_row_alone():
    for part in ("values", "weights"):
        batch = next(each for each in Stream("sample", 3, 0, 50).batches() if each.actual_batch_size > 3)
        before = row_digests(batch)
        getattr(batch.features, part)()[-1] += 1
        assert int((row_digests(batch) != before).sum()) == 1
    batch.target[0] = -batch.target[0]
    assert row_digests(batch)[0] != before[0]


@on_two_ranks
def test_a_row_that_one_rank_has_changed_is_reported_with_its_step():
    batches = [make_batch([10 * step + 1, 10 * step + 2], 3) for step in range(1, 8)]
    brought, trained = Steps(), Steps()
    for step, batch in enumerate(brought.noted(iter(batches))):
        batch.target[1] += step == 4 and dist.get_rank() == 1
        trained.add(batch)
    for group_by, first in ((1, 4), (3, 1)):
        with pytest.raises(AssertionError, match=f"^here: 1 of . steps differ, the first is {first}: "):
            require_equal(*(each.over_ranks(7, group_by) for each in (brought, trained)), "here")


@pytest.mark.parametrize("trained", [[(2, 7), (1, 4)], [(2, 7), (1, 5), (0, 0)], [(1, 5), (2, 7)]])
def test_rows_that_are_lost_are_told(trained):
    with pytest.raises(AssertionError, match=r"^here: "):
        require_equal(np.array([(2, 7), (1, 5)], np.uint64), np.array(trained, np.uint64), "here")


def test_memory_of_large_blocks_counts():
    before, kept = Footprint.now(0), np.ones(2**23)  # 64 MiB, which malloc maps by themselves
    assert Footprint.now(1).in_use_kib - before.in_use_kib > 2**15 and kept[0]


def test_what_grows_is_told():
    flat = [Footprint(step, 1000 + step % 300, 10**6, 5000, 9, 20, 3) for step in range(0, 20_000, 100)]
    assert abs(per_10k(flat, "in_use_kib")) < 100 and growth(flat) == {"threads": 0, "descriptors": 0, "groups": 0}
    rising = [
        dataclasses.replace(
            look,
            in_use_kib=look.in_use_kib + look.step,
            blocks=look.blocks + 2 * look.step,
            resident_kib=look.resident_kib + 2 * look.step,
            threads=9 + look.step // 6000,
        )
        for look in flat
    ]
    assert 9_900 < per_10k(rising, "in_use_kib") < 10_100
    early = [dataclasses.replace(look, threads=12) if look.step < 6000 else look for look in rising]
    assert growth(early)["threads"] == 0  # as many as there were in the second quarter
    assert soak.problems_of([RankReport(Totals(), flat, flat), RankReport(Totals(), rising, rising)]) == [
        f"rank 1: {per_10k(rising, 'in_use_kib'):.0f} more KiB of memory in use per 10,000 steps; the limit is 1,024",
        "rank 1: 20000 more of Python's blocks per 10,000 steps; the limit is 10,000",
        "rank 1: 20000 more KiB of resident memory per 10,000 steps; the limit is 16,384",
        "rank 1: 2 more threads after all steps",
        "rank 1: 2 more threads after all shufflers",
    ]
