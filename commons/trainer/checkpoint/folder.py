"""A folder of checkpoints: which there are, which of them are whole, and how one is added.

    <folder>/step_00000100/     a whole checkpoint: the files of torch.distributed.checkpoint, and state.json
    <folder>/step_00000200.tmp  one that is being written, or was when the run was ended

A checkpoint is written aside and renamed when every file of it is on disk, so that a folder without `.tmp` is whole.
state.json knows the digest of every file: what the disk has changed since is noticed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
STATE_FILE = "state.json"
_DIGEST_BYTES = 32
_PREFIX, _UNFINISHED = "step_", ".tmp"
_BLOCK_BYTES = 1 << 20


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"{_PREFIX}{step:08d}"


def holds_checkpoint(path: str | Path) -> bool:
    """Whether a path is a checkpoint, or a folder with one that is finished."""
    return (Path(path) / STATE_FILE).is_file() or bool(list_checkpoints(path))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints of a folder, oldest first; those that are not finished are left out."""
    found = [path for path in Path(folder).glob(f"{_PREFIX}*") if path.is_dir() and path.suffix != _UNFINISHED]
    return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdigit()), key=_step_of)


def unfinished_path(final: Path) -> Path:
    """Where a checkpoint lies while it is being written."""
    return final.with_name(final.name + _UNFINISHED)


def make_empty(path: Path) -> None:
    """Make a folder, without what is left of one of that name."""
    discard(path)
    path.mkdir(parents=True)


def digests_of(folder: Path, names: Iterable[str] | None = None, *, rank: int, ranks: int) -> dict[str, str]:
    """Digests (BLAKE2b, hexadecimal) by name of the files, all or `names`, that are a rank's to read; a second per GB.

    Every file has one rank that reads it: the one that wrote it where there are as many ranks, and some rank elsewhere.
    """
    digests = {}
    for name in [file.name for file in folder.iterdir()] if names is None else names:
        written_by = re.match(r"__(\d+)_", name)  # torch's name of a rank's file
        if (int(written_by[1]) if written_by else 0) % ranks == rank:
            digest, block = hashlib.blake2b(digest_size=_DIGEST_BYTES), memoryview(bytearray(_BLOCK_BYTES))
            with (folder / name).open("rb", buffering=0) as content:
                while size := content.readinto(block):
                    digest.update(block[:size])
            digests[name] = digest.hexdigest()
    return digests


def complete_checkpoint(unfinished: Path, final: Path, state: Mapping[str, Any], keep: int) -> None:
    """Write the state file, give the folder its name, remove what is too old.

    Args:
        unfinished: has all other files.
        final: its name from now on.
        state: JSON-ready, but for the version; with the digest of every file by name, "digests".
        keep: checkpoints to keep, this one included; those of later steps do not count.

    Raises:
        OSError: a file is missing or cannot be written.
    """
    found = {file.name for file in unfinished.iterdir()}
    written = FileSystemReader(unfinished).read_metadata().storage_data or {}
    missing = sorted({place.relative_path for place in written.values()} - found)
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} (and {len(missing) - 1} more) is not on rank 0's disk; all ranks write into one folder, on "
            "a disk that they share"
        )
    with (unfinished / STATE_FILE).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"version": FORMAT_VERSION, **state}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    discard(final)
    unfinished.rename(final)
    _sync(final.parent)  # what is removed next may be all that would be left after a power cut
    until_now = [path for path in list_checkpoints(final.parent) if _step_of(path) <= _step_of(final)]
    for old in until_now[:-keep]:
        discard(old)


def discard(path: Path) -> None:
    """Remove a folder, if it is there and can be removed."""
    shutil.rmtree(path, ignore_errors=True)


def read_state(path: Path) -> dict[str, Any]:
    """What the state file of a checkpoint says, once all files are there.

    Comparing the files' digests, `state["digests"]`, is left to the caller.

    Raises:
        ValueError: damaged, or of another version.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        version, names = state["version"], list(state["digests"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({STATE_FILE}: {error}): load another checkpoint") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version}; this evenrank reads version {FORMAT_VERSION}: load it with the version "
            "that wrote it"
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{path} is damaged ({missing[0]} is missing): load another checkpoint")
    return state


def latest_whole(folder: Path, damaged: list[Path] | None = None) -> Path:
    """The last checkpoint of a folder whose files are all there; a warning for each that is passed over.

    `damaged` are those that are known to be damaged; what is found is added.

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
    damaged = [] if damaged is None else damaged
    for path in reversed(checkpoints):
        if path in damaged:
            continue
        try:
            read_state(path)
        except ValueError as error:
            damaged.append(path)
            warn_of_damage(error)
        else:
            return path
    raise ValueError(f"all {len(checkpoints)} checkpoints of {folder} are damaged: start without one")


def warn_of_damage(problem: object) -> None:
    """Warn that a checkpoint is passed over."""
    logger.warning("%s; going back to the one before", problem)


def claim(folder: Path, step: int, damaged: Container[Path] = ()) -> None:
    """Make a folder for the checkpoints of a run that starts after `step` steps; `damaged` ones are nobody's.

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
        if _step_of(path) <= step or path in damaged:
            continue
        try:
            read_state(path)
        except ValueError:  # damaged
            continue
        raise ValueError(
            f"ckpt_save_dir {folder} holds {path.name}, and this run starts "
            f"{f'after step {step}' if step else 'from the beginning'}; the checkpoints of two runs would be taken "
            f"for one another: choose another ckpt_save_dir, or go on with --trainer.ckpt-load-dir {folder}"
        )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _sync(folder: Path) -> None:
    """Let a folder's names reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
