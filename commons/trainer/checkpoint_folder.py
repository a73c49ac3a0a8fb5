"""A folder of checkpoints: which there are, which of them are whole, and how one is added.

    <folder>/step_00000100/     a whole checkpoint: the files of torch.distributed.checkpoint, and state.json
    <folder>/step_00000200.tmp  one that is being written, or was when the run was ended

A checkpoint is written aside and renamed when every file of it is on disk, so that a folder without `.tmp` is whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
STATE_FILE = "state.json"
_PREFIX, _UNFINISHED = "step_", ".tmp"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"{_PREFIX}{step:08d}"


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints of a folder, oldest first; those that are not finished are left out."""
    found = [path for path in Path(folder).glob(f"{_PREFIX}*") if path.is_dir() and path.suffix != _UNFINISHED]
    return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdigit()), key=_step_of)


def unfinished_path(final: Path) -> Path:
    """Where a checkpoint lies while it is being written."""
    return final.with_name(final.name + _UNFINISHED)


def make_empty(path: Path) -> None:
    """Make a folder, without what is left of one of that name.

    Raises:
        OSError: it cannot be made, or there is a symbolic link of that name, which is not followed.
    """
    if path.is_symlink():
        raise FileExistsError(f"{path} is a symbolic link; a checkpoint is written there, and links are not followed")
    discard(path)
    path.mkdir(parents=True)


def complete_checkpoint(unfinished: Path, final: Path, state: Mapping[str, Any], keep: int) -> None:
    """Write the state file, give the folder its name, remove what is too old.

    Args:
        unfinished: has all other files.
        final: its name from now on.
        state: JSON-ready, besides version and sizes of files.
        keep: checkpoints to keep, this one included; those of later steps do not count.

    Raises:
        OSError: a file is missing or cannot be written.
    """
    sizes = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
    written = FileSystemReader(unfinished).read_metadata().storage_data or {}
    missing = sorted({place.relative_path for place in written.values()} - sizes.keys())
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} (and {len(missing) - 1} more) is not on rank 0's disk; all ranks write into one folder, on "
            "a disk that they share"
        )
    content = json.dumps({"version": FORMAT_VERSION, **state, "files": sizes}, indent=1) + "\n"
    with (unfinished / STATE_FILE).open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    discard(final)
    unfinished.rename(final)
    _sync(final.parent)  # what is removed next may be all that would be left after a power cut
    until_now = [path for path in list_checkpoints(final.parent) if _step_of(path) <= _step_of(final)]
    for old in until_now[:-keep]:
        discard(old)


def discard(path: Path) -> None:
    """Remove a folder, if it is there and can be removed; a symbolic link stays, and what it points to."""
    shutil.rmtree(path, ignore_errors=True)


def read_state(path: Path) -> dict[str, Any]:
    """What the state file of a checkpoint says, once all files have the sizes that were written.

    Raises:
        ValueError: damaged, or of another version.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        version, files, _, _ = state["version"], dict(state["files"]), state["progress"], state["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({STATE_FILE}: {error}): load another checkpoint") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version}; this evenrank reads version {FORMAT_VERSION}: load it with the version "
            "that wrote it"
        )
    for name, size in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            is_now = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"{path} is damaged ({name} {is_now}, {size} were written): load another checkpoint")
    return state


def latest_whole(folder: Path) -> Path:
    """The last checkpoint of a folder that is whole; a warning for each that is passed over.

    Raises:
        FileNotFoundError: the folder has none, or does not exist.
        ValueError: all are damaged.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        problem = "holds no checkpoint" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {problem}; it is a checkpoint or a folder of them, and may be empty only where this run saves "
            "to it (ckpt_save_dir, ckpt_save_interval): correct the path"
        )
    for path in reversed(checkpoints):
        try:
            read_state(path)
        except ValueError as error:
            logger.warning("%s; going back to the one before", error)
        else:
            return path
    raise ValueError(f"all {len(checkpoints)} checkpoints of {folder} are damaged: start without one")


def claim(folder: Path, step: int) -> None:
    """Make a folder for the checkpoints of a run that starts after `step` steps.

    Raises:
        ValueError: it cannot be made or written, or holds whole checkpoints of later steps, which are another run's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"ckpt_save_dir {folder} cannot be written ({error.strerror}); checkpoints are folders in it: choose "
            "another one"
        ) from None
    for path in reversed(list_checkpoints(folder)):
        if _step_of(path) > step and _is_whole(path):
            raise ValueError(
                f"ckpt_save_dir {folder} holds {path.name}, and this run starts "
                f"{f'after step {step}' if step else 'from the beginning'}; the checkpoints of two runs would be taken "
                f"for one another: choose another ckpt_save_dir, or go on with --trainer.ckpt-load-dir {folder}"
            )


def _is_whole(path: Path) -> bool:
    try:
        read_state(path)
    except ValueError:
        return False
    return True


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _sync(folder: Path) -> None:
    """Let a folder's names reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
