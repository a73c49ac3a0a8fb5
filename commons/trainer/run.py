"""One run of a recipe: join the ranks, open the run folder, train, leave."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commons.distributed.errors import raise_first_difference
from commons.distributed.process_group import resolve_process_group
from commons.run_log.files import (
    CONFIG_FILE,
    LOG_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
    TRACKERS_FILE,
    write_whole,
)
from commons.trainer.checkpoint.folder import folder_of, holds_checkpoint
from commons.trainer.config.args import TrainerArgs
from commons.trainer.config.load import load_config, make_config
from commons.trainer.folder_lock import lock_folder, unlock_folder
from commons.trainer.loop import TrainingLoop
from commons.trainer.observe.sinks import require_sinks
from commons.trainer.observe.train_log import TrainSummary
from commons.trainer.ranks.collectives import (
    gather_values,
    limit_collectives,
    on_all_ranks,
    on_rank_0,
    raised_on_all_ranks,
)
from commons.trainer.ranks.errors import log_to_file
from commons.trainer.ranks.launch import initialize_ranks
from commons.trainer.ranks.rank_info import RankInfo
from commons.trainer.recipe import Recipe
from commons.whole_folder import require_local

# Settings that may differ between ranks: paths, and what a rank does without the others.
_PATHS = ("_dir", "_path")
_PER_RANK = (
    "imports",
    "dataset.num_workers",
    "model.compile",
    "model.kernel_backend",
    "trainer.overwrite",
    "trainer.sinks",
    "trainer.sink_options.",
    "trainer.profile",
    "trainer.peak_tflops",
    "trainer.shuffler.calibration",
    "trainer.ckpt_keep",
)


def train_as_rank(recipe_class: type[Recipe], *, prog: str, description: str | None) -> TrainSummary:
    """Run one rank of a training that torchrun started, with the command line's config and flags.

    A model's training script calls it. `--help` prints `prog`, the name of the script, and `description`, its purpose
    with examples.
    """
    config = load_config(recipe_class.config_class, sys.argv[1:], prog=prog, description=description)
    return train(recipe_class, config, logs_to_file=True)


def train(
    recipe_class: type[Recipe], config: Any, *, ranks: RankInfo | None = None, logs_to_file: bool = False
) -> TrainSummary:
    """Run one rank of a training, under any launcher and in any script; called on all ranks together.

    An existing process group is used and not destroyed. Logging and signal handlers stay unchanged, except SIGTERM in
    a run that saves checkpoints. A process group that is created here is destroyed after a successful run; after a
    failure it is not, because destroying it would wait for ranks that have exited.

    Args:
        recipe_class: the model.
        config: an instance of `recipe_class.config_class`, or the nested dictionaries of a config file.
        ranks: the rank of this process; needed without a process group and without torchrun.
        logs_to_file: whether this process writes its logging to the run folder.

    Returns:
        The result of the run.

    Raises:
        KeyError, FileNotFoundError, ValueError: wrong data, ranks or settings.
    """
    if isinstance(config, Mapping):
        config = make_config(recipe_class.config_class, config)
    args = config.trainer
    joined = dist.is_initialized()
    device = initialize_ranks(args.device, ranks=ranks)
    if not joined:
        limit_collectives(args.shuffler.timeout)
    _require_equal_settings(config, device)
    recipe = raised_on_all_ranks(lambda: recipe_class(config, device), device)
    recipe.prepare_ranks()
    try:
        open_run_folder(config, device, logs_to_file=logs_to_file)
        summary = run_training(recipe)
    finally:
        unlock_folder(Path(args.run_dir))
    recipe.release_ranks()
    if not joined:
        dist.destroy_process_group()
    return summary


def run_training(recipe: Recipe) -> TrainSummary:
    """Train and, if the recipe has evaluation data, evaluate; errors as `TrainingLoop.run`."""
    as_given = copy.deepcopy(recipe.config)  # config.json starts the same run on another number of ranks
    recipe.share_batch(dist.get_world_size(resolve_process_group()))
    return TrainingLoop(recipe, on_start=lambda: replace_run(as_given)).run()


def _require_equal_settings(config: Any, device: torch.device) -> None:
    """Raise ValueError on all ranks if their settings differ: they would wait for one another, or train two models."""
    own = dict(_shared_settings(config)) | {"trainer.ckpt_load_dir given": bool(config.trainer.ckpt_load_dir)}
    settings = gather_values(own, device)
    raise_first_difference([("training", each) for each in settings], range(len(settings)))


def _shared_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of the settings that are equal on all ranks.

    Without values that JSON does not have, such as a Path, and without the fields that a user's subclass of TrainerArgs
    adds, such as the name of the host.
    """
    for field in dataclasses.fields(TrainerArgs if isinstance(section, TrainerArgs) else section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _shared_settings(value, f"{name}.")
        elif not (name.endswith(_PATHS) or name.startswith(_PER_RANK)):
            with contextlib.suppress(TypeError):
                json.dumps(value)
                yield name, value


def open_run_folder(config: Any, device: torch.device, *, logs_to_file: bool) -> None:
    """Lock the run folder for this process and, with `logs_to_file`, log there; called on all ranks together.

    With `ckpt_load_dir` this run continues the run in the folder; with `overwrite` it replaces that run when training
    starts, by `replace_run`: a run that fails before leaves it as it was, except for the ranks' logs.

    Raises:
        ValueError: the folder contains another run, another process is writing to it, or it cannot be written.
        ImportError: a sink's library is not installed.
    """
    args = config.trainer
    raised_on_all_ranks(lambda: require_sinks(args.sinks), device)
    on_rank_0(lambda: _claim_folder(config), device)
    if logs_to_file:
        # A run that torchrun starts again keeps the traceback of its failure.
        on_all_ranks(lambda: log_to_file(args.run_dir, append=bool(args.ckpt_load_dir)), device)


def replace_run(config: Any) -> None:
    """Write config.json for the run that starts, on rank 0; with `overwrite`, first remove the files of the old run."""
    folder = Path(config.trainer.run_dir)
    if config.trainer.overwrite:
        _remove(folder, LOG_FILE, CONFIG_FILE, SUMMARY_FILE, TRACKERS_FILE, "trace-rank[0-9]*.json")
        _remove(folder, f"{TENSORBOARD_FOLDER}/events.out.tfevents.*")
    text = json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"  # a recipe's config may hold paths
    write_whole(folder / CONFIG_FILE, text)


def _claim_folder(config: Any) -> None:
    """Lock the folder of a run; raise ValueError unless this run may use it."""
    args: TrainerArgs = config.trainer
    for name in ("run_dir", "ckpt_save_dir", "ckpt_load_dir"):
        require_local(name, getattr(args, name))
    folder = Path(args.run_dir)
    lock_folder(folder)
    try:
        log = folder / LOG_FILE
        # A run that ended before its first line of the log has left no results.
        holds_run = (log.is_file() and log.stat().st_size > 0) or (folder / SUMMARY_FILE).is_file()
        if args.overwrite:
            _remove(folder, "rank[0-9]*.log")
    except OSError as error:
        raise ValueError(
            f"run_dir is {args.run_dir!r}, which cannot be read ({error}): give a folder of yours"
        ) from None
    if not holds_run:
        replace_run(config)
    elif not (args.overwrite or _continues_run(folder, args)):
        load, why = args.ckpt_load_dir, ""
        if load:
            of_another = "is neither the ckpt_save_dir nor the ckpt_load_dir in its config.json"
            why = f", and ckpt_load_dir {load} {of_another if holds_checkpoint(load) else 'has no checkpoint'}"
        raise ValueError(
            f"run_dir {args.run_dir} already contains a run{why}; a folder may contain only one run: give another "
            "--trainer.run-dir, remove the old run with --trainer.overwrite, or continue it from its checkpoints with "
            "--trainer.ckpt-load-dir"
        )


def _continues_run(folder: Path, args: TrainerArgs) -> bool:
    """Whether a run with these settings continues the run in the folder, or starts it again."""
    try:
        before = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["trainer"]
        saved = _places_of(before, "ckpt_save_dir") if before["ckpt_save_interval"] > 0 else set()
        loaded = _places_of(before, "ckpt_load_dir") if before["ckpt_load_dir"] else set()
    except (OSError, ValueError, KeyError, TypeError):
        # The folder does not say which checkpoints are its run's.
        return bool(args.ckpt_load_dir) and holds_checkpoint(args.ckpt_load_dir)
    if args.ckpt_load_dir and holds_checkpoint(args.ckpt_load_dir):
        return not (saved | loaded).isdisjoint(_places_of(vars(args), "ckpt_load_dir"))
    # A run that ended before its first checkpoint starts again when its command is repeated.
    return bool(args.ckpt_load_dir) and not saved.isdisjoint(_places_of(vars(args), "ckpt_save_dir"))


def _places_of(settings: Mapping[str, Any], name: str) -> set[str]:
    """A folder of checkpoints by its absolute path, and by that from the run folder, for a run that was moved."""
    folder = folder_of(settings[name])
    return {str(folder), os.path.relpath(folder, Path(settings["run_dir"]).resolve())}


def _remove(folder: Path, *patterns: str) -> None:
    """Remove the files of a folder that match; patterns are only of files that a run writes."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()
