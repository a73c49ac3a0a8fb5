"""AGREE: what ranks tell one another before they pack: one gather of six integers over the control channel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed.control import ControlChannel, RankMissingError
from commons.distributed.process_group import resolve_process_group


@dataclass(frozen=True)
class Needs:
    """What one rank brings and asks for.

    Attributes:
        rows: rows of its batch.
        blocks: how many there are to be dealt, each of `granularity` rows; at most as many micro-batches.
        micro_batches: fewest micro-batches that its packing takes.
        loss_tokens: terms of the loss in its batch.
    """

    rows: int
    blocks: int
    micro_batches: int
    loss_tokens: int


@contextmanager
def open_channel(group: dist.ProcessGroup | None, timeout: float) -> Iterator[ControlChannel]:
    """A control channel for one call; its groups are taken from the pool and given back, unless they have failed."""
    channel = ControlChannel(resolve_process_group(group), timeout, moves_rows=False)
    intact = True
    try:
        yield channel
    except RankMissingError:
        intact = False
        raise
    finally:
        channel.close(intact)


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
    said = json.dumps(options)
    digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big") >> 1
    own = [0] * 4 if needs is None else list(asdict(needs).values())
    heard = channel.gather(np.array([error is not None, digest, *own]), 0, "agreement on micro-batches")
    # Different options come first: they often are why a rank has failed.
    if (heard[:, 1] != digest).any():
        _raise_for_difference([json.loads(text) for text in channel.gather_text(said, 0)], channel.members)
    if heard[:, 0].any():
        channel.raise_on_all(error, 0)
    return [Needs(*row) for row in heard[:, 2:].tolist()]


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


def _raise_for_difference(said: list[dict[str, Any]], members: Sequence[int]) -> None:
    for rank, options in zip(members, said):
        for name in {**said[0], **options}:
            if options.get(name) != said[0].get(name):
                raise ValueError(
                    f"{name} is {said[0].get(name)!r} on rank {members[0]} and {options.get(name)!r} on rank {rank}; "
                    "all ranks pack by the same spec and arguments: make them equal"
                )
