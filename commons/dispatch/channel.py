"""EXCHANGE: what the dispatch functions say to one another: first who brings what, then bytes.

Every call begins with one collective of a fixed size, in which each rank tells each other one whether it has failed,
what it was asked to do, and how many bytes it has for it. A mistake on any rank is thus raised on all of them before
any payload moves. Host tensors travel over the gloo group, those of a device over the payload group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.control import ControlChannel
from commons.distributed.group_pool import sends_from_cuda
from commons.distributed.process_group import all_gather_single, resolve_process_group

# Seconds after which a rank that does not take part is reported.
DEFAULT_TIMEOUT = 600.0
# What messages call the collectives that carry rows.
EXCHANGE, GATHER = "exchange of rows", "gather of results"
# What a rank says of itself at the start of a call; 0 is that all is well.
_FAILED, _WRONG_OPTIONS = 1, 2


class DispatchChannel(ControlChannel):
    """The control channel, with an exchange of bytes.

    Attributes:
        step: number of the call; all ranks count alike.
    """

    remedy = "all ranks make the same calls: see the log there, or raise the timeout"

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        super().__init__(group, timeout)
        self.names = range(self.world_size)  # as src counts them
        self.step = 0
        self._in_collective = False

    def begin(
        self,
        call: str,
        options: dict[str, Any] | None,
        error: Exception | None,
        outgoing: Sequence[int] = (),
        note: int = 0,
    ) -> tuple[list[int], list[int]]:
        """Start a call: agree that all ranks make the same one and that none has failed.

        Args:
            call: name of the function.
            options: its arguments as far as all ranks must pass the same, as JSON holds them; None where `error` is
                about these.
            error: what went wrong on this rank, if anything.
            outgoing: bytes for each rank, `(world_size,)`; none if not given.
            note: any number for all ranks.

        Returns:
            The bytes that each rank has for this one, and each rank's note.

        Raises:
            ValueError: ranks differ in call or options.
            Exception: another rank's error, of its type where it is a ValueError, TypeError or KeyError.
            RankMissingError: a rank did not take part in time.
        """
        self.step += 1
        said = json.dumps([call, options], sort_keys=True)
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big") >> 1
        rows = np.empty((self.world_size, 4), dtype=np.int64)
        rows[:] = (0 if error is None else _FAILED if options is not None else _WRONG_OPTIONS, digest, note, 0)
        if len(outgoing) and error is None:
            rows[:, 3] = outgoing
        heard = self._swap(rows, call)
        states = heard[:, 0]
        # Different options come first: they often are why a rank has failed.
        if (heard[:, 1] != digest).any() and not (states == _WRONG_OPTIONS).any():
            raise_for_difference([json.loads(text) for text in self.gather_text(said, self.step)])
        if states.any():
            self.raise_on_all(error, self.step)
        return heard[:, 3].tolist(), heard[:, 2].tolist()

    def confirm(self, error: Exception | None) -> None:
        """End a call: raise on all ranks what went wrong on any of them with what it received."""
        if self.gather(np.array([error is not None]), self.step, "end of the call").any():
            self.raise_on_all(error, self.step)

    def send_bytes(self, outgoing: torch.Tensor, sizes: Sequence[int], incoming: Sequence[int]) -> torch.Tensor:
        """Send each rank its own bytes.

        Args:
            outgoing: uint8 `(sum(sizes),)`, by receiver; on the host, or on the device that the payload group works on.
            sizes: bytes for each rank.
            incoming: bytes from each rank, as `begin` returned them.

        Returns:
            uint8 `(sum(incoming),)` by sender, where `outgoing` is.

        Raises:
            RankMissingError: a rank did not take part.
        """
        with self.failures_posted(self.step, EXCHANGE):
            received = outgoing.new_empty(sum(incoming))
        if self.world_size == 1:
            return received.copy_(outgoing)
        if outgoing.device.type == "cpu":
            work = dist.all_to_all_single(
                received, outgoing, list(incoming), list(sizes), group=self._group, async_op=True
            )
            self._wait(work, self.step, EXCHANGE)
            return received
        try:
            self._in_collective = True
            dist.all_to_all_single(received, outgoing, list(incoming), list(sizes), group=self.payload_group)
            self._in_collective = False
        except RuntimeError as error:  # of the collective: a peer has ended or stalls
            raise self.name_missing(self.step, EXCHANGE) from error
        return received

    def gather_bytes(self, own: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send the same bytes to every rank.

        Args:
            own: uint8 `(sizes[rank],)`, on the host, or on the device that the payload group works on.
            sizes: bytes of each rank, as `begin` returned them.

        Returns:
            For each rank uint8 `(its size,)`.
        """
        if self.world_size == 1:
            return [own]
        with self.failures_posted(self.step, GATHER):
            block = own.new_empty(max(sizes))  # the collective gathers equal sizes
            block[: own.numel()] = own
            received = own.new_empty(self.world_size * block.numel())
        if own.device.type == "cpu":
            work = all_gather_single(received, block, group=self._group, async_op=True)
            self._wait(work, self.step, GATHER)
        else:
            try:
                self._in_collective = True
                all_gather_single(received, block, group=self.payload_group)
                self._in_collective = False
            except RuntimeError as error:
                raise self.name_missing(self.step, GATHER) from error
        return [part[:size] for part, size in zip(received.view(self.world_size, -1), sizes)]

    def can_send_from_device(self) -> bool:
        """Whether bytes on this rank's CUDA device can be sent from there."""
        return self.payload_group is not None and self.has_all_to_all and sends_from_cuda(self.payload_group)

    def close(self, intact: bool = True, *, collected: bool = False) -> None:
        """Give the groups back, unless a collective has failed or was interrupted in them."""
        super().close(intact and not self._in_collective, collected=collected)

    def _swap(self, rows: np.ndarray, call: str) -> np.ndarray:
        """int64 `(world_size, n)`: row r goes to rank r; returns what each rank had for this one."""
        if self._group is None:
            return rows
        source = torch.from_numpy(rows)
        result = torch.empty_like(source)
        work = dist.all_to_all_single(result, source, group=self._group, async_op=True)
        self._wait(work, self.step, f"call of {call}")
        return result.numpy()

    def _wait(self, work: dist.Work, step: int, what: str) -> None:
        self._in_collective = True
        super()._wait(work, step, what)
        self._in_collective = False


