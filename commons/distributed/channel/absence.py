"""ABSENCE: which rank a failed collective lacks, and where the others were; one protocol for all collectives.

When a collective of a channel fails on a rank, all ranks give the channel up. Each writes a record to torch's store:
where it is and how long it has waited. It waits some seconds for the records of the others, and reads who is missing. A
rank that fails by itself writes its error instead, which the others quote. Ranks that still wait look every second
whether the channel has failed elsewhere, whichever collective they are in. A rank leaves when the others have read,
within limits, because the store may end with the rank that hosts it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from commons.distributed.channel.groups import number_channel, rank_set
from commons.distributed.channel.store import (
    KeyWatch,
    StoreGather,
    StoreUnavailableError,
    ask_store,
    begin_asking,
    ends_with_rank,
)
from commons.distributed.errors import describe_error, first_line, listed, name_ranks
from commons.distributed.process_group import describe_group

# Seconds between two looks of a waiting rank at the store; of one at a device, between two looks at that.
POLL_SECONDS = 1.0
_POLL_TIME = datetime.timedelta(seconds=POLL_SECONDS)
_LOOK_SECONDS = 0.0005
# Seconds that a rank waits for the others' records, and then for the others to read what it knows.
_RECORDS_SECONDS = 4.0
_READERS_SECONDS = 2.0
# A rank stood still if its looks are this many seconds further apart than they should be.
_STILL_SECONDS = 1.5
# A rank is late if it waited for less, and under half as long as the longest waiter: all notice a failure in one poll.
_LATE_SECONDS = 2 * POLL_SECONDS


class RankMissingError(RuntimeError):
    """A collective of a channel failed: a rank died, stalled or left the common order of calls."""


class ShufflerAbortedError(RankMissingError):
    """The shuffler was aborted on this rank while it was used: ranks are at different places from then on."""


class _FailedElsewhereError(RuntimeError):
    """The collective has not failed here; the channel has."""


class Waitable(Protocol):
    """The work of a collective, or what is waited for like one."""

    def is_completed(self) -> bool:
        """Whether `wait` returns, or raises an error of its own, at once."""
        ...

    def wait(self, timeout: datetime.timedelta = ..., /) -> Any:
        """Raise RuntimeError unless it is done in time, or if it has failed."""
        ...


class Attendance:
    """A rank's time in one collective.

    Args:
        what: the collective.
        step: number of the step or call; None where the name of the collective says all.
        failed: key that is set once the channel has failed on any rank.
    """

    def __init__(self, what: str, step: int | None, failed: str) -> None:
        self._what, self._step = what, step
        self._entered = self._seen = time.monotonic()
        self._still = 0.0
        self._failed = failed
        self._watch: KeyWatch | None = None  # made with the first look, which most collectives do without

    @property
    def place(self) -> str:
        """The collective and its step, in messages."""
        return _place(self._step, self._what)

    def has_failed_elsewhere(self) -> bool:
        """Whether another rank has given the channel up; called every POLL_SECONDS."""
        now = time.monotonic()
        self._still = max(self._still, now - self._seen - POLL_SECONDS)
        self._seen = now
        self._watch = self._watch or KeyWatch(self._failed)
        return self._watch.is_set()

    def record(self) -> str:
        """JSON for the other ranks: the place, and the seconds spent, stood still and without the store in it."""
        silent = 0.0 if self._watch is None else self._watch.silent_seconds
        return json.dumps([self.place, time.monotonic() - self._entered, self._still, silent])


class Verdict(NamedTuple):
    """What is known of a failed channel."""

    missing: list[int]  # global ranks without a record
    # A sentence about each that came late or stood still; where some are missing, about the store's host alone.
    late: list[str]
    failure: str | None  # the text of a rank that has failed by itself, if any has


class FailedChannel:
    """A channel in the store, once it has failed on a rank.

    Args:
        key: of the channel; the same on all ranks, and of no other channel.
        members: global ranks that take part.
    """

    def __init__(self, key: str, members: Sequence[int]) -> None:
        self._key, self._members, self._failed_key = key, members, f"{key}/failed"
        self._records = StoreGather(key, members)

    def attend(self, what: str, step: int | None = None) -> Attendance:
        """This rank's time in a collective, from now on."""
        return Attendance(what, step, self._failed_key)

    def post(self, text: str) -> None:
        """Let all ranks that wait in the channel, now or later, know why this one will not come.

        The host of the store stays for a moment, so that they can read it. Nothing happens without a store.
        """
        with contextlib.suppress(StoreUnavailableError):
            ask_store(lambda store: store.set(f"{self._key}/failure", text))
            ask_store(lambda store: store.set(self._failed_key, "1"))
            if ends_with_rank() == dist.get_rank():
                self._records.await_count("read", len(self._members) - 1, _READERS_SECONDS)

    def leave(self, text: str) -> None:
        """`post` without a wait, for a store that may not answer; what waits here in `who_is_missing` ends soon."""
        self._records.give_up()
        if dist.is_initialized():
            begin_asking(lambda store: store.set(f"{self._key}/failure", text))
            begin_asking(lambda store: store.set(self._failed_key, "1"))

    def who_is_missing(self, attendance: Attendance) -> Verdict:
        """Write this rank's record, wait for the others' and read; takes seconds, whatever the store does.

        Raises:
            StoreUnavailableError: the store does not answer, or has ended.
        """
        ask_store(lambda store: store.set(self._failed_key, "1"))
        self._records.write(attendance.record())
        missing: list[int] = []
        late: list[str] = []
        if (failure := self._failure()) is None:
            missing = self._records.await_others(_RECORDS_SECONDS)
            failure = self._failure()
        with contextlib.suppress(StoreUnavailableError):  # its host may have ended since
            if failure is None:
                present = [rank for rank in self._members if rank not in missing]
                late = _late(self._records.read(present), bool(missing))
            self._records.count("read")
            # The host leaves last; else all leave together, since torchrun ends the others with the first.
            if ends_with_rank() in (None, dist.get_rank()):
                readers = len(self._members) - max(len(missing), failure is not None)
                self._records.await_count("read", readers, _READERS_SECONDS)
        return Verdict(missing, late, failure)

    def _failure(self) -> str | None:
        key = f"{self._key}/failure"
        return ask_store(lambda store: store.get(key).decode() if store.check([key]) else None)


