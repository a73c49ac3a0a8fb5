"""Raw archives of public data sets: a folder, a zip file or a tar file, listed, checked and read as streams.

Members go by their name without folders. A folder and a zip file are read in any order; a tar file is read from front
to back: once to list and to check it, once for its contents.

Archives come from elsewhere, so what they may ask for is limited, far above what published ones do: an archive expands
at most 100-fold (and always may to 64 MiB), a line has at most 64 KiB, a member that is held in memory at most 256 MiB,
and there are at most 10,000 members.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

# First words of the README of an archive that holds generated data; published READMEs begin otherwise.
GENERATED_MARK = "GENERATED DATA"
_BLOCK = 1 << 20
_MOST_EXPANSION, _ALWAYS_ALLOWED = 100, 64 << 20
LONGEST_LINE = 64 << 10
_LONGEST_SHOWN = 80
_MOST_IN_MEMORY = 256 << 20
_MOST_MEMBERS = 10_000
_README_BYTES = 1 << 20
_LARGEST_TAR_HEADER = 1 << 20
_READMES = ("README", "README.txt")
_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"PK"
# What damaged archives raise while they are listed or read.
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError),
    *(struct.error, IndexError),  # of a zip file's directory
)


class RawArchive(ABC):
    """Members of an archive.

    Attributes:
        path: the archive.
        sizes: bytes of every member, by its name without folders.
        folder: the folder within the archive that holds the members; "" where there is none.
        most_bytes: to which the archive may expand; None for a folder.

    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self.sizes: dict[str, int] = {}
        self.folder = ""

    @abstractmethod
    def streams(self, names: Sequence[str]) -> Generator[tuple[str, io.RawIOBase], None, None]:
        """Contents of members, each to be read before the next is asked for, in an order of the archive's own.

        Reading raises ValueError where the archive is damaged.
        """

    @abstractmethod
    def checksum(self, names: Sequence[str]) -> str:
        """SHA-256 in hex: of the archive; of a folder, that of the lines `sha256sum` prints for `names`, sorted."""

    def read(self, name: str) -> bytes:
        """Contents of a small member.

        Raises:
            ValueError: a member of more than 256 MiB.

        """
        if self.sizes[name] > _MOST_IN_MEMORY:
            raise ValueError(
                f"{self.path}: {name} has {self.sizes[name]:,} bytes; it is held in memory, and may have "
                f"{_MOST_IN_MEMORY:,}: give the archive as published"
            )
        with contextlib.closing(self.streams([name])) as streams:
            return next(streams)[1].readall()

    def readme(self) -> bytes:
        """The first MiB of README or README.txt; nothing where there is none."""
        found = [name for name in _READMES if name in self.sizes]
        if not found:
            return b""
        with contextlib.closing(self.streams(found[:1])) as streams:
            return io.BufferedReader(next(streams)[1], _BLOCK).read(_README_BYTES)

    def require(self, names: Sequence[str], title: str, remedy: str) -> None:
        """Raise ValueError unless all of `names` are members, and together expand to no more than they may."""
        missing = [name for name in names if name not in self.sizes]
        if missing:
            found = [f"{self.folder}/{name}" if self.folder else name for name in self.sizes]
            shown = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
            raise ValueError(
                f"{self.path} has no {', '.join(missing)}; {title} has {', '.join(names)}, found: "
                f"{shown or 'nothing'}: {remedy}"
            )
        self._require_room(sum(self.sizes[name] for name in names), f"{', '.join(names)} expand")

    def _require_room(self, num_bytes: int, subject: str = "it expands") -> None:
        if self.most_bytes is not None and num_bytes > self.most_bytes:
            raise ValueError(
                f"{self.path} has {self.path.stat().st_size:,} bytes and {subject} to {num_bytes:,} or more; an "
                f"archive may expand to {_MOST_EXPANSION} times its size, and always to {_ALWAYS_ALLOWED:,}: download "
                "it again or, if you trust it, unpack it and give the folder"
            )

    def _require_few(self, num_members: int) -> None:
        if num_members > _MOST_MEMBERS:
            raise ValueError(
                f"{self.path} has more than {_MOST_MEMBERS:,} members; the data sets have a few each: give the archive "
                "as published"
            )

    def _add(self, member: str, size: int) -> bool:
        """Note a member; the first of several with one name counts. Archives made on macOS repeat names."""
        name = PurePosixPath(member)
        if member.startswith("__MACOSX/") or name.name.startswith("._") or name.name in self.sizes:
            return False
        self.sizes[name.name] = size
        if len(name.parts) > 1:
            self.folder = str(name.parent)
        return True


