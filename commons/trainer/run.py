"""One run of a recipe: its ranks, its folder, the loop, and the end."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commons.distributed.process_group import resolve_process_group
from commons.run_log.files import (
    CONFIG_FILE,
    LOG_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
    TRACKERS_FILE,
    write_whole,
)
from commons.trainer.checkpoint.folder import holds_checkpoint
from commons.trainer.config.args import TrainerArgs
from commons.trainer.config.load import load_config, make_config
from commons.trainer.loop import TrainingLoop
from commons.trainer.observe.sinks import require_sinks
from commons.trainer.observe.train_log import TrainSummary
from commons.trainer.ranks.collectives import limit_collectives, on_rank_0
from commons.trainer.ranks.errors import log_to_file
from commons.trainer.ranks.launch import initialize_ranks
from commons.trainer.ranks.rank_info import RankInfo
from commons.trainer.recipe import Recipe


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

    Returns:
        What came out of the run.

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


def open_run_folder(config: Any, device: torch.device, *, logs_to_file: bool) -> None:
    """Let a run have its folder, write config.json there and, with `logs_to_file`, log there; called on all ranks.

    A run that resumes (ckpt_load_dir) goes on with the run in the folder; with `overwrite` that run is removed.

    Raises:
        ValueError: the folder holds another run, or cannot be written.
        ImportError: a sink's library is not installed.
    """
    args = config.trainer
    require_sinks(args.sinks)
    on_rank_0(lambda: _make_room(args), device)
    if logs_to_file:
        log_to_file(args.run_dir)
    if dist.get_rank() == 0:
        Path(args.run_dir).mkdir(parents=True, exist_ok=True)
        write_whole(Path(args.run_dir) / CONFIG_FILE, json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def _make_room(args: TrainerArgs) -> None:
    """Raise ValueError unless the folder may take the run."""
    folder = Path(args.run_dir)
    try:
        if args.overwrite:
            _remove_run(folder)
        log = folder / LOG_FILE
        # One that ended before its first line has left no results.
        holds_run = (log.is_file() and log.stat().st_size > 0) or (folder / SUMMARY_FILE).is_file()
    except OSError as error:
        raise ValueError(
            f"run_dir is {args.run_dir!r}, which cannot be looked through ({error}): give a folder of yours"
        ) from None
    if holds_run and not _goes_on(folder, args):
        empty = f", and ckpt_load_dir {args.ckpt_load_dir} no checkpoint" if args.ckpt_load_dir else ""
        raise ValueError(
            f"run_dir {args.run_dir} holds a run already{empty}; two runs in one folder would be taken for one: give "
            "another --trainer.run-dir, remove that run with --trainer.overwrite, or go on with it from its "
            "checkpoints, --trainer.ckpt-load-dir"
        )


def _goes_on(folder: Path, args: TrainerArgs) -> bool:
    """Whether the run that the settings describe is a later part of the one in the folder."""
    if not args.ckpt_load_dir or holds_checkpoint(args.ckpt_load_dir):
        return bool(args.ckpt_load_dir)
    # Given again, a command whose run ended before its first checkpoint begins it anew.
    try:
        before = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["trainer"]["ckpt_save_dir"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return Path(before).resolve() == Path(args.ckpt_save_dir).resolve()


def _remove_run(folder: Path) -> None:
    """Remove what a run writes, and nothing else."""
    patterns = [LOG_FILE, CONFIG_FILE, SUMMARY_FILE, TRACKERS_FILE, "rank[0-9]*.log", "trace-rank[0-9]*.json"]
    for pattern in (*patterns, f"{TENSORBOARD_FOLDER}/events.out.tfevents.*"):
        for path in folder.glob(pattern):
            path.unlink()


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
