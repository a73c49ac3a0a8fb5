"""NAMED COLLECTIVES: a collective that fails says which rank is missing, or what a rank has said of itself.

The protocol is that of missing_ranks.py; here it is put around the collectives of a group, whosever that is.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from commons.distributed.errors import first_line
from commons.distributed.group_pool import number_channel, ranks_beside_store
from commons.distributed.missing_ranks import POLL_SECONDS, Attendance, FailedChannel
from commons.distributed.process_group import describe_group
from commons.distributed.store import StoreUnavailableError

_POLL_TIME = datetime.timedelta(seconds=POLL_SECONDS)
# Between two looks at a device.
_LOOK_SECONDS = 0.0005
# How many ranks a message names.
_NAMED = 16


class RankMissingError(RuntimeError):
    """A collective of the control channel failed: a rank died, stalled or left the common order of calls."""


class ShufflerAbortedError(RankMissingError):
    """The shuffler was aborted on this rank while it was used: ranks are at different places from then on."""


class NamedCollectives:
    """Waits for collectives over the ranks of a group; all of them make it in the same order.

    Attributes:
        remedy: what the message about a missing rank advises.
        description: the group in words.
        members: global ranks of the group.
        generation: how many of these over the same ranks there were before; the same on all of them.
    """

    remedy = "see the log there, or raise the timeout of the process group"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.description = describe_group(group)
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        self.generation = number_channel(self.members)
        digest = hashlib.blake2b(repr(self.members).encode(), digest_size=8).hexdigest()
        self._failed = FailedChannel(f"evenrank/{digest}/{self.generation}", self.members)
        self._intact = True
        self._aborted_for: RankMissingError | None = None

    def wait(self, work: dist.Work, step: int | None, what: str, *, on_host: bool = True) -> None:
        """Wait on the host for a collective, and ask the store whether it has failed elsewhere.

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
        attendance = Attendance(_place(step, what))
        with self._named(step, what, attendance):
            failed = self._failed.watch(attendance)
            while True:
                try:
                    if on_host:
                        work.wait(_POLL_TIME)  # without the interpreter lock; a callback would need it
                    else:
                        _wait_for_device(work)
                    return
                except RuntimeError:
                    attendance.look()
                    if work.is_completed():  # with an error of its own, or well since then
                        work.wait()
                        return
                    if (known := self._known_failure()) is not None:
                        raise known from None
                    if failed.is_set():
                        raise self._missing(step, what, attendance) from None

    @contextlib.contextmanager
    def collective(self, step: int | None, what: str) -> Iterator[None]:
        """Around a collective: if it fails, the error names the ranks that are missing, and the groups are given up."""
        with self._named(step, what, Attendance(_place(step, what))):
            yield

    @contextlib.contextmanager
    def _named(self, step: int | None, what: str, attendance: Attendance) -> Iterator[None]:
        try:
            if (known := self._known_failure()) is not None:
                raise known
            yield
        except BaseException as error:  # an interrupt too leaves the ranks at different places
            self._intact = False
            if (known := self._known_failure()) is not None:
                raise known from None
            if isinstance(error, RuntimeError) and not isinstance(error, RankMissingError):
                raise self._missing(step, what, attendance, error) from None  # whose text may bring forty lines of C++
            raise

    def _known_failure(self) -> RankMissingError | None:
        """Why no collective here can be waited for, where this rank knows it already."""
        return self._aborted_for

    def _missing(
        self, step: int | None, what: str, attendance: Attendance, error: BaseException | None = None
    ) -> RankMissingError:
        """Tell the others that a collective has failed here; the error says who is missing, or who has failed.

        Args:
            step: number of the step or call.
            what: the collective.
            attendance: this rank's time in it.
            error: what torch says of it; its first line is kept where nobody is missing.
        """
        said = "" if error is None else f" ({first_line(error)})"
        try:
            missing, late, failure = self._failed.who_is_missing(attendance)
        except StoreUnavailableError as unavailable:
            return RankMissingError(
                f"the {_place(step, what)} failed on rank {dist.get_rank()} and {unavailable}"
                f"{out_of_reach(self.members)}{said}"
            )
        if (known := self._known_failure()) is not None:
            return known
        if failure is not None:
            return RankMissingError(failure)
        advice = f"({self.description}); {self.remedy} if it was only slow"
        if late and not missing:
            return RankMissingError(f"{_listed(late, '; ')} {advice}")
        if not missing:
            return RankMissingError(
                f"the {_place(step, what)} failed although all of {self.description} took part{said}"
            )
        names = f"{'rank' if len(missing) == 1 else 'ranks'} {_listed(missing, ', ')}"
        absent = f"{names} did not take part in the {_place(step, what)}"
        return RankMissingError(f"{'; '.join([*late, absent])} {advice}")


def _place(step: int | None, what: str) -> str:
    """How messages call a collective."""
    return what if step is None else f"{what} of step {step}"


def _wait_for_device(work: dist.Work) -> None:
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
    """What to say of the ranks on the store's host, which does not answer; "" on that host."""
    there = ranks_beside_store(members)
    if not there or dist.get_rank() in there:
        return ""
    runs = "rank {} runs" if len(there) == 1 else "ranks {} run"
    return f"; {runs.format(_listed(there, ', '))} on that host, which may be out of reach"


def _listed(each: Sequence[Any], separator: str) -> str:
    """The first few in words, and how many more there are."""
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return separator.join(map(str, each[:_NAMED])) + more