def open_archive(source: str | Path, folders: Sequence[str], hint: str, *, show_progress: bool = False) -> RawArchive:
    """Open an archive and list it.

    Args:
        source: a folder, a zip file or a tar file.
        folders: where in a folder the members may lie, such as `["ml-20m"]`, besides the folder itself.
        hint: for the error where there is nothing: what the source is.
        show_progress: show a progress bar on stderr, if that is a terminal, while a tar file is listed.

    Raises:
        FileNotFoundError: nothing at `source`.
        ValueError: a truncated or damaged file, or no archive.

    """
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; {hint}")
    if source.is_dir():
        return _Folder(source, folders)
    if not source.is_file():
        raise ValueError(f"{source} is neither a file nor a folder; {hint}")
    with source.open("rb") as file:
        start = file.read(len(_ZIP_MAGIC))
    if source.suffix == ".zip" or start == _ZIP_MAGIC:
        return _Zip(source)
    if start and start != _GZIP_MAGIC and not tarfile.is_tarfile(source):
        raise ValueError(f"{source} is neither a zip file nor a tar file; {hint}")
    return _Tar(source, show_progress)


class _Folder(RawArchive):
    def __init__(self, path: Path, folders: Sequence[str]) -> None:
        super().__init__(path)
        # An archive unpacks to a folder of its own: take that one too.
        self._root = next((path / name for name in folders if (path / name).is_dir()), path)
        # Given the inner one of two folders, the README may be in the outer.
        is_inner = self._root == path and path.resolve().name in [Path(name).name for name in folders if "/" in name]
        self._top = path.resolve().parent if is_inner else path.resolve()
        for entry in sorted(self._root.iterdir()):
            if entry.is_file():
                self.sizes[entry.name] = entry.stat().st_size

    def streams(self, names: Sequence[str]) -> Generator[tuple[str, io.RawIOBase], None, None]:
        for name in names:
            with (self._root / name).open("rb", buffering=0) as stream:
                yield name, stream

    def readme(self) -> bytes:
        # It may stand above the folder of the data.
        root = self._root.resolve()
        inside = [folder for folder in (root, *root.parents) if folder.is_relative_to(self._top)]
        found = [folder / name for folder in inside for name in _READMES if (folder / name).is_file()]
        if not found:
            return b""
        with found[0].open("rb") as file:
            return file.read(_README_BYTES)

    def checksum(self, names: Sequence[str]) -> str:
        lines = "".join(f"{_sha256_of(self._root / name)}  {name}\n" for name in sorted(names))
        return hashlib.sha256(lines.encode()).hexdigest()


class _Zip(RawArchive):
    def __init__(self, path: Path) -> None:
        super().__init__(path, _most_bytes(path))
        self._members: dict[str, zipfile.ZipInfo] = {}
        with _damage_named(path, "zip file"), zipfile.ZipFile(path) as archive:
            self._require_few(len(archive.infolist()))
            for info in archive.infolist():
                if not info.is_dir() and self._add(info.filename, info.file_size):
                    # Not its name: of several members with one name that opens the last, whose size was not looked at.
                    self._members[PurePosixPath(info.filename).name] = info
                # Other methods expand a block as a whole, whatever its size; a password is asked for by no data set.
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                    raise ValueError(
                        f"{path}: {info.filename} is encrypted or compressed by method {info.compress_type}; zip files "
                        "are read where members are stored or deflated: pack it again, or unpack it and give the folder"
                    )

    def streams(self, names: Sequence[str]) -> Generator[tuple[str, io.RawIOBase], None, None]:
        with contextlib.ExitStack() as stack:
            with _damage_named(self.path, "zip file"):
                archive = stack.enter_context(zipfile.ZipFile(self.path))
            for name in names:
                with _damage_named(self.path, "zip file"):
                    member = archive.open(self._members[name])
                with member:
                    yield name, _MemberStream(member, self.path, "zip file")

    def checksum(self, names: Sequence[str]) -> str:
        return _sha256_of(self.path)


