"""Results of all ranks, brought together in the order of the rows that they belong to."""

from __future__ import annotations

from typing import Any

import torch

from commons.dispatch.channel import EXCHANGE, GATHER, DispatchChannel
from commons.sequence_batch.rows import concat_rows, count_rows, select_rows
from commons.sequence_batch.wire import Message, MessageBuffer, decode, encode


def results_message(results: Any, indices: torch.Tensor) -> Message:
    """Results of the real rows of a share, and which rows these are.

    Args:
        results: a batch with a row per row of the share.
        indices: int64 `(rows,)`: the row of the whole batch that each row is, -1 for padding, which comes last.

    Raises:
        ValueError: results with another number of rows.
        TypeError: results that cannot be sent.
    """
    rows = count_rows(results)
    if rows != len(indices):
        raise ValueError(
            f"results have {rows} rows, the share has {len(indices)}; they have a row per row of the share, padding "
            "included: keep all rows"
        )
    num_real = int((indices >= 0).sum())
    return encode(select_rows(results, torch.arange(num_real)), compact_indices(indices[:num_real]))


def gather_results(
    channel: DispatchChannel, src: int, to_all: bool, message: Message | None, error: Exception | None
) -> Any | None:
    """The results of all ranks, on those that get them; called on all ranks together.

    Args:
        channel: over the ranks.
        src: the rank that gets them.
        to_all: whether all ranks do.
        message: of `results_message`; None after an error.
        error: what is wrong on this rank.

    Returns:
        One batch in the order of the rows, without padding; None on the other ranks.

    Raises:
        Exception: what went wrong on any rank.
    """
    receivers = range(channel.world_size) if to_all else (src,)
    size = 0 if message is None else message.nbytes
    sizes = [size * (rank in receivers) for rank in range(channel.world_size)]
    can_send = message is not None and message.on_accelerator and channel.can_send_from_device()
    incoming, notes = channel.begin(
        "gather_back", {"src": src, "to_all": bool(to_all)}, error, sizes, note=int(can_send)
    )
    assert message is not None  # noqa: S101  begin raised the error
    with channel.failures_posted(channel.step, GATHER if to_all else EXCHANGE):
        outgoing = MessageBuffer(size, on_accelerator=all(notes))
        outgoing.append(message)
    if to_all:
        received = channel.gather_bytes(outgoing.bytes, incoming)
    else:
        received = list(channel.send_bytes(outgoing.bytes, sizes, incoming).split(incoming))
    collected = None
    if channel.rank in receivers:
        try:
            parts = [decode(part)[0] for part in received]
            order = torch.argsort(torch.cat([indices for _, indices in parts]))
            collected = select_rows(concat_rows([rows for rows, _ in parts]), order)
        except Exception as caught:
            error = caught
    channel.confirm(error)
    return collected


def compact_indices(indices: torch.Tensor) -> torch.Tensor:
    """Row numbers in four bytes, where they fit, so that they weigh little beside short rows."""
    return indices.to(torch.int32) if not indices.numel() or int(indices.max()) < 2**31 else indices
