"""NAMES: what ranks tell one another through the store about a collective that has failed.

Those who are there write their names, wait a moment for the others', and read who is missing, or what a rank has said
of itself. Nobody leaves before the others have read, within limits: the store may end with the one who hosts it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch.distributed as dist

from commons.distributed.store import KeyWatch, StoreUnavailableError, ask_store, ends_with_rank

# How long a rank in which a collective has failed waits for the others' names, and then for them to read what it knows.
_NAMES_SECONDS = 4.0
_READERS_SECONDS = 2.0
# Between two looks at a count: of a few ranks, and for every rank more, all of which look.
_PAUSE_SECONDS = 0.05
_PAUSE_PER_RANK = 0.0002


class FailedCollective:
    """One collective as the store knows it, once it has failed on a rank.

    Args:
        key: of the collective; the same on all ranks, and on no other occasion.
        members: global ranks that take part.
    """

    def __init__(self, key: str, members: Sequence[int]) -> None:
        self._key = key
        self._members = members

    def watch(self) -> KeyWatch:
        """For a rank that still waits: tells whether the collective has failed elsewhere."""
        return KeyWatch(f"{self._key}/failed")

    def post(self, text: str) -> None:
        """Tell the ranks that wait in the collective that this one will not come, and why.

        The host of the store stays for a moment, so that they can read it. Nothing happens without a store.
        """
        with contextlib.suppress(StoreUnavailableError):
            self._set("failure", text)
            self._sign_in()
            self._count("read", 1)
            if ends_with_rank() == dist.get_rank():
                self._await("read", len(self._members), _READERS_SECONDS)

    def who_is_missing(self) -> tuple[list[int], str | None]:
        """Sign in, wait for the others, and read; takes seconds, whatever the store does.

        Returns:
            Global ranks that did not sign in, and the text of one that has posted its failure, if any has.

        Raises:
            StoreUnavailableError: the store does not answer, or has ended.
        """
        self._sign_in()
        self._await("present", len(self._members), _NAMES_SECONDS)
        missing = self._without_name(list(self._members))
        posted = ask_store(lambda store: store.check([f"{self._key}/failure"]))
        text = ask_store(lambda store: store.get(f"{self._key}/failure").decode()) if posted else None
        with contextlib.suppress(StoreUnavailableError):
            self._count("read", 1)
            # The host leaves last; else all leave together, since torchrun ends the others with the first.
            if ends_with_rank() in (None, dist.get_rank()):
                self._await("read", len(self._members) - len(missing), _READERS_SECONDS)
        return missing, text

    def _sign_in(self) -> None:
        self._set("failed", "1")
        self._set(str(dist.get_rank()), "1")
        self._count("present", 1)

    def _without_name(self, ranks: list[int]) -> list[int]:
        """Which of the ranks have not signed in; by halves, since few have not and each question takes its time."""
        keys = [f"{self._key}/{rank}" for rank in ranks]
        if ask_store(lambda store: store.check(keys)):
            return []
        if len(ranks) == 1:
            return ranks
        half = len(ranks) // 2
        return self._without_name(ranks[:half]) + self._without_name(ranks[half:])

    def _set(self, name: str, value: str) -> None:
        ask_store(lambda store: store.set(f"{self._key}/{name}", value))

    def _count(self, name: str, more: int) -> int:
        return ask_store(lambda store: store.add(f"{self._key}/count of {name}", more))

    def _await(self, name: str, number: int, seconds: float) -> None:
        """Wait until so many ranks have counted themselves, or the time is over."""
        deadline = time.monotonic() + seconds
        pause = _PAUSE_SECONDS + _PAUSE_PER_RANK * len(self._members)
        while self._count(name, 0) < number and time.monotonic() < deadline:
            time.sleep(pause)
