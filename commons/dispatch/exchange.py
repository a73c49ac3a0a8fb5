"""EXCHANGE: rows from rank to rank, each with what belongs to it; the one way in which dispatch moves anything.

call, options and errors of all ranks ─► bytes by receiver ─► one all-to-all ─► errors of all ranks

Nothing need be known beforehand: rows of any kind travel as messages that say what they are. Nothing is sent where no
rank has anything for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from commons.dispatch.channel import EXCHANGE, DispatchChannel
from commons.distributed.errors import attempt
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.wire import MessageBuffer, decode, encode

T = TypeVar("T")

# What a rank has: no pieces at all, pieces that stay where they are, bytes for others on the host, or on its device.
_NO_PIECES, _NOTHING_TO_SEND, _ON_HOST, _ON_DEVICE = range(4)


class Piece(NamedTuple):
    """What one rank has for another one."""

    rows: Rows[Any]  # a batch
    indices: torch.Tensor | None = None  # int64 `(rows,)`, numbers of the rows, if they are to be known
    extra: Any = None  # a plain value


@dataclass(frozen=True)  # a named tuple that is generic would need Python 3.11
class Exchanged(Generic[T]):
    """What came of an exchange, and the bytes that this rank has sent and received."""

    result: T
    bytes_sent: int
    bytes_received: int


def exchange(
    channel: DispatchChannel,
    call: str,
    options: dict[str, Any] | None,
    error: Exception | None,
    pieces: Callable[[int], Piece | None] | None,
    collect: Callable[[list[Piece | None]], T],
    *,
    expected_bytes: int = 0,
) -> Exchanged[T] | None:
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
        The result; None if no rank has pieces.

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
        return None
    messages, incoming = [torch.empty(0)] * channel.world_size, sizes
    if max(places) > _NOTHING_TO_SEND:
        incoming = channel.swap_sizes(sizes)
        on_device = _ON_DEVICE in places and _ON_HOST not in places  # all use the same group
        with channel.failures_posted(channel.step, EXCHANGE):
            source = torch.empty(0, dtype=torch.uint8) if outgoing is None else outgoing.bytes
            source = source.to("cuda" if on_device else "cpu")
        messages = channel.send_bytes(source, sizes, incoming)
    result, error = attempt(
        lambda: collect([own if rank == channel.rank else _received(part) for rank, part in enumerate(messages)])
    )
    channel.confirm(error)
    return Exchanged(cast(T, result), sum(sizes), sum(incoming))


def _pack(
    channel: DispatchChannel, pieces: Callable[[int], Piece | None], expected_bytes: int
) -> tuple[Piece | None, MessageBuffer | None]:
    """This rank's own piece, and the messages to the others; None if there are none."""
    own, buffer = None, None
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
                on_device = message.on_accelerator and channel.can_send_from_device()
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
