"""MEETING: ranks agree on numbers over torch's store, before they have a group of their own.

Not over the user's group: if a rank does not come, the collectives of that group would be out of step from then on.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from commons.distributed.channel.store import call_store

T = TypeVar("T")

_MET, _GIVEN_UP = "met", "given up"

# Seconds between two reads of the outcome, and what each rank adds to them, because all ranks read.
_PAUSE_SECONDS = 0.01
_PAUSE_PER_RANK = 0.0002

# By default group and ranks, how many times these ranks have met.
_MEETINGS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


class Meeting:
    """A meeting of `num_ranks` ranks, all of which call one and the same method, once.

    Args:
        key: of the store, equal on all ranks and unique to the meeting.
        num_ranks: how many ranks meet.
        timeout: seconds until a method raises RuntimeError because a rank has not come.
    """

    def __init__(self, key: str, num_ranks: int, timeout: float) -> None:
        self._key, self._num_ranks = key, num_ranks
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._pause = _PAUSE_SECONDS + _PAUSE_PER_RANK * num_ranks

    def largest(self, number: int) -> int:
        """The largest number of any rank; numbers are not negative."""
        key = f"{self._key}/largest"

        def enter(store: dist.Store) -> None:
            known = b""
            while int(known or -1) < number:
                known = store.compare_set(key, known.decode(), str(number))

        self._call(enter)
        self._await_all()
        return int(self._call(lambda store: store.get(key)))

    def named_by_all(self, numbers: Sequence[int]) -> list[int]:
        """Those of this rank's numbers that every rank has."""
        self._call(lambda store: [store.add(f"{self._key}/{number}", 1) for number in numbers])
        self._await_all()
        counts = self._call(lambda store: [store.add(f"{self._key}/{number}", 0) for number in numbers])
        return [number for number, count in zip(numbers, counts) if count == self._num_ranks]

    def _await_all(self) -> None:
        """Wait until all ranks have come, or one has given up: the outcome is the same on all, also on a late rank."""
        key = f"{self._key}/outcome"
        is_last = self._call(lambda store: store.add(f"{self._key}/arrived", 1)) == self._num_ranks
        outcome = b""
        while not outcome:
            if is_last:
                outcome = self._call(lambda store: store.compare_set(key, "", _MET))
            elif time.monotonic() > self._deadline:
                outcome = self._call(lambda store: store.compare_set(key, "", _GIVEN_UP))
            else:
                time.sleep(self._pause)
                outcome = self._call(lambda store: store.get(key) if store.check([key]) else b"")
        if outcome.decode() == _GIVEN_UP:
            raise RuntimeError(f"the ranks have not all come within {self._timeout:g} s")

    def _call(self, call: Callable[[dist.Store], T]) -> T:
        return call_store(call, max(1.0, self._deadline - time.monotonic()))


def key_of(members: Sequence[int]) -> str:
    """The beginning of the store's keys about these ranks."""
    return f"evenrank/{hashlib.blake2b(repr(list(members)).encode(), digest_size=8).hexdigest()}"


def next_meeting(members: Sequence[int], timeout: float) -> Meeting:
    """The next meeting of these ranks, each of which calls this as often as the others."""
    counts = _MEETINGS.setdefault(dist.distributed_c10d._get_default_group(), Counter())
    counts[tuple(members)] += 1
    return Meeting(f"{key_of(members)}/meeting {counts[tuple(members)]}", len(members), timeout)
