"""NAMES: what ranks tell one another through the store once a collective of a channel has failed.

Those who are there write where they are and how long they have waited, wait a moment for the others, and read who is
missing, or what a rank has said of itself. All of it is said once per channel, which nobody uses any more after that:
ranks may be one collective apart. Nobody leaves before the others have read, within limits: the store may end with the
one who hosts it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from commons.distributed.store import KeyWatch, StoreUnavailableError, ask_store, begin_asking, ends_with_rank

# How often a waiting rank asks the store whether a collective of the channel has failed elsewhere, in seconds.
POLL_SECONDS = 1.0
# How long a rank in which a collective has failed waits for the others' names, and then for them to read what it knows.
_NAMES_SECONDS = 4.0
_READERS_SECONDS = 2.0
# Between two looks at a count: of a few ranks, and for every rank more, all of which look.
_PAUSE_SECONDS = 0.05
_PAUSE_PER_RANK = 0.0002
# A rank whose looks at the store lie this much further apart than they should stood still.
_STILL_SECONDS = 1.5
# A rank that has waited for less, and less than half as long as another one, came when that one had given up, or about
# to: those who wait notice a failure within a poll.
_LATE_SECONDS = 2 * POLL_SECONDS


class Attendance:
    """A rank's time in one collective.

    Attributes:
        collective: what messages call it; one name for one collective of a channel.
    """

    def __init__(self, collective: str) -> None:
        self.collective = collective
        self._entered = self._seen = time.monotonic()
        self._still = 0.0
        self._watch: KeyWatch | None = None

    def watch(self, *keys: str) -> KeyWatch:
        """For a rank that still waits: looks for keys, and how long the store leaves it without an answer."""
        self._watch = KeyWatch(*keys)
        return self._watch

    def look(self) -> None:
        """Called each time the rank looks around, every POLL_SECONDS."""
        now = time.monotonic()
        self._still = max(self._still, now - self._seen - POLL_SECONDS)
        self._seen = now

    def to_json(self) -> str:
        """What the others are told: the collective, and the seconds spent, stood still and without the store in it."""
        silent = 0.0 if self._watch is None else self._watch.silent_seconds
        return json.dumps([self.collective, time.monotonic() - self._entered, self._still, silent])


class Verdict(NamedTuple):
    """What is known of a failed channel.

    Attributes:
        missing: global ranks that did not say where they are.
        late: a sentence about each that came late or stood still; where some are missing, about the store's host alone.
        failure: the text of a rank that has posted its failure, if any has.
    """

    missing: list[int]
    late: list[str]
    failure: str | None


class FailedChannel:
    """A channel as the store knows it, once a collective of it has failed on a rank.

    Threads of a rank that fail in different collectives get one verdict.

    Args:
        key: of the channel; the same on all ranks, and of no other channel.
        members: global ranks that take part.
    """

    def __init__(self, key: str, members: Sequence[int]) -> None:
        self._key = key
        self._members = members
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._left = threading.Event()

    def watch(self, attendance: Attendance) -> KeyWatch:
        """For a rank that still waits: tells whether its or another collective of the channel has failed elsewhere."""
        return attendance.watch(f"{self._key}/failed", self._failure_of(attendance.collective))

    def post(self, collective: str, text: str) -> None:
        """Tell the ranks that wait in a collective, now or later, that this one will not come, and why.

        The host of the store stays for a moment, so that they can read it. Nothing happens without a store.
        """
        with contextlib.suppress(StoreUnavailableError):
            ask_store(lambda store: store.set(self._failure_of(collective), text))
            if ends_with_rank() == dist.get_rank():
                self._await("read", len(self._members) - 1, _READERS_SECONDS)

    def leave(self, text: str) -> None:
        """Tell those who wait or will wait in any collective why this rank is gone; waits for nothing, nor do others.

        The store may not answer, or be gone with the process groups.
        """
        self._left.set()
        if dist.is_initialized():
            begin_asking(lambda store: store.set(f"{self._key}/failure", text))
            begin_asking(lambda store: store.set(f"{self._key}/failed", "1"))

    def who_is_missing(self, attendance: Attendance) -> Verdict:
        """Sign in, wait for the others, and read; takes seconds, whatever the store does.

        Raises:
            StoreUnavailableError: the store does not answer, or has ended.
        """
        with self._lock:
            self._verdict = self._verdict or self._ask(attendance)
            return self._verdict

    def _ask(self, attendance: Attendance) -> Verdict:
        posted = own = self._read(self._failure_of(attendance.collective))
        if own is not None:
            ask_store(lambda store: store.set(f"{self._key}/failure", own))  # for those in other collectives
        self._sign_in(attendance)
        posted = posted or self._read(f"{self._key}/failure")
        missing: list[int] = []
        if posted is None:
            self._await("present", len(self._members), _NAMES_SECONDS)
            missing = self._without_name(list(self._members))
            posted = self._read(f"{self._key}/failure")
        late: list[str] = []
        if posted is None:
            late = self._silent_host(missing) if missing else self._late()
        with contextlib.suppress(StoreUnavailableError):
            self._count("read", 1)
            # The host leaves last; else all leave together, since torchrun ends the others with the first.
            if ends_with_rank() in (None, dist.get_rank()):
                self._await("read", len(self._members) - max(len(missing), posted is not None), _READERS_SECONDS)
        return Verdict(missing, late, posted)

    def _sign_in(self, attendance: Attendance) -> None:
        ask_store(lambda store: store.set(f"{self._key}/failed", "1"))
        ask_store(lambda store: store.set(f"{self._key}/{dist.get_rank()}", attendance.to_json()))
        self._count("present", 1)

    def _read(self, key: str) -> str | None:
        if not ask_store(lambda store: store.check([key])):
            return None
        return ask_store(lambda store: store.get(key).decode())

    def _failure_of(self, collective: str) -> str:
        return f"{self._key}/{collective}/failure"

    def _said_by(self, ranks: Sequence[int]) -> list[Any]:
        """What ranks have said that have signed in; nothing where the store has gone since."""
        keys = [f"{self._key}/{rank}" for rank in ranks]
        try:
            return [json.loads(each) for each in ask_store(lambda store: store.multi_get(keys))]
        except StoreUnavailableError:
            return []

    def _silent_host(self, missing: list[int]) -> list[str]:
        """A sentence about the rank that hosts the store, if it is back after a silence in which others gave up."""
        host, present = ends_with_rank(), [rank for rank in self._members if rank not in missing]
        silent = max((each[-1] for each in self._said_by(present)), default=0.0)
        if host is None or host in missing or silent < _STILL_SECONDS:
            return []
        return [
            f"rank {host}, which hosts the store, stood still for {silent:.0f} s, in which others may have given up"
        ]

    def _late(self) -> list[str]:
        """A sentence about each rank that stood still or, if none did, that came late; all have signed in."""
        said = self._said_by(self._members)
        if not said:
            return []
        longest = max(waited for _, waited, _, _ in said)
        stood_still = [
            f"rank {rank} stood still for {still:.0f} s in the {collective}, until the others gave up"
            for rank, (collective, _, still, _) in zip(self._members, said)
            if still >= max(_STILL_SECONDS, longest / 4)
        ]
        return stood_still or [
            f"rank {rank} came to the {collective} only when the others gave up"
            for rank, (collective, waited, _, _) in zip(self._members, said)
            if waited < min(_LATE_SECONDS, longest / 2)
        ]

    def _without_name(self, ranks: list[int]) -> list[int]:
        """Which of the ranks have not signed in; by halves, since few have not and each question takes its time."""
        keys = [f"{self._key}/{rank}" for rank in ranks]
        if ask_store(lambda store: store.check(keys)):
            return []
        if len(ranks) == 1:
            return ranks
        half = len(ranks) // 2
        return self._without_name(ranks[:half]) + self._without_name(ranks[half:])

    def _count(self, name: str, more: int) -> int:
        return ask_store(lambda store: store.add(f"{self._key}/count of {name}", more))

    def _await(self, name: str, number: int, seconds: float) -> None:
        """Wait until so many ranks have counted themselves, or the time is over."""
        deadline = time.monotonic() + seconds
        pause = _PAUSE_SECONDS + _PAUSE_PER_RANK * len(self._members)
        while self._count(name, 0) < number and time.monotonic() < deadline and not self._left.wait(pause):
            pass
