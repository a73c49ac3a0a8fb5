"""ABSENCE: finds out which rank is missing when a collective fails, and names it on every other rank.

When a collective of a channel fails on one rank, all ranks stop using the channel. Each writes a record to torch's
store: which collectives it is in and how long it has waited. It then waits a few seconds for the other records; a rank
without a record is missing. A rank that fails with an error of its own writes the error, and the others raise it. Every
waiting rank checks the store once per second for a failure on another rank. A rank waits a moment until the others have
read its record, because the store may end with the rank that hosts it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from commons.distributed.channel.groups import MakingOfGroups, key_of_channel, out_of_reach
from commons.distributed.channel.store import StoreUnavailableError, call_store, ends_with_rank, pause_of, submit_call
from commons.distributed.errors import describe_error, first_line, listed, name_errors, name_ranks
from commons.distributed.process_group import describe_group

# Seconds between two checks of the store while a rank waits, and between two checks of a device.
POLL_SECONDS = 1.0
_POLL_TIME = datetime.timedelta(seconds=POLL_SECONDS)
_LOOK_SECONDS = 0.0005
# Most seconds that one check of the store waits for the reply.
_GLANCE_SECONDS = 0.2
# Seconds that a rank waits for the others' records, and then for the others to read its own.
_RECORDS_SECONDS = 4.0
_READERS_SECONDS = 2.0
# A process was stopped if two of its checks are this many seconds further apart than POLL_SECONDS.
_STILL_SECONDS = 1.5
# A rank is late if it waited less than this, and under half as long as the longest waiter.
_LATE_SECONDS = 2 * POLL_SECONDS

# Torch's signal handler raises a RuntimeError in any line of the main thread if a loader's worker was killed.
_KILLED_WORKER = "DataLoader worker "

# What a rank waits for: the handle of an asynchronous collective, or process groups.
Awaited: TypeAlias = "dist.Work | MakingOfGroups"


class RankMissingError(RuntimeError):
    """A collective of a channel failed: a rank died, stalled, or made its calls in another order."""


class ShufflerAbortedError(RankMissingError):
    """The shuffler was aborted on this rank while it was in use, so that ranks are no longer at the same call."""


class _FailedElsewhereError(RuntimeError):
    """The channel failed on another rank, while this rank's collective has not failed."""


class CollectiveWait:
    """This rank's wait in one collective, which checks whether the channel has failed on another rank meanwhile.

    The store's key `failed` is set once the channel has failed on any rank; at most one call of the store is under way.
    """

    def __init__(self, place: str, failed: str) -> None:
        self.place = place  # the collective and its step, in messages
        self._failed = failed
        self._entered = self._seen = time.monotonic()
        # The longest times for which this process was stopped, and for which the store has not replied.
        self._still = self._silent = 0.0
        self.failed_elsewhere = False  # the last result of has_failed_elsewhere()
        self._check: Future[bool] | None = None  # the call under way, and since when
        self._called = 0.0

    def has_failed_elsewhere(self) -> bool:
        """Whether the channel has failed on another rank or the store has ended; called every POLL_SECONDS.

        False while the store does not reply.
        """
        now = time.monotonic()
        self._still = max(self._still, now - self._seen - POLL_SECONDS)
        self._seen = now
        if self._check is None:
            self._check, self._called = submit_call(lambda store: store.check([self._failed])), now
        try:
            found = self._check.result(_GLANCE_SECONDS)
        except concurrent.futures.TimeoutError:
            self._silent = max(self._silent, time.monotonic() - self._called)
            return False
        except StoreUnavailableError:
            return True
        self._check, self.failed_elsewhere = None, found
        return found

    def record(self, places: Sequence[str], cause: str) -> str:
        """JSON for the other ranks: the rank's collectives, seconds waited, stopped and without the store, and `cause`.

        `places` are the collectives that other threads of this rank wait in.
        """
        places = [self.place, *(place for place in places if place != self.place)]
        cause = "" if self.failed_elsewhere else cause  # failed because another rank had given up
        return json.dumps([places, time.monotonic() - self._entered, self._still, self._silent, cause])


