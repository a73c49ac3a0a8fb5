"""The soak programme in short: every row accounted for, and what it would say of rows that are not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.soak.__main__ import problems_of
from tests.soak.accounts import require_equal, row_digests
from tests.soak.episodes import Totals
from tests.soak.footprint import Footprint, growth, per_10k
from tests.soak.ranks import RankReport, run
from tests.soak.streams import KINDS, Stream


# Seed 290 draws every way to train, and everything that can be in between, in its first steps.
@pytest.mark.parametrize(("steps", "seed"), [(30, 1), pytest.param(420, 290, marks=pytest.mark.slow)])
def test_some_steps(steps, seed):
    reports = run(steps, ranks=2, seed=seed, shufflers=5)
    assert reports[0].totals.steps >= steps and reports[0].totals.rows > 0
    assert seed == 1 or (len(reports[0].totals.episodes), len(reports[0].totals.events)) == (5, 6)
    assert dataclasses.replace(reports[0].totals, moved=0) == dataclasses.replace(reports[1].totals, moved=0)


@pytest.mark.parametrize("kind", KINDS)
def test_digests_tell_rows_apart_whatever_their_order(kind):
    batch = next(each for each in Stream(kind, 3, 0, 50, dtype=5).batches() if len(row_digests(each)) > 3)
    digests = row_digests(batch)
    assert digests.dtype == np.uint64 and len(set(digests.tolist())) == len(digests)
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


@pytest.mark.parametrize("trained", [[(2, 7), (1, 4)], [(2, 7), (1, 5), (0, 0)], [(1, 5), (2, 7)]])
def test_rows_that_are_lost_are_told(trained):
    with pytest.raises(AssertionError, match=r"^here: "):
        require_equal(np.array([(2, 7), (1, 5)], np.uint64), np.array(trained, np.uint64), "here")


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
    assert problems_of([RankReport(Totals(), flat, [])]) == []
    assert problems_of([RankReport(Totals(), rising, flat)]) == [
        f"rank 0: {per_10k(rising, 'in_use_kib'):.0f} more KiB of memory in use per 10,000 steps; the limit is 1,024",
        "rank 0: 20000 more of Python's blocks per 10,000 steps; the limit is 10,000",
        "rank 0: 20000 more KiB of resident memory per 10,000 steps; the limit is 16,384",
        "rank 0: 2 more threads after all steps",
    ]
