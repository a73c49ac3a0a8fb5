"""A folder of checkpoints: list them, find complete ones, add one.

    <folder>/step_00000100/     a complete checkpoint: the files of torch.distributed.checkpoint, and state.json
    <folder>/step_00000200.tmp  a checkpoint that is being written, or whose run ended while writing

A checkpoint is renamed when all its files are on disk, so that a folder without `.tmp` is complete. state.json contains
the digest of every file and of its own content, so that later changes on the disk are detected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
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


class DamagedError(ValueError):
    """A checkpoint that is not whole; one of another version may be."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return folder / f"{_PREFIX}{step:08d}"


def folder_of(path: str | Path) -> Path:
    """The folder of checkpoints that a path is, or in which it is a checkpoint; absolute."""
    found = Path(path).resolve()
    return found.parent if found.name.startswith(_PREFIX) or (found / STATE_FILE).is_file() else found


def holds_checkpoint(path: str | Path) -> bool:
    """Whether a path is a checkpoint, or a folder with a complete checkpoint."""
    return (Path(path) / STATE_FILE).is_file() or bool(list_checkpoints(path))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints of a folder, oldest first, without unfinished ones."""
    found = (path for path in Path(folder).glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit())
    return sorted(filter(Path.is_dir, found), key=_step_of)


def unfinished_path(final: Path) -> Path:
    """Path of a checkpoint while it is being written."""
    return final.with_name(final.name + _UNFINISHED)


def make_empty(path: Path) -> None:
    """Create an empty folder; an existing folder is removed first."""
    discard(path)
    path.mkdir(parents=True)


def digests_of(folder: Path, names: Iterable[str] | None = None, *, rank: int, ranks: int) -> dict[str, str]:
    """Digests (BLAKE2b, hexadecimal) by name of this rank's share of the files, all or `names`; a second per GB.

    Every file is read by one rank: the rank that wrote it if the number of ranks is the same, else any rank.
    """
    digests = {}
    for name in [file.name for file in folder.iterdir()] if names is None else names:
        written_by = re.match(r"__(\d+)_", name)  # torch's file names begin with the rank
        if (int(written_by[1]) if written_by else 0) % ranks == rank:
            digest, block = hashlib.blake2b(digest_size=_DIGEST_BYTES), memoryview(bytearray(_BLOCK_BYTES))
            with (folder / name).open("rb", buffering=0) as content:
                while size := content.readinto(block):
                    digest.update(block[:size])
            digests[name] = digest.hexdigest()
    return digests


def complete_checkpoint(
    unfinished: Path, final: Path, state: Mapping[str, Any], keep: int, damaged: list[Path] | None = None
) -> None:
    """Write the state file, rename the folder, remove old checkpoints.

    Args:
        unfinished: the folder with all other files.
        final: the folder's new name.
        state: content of the state file without the version, JSON-ready; "digests" has every file's digest by name.
        keep: number of checkpoints to keep, this one included; those of later steps and damaged ones do not count.
        damaged: checkpoints that were found damaged; the new one is removed from the list.

    Raises:
        OSError: a file is missing or cannot be written.
    """
    found = {file.name for file in unfinished.iterdir()}
    written = FileSystemReader(unfinished).read_metadata().storage_data or {}
    missing = sorted({place.relative_path for place in written.values()} - found)
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} (and {len(missing) - 1} more) is not on rank 0's disk; all ranks write to one folder on a "
            "shared disk"
        )
    with (unfinished / STATE_FILE).open("w", encoding="utf-8") as file:
        file.write(state_text({"version": FORMAT_VERSION, **state}))
        file.flush()
        os.fsync(file.fileno())
    discard(final)
    unfinished.rename(final)
    _sync(final.parent)  # before older checkpoints are removed, so that a power cut loses none but the new one
    if damaged and final in damaged:
        damaged.remove(final)
    until_now = [path for path in list_checkpoints(final.parent) if _step_of(path) <= _step_of(final)]
    # Those of a killed run are removed now, not at the start, when the run before may still be writing its last one.
    left = [path for path in final.parent.glob(f"{_PREFIX}*{_UNFINISHED}") if path.stem[len(_PREFIX) :].isdigit()]
    first_kept = [path for path in until_now if path not in (damaged or ())][-keep:][0]
    for old in (*until_now[: until_now.index(first_kept)], *left):
        discard(old)


def state_text(state: Mapping[str, Any]) -> str:
    """The text of a state file: JSON, with a digest of the other entries."""
    content = {name: value for name, value in state.items() if name != "digest"}
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1) + "\n"


def discard(path: Path) -> None:
    """Remove a folder, if it exists and can be removed."""
    shutil.rmtree(path, ignore_errors=True)


def read_state(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's state file; checks that all files exist.

    The caller compares the files' digests with `state["digests"]`.

    Raises:
        DamagedError: the checkpoint is damaged.
        ValueError: it is of another version.
    """
    try:
        text = (path / STATE_FILE).read_text(encoding="utf-8")
        state = json.loads(text)
        version, names = state["version"], list(state["digests"])
        if text != state_text(state):
            raise ValueError("its content has another digest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged ({STATE_FILE}: {error}): load another checkpoint") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version}; this evenrank reads version {FORMAT_VERSION}: load it with the version "
            "that wrote it"
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise DamagedError(f"{path} is damaged ({missing[0]} is missing): load another checkpoint")
    return state


