"""Calls of a shuffler in any order, on two ranks: nothing hangs, no row is lost, misuse is one line on every rank."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from tests.helpers.batches.square_shuffler import SquareShuffler
from tests.helpers.datasets.fuzzing import fuzzed
from tests.helpers.ranks.on_ranks import of_all
from tests.soak.accounts import row_digests
from tests.soak.streams import Stream


class Caller:
    """One rank's shuffler, its shuffles in flight and its windows; a call returns the digests of rows, if any."""

    def __init__(self) -> None:
        self.open()

    def can(self, name: str) -> bool:
        """Whether it makes sense to call this now; the same on both ranks."""
        if self.closed:
            return name in ("start", "close", "open")
        return {
            "start": len(self.in_flight) < 4,
            **dict.fromkeys(("finish", "drop"), bool(self.in_flight)),
            "finish_again": self.used is not None,
            "open_windows": self.windows is None,
            **dict.fromkeys(("next", "leave_windows"), self.windows is not None),
            "close": True,
            "open": False,
        }[name]

    def open(self) -> None:
        self.shuffler = SquareShuffler(ShufflerOptions(timeout=30))
        self.in_flight, self.windows, self.used = deque[Any](), None, None
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.shuffler.close()

    def start(self, seed: int, *brings: bool) -> list[int]:
        batch = Stream("rich", seed, dist.get_rank(), 1).batch(0) if brings[dist.get_rank()] else None
        self.in_flight.append((batch, self.shuffler.start_shuffle(batch)))
        return [] if batch is None else row_digests(batch).tolist()

    def finish(self) -> list[int] | None:
        batch, handle = self.in_flight.popleft()
        if handle.has_ended():
            return None
        self.used = handle.empty_batch() if batch is None else batch, handle
        return row_digests(self.shuffler.finish_shuffle(*self.used)).tolist()

    def finish_again(self) -> None:
        used, self.used = self.used, None
        self.shuffler.finish_shuffle(*used)

    def drop(self) -> None:
        self.in_flight.popleft()[1].drain()

    def open_windows(self, seed: int, *lengths: int) -> list[int]:
        stream = Stream("rich", seed, dist.get_rank(), lengths[dist.get_rank()])
        self.windows = windowed_iter(stream.batches(), self.shuffler, 2)
        return [digest for batch in stream.batches() for digest in row_digests(batch).tolist()]

    def next(self) -> list[int] | None:
        if (batch := next(self.windows, None)) is None:
            self.windows = None
        return None if batch is None else row_digests(batch).tolist()

    def leave_windows(self) -> None:
        self.windows.close()
        self.windows = None


def _call_all(calls: list[tuple[Any, ...]]) -> None:
    """Make every call that makes sense: finished rows are those that were started, those of windows come once."""
    caller, in_flight, in_windows = Caller(), deque[list[int]](), list[int]()
    for name, *arguments in calls:
        if not caller.can(name):
            continue
        if name == "finish_again" or (caller.closed and name == "start"):
            refused = "the shuffler is closed" if caller.closed else "is used twice"
            with pytest.raises((ValueError, RuntimeError), match=f"^.*{refused}.*$"):
                getattr(caller, name)(*arguments)
            continue
        own, other = of_all([getattr(caller, name)(*arguments)])
        assert (own is None) == (other is None), name
        rows = sorted([*(own or []), *(other or [])])
        if name == "start":
            in_flight.append(rows)
        elif name == "finish":
            assert rows == in_flight.popleft()
        elif name == "drop":
            in_flight.popleft()
        elif name == "open_windows":
            in_windows = rows
        elif name == "next":
            assert own is not None or in_windows == []  # at the end
            for row in rows:
                in_windows.remove(row)
        elif name == "open":
            in_flight.clear()
    caller.close()


SEEDS, LENGTHS = st.integers(0, 10**6), st.integers(0, 4)
PLAIN = ("finish", "finish_again", "drop", "next", "leave_windows", "close", "open")
CALLS = [
    st.tuples(st.just("start"), SEEDS, st.booleans(), st.booleans()),
    st.tuples(st.just("open_windows"), SEEDS, LENGTHS, LENGTHS),
    *(st.tuples(st.just(name)) for name in PLAIN),
]


@fuzzed(2, many=200)
@example([("start", 3, True, True), ("finish",), ("finish_again",), ("close",), ("open",)] * 10)
@given(st.lists(st.one_of(CALLS), min_size=25, max_size=40))
def test_calls_in_any_order(two_ranks, calls):
    two_ranks.run(_call_all, calls, timeout=100)
