"""EXCHANGE: what the dispatch functions say to one another: first who brings what, then bytes.

Every call begins with one gather of a fixed size, in which each rank tells whether it has failed and what it was asked
to do. A mistake on any rank, a different call among them, is thus raised on all of them before any payload moves. Host
tensors travel over the gloo group, those of a device over the payload group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.channel.agree import CALL_NUMBERS, ControlChannel
from commons.distributed.channel.groups import serves

# Seconds after which a rank that does not take part is reported.
DEFAULT_TIMEOUT = 600.0
# What messages call the collective that carries rows.
EXCHANGE = "exchange of rows"


class DispatchChannel(ControlChannel):
    """The control channel, with an exchange of bytes.

    Attributes:
        step: number of the call; all ranks count alike.
    """

    remedy = "all ranks make the same calls: see the log there, or raise the timeout"

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True) -> None:
        super().__init__(group, timeout, moves_rows=moves_rows, pairwise=True)
        self.names = range(self.world_size)  # as src counts them
        self.step = 0

    def begin(
        self,
        call: str,
        options: dict[str, Any] | None,
        error: Exception | None,
        number: int = 0,
    ) -> list[int]:
        """Start a call: agree that all ranks make the same one and that none has failed.

        Args:
            call: name of the function.
            options: its arguments as far as all ranks must pass the same, as JSON holds them; None where `error` is
                about these.
            error: what went wrong on this rank, if anything.
            number: any number for all ranks.

        Returns:
            Each rank's number.

        Raises:
            ValueError: ranks differ in call or options.
            Exception: another rank's error, of its type where it is a ValueError, TypeError or KeyError.
            RankMissingError: a rank did not take part in time.
        """
        self.step += 1
        return self.agree(call, options, error, [number], self.step, CALL_NUMBERS)[:, 0].tolist()

    def swap_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Bytes that each rank has for this one; `sizes` are those that this one has for each, `(world_size,)`."""
        return self.swap(np.array(sizes, dtype=np.int64).reshape(-1, 1), self.step, "exchange of sizes")[:, 0].tolist()

    def confirm(self, error: Exception | None) -> None:
        """End a call: raise on all ranks what went wrong on any of them with what it received."""
        self.agree("end of the call", {}, error, step=self.step)

    def send_bytes(self, outgoing: torch.Tensor, sizes: list[int], incoming: list[int]) -> list[torch.Tensor]:
        """Send each rank its own bytes; waits until they have come, those of a device too: they are read on the host.

        On a device too, a rank that has failed before the exchange is heard within a second or two. One that has died
        or stalled in it ends NCCL's collective only after the group's timeout; NCCL's watchdog, which no caller can
        hold off, may then end the process before the ranks have told each other who is missing.

        Args:
            outgoing: uint8 `(sum(sizes),)`, by receiver; on the host, or on the device that the payload group works on.
            sizes: bytes for each rank.
            incoming: bytes from each rank, as `swap_sizes` returned them.

        Returns:
            For each rank uint8 `(bytes from there,)`, where `outgoing` is.

        Raises:
            RankMissingError: a rank did not take part, or has failed, with its message.
        """
        with self.failures_posted(self.step, EXCHANGE):
            received = outgoing.new_empty(sum(incoming))
        on_host = outgoing.device.type == "cpu"
        group = self.control_group if on_host else self.payload_group
        with self.collective(self.step, EXCHANGE):
            work = dist.all_to_all_single(received, outgoing, incoming, sizes, group=group, async_op=True)
        self.wait(work, self.step, EXCHANGE, on_host=on_host)
        return list(received.split(incoming))

    def can_send_from_device(self) -> bool:
        """Whether bytes on this rank's CUDA device can be sent from there."""
        return self.payload_group is not None and self.has_all_to_all and serves(self.payload_group, "cuda")
