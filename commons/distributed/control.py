"""AGREE: small collectives over a gloo group of its own, and the one protocol of every distributed call.

Ranks agree before they act: `ControlChannel.agree` compares the call and its options, raises on all ranks what went
wrong on any of them, and tells all of them a few numbers of each, in one gathered table.

Only integers and JSON text cross the group. The shuffler's one worker thread uses it; the payload group beside it is
used by the main thread alone, so that neither waits for the other's turn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.connections import break_connections
from commons.distributed.errors import describe_error, raise_first_difference, raise_first_error
from commons.distributed.group_pool import (
    GroupPair,
    acquire_groups,
    make_in_time,
    numbers_device,
    release_groups,
    with_payload,
)
from commons.distributed.missing_ranks import Attendance
from commons.distributed.named_collectives import NamedCollectives
from commons.distributed.named_collectives import RankMissingError as RankMissingError
from commons.distributed.named_collectives import ShufflerAbortedError as ShufflerAbortedError
from commons.distributed.process_group import all_gather_single, resolve_process_group

# Bytes of text that travel as one integer.
_WORD = 8
# What a rank says of itself when ranks agree on a call; 0 is that all is well.
_FAILED, _OPTIONS_UNKNOWN = 1, 2
# Numbers of each rank in the first message of a call.
_CALL_NUMBERS = 4

C = TypeVar("C", bound="ControlChannel")


class ControlChannel(NamedCollectives):
    """Groups over the ranks of a data-parallel group: gloo for metadata, the default backend for rows.

    Constructed on the main thread by all ranks of the group in the same order; all groups are made and connected here:
    those that gather, which are two of many ranks (see gather_grid.py); the one for rows, unless no rank will move any
    (`moves_rows`); and one over all ranks for host tensors of single ranks, if any will send some (`pairwise`).

    Attributes:
        rank: this process' rank in the group.
        world_size: ranks in the group.
        payload_group: the group for rows; None for a group of one, and where none move.
        names: how messages call the ranks: by their global numbers.
    """

    remedy = "every rank must call the shuffler for every step: see the log there, or raise ShufflerOptions.timeout"

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True, pairwise: bool = False
    ) -> None:
        super().__init__(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.payload_group: dist.ProcessGroup | None = None
        self._given, self._timeout = group, timeout
        self._groups: GroupPair | None = None
        self.names: Sequence[int] = self.members
        if self.world_size > 1:
            assert group is not None  # noqa: S101  there are several ranks
            attendance = Attendance("connection of step 0")
            try:
                self._groups = make_in_time(
                    lambda: acquire_groups(group, timeout, moves_rows=moves_rows, pairwise=pairwise), timeout
                )
            except RuntimeError as error:
                raise self._missing(0, "connection", attendance, error) from None
            self.payload_group = self._groups.payload

    def agree(
        self,
        call: str,
        options: dict[str, Any] | None,
        error: Exception | None,
        numbers: Sequence[int] | np.ndarray = (),
        step: int = 0,
    ) -> np.ndarray:
        """Agree, before any rank acts, that all make the same call with the same options and that none has failed.

        Args:
            call: name of the call, in messages.
            options: what all ranks must pass alike, as JSON holds it; None where `error` is about these.
            error: what went wrong on this rank so far, if anything.
            numbers: int64 `(n,)` for all ranks, which bring as many.
            step: number of the step or call, in messages.

        Returns:
            int64 `(world_size, n)`, the numbers of every rank.

        Raises:
            ValueError: ranks differ in the call or in an option.
            ValueError, TypeError, KeyError: where the first failing rank's error is one.
            RuntimeError: for any other error.
            RankMissingError: a rank did not take part in time.
        """
        said, problem = _as_json(call, options)
        error = error or problem
        state = 0 if error is None else _FAILED if options is not None and problem is None else _OPTIONS_UNKNOWN
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big") >> 1
        own = np.asarray(numbers, dtype=np.int64)
        table = self.gather(np.concatenate([np.array([state, digest]), own]), step, call)
        states = table[:, 0]
        # Different options come first: they often are why a rank has failed.
        if (table[:, 1] != digest).any() and not (states == _OPTIONS_UNKNOWN).any():
            raise_first_difference([json.loads(text) for text in self.gather_text(said, step)], self.names)
        if states.any():
            self.raise_on_all(error, step)
        return table[:, 2:]

    def agree_on_call(
        self,
        call: str,
        options: dict[str, Any] | None,
        error: Exception | None,
        numbers: Sequence[int] = (),
        step: int = 0,
    ) -> np.ndarray:
        """`agree` at the beginning of a call, by messages of one size: ranks that make different calls learn of it.

        Args:
            call: as of `agree`, like the others.
            options: what all ranks must pass alike.
            error: what went wrong on this rank.
            numbers: up to four.
            step: number of the call.

        Returns, Raises: as `agree`.
        """
        padded = [*numbers, *[0] * (_CALL_NUMBERS - len(numbers))]
        return self.agree(call, options, error, padded, step)[:, : len(numbers)]

    def gather(self, values: np.ndarray, step: int, what: str = "gather") -> np.ndarray:
        """Gather int64 `(n,)`, of one size on all ranks, into `(world_size, n)`.

        Raises:
            RankMissingError: a rank did not take part in time; names it.
        """
        if self._groups is None:
            return values.reshape(1, -1)
        # In arrays: torch lets go of the interpreter lock wherever it is asked. Copied: the bytes of a text are fixed.
        told = np.array(values, dtype=np.int64)
        for ring in self._groups.rings:
            heard = np.empty(ring.size() * len(told), dtype=np.int64)
            into, own = torch.from_numpy(heard), torch.from_numpy(told)
            self.wait(all_gather_single(into, own, group=ring, async_op=True), step, what)
            told = heard
        return told.reshape(self.world_size, -1)

    def gather_text(self, text: str, step: int, *, on_main: bool = False) -> list[str]:
        """Gather one string per rank; see `raise_on_all` for `on_main`."""
        gather = self._gather_rows_on_main if on_main else self.gather
        encoded = text.encode(errors="backslashreplace")  # of a lone surrogate, which UTF-8 has no bytes for
        sizes = gather(np.array([len(encoded)]), step, "gather of text sizes")[:, 0]
        words = max(-(-int(sizes.max()) // _WORD), 1)
        padded = bytearray(encoded.ljust(words * _WORD))  # torch warns of memory that it could not write to
        rows = gather(np.frombuffer(padded, dtype=np.int64), step, "gather of texts")
        return [rows[rank].tobytes()[:size].decode() for rank, size in enumerate(sizes)]

    def raise_on_all(self, error: Exception | None, step: int, *, on_main: bool = False) -> None:
        """Raise what went wrong on any rank; called by all ranks together, once they know that there is something.

        Args:
            error: of this rank, if it has one.
            step: number of the step or call, in messages.
            on_main: whether this is the main thread of a channel whose gloo group a worker thread is using.
        """
        said = self.gather_text("" if error is None else json.dumps(describe_error(error)), step, on_main=on_main)
        raise_first_error([json.loads(text) if text else None for text in said], error, self.names)

    def gather_on_main(self, values: list[int], step: int = 0, what: str = "gather") -> list[list[int]]:
        """Gather a few integers per rank over the payload group, on the main thread; waits for a device.

        The group is made where there is none: the worker thread may be using the other one.

        Raises:
            RankMissingError: a rank did not take part in time; names it.
        """
        if self._groups is None or self._given is None:
            return [values]
        pair, given, timeout = self._groups, self._given, self._timeout
        with self.collective(step, what):
            self._groups = make_in_time(lambda: with_payload(pair, given, timeout), timeout)
        self.payload_group = self._groups.payload
        assert self.payload_group is not None  # noqa: S101  it has just been made
        source = torch.tensor(values, dtype=torch.int64, device=numbers_device(self.payload_group))
        result = source.new_empty(self.world_size * len(values))
        work = all_gather_single(result, source, group=self.payload_group, async_op=True)
        self.wait(work, step, what, on_host=source.device.type == "cpu")
        return result.view(self.world_size, -1).tolist()

    def _gather_rows_on_main(self, values: np.ndarray, step: int, what: str) -> np.ndarray:
        return np.array(self.gather_on_main(values.tolist(), step, what), dtype=np.int64)

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

    def sum_over_ranks(self, numbers: torch.Tensor, group: dist.ProcessGroup | None, step: int, what: str) -> list[int]:
        """Sums of int64 numbers `(n,)`, of the host or a device, over a group of this channel's; waits for a device.

        Raises:
            RankMissingError: a rank did not take part in time; names it.
        """
        if group is not None:
            with self.collective(step, what):
                work = dist.all_reduce(numbers, group=group, async_op=True)
            self.wait(work, step, what, on_host=numbers.device.type == "cpu")
        return numbers.tolist()

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """The gloo group over all ranks, for host tensors on the thread that uses the channel.

        None for a group of one, and for a grid of many ranks unless one of them is `pairwise`.
        """
        return None if self._groups is None else self._groups.control

    @property
    def has_all_to_all(self) -> bool:
        """Whether rows can be sent to their receivers alone."""
        return self._groups is None or self._groups.has_all_to_all

    @contextlib.contextmanager
    def failures_posted(self, step: int, what: str) -> Iterator[None]:
        """Around what this rank does alone before a collective: tells those that wait there if it fails."""
        try:
            yield
        except RankMissingError:
            raise
        except Exception as error:
            self.post_failure(step, what, error)
            raise

    def post_failure(self, step: int, what: str, error: Exception) -> None:
        """Tell the ranks that wait in a collective that this one will not come, and why."""
        if self._groups is None:
            return
        self._intact = False
        text = f"rank {dist.get_rank()} failed in the {what} of step {step}: {': '.join(describe_error(error))}"
        self._failed.post(f"{what} of step {step}", " ".join(text.split()))

    def abort(self, error: RankMissingError) -> None:
        """Let whatever waits in this channel raise `error`, now or later; from any thread, waits for nothing."""
        self._aborted_for, self._intact = error, False
        if self._groups is None:
            return
        with contextlib.suppress(ValueError, RuntimeError):  # the process groups may be gone
            self._failed.leave(f"rank {dist.get_rank()} aborted its shuffler: see the log there")
        break_connections(self._groups.connections)

    def close(self, *, collected: bool = False) -> None:
        """Give both groups back; not if a collective has failed in them, on this rank or for want of it.

        Args:
            collected: whether this happens because nobody uses the channel any more, at another time on every rank.
        """
        if self._groups is not None and self._intact:
            release_groups(self.members, self._groups, collected=collected)
        self._groups = self._given = self.payload_group = None


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


def _as_json(call: str, options: dict[str, Any] | None) -> tuple[str, Exception | None]:
    """A call and its options as text that ranks compare, and what is wrong with an option that JSON cannot hold."""
    problem: Exception | None = None
    for name, value in (options or {}).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            problem = TypeError(
                f"{name} is a {type(value).__name__}; ranks compare their options as JSON: pass a Python bool or number"
            )
            problem.__cause__ = error
    return json.dumps([call, None if problem else options]), problem
