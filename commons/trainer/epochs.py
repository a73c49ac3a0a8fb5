"""Epochs of a loader: opened at their beginning or where a checkpoint ended, in the same order every time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from commons.dispatch import SingleRankLoader
from commons.trainer.launch import seed_all
from commons.trainer.random_state import kept_random_state

# These say which part of the order a rank reads, and how much of it at a time.
_PER_LAUNCH = ("rank", "world_size", "batch_size", "rows_per_step")


def open_epoch(
    loader: DataLoader[Any] | SingleRankLoader, epoch: int, *, first_row: int, seed: int, rank: int
) -> Iterator[Any]:
    """The batches of an epoch.

    The loader draws the seed of its workers from `seed`, `epoch` and `rank`, and leaves the random states of this
    process alone: it draws more or less often where a run has just been resumed.

    Args:
        loader: its sampler has `set_epoch` if epochs differ.
        epoch: from 0.
        first_row: rows of the epoch to leave out, counted over all ranks.
        seed: of the run.
        rank: this rank.

    Raises:
        ValueError: the sampler cannot begin within an epoch.
    """
    sampler = loader.sampler
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if first_row:
        if not hasattr(sampler, "start_at"):
            raise ValueError(
                f"the checkpoint ends within epoch {epoch}, and {type(sampler).__name__} cannot begin there; resuming "
                "needs a sampler with start_at(row): use one of commons.datasets.samplers"
            )
        sampler.start_at(first_row)
    with kept_random_state():
        seed_all(int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1)[0]))
        return iter(loader)


def order_of(loader: DataLoader[Any] | SingleRankLoader) -> dict[str, Any]:
    """What decides the order in which all ranks together read the data, JSON-ready; empty where it is not known."""
    identity = getattr(loader.sampler, "identity", None)
    known = {} if identity is None else identity()
    return {name: value for name, value in known.items() if name not in _PER_LAUNCH}
