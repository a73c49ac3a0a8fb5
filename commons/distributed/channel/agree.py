"""AGREE: small collectives over a gloo group of its own, and the one protocol of every distributed call.

Ranks agree before they act: `ControlChannel.agree` compares the call and its options, raises on all ranks what went
wrong on any of them, and tells all of them a few numbers of each, in one gathered table.

Only integers and JSON text cross the group. The shuffler's one worker thread uses it; the payload group beside it is
used by the main thread alone, so that neither waits for the other's turn.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.channel.absence import NamedCollectives, RankMissingError
from commons.distributed.channel.connections import break_connections
from commons.distributed.channel.groups import (
    GroupPair,
    MakingOfGroups,
    acquire_groups,
    numbers_device,
    rank_set,
    release_groups,
    serves,
    try_collectives,
    with_control,
    with_payload,
)
from commons.distributed.channel.store import is_beside_host
from commons.distributed.errors import attempt, gather_strings, raise_first_difference, raise_on_all
from commons.distributed.options import ShufflerOptions, timeout_error
from commons.distributed.process_group import all_gather_single, resolve_process_group

# What a rank says of itself when ranks agree on a call; 0 is that all is well.
_FAILED, _OPTIONS_UNKNOWN = 1, 2
# Numbers that the first message of a call has room for: ranks that make different calls learn of it.
CALL_NUMBERS = 4

_CONNECTION = "connection"

C = TypeVar("C", bound="ControlChannel")
T = TypeVar("T")


class ControlChannel(NamedCollectives):
    """Groups over the ranks of a data-parallel group: gloo for metadata, the default backend for rows.

    Constructed on the main thread by all ranks of the group in the same order; all groups are made and connected here:
    those that gather, which are two of many ranks (see groups.py); the one for rows, unless no rank will move any
    (`moves_rows`); and one over all ranks for host tensors of single ranks, if any will send some (`pairwise`).

    Attributes:
        rank: this process' rank in the group.
        world_size: ranks in the group.
        names: how messages call the ranks: by their global numbers.
    """

    remedy = "every rank must call the shuffler for every step: see the log there, or raise ShufflerOptions.timeout"

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True, pairwise: bool = False
    ) -> None:
        super().__init__(group)
        # Raised by `agree`, on all ranks: those with a good timeout would wait for one that raises it here.
        self._problem = timeout_error(timeout)
        timeout = timeout if self._problem is None else ShufflerOptions.timeout
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._given, self._timeout, self._process = group, timeout, os.getpid()
        self._groups: GroupPair | None = None
        self._groups_of_main: GroupPair | None = None
        self.names: Sequence[int] = self.members
        if self.world_size > 1:
            assert group is not None  # noqa: S101  there are several ranks
            self._groups = self._make(lambda: acquire_groups(group, timeout))
            if self._groups.control is None or self._groups.has_all_to_all is None:
                self._complete_groups(self._groups, group, moves_rows, pairwise)

    def _make(self, make: Callable[[], T], step: int = 0, what: str = _CONNECTION) -> T:
        """What a function of groups.py returns, which all ranks call together.

        Raises:
            RankMissingError: a rank did not take part in time; names it.
        """
        making = MakingOfGroups(make, self._timeout)
        self.wait(making, step, what)
        return making.result

    def _complete_groups(self, pair: GroupPair, group: dist.ProcessGroup, moves_rows: bool, pairwise: bool) -> None:
        """Make and try the groups that any rank needs: ranks whose settings differ learn of it later."""
        timeout, ranks = self._timeout, rank_set(self.members)
        own = [moves_rows, pairwise, ranks.beside_store is None and is_beside_host()]
        moves, pairs, beside = self.gather(np.array(own, dtype=np.int64), 0, _CONNECTION).T
        if ranks.beside_store is None:
            ranks.beside_store = [rank for rank, is_there in zip(self.members, beside) if is_there]
        if pair.control is None and pairs.any():
            pair = self._groups = self._make(functools.partial(with_control, pair, group, timeout))
        for all_to_all in (True, False):
            if moves.any() and pair.has_all_to_all is None:
                pair = self._groups = self._make(functools.partial(with_payload, pair, group, timeout))
                pair = self._groups = pair._replace(has_all_to_all=self._try(pair, all_to_all))

    def _try(self, pair: GroupPair, all_to_all: bool) -> bool | None:
        """Run the payload group's collectives once; a rank that fails in that leaves nobody waiting.

        Args:
            pair: with a payload group that nobody has used.
            all_to_all: whether an all-to-all is tried.

        Returns:
            Whether the group has an all-to-all; None if some ranks have begun one and others have none: it never ends,
            and the group cannot be used.

        Raises:
            Exception: this rank's own, such as too little memory.
            RankMissingError: another rank did not take part, or has failed, with its message.
        """
        payload = pair.payload
        assert payload is not None  # noqa: S101  it has just been made
        device = numbers_device(payload)
        if serves(payload, "cpu"):
            # All ranks must use the same device, and some may see no GPU: CUDA if all of them have it in use already.
            # (Another connects at first use.)
            uses_cuda = serves(payload, "cuda") and torch.cuda.is_initialized()
            on_cuda = self.gather(np.array([uses_cuda], dtype=np.int64), 0, _CONNECTION).all()
            device = torch.device("cuda" if on_cuda else "cpu")
        works, error = self._make(lambda: attempt(lambda: try_collectives(payload, device, all_to_all)))
        if error is not None:
            self.post_failure(0, _CONNECTION, error)
            raise error
        works = works or []
        begun = self.gather(np.array([len(works)]), 0, _CONNECTION)
        if begun.min() < begun.max():
            return None
        for work in works:
            self.wait(work, 0, _CONNECTION, on_host=device.type == "cpu")
        return len(works) > 1

    def agree(
        self,
        call: str,
        options: dict[str, Any] | None,
        error: Exception | None,
        numbers: Sequence[int] | np.ndarray = (),
        step: int = 0,
        room: int = 0,
    ) -> np.ndarray:
        """Agree, before any rank acts, that all make the same call with the same options and that none has failed.

        Args:
            call: name of the call, in messages.
            options: what all ranks must pass alike, as JSON holds it; None where `error` is about these.
            error: what went wrong on this rank so far, if anything.
            numbers: int64 `(n,)` for all ranks, which bring as many.
            step: number of the step or call, in messages.
            room: at least this many numbers are sent, so that messages of different calls have one size.

        Returns:
            int64 `(world_size, n)`, the numbers of every rank.

        Raises:
            ValueError: ranks differ in the call or in an option.
            ValueError, TypeError, KeyError: where the first failing rank's error is one.
            RuntimeError: for any other error.
            RankMissingError: a rank did not take part in time.
        """
        said, digest, problem = _without_options(call) if options == {} else _as_json(call, options)
        error = error or problem or self._problem
        state = 0 if error is None else _FAILED if options is not None and problem is None else _OPTIONS_UNKNOWN
        last = 2 + len(numbers)
        own = np.zeros(max(last, 2 + room), dtype=np.int64)
        own[0], own[1], own[2:last] = state, digest, numbers
        table = self.gather(own, step, call)
        if not state and (table[:, :2] == own[:2]).all():
            return table[:, 2:last]
        states = table[:, 0]
        # Different options come first: they often are why a rank has failed.
        if (table[:, 1] != digest).any() and not (states == _OPTIONS_UNKNOWN).any():
            raise_first_difference([json.loads(text) for text in self.gather_text(said, step)], self.names)
        if states.any():
            self.raise_on_all(error, step)
        return table[:, 2:last]

    def gather(self, values: np.ndarray, step: int, what: str = "gather", *, on_main: bool = False) -> np.ndarray:
        """Gather int64 `(n,)`, of one size on all ranks, into `(world_size, n)`.

        Args:
            values: of this rank.
            step: number of the step or call, in messages.
            what: names the gather in messages.
            on_main: whether this is the main thread of a channel whose groups a worker thread is using; it has groups
                of its own, which are made with the first such call.

        Raises:
            RankMissingError: a rank did not take part in time; names it.
        """
        pair = self._groups
        if pair is None or (group := self._given) is None:
            return values.reshape(1, -1)
        if on_main:
            timeout = self._timeout
            pair = self._groups_of_main = self._groups_of_main or self._make(
                lambda: acquire_groups(group, timeout), step, what
            )
        # numpy, because torch calls release the GIL.
        for ring in pair.rings:
            gathered = np.empty(ring.size() * len(values), dtype=np.int64)
            into, own = torch.from_numpy(gathered), torch.from_numpy(values)
            self.wait(all_gather_single(into, own, group=ring, async_op=True), step, what)
            values = gathered
        return values.reshape(self.world_size, -1)

    def gather_text(self, text: str, step: int, *, on_main: bool = False) -> list[str]:
        """Gather one string per rank; see `gather` for `on_main`."""
        return gather_strings(text, functools.partial(self.gather, step=step, what="gather of texts", on_main=on_main))

    def raise_on_all(self, error: Exception | None, step: int, *, on_main: bool = False) -> None:
        """Raise what went wrong on any rank; called by all ranks together, once they know that there is something.

        Args:
            error: of this rank, if it has one.
            step: number of the step or call, in messages.
            on_main: as of `gather`.
        """
        gather = functools.partial(self.gather, step=step, what="gather of errors", on_main=on_main)
        raise_on_all(error, self.names, gather)

    def swap(self, numbers: np.ndarray, step: int, what: str) -> np.ndarray:
        """int64 `(world_size, n)`: row r goes to rank r; returns what each rank had for this one.

        Raises:
            RankMissingError: a rank did not take part in time; names it.
        """
        if self._groups is None:
            return numbers
        source = torch.from_numpy(numbers)
        result = torch.empty_like(source)
        self.wait(dist.all_to_all_single(result, source, group=self.control_group, async_op=True), step, what)
        return result.numpy()

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """The gloo group over all ranks, for host tensors on the thread that uses the channel.

        None for a group of one, and for many ranks, which gather in several rings, unless a channel is `pairwise`.
        """
        return None if self._groups is None else self._groups.control

    @property
    def payload_group(self) -> dist.ProcessGroup | None:
        """The group for rows; None for a group of one, and where none move."""
        return None if self._groups is None else self._groups.payload

    @property
    def has_all_to_all(self) -> bool:
        """Whether rows can be sent to their receivers alone."""
        return self._groups is None or bool(self._groups.has_all_to_all)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the channel's: it has no thread that could use it."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the shuffler belongs to process {self._process}, and process {os.getpid()} was forked from it; a "
                "fork takes over neither threads nor connections: shuffle in the first, or start the second by spawn"
            )

    def _end_issued(self) -> None:
        """Abort the payload group, in whose collective the main thread hangs: its rows go nowhere but into an error."""
        if self.payload_group is not None and self.payload_group is not self._given:
            with contextlib.suppress(RuntimeError):  # the process groups may be gone
                self.payload_group.abort()

    def abort(self, error: RankMissingError) -> None:
        """Let whatever waits in this channel raise `error`, now or later; from any thread, waits for nothing."""
        self.failure, self._intact = error, False
        if self._groups is None:
            return
        with contextlib.suppress(ValueError, RuntimeError):  # the process groups may be gone
            self.failed.leave(f"rank {dist.get_rank()} aborted its shuffler: see the log there")
        for pair in (self._groups, self._groups_of_main):
            if pair is not None:
                break_connections(pair.connections)

    def close(self, *, collected: bool = False) -> None:
        """Give the groups back; not if a collective has failed in them, nor in a fork, which has none.

        Args:
            collected: whether this happens because nobody uses the channel any more, at another time on every rank.
        """
        if os.getpid() != self._process:
            return
        for pair in (self._groups, self._groups_of_main):
            if pair is not None and self._intact:
                release_groups(self.members, pair, collected=collected)
        self._groups = self._groups_of_main = self._given = None


@contextlib.contextmanager
def open_channel(
    group: dist.ProcessGroup | None,
    timeout: float,
    channel_type: type[C],
    *,
    moves_rows: bool = True,
) -> Iterator[C]:
    """A channel for one call; its groups are taken from the pool and given back.

    Args:
        group: ranks that take part; default as for the shuffler.
        timeout: seconds after which a rank that does not take part is reported.
        channel_type: what to open.
        moves_rows: whether the call sends rows, so that the payload group is needed.
    """
    channel = channel_type(resolve_process_group(group), timeout, moves_rows=moves_rows)
    try:
        yield channel
    finally:
        channel.close()


@functools.cache
def _without_options(call: str) -> tuple[str, int, Exception | None]:
    return _as_json(call, {})


def _as_json(call: str, options: dict[str, Any] | None) -> tuple[str, int, Exception | None]:
    """A call and its options as text, a digest that ranks compare, and the error of an option that is not JSON."""
    problem: Exception | None = None
    for name, value in (options or {}).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            problem = TypeError(
                f"{name} is a {type(value).__name__}; ranks compare their options as JSON: pass a Python bool or number"
            )
            problem.__cause__ = error
    text = json.dumps([call, None if problem else options])
    return text, int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1, problem
