"""AGREE: small collectives over gloo groups of evenrank's own, and the protocol that every distributed call follows.

Ranks agree before they act: in one gather, `ControlChannel.agree` compares the call and its options, raises the errors
of any rank on all ranks, and gathers a few numbers of each rank.

The groups carry only integers and JSON text. The shuffler's worker thread uses them; only the main thread uses the
payload group, so that neither thread's collectives wait for the other's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.checks import kind_of
from commons.distributed.channel.absence import NamedCollectives, RankMissingError
from commons.distributed.channel.connections import break_connections
from commons.distributed.channel.groups import (
    GroupPair,
    MakingOfGroups,
    acquire_groups,
    numbers_device,
    rank_set,
    release_groups,
    try_collectives,
    with_control,
    with_payload,
)
from commons.distributed.channel.store import is_beside_host
from commons.distributed.channel.store_barrier import StoreBarrier
from commons.distributed.errors import capture_error, gather_strings, raise_first_difference, raise_on_all
from commons.distributed.options import ShufflerOptions, timeout_error
from commons.distributed.process_group import all_gather_single, resolve_process_group, serves
from commons.perf_model.partitioner.core import SOURCES
from commons.version import __version__

# States of a rank that agrees on a call; 0 is no error.
_FAILED, _OPTIONS_UNKNOWN = 1, 2
# Least size of the first message of a call, so that ranks that make different calls can still compare them. The first
# message of a connection keeps its size in every release: ranks of two releases compare their versions.
CALL_NUMBERS = 4

_CONNECTION = "connection"

T = TypeVar("T")


class ControlChannel(NamedCollectives):
    """The process groups over the ranks of a data-parallel group: gloo for metadata, the group's own backend for rows.

    All ranks of the group (default as for the shuffler) construct it on the main thread, in the same order. The
    constructor makes and connects all groups: those that gather (several rings for many ranks, see groups.py); the
    group for rows, if any rank has `moves_rows`; and a gloo group over all ranks for host tensors from rank to rank, if
    any rank has `pairwise`. `close` returns them to the pool.

    Attributes:
        rank: this process' rank in the group.
        world_size: ranks in the group.
    """

    remedy = "every rank must call the shuffler for every step: see the log there, or raise ShufflerOptions.timeout"

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True, pairwise: bool = False
    ) -> None:
        group = resolve_process_group(group)
        super().__init__(group)
        timeout = timeout.item() if isinstance(timeout, np.generic) else timeout
        # Raised by `agree`, on all ranks; raised here, it would leave the other ranks waiting.
        self._problem = timeout_error(timeout)
        timeout = timeout if self._problem is None else ShufflerOptions.timeout
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._given, self._timeout, self._process = group, timeout, os.getpid()
        # Compared with the call: groups over the same ranks share connections, so calls of two threads would mix rows.
        # Only torch's numbers: another name, such as of `split_group`, has a hash of a count that ranks may not share.
        name = "" if group is None or group is dist.group.WORLD else group.group_name
        self._where = f" in the group {name!r}" if name.isdigit() else ""
        self._groups: GroupPair | None = None
        self._groups_of_main: GroupPair | None = None
        if self.world_size > 1:
            assert group is not None  # noqa: S101  there are several ranks
            self._barrier = barrier = StoreBarrier(self.failed.key, self.world_size, timeout)
            self._groups = self._make(lambda: acquire_groups(group, barrier))
            if self._groups.control is None or self._groups.has_all_to_all is None:
                self._complete_groups(self._groups, group, moves_rows, pairwise)

    def _make(self, make: Callable[[], T], step: int = 0, what: str = _CONNECTION) -> T:
        """Call a function of groups.py, on all ranks together; RankMissingError if one does not join in time.

        Raises:
            Exception: an error of this rank; the others raise RankMissingError with its text.
        """
        making = MakingOfGroups(make, self._timeout)
        with self.failures_posted(step, what):
            self.wait(making, step, what)
        return making.result

    def _complete_groups(self, pair: GroupPair, group: dist.ProcessGroup, moves_rows: bool, pairwise: bool) -> None:
        """Compare versions, and make and test every group that any rank needs; settings are compared only later."""
        barrier, ranks = self._barrier, rank_set(self.members)
        own = [moves_rows, pairwise, ranks.beside_store is None and is_beside_host()]
        versions = {"evenrank": __version__, "planner": SOURCES, "torch": torch.__version__}
        moves, pairs, beside = self.agree(_CONNECTION, {"versions": versions}, None, own, room=CALL_NUMBERS).T
        if ranks.beside_store is None:
            ranks.beside_store = [rank for rank, is_there in zip(self.members, beside) if is_there]
        if pair.control is None and pairs.any():
            pair = self._groups = self._make(functools.partial(with_control, pair, group, barrier))
        for all_to_all in (True, False):
            if moves.any() and pair.has_all_to_all is None:
                pair = self._groups = self._make(functools.partial(with_payload, pair, group, barrier))
                pair = self._groups = pair._replace(has_all_to_all=self._try(pair, all_to_all))

    def _try(self, pair: GroupPair, all_to_all: bool) -> bool | None:
        """Run the new payload group's collectives once, before anyone relies on them.

        Returns:
            Whether the group has an all-to-all; None if only some ranks could start one, which then never completes, so
            that the group must not be used.

        Raises:
            Exception: an error of this rank, such as too little memory.
            RankMissingError: another rank did not join, or raised an error (quoted).
        """
        payload = pair.payload
        assert payload is not None  # noqa: S101  it has just been made
        device = numbers_device(payload)
        if serves(payload, "cpu"):
            # All ranks must use the same device: CUDA only if every rank has initialised it; some may have no GPU.
            uses_cuda = serves(payload, "cuda") and torch.cuda.is_initialized()
            on_cuda = self.gather(np.array([uses_cuda], dtype=np.int64), 0, _CONNECTION).all()
            device = torch.device("cuda" if on_cuda else "cpu")
        works, error = self._make(lambda: capture_error(lambda: try_collectives(payload, device, all_to_all)))
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
        *,
        on_main: bool = False,
    ) -> np.ndarray:
        """Check on all ranks, before any of them acts, that they make the same call and that none has failed.

        Args:
            call: name of the call, for messages.
            options: JSON values that must be equal on all ranks; None if `error` is about the options themselves.
            error: this rank's error so far, if any.
            numbers: int64 `(n,)` to gather; n is equal on all ranks.
            step: number of the step or call, for messages.
            room: least count of numbers to send, so that messages of different calls have the same size.
            on_main: see `gather`.

        Returns:
            int64 `(world_size, n)`, the numbers of every rank.

        Raises:
            ValueError: ranks differ in the call or in an option.
            ValueError, TypeError, KeyError: the first failing rank's error is of this type.
            RuntimeError: any other error of a rank.
            RankMissingError: a rank did not join in time.
        """
        made = call if call == _CONNECTION else call + self._where
        text, digest, problem = _without_options(made) if options == {} else _as_json(made, options)
        error = error or problem or self._problem
        state = 0 if error is None else _FAILED if options is not None and problem is None else _OPTIONS_UNKNOWN
        last = 2 + len(numbers)
        own = np.zeros(max(last, 2 + room), dtype=np.int64)
        own[0], own[1], own[2:last] = state, digest, numbers
        table = self.gather(own, step, call, on_main=on_main)
        if state or (table[:, :2] != own[:2]).any():
            states = table[:, 0]
            # Different options are reported first: they are often the reason for a rank's error.
            if (table[:, 1] != digest).any() and not (states == _OPTIONS_UNKNOWN).any():
                calls = self.gather_text(text, step, on_main=on_main)
                raise_first_difference([json.loads(each) for each in calls], self.members)
            if states.any():
                gather = functools.partial(self.gather, step=step, what="gather of errors", on_main=on_main)
                raise_on_all(error, self.members, gather)
        return table[:, 2:last]

    def gather(self, values: np.ndarray, step: int, what: str = "gather", *, on_main: bool = False) -> np.ndarray:
        """Gather int64 `(n,)` of every rank into `(world_size, n)`.

        Args:
            values: this rank's; n is equal on all ranks.
            step: number of the step or call, for messages.
            what: name of the gather, for messages.
            on_main: whether the main thread calls this while a worker thread may use the channel's groups; then it uses
                groups of its own, which the first such call makes.

        Raises:
            RankMissingError: a rank did not join in time; the message names it.
        """
        pair = self._groups
        if pair is None or (group := self._given) is None:
            return values.reshape(1, -1)
        if on_main:
            barrier = self._barrier
            pair = self._groups_of_main = self._groups_of_main or self._make(
                lambda: acquire_groups(group, barrier), step, what
            )
        # numpy, because torch calls release the GIL.
        for ring in pair.rings:
            gathered = np.empty(ring.size() * len(values), dtype=np.int64)
            tensors = torch.from_numpy(gathered), torch.from_numpy(values)
            self.wait(functools.partial(all_gather_single, *tensors, group=ring, async_op=True), step, what)
            values = gathered
        return values.reshape(self.world_size, -1)

    def gather_text(self, text: str, step: int, *, on_main: bool = False) -> list[str]:
        """Gather one string from each rank."""
        return gather_strings(text, functools.partial(self.gather, step=step, what="gather of texts", on_main=on_main))

    def swap(self, numbers: np.ndarray, step: int, what: str) -> np.ndarray:
        """All-to-all of int64 `(world_size, n)`: sends row r to rank r, and returns the rows that each rank sent here.

        RankMissingError names a rank that did not join in time.
        """
        if self._groups is None:
            return numbers
        source = torch.from_numpy(numbers)
        result = torch.empty_like(source)
        issue = functools.partial(dist.all_to_all_single, result, source, group=self.control_group, async_op=True)
        self.wait(issue, step, what)
        return result.numpy()

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """The gloo group over all ranks, for host tensors.

        None for a group of one rank, and for many ranks, which gather in several rings, unless the channel is
        `pairwise`.
        """
        return None if self._groups is None else self._groups.control

    @property
    def payload_group(self) -> dist.ProcessGroup | None:
        """The group for rows; None for a group of one rank, and if no rank moves rows."""
        return None if self._groups is None else self._groups.payload

    @property
    def has_all_to_all(self) -> bool:
        """Whether the payload group has an all-to-all; without it, every rank receives all moved rows."""
        return self._groups is None or bool(self._groups.has_all_to_all)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the channel's, which lacks its threads."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the shuffler belongs to process {self._process}, and process {os.getpid()} was forked from it; a "
                "forked process lacks its threads and connections: shuffle in the first, or make another one in a "
                "spawned process"
            )

    def _end_issued(self) -> None:
        """Abort the payload group, in whose collective the main thread hangs."""
        if self.payload_group is not None and self.payload_group is not self._given:
            with contextlib.suppress(RuntimeError):  # the process groups may be gone
                self.payload_group.abort()

    def abort(self, error: RankMissingError) -> None:
        """Make every present and later wait in this channel raise `error`; from any thread, does not block."""
        self.failure, self._intact = error, False
        if self._groups is None:
            return
        with contextlib.suppress(ValueError, RuntimeError):  # the process groups may be gone
            self.failed.leave(f"rank {dist.get_rank()} aborted its shuffler: see the log there")
        for pair in (self._groups, self._groups_of_main):
            if pair is not None:
                break_connections(pair.connections)

    def close(self, *, ordered: bool = True) -> None:
        """Return the groups to the pool, unless a collective has failed in them; without effect in a forked process.

        `ordered`: see `release_groups`.
        """
        if os.getpid() != self._process:
            return
        for pair in (self._groups, self._groups_of_main):
            if pair is not None and self._intact:
                release_groups(self.members, pair, self._given, ordered=ordered)
        self._groups = self._groups_of_main = self._given = None


@functools.lru_cache(16)
def _without_options(call: str) -> tuple[str, int, Exception | None]:
    return _as_json(call, {})


def _as_json(call: str, options: dict[str, Any] | None) -> tuple[str, int, Exception | None]:
    """A call and its options as JSON text, the text's digest, and the error if an option is not JSON."""
    problem: Exception | None = None
    for name, value in (options or {}).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            problem = TypeError(
                f"{name} is {kind_of(value)}; ranks compare their options as JSON: pass a Python bool or number"
            )
            problem.__cause__ = error
    text = json.dumps([call, None if problem else options])
    return text, int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1, problem
