"""BARRIER: ranks agree on numbers in torch's store, before they have a group of their own.

Not over the user's group: if a rank does not join, the collectives of that group would be out of step from then on.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from commons.distributed.channel.store import call_store, pause_of

T = TypeVar("T")

_PASSED, _GIVEN_UP = "passed", "given up"


class StoreBarrier:
    """The barriers of one channel, whose ranks make its groups; each call of a method is the channel's next barrier.

    All ranks call the same methods in the same order. A barrier has one outcome on all ranks, also on those that join
    too late: all have joined, or RuntimeError, because one has waited for `timeout` seconds.

    Args:
        key: beginning of the store's keys, equal on all ranks and unique to the channel.
        num_ranks: ranks that join.
        timeout: in seconds.
    """

    def __init__(self, key: str, num_ranks: int, timeout: float) -> None:
        self.timeout = timeout
        self._channel, self._num_ranks, self._number = key, num_ranks, 0
        self._pause = pause_of(num_ranks)
        self._key, self._deadline = "", 0.0  # of the current barrier
        # A program may begin again in a new world while a thread waits here for a rank of this one.
        self._world = weakref.ref(dist.distributed_c10d._get_default_group())

    def largest(self, number: int) -> int:
        """The largest number of any rank; numbers are not negative."""
        self._begin()
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
        self._begin()
        self._call(lambda store: [store.add(f"{self._key}/{number}", 1) for number in numbers])
        self._await_all()
        counts = self._call(lambda store: [store.add(f"{self._key}/{number}", 0) for number in numbers])
        return [number for number, count in zip(numbers, counts) if count == self._num_ranks]

    def _begin(self) -> None:
        self._key = f"{self._channel}/barrier {self._number}"
        self._number += 1
        self._deadline = time.monotonic() + self.timeout

    def _await_all(self) -> None:
        """Wait until all ranks have joined, or one has given up."""
        key = f"{self._key}/outcome"
        is_last = self._call(lambda store: store.add(f"{self._key}/joined", 1)) == self._num_ranks
        outcome = b""
        while not outcome:
            if is_last:
                outcome = self._call(lambda store: store.compare_set(key, "", _PASSED))
            elif time.monotonic() > self._deadline:
                outcome = self._call(lambda store: store.compare_set(key, "", _GIVEN_UP))
            else:
                time.sleep(self._pause)
                outcome = self._call(lambda store: store.get(key) if store.check([key]) else b"")
        if outcome.decode() == _GIVEN_UP:
            raise RuntimeError(f"a rank has not joined within {self.timeout:g} s")

    def _call(self, call: Callable[[dist.Store], T]) -> T:
        if dist.group.WORLD is not self._world():
            raise RuntimeError("the process group was destroyed while groups were made over it")
        return call_store(call, max(1.0, self._deadline - time.monotonic()))
