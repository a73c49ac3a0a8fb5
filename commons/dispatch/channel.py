"""EXCHANGE: what the dispatch functions say to one another: first who brings what, then bytes.

Every call begins with one collective of a fixed size, in which each rank tells each other one whether it has failed,
what it was asked to do, and how many bytes it has for it. A mistake on any rank is thus raised on all of them before
any payload moves. Host tensors travel over the gloo group, those of a device over the payload group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.control import ControlChannel
from commons.distributed.group_pool import sends_from_cuda
from commons.distributed.process_group import all_gather_single

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

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True) -> None:
        super().__init__(group, timeout, moves_rows=moves_rows)
        self.names = range(self.world_size)  # as src counts them
        self.step = 0

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
        numbers = np.zeros((self.world_size, 2), dtype=np.int64)
        numbers[:, 0] = note
        if len(outgoing) and error is None:
            numbers[:, 1] = outgoing
        heard = self.agree(call, options, error, numbers, self.step)
        return heard[:, 1].tolist(), heard[:, 0].tolist()

    def confirm(self, error: Exception | None) -> None:
        """End a call: raise on all ranks what went wrong on any of them with what it received."""
        self.agree("end of the call", {}, error, step=self.step)

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
            self.wait(work, self.step, EXCHANGE)
            return received
        with self.collective(self.step, EXCHANGE):
            dist.all_to_all_single(received, outgoing, list(incoming), list(sizes), group=self.payload_group)
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
            self.wait(work, self.step, GATHER)
        else:
            with self.collective(self.step, GATHER):
                all_gather_single(received, block, group=self.payload_group)
        return [part[:size] for part, size in zip(received.view(self.world_size, -1), sizes)]

    def can_send_from_device(self) -> bool:
        """Whether bytes on this rank's CUDA device can be sent from there."""
        return self.payload_group is not None and self.has_all_to_all and sends_from_cuda(self.payload_group)
