"""EXCHANGE: sends rows from rank to rank; all of dispatch's rows are sent here.

call, options and errors of all ranks ─► bytes by receiver ─► one all-to-all ─► errors of all ranks

Every call begins with one gather of a fixed size, so that an error on any rank, or a different call, is raised on all
ranks before any payload moves. A message contains rows of any kind with their schema. Host tensors are sent over the
gloo group, device tensors over the payload group. If no rank has rows for another rank, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.channel.agree import CALL_NUMBERS, ControlChannel
from commons.distributed.errors import capture_error
from commons.distributed.process_group import serves
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.wire import Message, MessageBuffer, decode, encode

T = TypeVar("T")

# Seconds after which a missing rank is reported.
DEFAULT_TIMEOUT = 600.0
# Name of the all-to-all of rows in messages.
EXCHANGE = "exchange of rows"
# Space in the buffer for the description of a message's batch; more than most take.
_HEADER_BYTES = 4096
# State of a rank: no pieces, pieces for itself only, bytes for other ranks on the host, or on its device.
_NO_PIECES, _NOTHING_TO_SEND, _ON_HOST, _ON_DEVICE = range(4)


class DispatchChannel(ControlChannel):
    """The control channel, with an exchange of bytes."""

    remedy = "all ranks make the same calls: see the log there, or raise the timeout"

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True) -> None:
        super().__init__(group, timeout, moves_rows=moves_rows, pairwise=True)
        self.step = 0  # number of the call, equal on all ranks

    def begin(self, call: str, options: dict[str, Any] | None, error: Exception | None, number: int = 0) -> list[int]:
        """Start a call: `agree` with one number per rank; returns the numbers of all ranks."""
        self.step += 1
        return self.agree(call, options, error, [number], self.step, CALL_NUMBERS)[:, 0].tolist()

    def send_bytes(self, outgoing: torch.Tensor, sizes: list[int], incoming: list[int]) -> list[torch.Tensor]:
        """Send each rank its bytes, and wait for `incoming` bytes from each rank, because the host reads them.

        On a device, a rank that failed before the exchange is detected within a second or two. If a rank exits or
        stalls during the exchange, NCCL's collective ends only after the group's timeout, and NCCL's watchdog may end
        the process before the ranks have agreed on the missing rank.

        `outgoing` is uint8 `(sum(sizes),)`, by receiver; on the host, or on the payload group's device. The result is
        for each sender uint8 `(bytes from it,)`, on the same device. RankMissingError if a rank is missing or failed.
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
    """The rows that one rank sends to another rank."""

    rows: Rows[Any]
    indices: torch.Tensor | None = None  # int64 `(rows,)`, numbers of the rows; None if the receiver needs none
    extra: Any = None  # a plain value for the receiver


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
    """Send each rank its piece; all ranks call this together.

    Args:
        channel: channel of the ranks.
        call: name of the call, for messages.
        options: must be equal on all ranks; None if `error` is about the options.
        error: this rank's error before the exchange; None for no error.
        pieces: makes the piece for a rank, None for no piece. It is called rank by rank, and each piece is encoded and
            released before the next call; this rank's own piece is not encoded. None on a rank without pieces.
        collect: makes the result from the list of pieces by sender, with None for a sender without a piece.
        expected_bytes: approximate bytes of the rows to send.

    Returns:
        The result of `collect` (None if no rank has pieces), and the bytes that this rank sent and received.

    Raises:
        Exception: the error of any rank, also in `collect`, on all ranks.
        RankMissingError: a rank is missing after the timeout.
    """
    group = channel.payload_group
    from_device = group is not None and channel.has_all_to_all and serves(group, "cuda")
    buffer = MessageBuffer(expected_bytes + channel.world_size * _HEADER_BYTES, on_accelerator=bool(from_device))
    own, state = None, _NO_PIECES
    if error is None and pieces is not None:
        own, error = capture_error(lambda: _pack(channel, pieces, buffer))
        state = _NOTHING_TO_SEND if not any(buffer.sizes) else _ON_DEVICE if buffer.bytes.is_cuda else _ON_HOST
    sizes = buffer.sizes or [0] * channel.world_size
    states = channel.begin(call, options, error, state)
    if max(states) == _NO_PIECES:
        return None, 0, 0
    messages, incoming = [torch.empty(0, device="cpu")] * channel.world_size, sizes
    if max(states) > _NOTHING_TO_SEND:
        own_sizes = np.array(sizes, dtype=np.int64).reshape(-1, 1)
        incoming = channel.swap(own_sizes, channel.step, "exchange of sizes")[:, 0].tolist()
        on_device = _ON_DEVICE in states and _ON_HOST not in states  # all ranks must use the same group
        with channel.failures_posted(channel.step, EXCHANGE):
            source = buffer.bytes.to("cuda" if on_device else "cpu")
        messages = channel.send_bytes(source, sizes, incoming)
    result, error = capture_error(
        lambda: collect([own if rank == channel.rank else _received(part) for rank, part in enumerate(messages)])
    )
    channel.agree("end of the call", {}, error, step=channel.step)
    return result, sum(sizes), sum(incoming)


def _pack(channel: DispatchChannel, pieces: Callable[[int], Piece | None], buffer: MessageBuffer) -> Piece | None:
    """Append a message for each rank to the buffer; returns this rank's own piece."""
    own = None
    for rank in range(channel.world_size):
        with torch.no_grad():  # also for this rank's own piece, so that a result does not depend on its rows' origin
            piece = pieces(rank)
        if rank == channel.rank:
            own, piece = piece, None
        buffer.append(None if piece is None else _message(piece))
    return own


def _message(piece: Piece) -> Message:
    indices = [] if piece.indices is None else [_compact(piece.indices)]
    return encode(piece.rows, *indices, extra=piece.extra)


def _received(message: torch.Tensor) -> Piece | None:
    if not message.numel():
        return None
    (rows, *indices), extra = decode(message)
    return Piece(Rows.of(rows), indices[0].to(torch.int64) if indices else None, extra)


def _compact(indices: torch.Tensor) -> torch.Tensor:
    """Row numbers in four bytes if they fit, because eight bytes are much compared with short rows."""
    return indices.to(torch.int32) if not indices.numel() or int(indices.max()) < 2**31 else indices