def _late(texts: Mapping[int, str], some_are_missing: bool) -> list[str]:
    """A sentence about each rank that explains the failure, by the records."""
    records = {rank: json.loads(text) for rank, text in texts.items()}
    if some_are_missing:
        host, silent = ends_with_rank(), max(silent for *_, silent in records.values())
        if host not in records or silent < _STILL_SECONDS:
            return []
        return [
            f"rank {host}, which hosts the store, stood still for {silent:.0f} s, in which others may have given up"
        ]
    longest = max(waited for _, waited, _, _ in records.values())
    stood_still = [
        f"rank {rank} stood still for {still:.0f} s in the {place}, until the others gave up"
        for rank, (place, _, still, _) in records.items()
        if still >= max(_STILL_SECONDS, longest / 4)
    ]
    return stood_still or [
        f"rank {rank} came to the {place} only when the others gave up"
        for rank, (place, waited, _, _) in records.items()
        if waited < min(_LATE_SECONDS, longest / 2)
    ]


class NamedCollectives:
    """Waits for collectives over the ranks of a group; all of them make it in the same order.

    Attributes:
        remedy: what the message about a missing rank advises.
        description: the group in words.
        members: global ranks of the group.
        generation: how many of these over the same ranks there were before; the same on all of them.
        failure: the error of the first collective that failed here; None while all is well.
    """

    remedy = "see the log there, or raise the timeout of the process group"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.description = describe_group(group)
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        self.generation = number_channel(self.members)
        digest = hashlib.blake2b(repr(self.members).encode(), digest_size=8).hexdigest()
        self.failed = FailedChannel(f"evenrank/{digest}/{self.generation}", self.members)
        self.failure: RankMissingError | None = None
        self._intact = True
        self._failing = threading.Lock()
        self._is_issuing = False

    def wait(self, work: Waitable, step: int | None, what: str, *, on_host: bool = True) -> None:
        """Wait on the host for a collective, and ask the store whether the channel has failed elsewhere.

        gloo fails at once on the neighbours of a rank that died, but only after the timeout on the others: these end
        here, and are not taken for missing.

        Args:
            work: what the asynchronous collective returned.
            step: number of the step or call; None where the name of the collective says all.
            what: the collective.
            on_host: whether its tensors are; those of a device are there when this returns.

        Raises:
            RankMissingError: a rank did not take part in time, which is named, or has failed, with its message.
        """
        attendance = self.failed.attend(what, step)
        try:
            self._raise_known()
            while True:
                try:
                    if on_host:
                        work.wait(_POLL_TIME)  # without the GIL; a callback would need it
                    else:
                        _wait_for_device(work)
                    return
                except RuntimeError:
                    failed = attendance.has_failed_elsewhere()
                    if work.is_completed():  # with an error of its own, or well since then
                        work.wait()
                        return
                    if failed or self._known_failure() is not None:
                        raise _FailedElsewhereError from None
        except BaseException as error:
            raise self._failure_after(attendance, error) from None  # torch's text may bring forty lines of C++

    @contextlib.contextmanager
    def collective(self, step: int | None, what: str) -> Iterator[None]:
        """Around the call of a collective: if it fails, the error names the ranks that are missing."""
        attendance = self.failed.attend(what, step)
        try:
            self._is_issuing = True
            try:
                self._raise_known()  # that another thread has set before it could see this one here
                yield
            finally:
                self._is_issuing = False
            self._raise_known()  # an aborted collective may return as if all were well
        except BaseException as error:
            raise self._failure_after(attendance, error) from None  # torch's text may bring forty lines of C++

    @contextlib.contextmanager
    def failures_posted(self, step: int, what: str) -> Iterator[None]:
        """Around what this rank does alone before a collective: its error is posted to those that wait there."""
        try:
            yield
        except RankMissingError:
            raise
        except Exception as error:
            self.post_failure(step, what, error)
            raise

    def post_failure(self, step: int, what: str, error: Exception) -> None:
        """Let the ranks that wait in this channel know that this one will not come, and why."""
        if len(self.members) > 1:
            self._intact = False
            text = f"rank {dist.get_rank()} failed in the {_place(step, what)}: {': '.join(describe_error(error))}"
            self.failed.post(" ".join(text.split()))

    def _failure_after(self, attendance: Attendance, error: BaseException) -> BaseException:
        """The error to raise for one that has ended this rank's time in a collective: it names who is missing."""
        self._intact = False  # an interrupt too leaves the ranks at different places
        if not isinstance(error, RuntimeError) and self._known_failure() is None:
            return error
        return self._fail(attendance, error)

    def _raise_known(self) -> None:
        if (known := self._known_failure()) is not None:
            raise known

    def _known_failure(self) -> RankMissingError | None:
        """Why no collective here can be waited for, where this rank knows it already."""
        return self.failure

    def _fail(self, attendance: Attendance, error: BaseException) -> RankMissingError:
        """The error of this channel, whose ranks learn that it has failed; of several threads, that of the first."""
        with self._failing:
            failure = self._known_failure() or (
                error if isinstance(error, RankMissingError) else self._describe(attendance, error)
            )
            self.failure = failure = self._known_failure() or failure  # aborted meanwhile
        if self._is_issuing:
            self._end_issued()
        return failure

    def _end_issued(self) -> None:
        """End the collective that another thread is calling."""

    def _describe(self, attendance: Attendance, error: BaseException) -> RankMissingError:
        place, rank = attendance.place, dist.get_rank()
        said = "" if isinstance(error, _FailedElsewhereError) else f" ({first_line(error)})"
        try:
            missing, late, failure = self.failed.who_is_missing(attendance)
        except StoreUnavailableError as unavailable:
            return RankMissingError(
                f"the {place} failed on rank {rank} and {unavailable}{out_of_reach(self.members)}{said}"
            )
        if failure is not None:
            return RankMissingError(failure)
        advice = f"({self.description}); {self.remedy} if it was only slow"
        if late and not missing:
            return RankMissingError(f"{listed(late, '; ')} {advice}")
        if not missing:
            return RankMissingError(f"the {place} failed although all of {self.description} took part{said}")
        absent = f"{name_ranks(missing)} did not take part in the {place}"
        return RankMissingError(f"{'; '.join([*late, absent])} {advice}")


def _place(step: int | None, what: str) -> str:
    """How messages call a collective."""
    return what if step is None else f"{what} of step {step}"


def _wait_for_device(work: Waitable) -> None:
    """Raise RuntimeError unless a collective is done within POLL_SECONDS, or if it has failed.

    A wait with a limit would let NCCL give the group up where the limit is over.
    """
    deadline = time.monotonic() + POLL_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("not done yet")
        time.sleep(_LOOK_SECONDS)
    work.wait()


def out_of_reach(members: Sequence[int]) -> str:
    """What to add about the ranks on the store's host, which does not answer; "" on that host."""
    there = rank_set(members).beside_store
    if not there or dist.get_rank() in there:
        return ""
    return f"; {name_ranks(there)} {'runs' if len(there) == 1 else 'run'} on that host, which may be out of reach"