@contextmanager
def open_channel(group: dist.ProcessGroup | None, timeout: float) -> Iterator[DispatchChannel]:
    """A channel for one call; groups are taken from the pool and given back.

    Args:
        group: ranks that take part; default as for the shuffler.
        timeout: seconds after which a rank that does not take part is reported.
    """
    channel = DispatchChannel(resolve_process_group(group), timeout)
    try:
        yield channel
    finally:
        channel.close()


def as_json_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they are compared between ranks.

    Raises:
        TypeError: an option that JSON cannot hold.
    """
    for name, value in options.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise TypeError(
                f"{name} is a {type(value).__name__}; ranks compare their options as JSON: pass a Python bool or number"
            ) from error
    return options


def raise_for_difference(said: list[list[Any]]) -> None:
    """Raise ValueError for ranks that make different calls, or the same one with different options.

    Args:
        said: name and options of every rank's call.
    """
    first_call, first_options = said[0]
    for rank, (call, options) in enumerate(said):
        if call != first_call:
            raise ValueError(
                f"rank 0 calls {first_call} and rank {rank} calls {call}; all ranks make the same calls in the same "
                "order: correct the program"
            )
        for name, value in options.items():
            if value != first_options[name]:
                raise ValueError(
                    f"{name} is {first_options[name]!r} on rank 0 and {value!r} on rank {rank} in {call}; all ranks "
                    "pass the same: make them equal"
                )
