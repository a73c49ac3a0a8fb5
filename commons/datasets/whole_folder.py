"""A folder that appears when it is whole: written aside, renamed at the end, and never half there.

- `<name>`: the folder, whole;
- `.<name>.unfinished`: one that is being written, or was when its process was ended; the next one clears it;
- `.<name>.replaced`: the earlier folder, for the moment between two renames.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(target: Path, *, may_replace: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """The folder to write into; it becomes `target` when the block ends without an error.

    Args:
        target: where the folder goes; its parents are made if missing.
        may_replace: whether what is at `target` is ours to replace.
        what: what the folder holds, for errors: "data set".

    Raises:
        FileExistsError: something at `target` that may not be replaced.
        BlockingIOError: another process is writing the same folder.

    """
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    replaced = target.with_name(f".{target.name}.replaced")
    with _without_traces(made), owned_folder(unfinished, target, what):
        if replaced.exists():
            # A process was ended between the two renames: the earlier folder counts until the new one is there.
            if target.exists():
                _remove(replaced)
            else:
                replaced.replace(target)
        check_replaceable(target, may_replace, what)
        yield unfinished
        if target.exists():
            target.replace(replaced)
        unfinished.replace(target)
        _remove(replaced)


def check_replaceable(target: Path, may_replace: Callable[[Path], bool], what: str) -> None:
    """Raise FileExistsError where writing would replace something else."""
    if target.exists() and not may_replace(target):
        raise FileExistsError(
            f"{target} exists and is no {what} of this kind; it is not overwritten: give another path"
        )


@contextlib.contextmanager
def _without_traces(made: list[Path]) -> Iterator[None]:
    """Remove the folders that were made for nothing."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def owned_folder(folder: Path, target: Path, what: str) -> Iterator[Path]:
    """An empty folder of this process, locked so that no other takes it for left over, and removed at the end.

    Args:
        folder: which; what an ended process left there is removed.
        target: what will come of it, for errors.
        what: what it holds, for errors.

    Raises:
        BlockingIOError: another process has the folder.

    """
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is writing {target}; one {what} has one writer: wait for it, or end it"
            ) from None
        for entry in folder.iterdir():
            _remove(entry)
        try:
            yield folder
        finally:
            # After the rename there is none.
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
