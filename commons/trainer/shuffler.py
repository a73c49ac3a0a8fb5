"""The shuffler that a run's settings name, also one of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.trainer.args import TrainerArgs
from commons.user_package import import_user_modules


def require_shuffler(name: str, imports: Sequence[str] = ()) -> None:
    """Import the user's modules, then raise ValueError unless a shuffler of this name is registered.

    Raises:
        ValueError: a module that cannot be imported, or an unknown name.
    """
    import_user_modules(imports)
    if not BatchShufflerFactory.is_registered(name):
        raise ValueError(
            f"shuffler_type is {name!r}; registered are {', '.join(sorted(BatchShufflerFactory.list_available()))}: "
            "choose one, or name with --import the module that registers yours"
        )


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
