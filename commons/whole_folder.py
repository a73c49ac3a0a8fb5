"""A folder, or a file, that appears when it is whole: written aside and renamed at the end.

- `<name>`: the folder, whole;
- `.<name>.unfinished`: one that is being written, or whose process was killed; the next writer clears it;
- `.<name>.replaced`: the earlier folder, for the moment between two renames.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# A full disk, a full quota, a file larger than is allowed.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        OSError: no right to write there, or no room.

    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    replaced = target.with_name(f".{target.name}.replaced")
    with parents_of(target), locked_folder(unfinished, target, what):
        if replaced.exists():
            # A process was ended between the two renames: the earlier folder counts until the new one is there.
            if os.path.lexists(target):
                _remove(replaced)
            else:
                replaced.replace(target)
        check_replaceable(target, may_replace, what)
        yield unfinished
        if os.path.lexists(target):
            target.replace(replaced)
        unfinished.replace(target)
        _remove(replaced)


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """The file to write into; it becomes `target` when the block ends without an error.

    A symbolic link at `target` is replaced, and what it points to left alone. The parents are made if missing.

    Raises:
        OSError: no right to write there, or no room.

    """
    with parents_of(target):
        aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            file = aside.open("xb")
        except OSError as error:
            raise _cannot_be_written(target, error) from error
        try:
            with file:
                yield file
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def check_replaceable(target: Path, may_replace: Callable[[Path], bool], what: str) -> None:
    """Raise FileExistsError where writing would replace something else."""
    if os.path.lexists(target) and not may_replace(target):
        raise FileExistsError(
            f"{target} exists and is no {what} of this kind; it is not overwritten: give another path"
        )


@contextlib.contextmanager
def parents_of(target: Path) -> Iterator[None]:
    """Make the parents of a path; if the block ends with an error, those that were made for nothing are removed.

    Raises:
        OSError: a parent that cannot be made; also in place of an error of the block that says that there is no room.

    """
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"{target.parent} cannot be made a folder ({error.strerror}); {target.name} is written there: give a "
                "path where you may write"
            ) from error
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise OSError(
                    f"{target} cannot be written ({os.strerror(error.errno)}); what was there before stays: make room, "
                    "or give a path on another disk"
                ) from error
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def locked_folder(folder: Path, target: Path, what: str) -> Iterator[None]:
    """An empty folder of this process, locked against other writers, and removed at the end.

    Args:
        folder: which; what a killed process left there is removed.
        target: what will come of it, for errors.
        what: what it holds, for errors.

    Raises:
        BlockingIOError: another process has the folder.
        OSError: no right to write there, or `folder` is a file or a symbolic link.

    """
    lock = _locked(folder, target, what)
    try:
        for left_over in folder.iterdir():
            _remove(left_over)
        try:
            yield
        finally:
            # After the rename there is none, or the next writer's.
            if _is_at(lock, folder):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(folder: Path, target: Path, what: str) -> int:
    """A file descriptor of a folder, made if missing, that holds its lock."""
    while True:
        try:
            folder.mkdir(exist_ok=True)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its writer has just removed it
        except OSError as error:
            raise _cannot_be_written(folder, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BlockingIOError(
                f"another process is writing {target}; one {what} has one writer: wait for it, or end it"
            ) from None
        if _is_at(lock, folder):
            return lock
        # Its writer renamed or removed it before it gave up the lock: this is the lock of another folder.
        os.close(lock)


def _cannot_be_written(path: Path, error: OSError) -> OSError:
    return OSError(
        f"{path} cannot be written ({error.strerror}); output is written beside its place first: give a path where you "
        "may write, or remove what is in the way"
    )


def _is_at(opened: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), folder.lstat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):  # what a writer replaced, the next one may remove too
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
