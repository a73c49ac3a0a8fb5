"""A lock on the folder of a run, so that two runs do not write into it at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

LOCK_FILE = ".lock"
_MOST_TRIES = 100  # to lock a file that other processes remove
# The open lock files of this process by folder. One per folder, because closing a second one would unlock the first.
_HELD: dict[Path, BinaryIO] = {}


def lock_folder(folder: Path) -> None:
    """Lock a folder, made if missing, until `unlock_folder` or the end of this process.

    This process may lock it again. A killed process leaves the lock file, but no lock, not even if processes that it
    has forked still run. On a file system without locks or lasting inode numbers, and where the folder cannot be
    written, nothing is locked.

    Raises:
        ValueError: another process has locked it.
    """
    with contextlib.suppress(OSError):  # the next write to the folder raises it
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_TRIES):
            if _lock(folder):
                return


def unlock_folder(folder: Path) -> None:
    """Unlock a folder that this process has locked, and remove the lock file."""
    held = _HELD.pop(folder.resolve(), None)
    if held is not None:
        with held, contextlib.suppress(OSError):
            (folder / LOCK_FILE).unlink()


def _lock(folder: Path) -> bool:
    """Lock a folder; False if another process has removed the lock file meanwhile, so that the lock is of no file."""
    held = _HELD.pop(folder.resolve(), None) or (folder / LOCK_FILE).open("ab")
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        held.close()
        raise ValueError(
            f"another run is writing to run_dir {folder}; a folder may contain only one run: give another "
            "--trainer.run-dir, or wait until that run has ended"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        is_there = os.path.samestat(os.fstat(held.fileno()), (folder / LOCK_FILE).stat())
    except FileNotFoundError:
        is_there = False
    if is_there:
        _HELD[folder.resolve()] = held
    else:
        held.close()
    return is_there