def require_visible(path: Path, digest: str) -> None:
    """Raise FileNotFoundError unless this rank sees the checkpoint that rank 0 has chosen, by its state's digest."""
    state = path / STATE_FILE
    found = state.read_text(encoding="utf-8", errors="replace") if state.is_file() else ""
    if digest not in found:
        problem = "is another one than that of rank 0" if found else "does not exist, and rank 0 has found it"
        raise FileNotFoundError(
            f"{path} on {socket.gethostname()} {problem}; all ranks load from one folder on a shared disk: mount the "
            "disk there, at the same path"
        )


def latest_whole(folder: Path, damaged: list[Path]) -> Path:
    """The latest checkpoint of a folder that has all its files; logs a warning for each checkpoint that is skipped.

    `damaged` lists checkpoints to skip without a warning; newly found damaged ones are appended.

    Raises:
        FileNotFoundError: the folder has no checkpoint, or does not exist.
        ValueError: all checkpoints are damaged, or the latest whole one is of another version.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        problem = "has no checkpoint" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {problem}; it must be a checkpoint or a folder of checkpoints, which may be empty only if this "
            "run saves to it (ckpt_save_dir, ckpt_save_interval): correct the path"
        )
    for path in reversed(checkpoints):
        if path in damaged:
            continue
        try:
            read_state(path)
        except DamagedError as error:
            damaged.append(path)
            warn_of_damage(error)
        else:
            return path
    raise ValueError(f"all {len(checkpoints)} checkpoints of {folder} are damaged: start without one")


def warn_of_damage(problem: object) -> None:
    """Log a warning that a checkpoint is skipped."""
    logger.warning("%s; trying the checkpoint before it", problem)


def claim(folder: Path, step: int, damaged: Container[Path] = ()) -> str:
    """Create the folder for the checkpoints of a run that starts after `step` steps; ignores `damaged` checkpoints.

    Returns:
        The name of a new file in the folder, by which other ranks recognise it; see `require_marker`.

    Raises:
        ValueError: the folder cannot be created or written, or has complete checkpoints of later steps of another run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_none_after(folder, step, damaged, f"starts {f'after step {step}' if step else 'from the beginning'}")
        descriptor, marker = tempfile.mkstemp(prefix=".shared-", dir=folder)
    except OSError as error:
        raise ValueError(
            f"ckpt_save_dir {folder} cannot be written ({error.strerror}); checkpoints are written there: choose "
            "another folder"
        ) from None
    os.close(descriptor)
    return Path(marker).name


def require_marker(folder: Path, name: str) -> None:
    """Raise OSError if a folder lacks the file that rank 0 has created by `claim`, or cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)  # NFS may remember for a minute that there was no folder
    if not (folder / name).is_file():
        raise FileNotFoundError(
            f"ckpt_save_dir {folder} on {socket.gethostname()} is another folder than that of rank 0; all ranks write "
            "to one folder on a shared disk: mount the disk there"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"ckpt_save_dir {folder} cannot be written on {socket.gethostname()}; every rank writes its part of a "
            "checkpoint: mount the disk there for writing, as a user who may write"
        )


def require_none_after(folder: Path, step: int, damaged: Container[Path], what: str) -> None:
    """Raise ValueError if a folder has complete checkpoints after `step`; `what` this run does, for the error."""
    for path in reversed(list_checkpoints(folder)):
        if _step_of(path) <= step or path in damaged:
            continue
        try:
            read_state(path)
        except DamagedError:
            continue
        raise ValueError(
            f"ckpt_save_dir {folder} contains {path.name}, and this run {what}; a folder has the checkpoints of one "
            f"run: choose another ckpt_save_dir, or continue that run with --trainer.ckpt-load-dir {folder}"
        )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
