"""EXCHANGE: rows from rank to rank, each with what belongs to it; the one way in which dispatch moves anything.

call, options and errors of all ranks ─► bytes by receiver ─► one all-to-all ─► errors of all ranks

Every call begins with one gather of a fixed size, so that a mistake on any rank, a different call among them, is raised
on all before any payload moves. Rows of any kind travel as messages that describe themselves; host tensors over the
gloo group, those of a device over the payload group. Nothing is sent where no rank has anything for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.channel.agree import CALL_NUMBERS, ControlChannel
from commons.distributed.channel.groups import serves
from commons.distributed.errors import attempt
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.wire import MessageBuffer, decode, encode

T = TypeVar("T")

# Seconds after which a rank that does not take part is reported.
DEFAULT_TIMEOUT = 600.0
# What messages call the collective that carries rows.
EXCHANGE = "exchange of rows"
# What a rank has: no pieces at all, pieces that stay where they are, bytes for others on the host, or on its device.
_NO_PIECES, _NOTHING_TO_SEND, _ON_HOST, _ON_DEVICE = range(4)


class DispatchChannel(ControlChannel):
    """The control channel, with an exchange of bytes."""

    remedy = "all ranks make the same calls: see the log there, or raise the timeout"

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True) -> None:
        super().__init__(group, timeout, moves_rows=moves_rows, pairwise=True)
        self.names = range(self.world_size)  # as src counts them
        self.step = 0  # number of the call; the same on all ranks

    def begin(self, call: str, options: dict[str, Any] | None, error: Exception | None, number: int = 0) -> list[int]:
        """Start a call: `agree` with one number of each rank; returns all of them."""
        self.step += 1
        return self.agree(call, options, error, [number], self.step, CALL_NUMBERS)[:, 0].tolist()

    def confirm(self, error: Exception | None) -> None:
        """End a call: raise on all ranks what went wrong on any of them with what it received."""
        self.agree("end of the call", {}, error, step=self.step)

    def send_bytes(self, outgoing: torch.Tensor, sizes: list[int], incoming: list[int]) -> list[torch.Tensor]:
        """Send each rank its own bytes; waits until they have come, those of a device too: they are read on the host.

        On a device, a rank that failed before the exchange is noticed within a second or two. One that died or stalled
        in it ends NCCL's collective only after the group's timeout; NCCL's watchdog may then end the process before the
        ranks have agreed on who is missing.

        Args:
            outgoing: uint8 `(sum(sizes),)`, by receiver; on the host, or on the device that the payload group works on.
            sizes: bytes for each rank.
            incoming: bytes from each rank.

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


class Piece(NamedTuple):
    """What one rank has for another one."""

    rows: Rows[Any]  # a batch
    indices: torch.Tensor | None = None  # int64 `(rows,)`, numbers of the rows, if they are to be known
    extra: Any = None  # a plain value


def exchange(
    channel: DispatchChannel,
    call: str,
    options: dict[str, Any] | None,
    error: Exception | None,
    pieces: Callable[[int], Piece | None] | None,
    collect: Callable[[list[Piece | None]], T],
    *,
    expected_bytes: int = 0,
) -> tuple[T | None, int, int]:
    """Send each rank its piece; called on all ranks together.

    Args:
        channel: over the ranks.
        call: name of the call.
        options: what all ranks must pass alike; None where `error` is about these.
        error: what is wrong on this rank already.
        pieces: makes the piece for a rank, None for none; called for one rank after the other, and only one of them is
            kept beside their bytes. This rank's own piece stays as it is. None on a rank that has no pieces.
        collect: makes the result of the pieces by sender, None from those that have none.
        expected_bytes: about what the rows to be sent take up.

    Returns:
        What `collect` made, None if no rank has pieces, and the bytes that this rank has sent and received.

    Raises:
        Exception: what went wrong on any rank, on all of them, in `collect` too.
        RankMissingError: a rank did not take part in time.
    """
    own, outgoing, place = None, None, _NO_PIECES
    if error is None and pieces is not None:
        packed, error = attempt(lambda: _pack(channel, pieces, expected_bytes))
        own, outgoing = packed or (None, None)
        place = _NOTHING_TO_SEND if outgoing is None else _ON_DEVICE if outgoing.bytes.is_cuda else _ON_HOST
    sizes = [0] * channel.world_size if outgoing is None else outgoing.sizes
    places = channel.begin(call, options, error, place)
    if max(places) == _NO_PIECES:
        return None, 0, 0
    messages, incoming = [torch.empty(0)] * channel.world_size, sizes
    if max(places) > _NOTHING_TO_SEND:
        own_sizes = np.array(sizes, dtype=np.int64).reshape(-1, 1)
        incoming = channel.swap(own_sizes, channel.step, "exchange of sizes")[:, 0].tolist()
        on_device = _ON_DEVICE in places and _ON_HOST not in places  # all use the same group
        with channel.failures_posted(channel.step, EXCHANGE):
            source = torch.empty(0, dtype=torch.uint8) if outgoing is None else outgoing.bytes
            source = source.to("cuda" if on_device else "cpu")
        messages = channel.send_bytes(source, sizes, incoming)
    result, error = attempt(
        lambda: collect([own if rank == channel.rank else _received(part) for rank, part in enumerate(messages)])
    )
    channel.confirm(error)
    return result, sum(sizes), sum(incoming)


def _pack(
    channel: DispatchChannel, pieces: Callable[[int], Piece | None], expected_bytes: int
) -> tuple[Piece | None, MessageBuffer | None]:
    """This rank's own piece, and the messages to the others; None if there are none."""
    own, buffer, group = None, None, channel.payload_group
    can_send_from_device = group is not None and channel.has_all_to_all and serves(group, "cuda")
    for rank in range(channel.world_size):
        with torch.no_grad():  # of rows that stay too: what a result is does not depend on where its rows were
            piece = pieces(rank)
        if rank == channel.rank:
            own, piece = piece, None
        message = None
        if piece is not None:
            message = encode(
                piece.rows, *([] if piece.indices is None else [_compact(piece.indices)]), extra=piece.extra
            )
            if buffer is None:
                on_device = message.on_accelerator and can_send_from_device
                headers = channel.world_size * (len(message.header) + 64)  # they differ by a few digits
                buffer = MessageBuffer(expected_bytes + headers, on_accelerator=on_device)
                buffer.sizes = [0] * rank
        if buffer is not None:
            buffer.append(message)
    return own, buffer


def _received(message: torch.Tensor) -> Piece | None:
    if not message.numel():
        return None
    (rows, *indices), extra = decode(message)
    return Piece(Rows.of(rows), indices[0].to(torch.int64) if indices else None, extra)


def _compact(indices: torch.Tensor) -> torch.Tensor:
    """Row numbers in four bytes, where they fit, so that they weigh little beside short rows."""
    return indices.to(torch.int32) if not indices.numel() or int(indices.max()) < 2**31 else indices
