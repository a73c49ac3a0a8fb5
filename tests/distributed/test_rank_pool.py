"""The ranks that other tests run on: one that raises, dies or hangs is named, and the next call has fresh ranks."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from tests.helpers.ranks.on_ranks import on_two_ranks
from tests.helpers.ranks.rank_pool import RankFailure, RankPool


class _Unreadable:
    """What a rank can send, and who gets it cannot read."""

    def __reduce__(self):
        return (int, ("no number",))


def _fail(how: str) -> object:
    if dist.get_rank() == 0:
        return _Unreadable() if how == "unreadable" else None
    if how == "raises":
        raise ValueError("on purpose")
    if how == "dies":
        os._exit(3)
    if how == "hangs":
        time.sleep(600)
    if how == "unreadable":
        time.sleep(0.5)  # so that this reply comes after the one that cannot be read
    return (lambda: None) if how == "unsendable" else "a reply to this call"


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raises", RankFailure, "^rank 1 raised ValueError: on purpose\n"),
        ("dies", RankFailure, "^rank 1 died with exit code 3$"),
        ("hangs", RankFailure, "^rank 1 hung: no answer within 1 s$"),
        ("unsendable", RankFailure, "^rank 1 raised result cannot be sent back: "),
        ("unreadable", ValueError, "no number"),
    ],
)
def test_what_goes_wrong_on_a_rank_is_named_and_the_next_call_has_fresh_ranks(pool, how, kind, message):
    with pytest.raises(kind, match=message):
        pool.run(_fail, how, timeout=1.0 if how == "hangs" else 60.0)
    assert pool.run(dist.get_rank) == [0, 1]


@pytest.mark.parametrize("has_call", [False, True])
def test_a_rank_that_dies_before_it_reads_a_call_is_named(pool, has_call):
    pool.run(dist.get_rank)
    victim = pool._ranks[1].process
    if has_call:
        os.kill(victim.pid, signal.SIGSTOP)
        threading.Timer(1.0, victim.kill).start()
    else:
        victim.kill()
        victim.join(30)
    with pytest.raises(RankFailure, match="^rank 1 died with exit code -9$"):
        pool.run(dist.get_rank)


@on_two_ranks
def _passes_on_the_first_rank(number) -> None:
    assert dist.get_rank() < number


def test_a_body_that_fails_on_one_rank_fails_the_test(two_ranks):
    _passes_on_the_first_rank(two_ranks=two_ranks, number=2)
    with pytest.raises(RankFailure, match="^rank 1 raised AssertionError"):
        _passes_on_the_first_rank(two_ranks=two_ranks, number=1)
