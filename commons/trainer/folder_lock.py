"""A lock on the folder of a run, so that two runs do not write into it at once."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import BinaryIO

# The open lock files of this process by folder. One per folder, because closing a second one would unlock the first.
_HELD: dict[Path, BinaryIO] = {}


def lock_folder(folder: Path) -> None:
    """Lock a folder, made if missing, until `unlock_folder` or the end of this process, which may lock it again.

    The lock file stays, because it could not be removed without a moment in which two processes lock two files. Where
    the file system has no locks, and where the folder cannot be written, nothing is locked.

    Raises:
        ValueError: another process has locked it.
    """
    path = folder.resolve()
    with contextlib.suppress(OSError):  # the next write to the folder raises it
        folder.mkdir(parents=True, exist_ok=True)
        if path not in _HELD:
            _HELD[path] = (path / ".lock").open("ab")
        try:
            fcntl.lockf(_HELD[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            unlock_folder(folder)
            raise ValueError(
                f"another run is writing to run_dir {folder}; a folder may contain only one run: give another "
                "--trainer.run-dir, or wait until that run has ended"
            ) from None


def unlock_folder(folder: Path) -> None:
    """Unlock a folder, if this process has locked it."""
    held = _HELD.pop(folder.resolve(), None)
    if held is not None:
        held.close()
