"""Raw files of public data sets, from their folder, or unpacked from a zip file or a tar file.

Files go by their name without folders, so that no name in an archive leads anywhere; those that are not wanted are
passed over. Archives come from elsewhere, so what they may ask for is limited, far above what published ones do: an
archive expands at most 100-fold (and always may to 64 MiB), and has at most 10,000 members.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from commons.console import progress_bar

# First words of the README of an archive that holds generated data; published READMEs begin otherwise.
GENERATED_MARK = "GENERATED DATA"
_BLOCK = 1 << 20
_MOST_EXPANSION, _ALWAYS_ALLOWED = 100, 64 << 20
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
_Members = Iterator[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True)
class RawKind:
    """A data set as it is published.

    Attributes:
        title: its name, for errors.
        archive: file name of the archive.
        folder: in which the archive holds the files.
        names: the files that are read.

    """

    title: str
    archive: str
    folder: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class RawFiles:
    """The files of a data set.

    Attributes:
        source: the archive, or its unpacked folder.
        paths: of the files that are read, by name.
        members: paths of all files within the archive, or the folder.
        readme: the first MiB of README or README.txt.
        sha256: in hex, of the archive; of a folder, that of the lines which `sha256sum` prints for the files, sorted.

    """

    source: Path
    paths: dict[str, Path]
    members: list[str]
    readme: bytes
    sha256: str

    @property
    def is_generated(self) -> bool:
        """Whether the files say that they were generated, and are not the published ones."""
        return self.readme.startswith(GENERATED_MARK.encode())

    def where(self, name: str) -> str:
        """A file, for errors."""
        return f"{self.source}: {name}"


def open_raw_files(kind: RawKind, source: Path, scratch: Path, *, show_progress: bool = False) -> RawFiles:
    """Find the files of a data set, and unpack them if they are in an archive.

    Args:
        kind: of the data set.
        source: a folder, a zip file or a tar file.
        scratch: for a folder to unpack into.
        show_progress: show a progress bar on stderr, if that is a terminal, while files are unpacked.

    Raises:
        FileNotFoundError: nothing at `source`.
        ValueError: a truncated or damaged file, no archive, one that expands to more than it may, or a missing file.

    """
    hint = f"the source is {kind.archive} as published, or its unpacked folder: correct the path"
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; {hint}")
    if source.is_dir():
        inner = [source / kind.folder, source / PurePosixPath(kind.folder).name]
        root = next((folder for folder in inner if folder.is_dir()), source)
        members = sorted(entry.name for entry in root.iterdir() if entry.is_file())
    elif source.is_file():
        root = scratch / "unpacked"
        root.mkdir()
        members = _unpack(source, kind.names, root, hint, show_progress)
    else:
        raise ValueError(f"{source} is neither a file nor a folder; {hint}")
    paths = {name: root / name for name in kind.names if (root / name).is_file()}
    missing = [name for name in kind.names if name not in paths]
    if missing:
        shown = ", ".join(members[:8]) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
        raise ValueError(
            f"{source} has no {', '.join(missing)}; {kind.title} has {', '.join(kind.names)}, found: "
            f"{shown or 'nothing'}: give the path of {kind.archive} or of its unpacked folder"
        )
    if source.is_dir():
        lines = "".join(f"{_sha256_of(paths[name])}  {name}\n" for name in sorted(kind.names))
        sha256 = hashlib.sha256(lines.encode()).hexdigest()
    else:
        sha256 = _sha256_of(source)
    return RawFiles(source, paths, members, _readme(kind, root), sha256)


def _readme(kind: RawKind, root: Path) -> bytes:
    # It stands above an inner folder of data.
    is_inner = "/" in kind.folder and root.resolve().name == PurePosixPath(kind.folder).name
    folders = [root, root.resolve().parent] if is_inner else [root]
    found = [folder / name for folder in folders for name in _READMES if (folder / name).is_file()]
    if not found:
        return b""
    with found[0].open("rb") as file:
        return file.read(_README_BYTES)


def _unpack(source: Path, names: Sequence[str], folder: Path, hint: str, show_progress: bool) -> list[str]:
    """Unpack some files of an archive, and its README; returns the paths of all in the archive."""
    with source.open("rb") as file:
        start = file.read(2)
    is_zip = source.suffix == ".zip" or start == _ZIP_MAGIC
    if start and start != _GZIP_MAGIC and not is_zip and not tarfile.is_tarfile(source):
        raise ValueError(f"{source} is neither a zip file nor a tar file; {hint}")
    found: dict[str, str] = {}
    with (
        progress_bar(f"unpack {source.name}", None, "B", show=show_progress) as progress,
        _damage_named(source, "zip file" if is_zip else "tar file"),
    ):
        budget = _Budget(source, progress.update)
        members = _zip_members(source, budget) if is_zip else _tar_members(source, start == _GZIP_MAGIC, budget)
        for number, (member, open_member) in enumerate(members):
            if number >= _MOST_MEMBERS:
                raise ValueError(
                    f"{source} has more than {_MOST_MEMBERS:,} members; the data sets have a few each: give the "
                    "archive as published"
                )
            name = PurePosixPath(member).name
            # The first of several with one name counts. Archives made on macOS repeat names.
            if member.startswith("__MACOSX/") or name.startswith("._") or name in found:
                continue
            found[name] = str(PurePosixPath(member))
            if name in (*names, *_READMES):
                with open_member() as stream, (folder / name).open("xb") as target:
                    if name in names:
                        shutil.copyfileobj(stream, target, _BLOCK)
                    else:
                        target.write(stream.read(_README_BYTES))
    return list(found.values())


def _zip_members(source: Path, budget: _Budget) -> _Members:
    """Paths of the files in a zip file, and how to open each."""
    with zipfile.ZipFile(source) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                yield info.filename, partial(_open_zipped, archive, info, budget)


def _open_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: _Budget) -> Any:
    # Other methods expand a block as a whole, whatever its size; a password is asked for by no data set.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
        raise ValueError(
            f"{budget.source}: {info.filename} is encrypted or compressed by method {info.compress_type}; zip files "
            "are read where members are stored or deflated: pack it again, or unpack it and give the folder"
        )
    return io.BufferedReader(_LimitedStream(archive.open(info), budget), _BLOCK)


def _tar_members(source: Path, is_gzip: bool, budget: _Budget) -> _Members:
    """Paths of the files in a tar file, and how to open each before the next one."""
    with source.open("rb") as file:
        stream = _LimitedStream(gzip.GzipFile(fileobj=file) if is_gzip else file, budget)
        plain = io.BufferedReader(stream, _BLOCK)
        with tarfile.open(fileobj=plain, mode="r|", tarinfo=_PlainTarInfo) as archive:
            for info in archive:
                # A folder or a link counts as a member, and is passed over.
                yield info.name if info.isfile() else "._", partial(archive.extractfile, info)
        # To the end of the file: gzip compares its checksum there.
        while plain.read(_BLOCK):
            pass


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


class _Budget:
    """How many bytes an archive has expanded to, and may."""

    def __init__(self, source: Path, on_bytes: Callable[[int], object]) -> None:
        self.source, self._on_bytes, self._spent = source, on_bytes, 0
        self._most = max(_MOST_EXPANSION * source.stat().st_size, _ALWAYS_ALLOWED)

    def spend(self, count: int) -> None:
        self._spent += count
        self._on_bytes(count)
        if self._spent > self._most:
            raise ValueError(
                f"{self.source} has {self.source.stat().st_size:,} bytes and expands to {self._spent:,} or more; an "
                f"archive may expand to {_MOST_EXPANSION} times its size, and always to {_ALWAYS_ALLOWED:,}: download "
                "it again or, if you trust it, unpack it and give the folder"
            )


class _LimitedStream(io.RawIOBase):
    """A stream whose bytes are counted against a budget."""

    def __init__(self, stream: IO[bytes] | Any, budget: _Budget) -> None:
        super().__init__()
        self._stream, self._budget = stream, budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._budget.spend(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


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
