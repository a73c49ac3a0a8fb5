"""EXCHANGE: one payload over a process group, by either transport. The only payload collectives are here."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commons.distributed.process_group import all_gather_single
from commons.distributed.row_routes import RowRoutes


def all_to_all_words(
    packed: torch.Tensor, received: torch.Tensor, routes: RowRoutes, group: dist.ProcessGroup, async_op: bool
) -> tuple[dist.Work | None, int]:
    """Send every moved row to the rank that trains it.

    Args:
        packed: int32 `(sent_words,)`, by receiver.
        received: int32 `(received_words,)`, filled by sender.
        routes: the split sizes.
        group: the payload group.
        async_op: return before the collective has ended.

    Returns:
        The collective, if it is asynchronous, and the bytes this rank sends.
    """
    work = dist.all_to_all_single(
        received, packed, routes.output_splits, routes.input_splits, group=group, async_op=async_op
    )
    return work, packed.numel() * packed.element_size()


def all_gather_words(
    packed: torch.Tensor, received: torch.Tensor, routes: RowRoutes, group: dist.ProcessGroup, async_op: bool
) -> tuple[dist.Work | None, int]:
    """Send every moved row to all ranks; each keeps what it needs.

    Args:
        packed: int32 `(sent_words,)`; padded here to the largest sender, because gloo gathers equal sizes only.
        received: int32 `(received_words,)`, one block per rank.
        routes: the size of a block.
        group: the payload group.
        async_op: return before the collective has ended.

    Returns:
        The collective, if it is asynchronous, and the bytes this rank sends: its block once to every other rank.
    """
    block = packed.new_zeros(routes.gather_words)
    block[: packed.numel()] = packed
    work = all_gather_single(received, block, group=group, async_op=async_op)
    return work, block.numel() * block.element_size() * (dist.get_world_size(group) - 1)
