"""AGREE: what ranks tell one another before they pack: one gather of six integers over the control channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commons.distributed.channel.agree import CALL_NUMBERS, ControlChannel

# What messages call it.
CALL = "pack_micro_batches"


@dataclass(frozen=True)
class Needs:
    """What one rank brings and asks for."""

    rows: int  # rows of its batch
    blocks: int  # how many there are to be dealt, each of `granularity` rows; at most as many micro-batches
    micro_batches: int  # fewest micro-batches that its packing takes; 0 where only other ranks' rows make one possible
    loss_tokens: int  # terms of the loss in its batch


def exchange_needs(
    channel: ControlChannel, options: dict[str, Any], needs: Needs | None, error: Exception | None
) -> list[Needs]:
    """Tell all ranks what this one needs, and hear it from them.

    Args:
        channel: the ranks.
        options: what all ranks must have passed alike, as JSON holds it.
        needs: this rank's; None after an error.
        error: what went wrong on this rank, if anything.

    Returns:
        The needs of every rank.

    Raises:
        ValueError: ranks differ in their options.
        Exception: a rank's error, on all of them, of its type where it is a ValueError, TypeError or KeyError.
        RankMissingError: a rank did not take part.
    """
    if error is not None and channel.world_size == 1:
        raise error
    own = [0] * 4 if needs is None else list(asdict(needs).values())
    heard = channel.agree(CALL, options, error, own, room=CALL_NUMBERS)
    return [Needs(*row) for row in heard.tolist()]


def most_needed(needs: list[Needs]) -> int:
    """The number of micro-batches that is enough for every rank."""
    return max(each.micro_batches for each in needs)


def all_can_make(num_micro_batches: int, needs: list[Needs]) -> bool:
    """Whether every rank has a block for each of so many micro-batches."""
    return num_micro_batches <= min(each.blocks for each in needs)


def require_blocks(needs: list[Needs], num_micro_batches: int, members: Sequence[int]) -> None:
    """Raise ValueError, the same on all ranks, if one has too few rows for the number that another one needs.

    Args:
        needs: the needs of every rank.
        num_micro_batches: the number.
        members: the ranks' global numbers, by which they are named.
    """
    if all_can_make(num_micro_batches, needs):
        return
    asking = max(range(len(needs)), key=lambda rank: needs[rank].micro_batches)
    short = [
        f"rank {rank} has {each.rows} rows" + ("" if each.blocks == each.rows else f" in {each.blocks} blocks")
        for rank, each in zip(members, needs)
        if each.blocks < num_micro_batches
    ]
    raise ValueError(
        f"rank {members[asking]} needs {num_micro_batches} micro-batches for its {needs[asking].rows} rows, "
        f"{', '.join(short)}; all ranks make as many micro-batches and none is empty: spread the rows evenly over the "
        "ranks (commons.dispatch.redistribute_balanced), raise max_tokens_per_mb or lower n_mbs and n_mbs_divisor"
    )
