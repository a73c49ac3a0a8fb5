"""One run of a recipe: its ranks, its folder, the loop, and the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from commons.distributed.process_group import resolve_process_group
from commons.trainer.config.load import load_config, make_config
from commons.trainer.loop import TrainingLoop
from commons.trainer.observe.train_log import TrainSummary
from commons.trainer.ranks.collectives import limit_collectives
from commons.trainer.ranks.launch import initialize_ranks
from commons.trainer.ranks.rank_info import RankInfo
from commons.trainer.recipe import Recipe
from commons.trainer.run_folder import open_run_folder


def train_as_rank(recipe_class: type[Recipe], *, prog: str, description: str | None) -> TrainSummary:
    """One rank of a run that torchrun started with a config and flags: what a model's training script calls.

    `prog` is the name of the script, `description` what it does, with examples, both for the help.
    """
    config = load_config(recipe_class.config_class, sys.argv[1:], prog=prog, description=description)
    return train(recipe_class, config, logs_to_file=True)


def train(
    recipe_class: type[Recipe], config: Any, *, ranks: RankInfo | None = None, logs_to_file: bool = False
) -> TrainSummary:
    """One rank of a run, for any launcher and any script; called on all ranks together.

    A process group that exists is joined and left as it is, and so are logging and signals, SIGTERM in a run that saves
    checkpoints aside. A group that is made here ends with the run, unless that fails: ranks that are gone would be
    waited for.

    Args:
        recipe_class: the model.
        config: an instance of its `config_class`, or nested dictionaries of such, as a config file holds them.
        ranks: which rank this is, where there is no process group and torchrun has not started the process.
        logs_to_file: let the logging of this process go to the run's folder.

    Raises:
        KeyError, FileNotFoundError, ValueError: data, ranks or settings that do not fit.
    """
    if isinstance(config, Mapping):
        config = make_config(recipe_class.config_class, config)
    args = config.trainer
    joined = dist.is_initialized()
    device = initialize_ranks(args.device, ranks=ranks)
    if not joined:
        limit_collectives(args.shuffler.timeout)
    recipe = recipe_class(config, device)
    recipe.prepare_ranks()
    open_run_folder(config, device, logs_to_file=logs_to_file)
    summary = run_training(recipe)
    recipe.release_ranks()
    if not joined:
        dist.destroy_process_group()
    return summary


def run_training(recipe: Recipe) -> TrainSummary:
    """Train and, if there is something to evaluate on, evaluate; called on all ranks together.

    Raises:
        KeyError, FileNotFoundError, ValueError: data or settings that do not fit.
    """
    _divide_batch(recipe)
    return TrainingLoop(recipe).run()


def _divide_batch(recipe: Recipe) -> None:
    """Give every rank its part of global_batch_size, if that is set."""
    args, ranks = recipe.config.trainer, dist.get_world_size(resolve_process_group())
    if args.global_batch_size is None:
        return
    if args.global_batch_size % ranks:
        raise ValueError(
            f"global_batch_size is {args.global_batch_size}, and {ranks} ranks share the data; each trains an equal "
            "part: give a multiple of every number of ranks that the run may have"
        )
    args.train_batch_size = recipe.batch_size = args.global_batch_size // ranks
