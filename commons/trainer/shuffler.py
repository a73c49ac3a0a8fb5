"""The shuffler that a run's settings name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.trainer.args import TrainerArgs


def make_shuffler(
    trainer: TrainerArgs, name: str, dimensions: Mapping[str, Mapping[str, Any]], *, balances: bool
) -> BaseTaskBalancedBatchShuffler:
    """The shuffler of this name with the run's options, or the one that moves nothing.

    Args:
        trainer: its `shuffler` options; with balance_batch rows are dealt out evenly already, and the shuffler only
            reports how even they are.
        name: of a registered shuffler.
        dimensions: arguments of the shufflers that take a model's dimensions, by name; others are made without.
        balances: False for the one that moves nothing.

    Raises:
        KeyError: an unknown name.
    """
    options = trainer.shuffler
    if trainer.balance_batch and options.mode == "balance":
        options = replace(options, mode="observe")
    if not balances:
        return IdentityBalancedBatchShuffler(options=options)
    return BatchShufflerFactory.create(name, options=options, **dimensions.get(name, {}))
