"""Atomic writes: a folder or a file is written under another name, and renamed when it is complete.

- `<name>`: the complete folder;
- `.<name>.unfinished`: a folder that is being written, or whose writer was killed; the next writer empties it;
- `.<name>.replaced`: the earlier folder, between the two renames that replace it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# A full disk, a full quota, a file above the size limit.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def whole_folder(target: Path, *, may_replace: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """The folder to write into; it becomes `target` when the block ends without an error.

    Args:
        target: path of the complete folder; its parents are made if missing.
        may_replace: whether the file or folder at `target` may be replaced.
        what: kind of content, for errors: "data set".

    Raises:
        FileExistsError: the file or folder at `target` may not be replaced.
        BlockingIOError: another process is writing the same folder.
        OSError: no permission to write there, or no space.
    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    replaced = target.with_name(f".{target.name}.replaced")
    with parents_of(target), locked_folder(unfinished, target, what):
        if os.path.lexists(replaced):
            # A process was killed between the two renames: restore the earlier folder unless the new one exists.
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

    A symbolic link at `target` is replaced, not followed. The parents are made if missing.

    Raises:
        OSError: no permission to write there, or no space.
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
    """Raise FileExistsError if `target` exists and may not be replaced."""
    if os.path.lexists(target) and not may_replace(target):
        raise FileExistsError(
            f"{target} exists and is not a {what} of this kind; it is not overwritten: give another path"
        )


def require_local(name: str, path: str | Path) -> None:
    """Raise ValueError for the URL of a store, such as s3://bucket/run: a folder named `s3:` would be made for it."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path), re.IGNORECASE):
        raise ValueError(
            f"{name} is {str(path)!r}; files are written to mounted disks, not to URLs: give a folder, such as the "
            "store's mount"
        )


@contextlib.contextmanager
def parents_of(target: Path) -> Iterator[None]:
    """Make the parents of a path; if the block raises, remove the new parents that are empty.

    Raises:
        ValueError: the path is the URL of a store.
        OSError: a parent cannot be made, or the block failed for lack of space; this error names the target.
    """
    require_local("the output", target)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"folder {target.parent} cannot be made ({error.strerror}); {target.name} is written there: give a "
                "path where you may write"
            ) from error
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise OSError(
                    f"{target} cannot be written ({os.strerror(error.errno)}); an earlier version is kept: free space, "
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
    """An empty folder, locked against other writers, and removed at the end.

    Args:
        folder: its path; files that a killed process left there are removed.
        target: the path that it will be renamed to, for errors.
        what: kind of content, for errors.

    Raises:
        BlockingIOError: another process has locked the folder.
        OSError: no permission to write there, or `folder` is a file or a symbolic link.
    """
    lock = _locked(folder, target, what)
    try:
        for left_over in folder.iterdir():
            _remove(left_over)
        try:
            yield
        finally:
            # After the rename the path does not exist, or is the next writer's folder.
            if _is_at(lock, folder):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(folder: Path, target: Path, what: str) -> int:
    """Lock a folder, made if missing; the lock lasts until the file descriptor that is returned is closed."""
    while True:
        try:
            folder.mkdir(exist_ok=True)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another writer has just removed it
        except OSError as error:
            raise _cannot_be_written(folder, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BlockingIOError(
                f"another process is writing {target}; a {what} has one writer at a time: wait for it, or end it"
            ) from None
        if _is_at(lock, folder):
            return lock
        # Another writer renamed or removed the folder before it released the lock: this lock is of the old folder.
        os.close(lock)


def _cannot_be_written(path: Path, error: OSError) -> OSError:
    return OSError(
        f"{path} cannot be written ({error.strerror}); output is first written under another name beside it, then "
        "renamed: give a path where you may write, or remove what is in the way"
    )


def _is_at(opened: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), folder.lstat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):  # the next writer may be removing the same replaced folder
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
