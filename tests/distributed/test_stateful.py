"""Calls of a shuffler in any order, on two ranks: nothing hangs, no row is lost, misuse is one line on every rank."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from tests.helpers.batches.square_shuffler import SquareShuffler
from tests.helpers.datasets.fuzzing import fuzzed
from tests.helpers.ranks.rank_pool import RankPool
from tests.soak.accounts import row_digests
from tests.soak.streams import Stream

# What a rank keeps between calls: its shuffler, shuffles in flight, and an open window.
_OF_RANK: dict[str, Any] = {}
# A shuffle that failed leaves its groups unused: so many failures, and the next example gets fresh ranks.
_MOST_FAILURES = 8


def _open() -> None:
    _OF_RANK.clear()
    _OF_RANK.update(shuffler=SquareShuffler(ShufflerOptions(timeout=30)), handles=deque(), windows=None, used=None)


def _start(seed: int, bring: list[bool]) -> list[int]:
    batch = Stream("rich", seed, dist.get_rank(), 1).batch(0) if bring[dist.get_rank()] else None
    handle = _OF_RANK["shuffler"].start_shuffle(batch)
    _OF_RANK["handles"].append((batch, handle))
    return [] if batch is None else row_digests(batch).tolist()


def _finish() -> list[int] | None:
    batch, handle = _OF_RANK["handles"].popleft()
    if handle.has_ended():
        return None
    batch = handle.empty_batch() if batch is None else batch
    _OF_RANK["used"] = batch, handle
    return row_digests(_OF_RANK["shuffler"].finish_shuffle(batch, handle)).tolist()


def _open_windows(seed: int, lengths: list[int], window: int) -> list[int]:
    stream = Stream("rich", seed, dist.get_rank(), lengths[dist.get_rank()])
    _OF_RANK["windows"] = windowed_iter(stream.batches(), _OF_RANK["shuffler"], window)
    return [digest for batch in stream.batches() for digest in row_digests(batch).tolist()]


def _next() -> list[int] | None:
    batch = next(_OF_RANK["windows"], None)
    return None if batch is None else row_digests(batch).tolist()


CALLS: dict[str, Callable[..., Any]] = {
    "open": _open,
    "close": lambda: _OF_RANK["shuffler"].close(),
    "start": _start,
    "finish": _finish,
    "finish again": lambda: _OF_RANK["shuffler"].finish_shuffle(*_OF_RANK["used"]),
    "drop": lambda: _OF_RANK["handles"].popleft()[1].drain(),
    "open windows": _open_windows,
    "next": _next,
    "leave windows": lambda: _OF_RANK["windows"].close(),
}


def _called(name: str, *arguments: Any) -> tuple[str, Any]:
    try:
        return "", CALLS[name](*arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", None


class Calls(RuleBasedStateMachine):
    """What both ranks are told to do, and the rows that are under way."""

    pool: RankPool
    failures = 0  # of the pool's ranks

    def __init__(self) -> None:
        super().__init__()
        if type(self).failures > _MOST_FAILURES:
            self.pool.stop()
            type(self).failures = 0
        self.closed = False
        self.closed_twice = False
        self.in_flight: deque[list[int]] = deque()  # rows of each shuffle
        self.in_windows: list[int] | None = None
        self.finished = False
        self.say("open")

    def say(self, name: str, *arguments: Any) -> list[Any]:
        """Call it on both ranks, where it succeeds."""
        answers = self.pool.run(_called, name, *arguments, timeout=50)
        assert [error for error, _ in answers] == ["", ""]
        return [result for _, result in answers]

    def refused(self, text: str, name: str, *arguments: Any) -> None:
        """Call it on both ranks, which say the same line."""
        for error, _ in self.pool.run(_called, name, *arguments, timeout=50):
            assert text in error and "\n" not in error

    @rule(seed=st.integers(0, 10**6), bring=st.lists(st.booleans(), min_size=2, max_size=2))
    def start(self, seed: int, bring: list[bool]) -> None:
        if self.closed:
            self.refused("the shuffler is closed", "start", seed, bring)
        elif len(self.in_flight) < 4:
            self.in_flight.append(list(itertools.chain(*self.say("start", seed, bring))) if any(bring) else [])
            if not any(bring):
                self.in_flight[-1] = [-1]  # the end of the data

    @precondition(lambda self: self.in_flight and not self.closed)
    @rule()
    def finish(self) -> None:
        rows, got = self.in_flight.popleft(), self.say("finish")
        if rows == [-1]:
            assert got == [None, None] or got == [[], []]
        else:
            assert sorted(got[0] + got[1]) == sorted(rows)
            self.finished = True

    @precondition(lambda self: self.in_flight and not self.closed)
    @rule()
    def drop(self) -> None:
        self.in_flight.popleft()
        self.say("drop")

    @precondition(lambda self: self.finished and not self.closed)
    @rule()
    def finish_again(self) -> None:
        self.finished = False
        type(self).failures += 1
        self.refused("is used twice", "finish again")

    @precondition(lambda self: self.in_windows is None)
    @rule(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(0, 4), min_size=2, max_size=2), window=st.just(2))
    def open_windows(self, seed: int, lengths: list[int], window: int) -> None:
        if not self.closed:
            self.in_windows = list(itertools.chain(*self.say("open windows", seed, lengths, window)))

    @precondition(lambda self: self.in_windows is not None and not self.closed)
    @rule()
    def next_of_windows(self) -> None:
        got = self.say("next")
        if got == [None, None]:
            assert self.in_windows == []
            self.in_windows = None
        else:
            for row in got[0] + got[1]:
                self.in_windows.remove(row)  # type: ignore[union-attr]

    @precondition(lambda self: self.in_windows is not None and not self.closed)
    @rule()
    def leave_windows(self) -> None:
        self.say("leave windows")
        self.in_windows = None

    @precondition(lambda self: not self.closed_twice)
    @rule()
    def close(self) -> None:
        self.closed_twice, self.closed = self.closed, True
        self.say("close")  # once more, too

    @precondition(lambda self: self.closed)
    @rule()
    def make_anew(self) -> None:
        self.say("open")
        self.closed = self.closed_twice = self.finished = False
        self.in_windows = None
        self.in_flight.clear()

    def teardown(self) -> None:
        """Both ranks close what they have."""
        self.say("close")


def test_calls_in_any_order():
    with RankPool(2, most_groups=10_000) as pool:  # which are not replaced between calls: they keep their shuffler
        machine = type("CallsOnRanks", (Calls,), {"pool": pool})
        calls = machine()
        for seed in range(10):  # each leaves two groups: the ranks stay, and so does what they keep
            calls.start(seed, [True, True])
            calls.finish()
            calls.finish_again()
            calls.close()
            calls.make_anew()
        calls.teardown()
        run_state_machine_as_test(machine, settings=settings(fuzzed(2, many=200), stateful_step_count=12))
