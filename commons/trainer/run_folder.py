"""A run's folder holds one run, which a resumed run goes on with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
from commons.trainer.observe.sinks import require_sinks
from commons.trainer.ranks.collectives import broadcast_text
from commons.trainer.ranks.errors import log_to_file


def open_run_folder(config: Any, device: torch.device, *, logs_to_file: bool) -> None:
    """Let a run have its folder, write config.json there and, with `logs_to_file`, log there; called on all ranks.

    Raises:
        ValueError: the folder holds a run, or cannot be written.
        ImportError: a sink's library is not installed.
    """
    require_sinks(config.trainer.sinks)
    require_run_folder(config.trainer, device)
    if logs_to_file:
        log_to_file(config.trainer.run_dir)
    write_config(config, config.trainer.run_dir)


def write_config(config: Any, run_dir: str | Path) -> None:
    """Write a dataclass to `<run_dir>/config.json`, which is a config too; rank 0 does."""
    if dist.get_rank() != 0:
        return
    path = Path(run_dir) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def require_run_folder(args: TrainerArgs, device: torch.device) -> None:
    """Raise ValueError on all ranks if the folder holds a run that this one does not go on with; rank 0 looks.

    A run that resumes (ckpt_load_dir) goes on with the run in the folder; with `overwrite` that run is removed.
    """
    problem = broadcast_text(_make_room(args) if dist.get_rank() == 0 else "", device)
    if problem:
        raise ValueError(problem)


def _make_room(args: TrainerArgs) -> str:
    """See that the folder may take the run; returns why it may not, or ""."""
    folder = Path(args.run_dir)
    try:
        if args.overwrite:
            _remove_run(folder)
        log = folder / LOG_FILE
        # One that ended before its first line has left no results.
        holds_run = (log.is_file() and log.stat().st_size > 0) or (folder / SUMMARY_FILE).is_file()
        if not holds_run or _goes_on(folder, args):
            return ""
    except OSError as error:
        return f"run_dir is {args.run_dir!r}, which cannot be looked through ({error}): give a folder of yours"
    empty = f", and ckpt_load_dir {args.ckpt_load_dir} no checkpoint" if args.ckpt_load_dir else ""
    return (
        f"run_dir {args.run_dir} holds a run already{empty}; two runs in one folder would be taken for one: give "
        "another --trainer.run-dir, remove that run with --trainer.overwrite, or go on with it from its checkpoints, "
        "--trainer.ckpt-load-dir"
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
    for pattern in (LOG_FILE, CONFIG_FILE, SUMMARY_FILE, TRACKERS_FILE, "rank[0-9]*.log", "trace-rank[0-9]*.json"):
        for path in folder.glob(pattern):
            path.unlink()
    scalars = folder / TENSORBOARD_FOLDER
    if scalars.is_symlink():
        scalars.unlink()  # what it leads to is not the run's alone
        return
    for path in scalars.glob("events.out.tfevents.*"):
        path.unlink()