class _Tar(RawArchive):
    def __init__(self, path: Path, show_progress: bool) -> None:
        super().__init__(path, _most_bytes(path))
        with (
            path.open("rb") as file,
            tqdm(
                total=path.stat().st_size,
                desc=f"check {path.name}",
                unit="B",
                unit_scale=True,
                disable=None if show_progress else True,
            ) as progress,
            _damage_named(path, "tar file"),
        ):
            hashing = _HashingReader(file, progress.update)
            with self._plain(hashing) as plain, _open_tar(plain) as archive:
                for number, info in enumerate(archive, start=1):
                    self._require_few(number)
                    if info.isfile():
                        self._add(info.name, info.size)
                # To the end of the file: gzip compares its checksum there.
                while plain.read(_BLOCK):
                    pass
            while hashing.read(_BLOCK):
                pass
        self._checksum = hashing.digest.hexdigest()

    def streams(self, names: Sequence[str]) -> Generator[tuple[str, io.RawIOBase], None, None]:
        wanted = set(names)
        with contextlib.ExitStack() as stack:
            with _damage_named(self.path, "tar file"):
                plain = stack.enter_context(self._plain(stack.enter_context(self.path.open("rb"))))
                archive = stack.enter_context(_open_tar(plain))
            while wanted:
                with _damage_named(self.path, "tar file"):
                    info = archive.next()
                    if info is None:
                        return
                    name = PurePosixPath(info.name).name
                    member = archive.extractfile(info) if info.isfile() and name in wanted else None
                if member is not None:
                    wanted.remove(name)
                    yield name, _MemberStream(member, self.path, "tar file")

    def checksum(self, names: Sequence[str]) -> str:
        return self._checksum

    def _plain(self, file: Any) -> Any:
        """The tar file, which may be compressed, as a stream."""
        with self.path.open("rb") as start:
            is_gzip = start.read(2) == _GZIP_MAGIC
        return io.BufferedReader(_LimitedStream(gzip.open(file), self._require_room) if is_gzip else file, _BLOCK)


class _PlainTarInfo(tarfile.TarInfo):
    """A member of a tar file, refused where it would be assembled in memory: huge headers, files with holes."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str | None, errors: str) -> tarfile.TarInfo:  # type: ignore[override]
        info = super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]
        if info.type not in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE) and info.size > _LARGEST_TAR_HEADER:
            raise tarfile.ReadError(f"a header of {info.size:,} bytes; {_LARGEST_TAR_HEADER:,} are allowed")
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"{info.name} is a file with holes, which no data set has")
        return info

    def _proc_gnusparse_10(self, *arguments: Any) -> None:
        raise tarfile.ReadError(f"{self.name} is a file with holes, which no data set has")


def _open_tar(plain: Any) -> tarfile.TarFile:
    return tarfile.open(fileobj=plain, mode="r|", tarinfo=_PlainTarInfo)


class _LimitedStream(io.RawIOBase):
    """What a file expands to; `check` is called with the number of bytes so far."""

    def __init__(self, file: Any, check: Callable[[int], object]) -> None:
        super().__init__()
        self._file, self._check, self._num_bytes = file, check, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._num_bytes += count
        self._check(self._num_bytes)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _MemberStream(io.RawIOBase):
    """A member whose damage is reported as that of its archive."""

    def __init__(self, member: Any, path: Path, kind: str) -> None:
        super().__init__()
        self._member, self._path, self._kind = member, path, kind

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _damage_named(self._path, self._kind):
            data = self._member.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _HashingReader(io.RawIOBase):
    """A file whose bytes are hashed and counted as they are read."""

    def __init__(self, file: Any, on_bytes: Callable[[int], object]) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self._file, self._on_bytes = file, on_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:count])
        self._on_bytes(count)
        return count


def _most_bytes(path: Path) -> int:
    return max(_MOST_EXPANSION * path.stat().st_size, _ALWAYS_ALLOWED)


def bounded_line(reader: Any, where: str) -> bytes:
    """The next line of a buffered reader with its end, nothing behind the last one.

    Raises:
        ValueError: a line of more than 64 KiB; `where` says which one.

    """
    line = reader.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise overlong_line(where)
    return line


def shortened(text: str) -> str:
    """The beginning of a text from an archive, quoted, for errors."""
    return repr(text) if len(text) <= _LONGEST_SHOWN else repr(text[:_LONGEST_SHOWN]) + " …"


def overlong_line(where: str) -> ValueError:
    """The error for a line of more than 64 KiB."""
    return ValueError(
        f"{where} has more than {LONGEST_LINE:,} bytes, which is the most that a line may have: mend it or download "
        "the archive again"
    )


@contextlib.contextmanager
def _damage_named(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        # A damaged directory of a zip file sends the reader to a place before its start.
        if isinstance(error, _DAMAGE) or error.errno == errno.EINVAL:
            raise ValueError(f"{path} is no complete {kind} ({error}): download it again") from error
        raise


def _sha256_of(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.sha256()
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
