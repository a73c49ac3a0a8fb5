"""A folder, or a file, that appears when it is whole: written aside, renamed at the end, and never half there.

- `<name>`: the folder, whole;
- `.<name>.unfinished`: one that is being written, or was when its process was ended; the next one clears it;
- `.<name>.replaced`: the earlier folder, for the moment between two renames.

These names can be foreseen, and others may have put something there: neither is taken if it is a symbolic link, and the
first one must be a folder of this user. It is opened once, and emptied through that opening, whatever its name has
become meanwhile. A file is written under a name that cannot be foreseen.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# A full disk, a full quota, a file larger than is allowed.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def whole_folder(target: Path, *, may_replace: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """The folder to write into; it becomes `target` when the block ends without an error.

    Args:
        target: where the folder goes; its parents are made if missing.
        may_replace: whether what is at `target` is ours to replace.
        what: what the folder holds, for errors: "data set".

    Raises:
        FileExistsError: something at `target` that may not be replaced, or a symbolic link or another user's folder
            where the folder is written first.
        BlockingIOError: another process is writing the same folder.
        OSError: no right to write there, or no room; or what was written is no longer where it was.

    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    replaced = target.with_name(f".{target.name}.replaced")
    with parents_of(target), owned_folder(unfinished, target, what) as is_there:
        if replaced.is_symlink():
            raise _is_a_link(replaced, target, what)
        if replaced.exists():
            # A process was ended between the two renames: the earlier folder counts until the new one is there.
            if os.path.lexists(target):
                _remove(replaced)
            else:
                replaced.replace(target)
        check_replaceable(target, may_replace, what)
        yield unfinished
        require_there(is_there(), unfinished, target)
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
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OSError(
                f"{target} cannot be written ({error.strerror}); it is written beside its place first: give a path "
                "where you may write"
            ) from error
        try:
            with os.fdopen(handle, "wb") as file:
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


def require_there(is_there: bool, folder: Path, target: Path) -> None:
    """Raise OSError where somebody has put something else in the place of the folder that was written."""
    if not is_there:
        raise OSError(
            f"{folder} was replaced while {target} was written; what was there before stays: give a path where nobody "
            "else may write"
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
            if error.errno in _NO_ROOM:
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
def owned_folder(folder: Path, target: Path, what: str) -> Iterator[Callable[[], bool]]:
    """An empty folder of this process, locked so that no other takes it for left over, and removed at the end.

    Args:
        folder: which; what an ended process left there is removed.
        target: what will come of it, for errors.
        what: what it holds, for errors.

    Yields:
        Whether the folder is still there, asked at any time.

    Raises:
        FileExistsError: `folder` is a symbolic link, or no folder, or another user's.
        BlockingIOError: another process has the folder.

    """
    lock = _locked(folder, target, what)
    try:
        _empty(lock)
        try:
            yield lambda: _is_at(lock, folder)
        finally:
            # After the rename there is none, or another process's.
            if _is_at(lock, folder):
                with contextlib.suppress(OSError):
                    _empty(lock)
                    folder.rmdir()
    finally:
        os.close(lock)


def _locked(folder: Path, target: Path, what: str) -> int:
    """A file descriptor of a folder, made if missing, that holds its lock."""
    while True:
        try:
            folder.mkdir()
            is_ours = True
        except FileExistsError:
            is_ours = False
        except OSError as error:
            raise OSError(
                f"{target} cannot be written ({error.strerror}); a {what} is written beside its place first: give a "
                "path where you may write"
            ) from error
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its owner has just removed it
        except OSError as error:
            if folder.is_symlink():
                raise _is_a_link(folder, target, what) from None
            raise FileExistsError(
                f"{folder} cannot be opened ({error.strerror}); {target} is written there first: remove it"
            ) from None
        try:
            if not is_ours and os.fstat(lock).st_uid != os.geteuid():
                raise FileExistsError(
                    f"{folder} belongs to another user; {target} is written there first, where nobody else may write: "
                    "remove it, or give another path"
                )
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, folder):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise BlockingIOError(
                f"another process is writing {target}; one {what} has one writer: wait for it, or end it"
            ) from None
        except BaseException:
            os.close(lock)
            raise
        # Its owner renamed or removed it, and then unlocked it: this is the lock of something else.
        os.close(lock)


def _is_a_link(path: Path, target: Path, what: str) -> FileExistsError:
    return FileExistsError(
        f"{path} is a symbolic link; {target} passes through there while the {what} is written, and links are not "
        "followed: remove it"
    )


def _is_at(opened: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), folder.lstat())
    except FileNotFoundError:
        return False


def _empty(opened: int) -> None:
    """Remove what an opened folder holds; links are removed, not followed."""
    with os.scandir(opened) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=opened).st_mode):
            os.unlink(name, dir_fd=opened)
            continue
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
        try:
            _empty(inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=opened)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):  # what a writer replaced, the next one may remove too
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