class Verdict(NamedTuple):
    """Why a channel has failed."""

    missing: list[int]  # global ranks without a record
    # A sentence about each rank that came late, was stopped or waited in another collective; where ranks are missing,
    # only about the store's host.
    late: list[str]
    failure: str | None  # the message of a rank that failed with an error of its own, if any did
    causes: str  # the connections' errors of all ranks, in words


class FailedChannel:
    """The store's entries about one channel, written after it has failed.

    Their keys begin with `key`, which is equal on all ranks and unique to the channel.
    """

    def __init__(self, key: str, members: Sequence[int]) -> None:
        self.key, self._members = key, members
        self._failed_key, self._failure_key = f"{key}/failed", f"{key}/failure"
        self._pause = pause_of(len(members))
        self._has_left = threading.Event()

    def start_wait(self, place: str) -> CollectiveWait:
        """Begin this rank's wait in a collective."""
        return CollectiveWait(place, self._failed_key)

    def post(self, text: str) -> None:
        """Write an error of this rank to the store; every rank that waits in the channel, now or later, raises it.

        The rank that hosts the store waits a moment for the others to read. Without effect if there is no store.
        """
        with contextlib.suppress(StoreUnavailableError):
            call_store(lambda store: store.set(self._failure_key, text))
            call_store(lambda store: store.set(self._failed_key, "1"))
            if ends_with_rank() == dist.get_rank():
                self._await_count("read", len(self._members) - 1, _READERS_SECONDS)

    def leave(self, text: str) -> None:
        """`post` without waiting, for a store that may not answer; also ends this rank's wait in `who_is_missing`."""
        self._has_left.set()
        submit_call(lambda store: store.set(self._failure_key, text))
        submit_call(lambda store: store.set(self._failed_key, "1"))

    def who_is_missing(self, own_wait: CollectiveWait, places: Sequence[str] = (), cause: str = "") -> Verdict:
        """Write this rank's record, wait for the others' and read them; takes a few seconds at most.

        `places` are the collectives that other threads of this rank wait in; `cause` is this rank's own error, if any.

        Raises:
            StoreUnavailableError: the store does not answer, or has ended.
        """
        call_store(lambda store: store.set(self._failed_key, "1"))
        call_store(lambda store: store.set(self._key_of(dist.get_rank()), own_wait.record(places, cause)))
        self._count("present")
        missing: list[int] = []
        late: list[str] = []
        quoted, causes = None, ""
        if (failure := self._failure()) is None:
            self._await_count("present", len(self._members), _RECORDS_SECONDS)
            missing = self._without_record(self._members)
            failure = self._failure()
        with contextlib.suppress(StoreUnavailableError):  # its host may have ended meanwhile
            if failure is None:
                present = [rank for rank in self._members if rank not in missing]
                texts = call_store(lambda store: store.multi_get([self._key_of(rank) for rank in present]))
                records = dict(zip(present, map(json.loads, texts)))
                late, quoted = _late(records, own_wait.place, bool(missing))
                causes = name_errors({rank: cause for rank, (*_, cause) in records.items()})
            self._count("read")
            # The store's host returns last. If no rank hosts it, all return together: torchrun ends all with the first.
            if ends_with_rank() in (None, dist.get_rank()):
                readers = len(self._members) - max(len(missing), failure is not None)
                self._await_count("read", readers, _READERS_SECONDS)
        return Verdict(missing, late, failure or quoted, causes)

    def _failure(self) -> str | None:
        key = self._failure_key
        return call_store(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _key_of(self, rank: int) -> str:
        return f"{self.key}/{rank}"

    def _count(self, name: str) -> None:
        call_store(lambda store: store.add(f"{self.key}/count of {name}", 1))

    def _await_count(self, name: str, number: int, seconds: float) -> None:
        """Wait until a count reaches `number`, the time is over, or `leave` is called."""
        deadline, key = time.monotonic() + seconds, f"{self.key}/count of {name}"
        while call_store(lambda store: store.add(key, 0)) < number and time.monotonic() < deadline:
            if self._has_left.wait(self._pause):
                return

    def _without_record(self, ranks: Sequence[int]) -> list[int]:
        """The ranks without a record, found by bisection: few are missing, and one call checks many keys."""
        if call_store(lambda store: store.check([self._key_of(rank) for rank in ranks])):
            return []
        half = len(ranks) // 2
        return list(ranks) if half == 0 else self._without_record(ranks[:half]) + self._without_record(ranks[half:])


def _late(records: Mapping[int, list[Any]], own_place: str, some_are_missing: bool) -> tuple[list[str], str | None]:
    """`Verdict.late` and `Verdict.failure` of a failure in `own_place`, from the ranks' records."""
    if some_are_missing:
        host, silent = ends_with_rank(), max(silent for *_, silent, _ in records.values())
        stalled = f"rank {host}, which hosts the store, stalled for {silent:.0f} s, in which others may have given up"
        return ([stalled] if host in records and silent >= _STILL_SECONDS else []), None
    longest = max(waited for _, waited, *_ in records.values())
    stood_still = [
        f"rank {rank} stalled for {still:.0f} s in the {places[0]}, until the others gave up"
        for rank, (places, _, still, *_) in records.items()
        if still >= max(_STILL_SECONDS, longest / 4)
    ]
    short = {rank: record for rank, record in records.items() if record[1] < min(_LATE_SECONDS, longest / 2)}
    came_late = [f"rank {rank} reached the {each[0][0]} only after the others gave up" for rank, each in short.items()]
    elsewhere = [
        f"rank {rank} waited in the {' and the '.join(places)}, not in the {own_place}"
        for rank, (places, *_) in records.items()
        if own_place not in places
    ]
    # If a rank has waited long and then failed by itself, the late ranks failed because it gave up.
    failed = {rank: f"rank {rank} failed in the {each[0][0]}: {each[-1]}" for rank, each in records.items() if each[-1]}
    if failed and not stood_still and failed.keys() <= short.keys():
        return [], "; ".join(failed.values())
    return stood_still or came_late or elsewhere, None


class NamedCollectives:
    """Waits for collectives of a group, and names the missing rank of one that fails; made by all ranks in one order.

    Attributes:
        remedy: advice at the end of the message about a missing rank.
        description: the group in words, for messages.
        members: global ranks of the group.
        failure: the error of the first collective that failed on this rank; None before.
    """

    remedy = "see the log there, or raise the timeout of the process group"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.description = describe_group(group)
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        self.failed = FailedChannel(key_of_channel(self.members), self.members)
        self.failure: RankMissingError | None = None
        self._intact = True
        self._failing = threading.Lock()
        self._is_issuing = False
        self._places: list[str] = []  # the collectives that threads of this rank wait in

    def wait(
        self, issued: Awaited | Callable[[], Awaited], step: int | None, what: str, *, on_host: bool = True
    ) -> None:
        """Wait for a collective, or issue and wait; check the store once per second for a failure on another rank.

        When a rank dies, gloo fails at once on its neighbours, but on the other ranks only after the timeout. The
        check ends their wait too, so that they are not reported as missing.

        If its tensors are not `on_host`, this waits until they are complete on their device. Without a `step`, messages
        have none.

        Raises:
            RankMissingError: a rank did not join in time (the message names it), or raised an error (quoted).
        """
        own_wait = self._enter(step, what)
        try:
            self._raise_known()
            # The call of a collective fails too, for example with TORCH_DISTRIBUTED_DEBUG=DETAIL.
            work = issued() if callable(issued) else issued
            while True:
                try:
                    if on_host:
                        work.wait(_POLL_TIME)  # releases the GIL; a callback would need it
                    else:
                        _wait_for_device(work)
                    return
                except RuntimeError as error:
                    if str(error).startswith(_KILLED_WORKER):
                        raise
                    failed = own_wait.has_failed_elsewhere()
                    if work.is_completed():  # has failed, or was completed after the wait
                        work.wait()
                        return
                    if failed or self._known_failure() is not None:
                        raise _FailedElsewhereError from None
        except BaseException as error:
            raise self._failure_after(own_wait, error) from None  # torch's text may have forty lines of C++
        finally:
            self._places.remove(own_wait.place)

    @contextlib.contextmanager
    def collective(self, step: int | None, what: str) -> Iterator[None]:
        """A context for the call of a collective: if the call fails, the error names the missing ranks."""
        own_wait = self._enter(step, what)
        try:
            self._is_issuing = True
            try:
                self._raise_known()  # set by another thread before `_is_issuing`, so that it aborted nothing
                yield
            finally:
                self._is_issuing = False
            self._raise_known()  # an aborted collective may return without an error
        except BaseException as error:
            raise self._failure_after(own_wait, error) from None  # torch's text may have forty lines of C++
        finally:
            self._places.remove(own_wait.place)

    def _enter(self, step: int | None, what: str) -> CollectiveWait:
        """Begin this rank's wait in a collective; the caller removes its place at the end."""
        own_wait = self.failed.start_wait(_place(step, what))
        self._places.append(own_wait.place)
        return own_wait

    @contextlib.contextmanager
    def failures_posted(self, step: int, what: str) -> Iterator[None]:
        """A context for this rank's own work before a collective: an error is posted to the ranks that wait there."""
        try:
            yield
        except RankMissingError:
            raise
        except Exception as error:
            self.post_failure(step, what, error)
            raise

    def post_failure(self, step: int, what: str, error: Exception) -> None:
        """Make every rank that waits in this channel raise this rank's error."""
        if len(self.members) > 1:
            self._intact = False
            text = f"rank {dist.get_rank()} failed in the {_place(step, what)}: {': '.join(describe_error(error))}"
            self.failed.post(" ".join(text.split()))

    def _failure_after(self, own_wait: CollectiveWait, error: BaseException) -> BaseException:
        """The error to raise in place of `error`, which ended this rank's wait in a collective."""
        self._intact = False  # also after KeyboardInterrupt: ranks are no longer at the same call
        of_collective = isinstance(error, RuntimeError) and not str(error).startswith(_KILLED_WORKER)
        if not of_collective and self._known_failure() is None:
            return error
        with self._failing:  # the error is that of the first thread, if several fail
            failure = self._known_failure() or (
                error if isinstance(error, RankMissingError) else self._describe(own_wait, error)
            )
            self.failure = failure = self._known_failure() or failure  # aborted meanwhile
        if self._is_issuing:
            self._end_issued()
        return failure

    def _raise_known(self) -> None:
        if (known := self._known_failure()) is not None:
            raise known

    def _known_failure(self) -> RankMissingError | None:
        """The error of this channel, if it has failed on this rank already."""
        return self.failure

    def _end_issued(self) -> None:
        """Abort the collective that another thread is calling."""

    def _describe(self, own_wait: CollectiveWait, error: BaseException) -> RankMissingError:
        place, rank = own_wait.place, dist.get_rank()
        reason = "" if isinstance(error, _FailedElsewhereError) else first_line(error)
        try:
            missing, late, failure, causes = self.failed.who_is_missing(own_wait, self._places, reason)
        except StoreUnavailableError as unavailable:
            text = f"the {place} failed on rank {rank} and {unavailable}{out_of_reach(self.members)}"
            return RankMissingError(f"{text} ({reason})" if reason else text)
        if failure is not None:
            return RankMissingError(failure)
        cause = f" ({causes or reason})" if causes or reason else ""
        advice = f"({self.description}); {self.remedy} if it was only slow"
        if late and not missing:
            return RankMissingError(f"{listed(late, '; ')} {advice}{cause}")
        if not missing:
            return RankMissingError(f"the {place} failed although all of {self.description} took part{cause}")
        absent = f"{name_ranks(missing)} did not take part in the {place}"
        return RankMissingError(f"{'; '.join([*late, absent])} {advice}")


def _place(step: int | None, what: str) -> str:
    """The name of a collective in messages."""
    return what if step is None else f"{what} of step {step}"


def _wait_for_device(work: Awaited) -> None:
    """Raise RuntimeError if a collective has failed or is not done within POLL_SECONDS.

    Polls, because NCCL aborts the group when a `wait` with a timeout expires.
    """
    deadline = time.monotonic() + POLL_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("not done yet")
        time.sleep(_LOOK_SECONDS)
    work.wait()
