"""Raw files of public data sets, from their folder, or unpacked from a zip file or a tar file.

Files go by their name without folders, so that no name in an archive leads anywhere; those that are not wanted are
passed over. An archive may expand to 100 times its size, and always to 64 MiB.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from commons.console import progress_bar

# First words of the README of an archive that holds generated data; published READMEs begin otherwise.
GENERATED_MARK = "GENERATED DATA"
_BLOCK = 1 << 20
_MOST_EXPANSION, _ALWAYS_ALLOWED = 100, 64 << 20
_README_BYTES = 1 << 20
_READMES = ("README", "README.txt")
_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"PK"
# What damaged archives raise while they are listed or read; struct.error and IndexError for a zip file's directory.
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError),
    *(struct.error, IndexError),
)


@dataclass(frozen=True)
class RawKind:
    """A data set as it is published."""

    title: str  # its name, for errors
    archive: str  # file name of the archive
    folder: str  # in which the archive holds the files
    names: tuple[str, ...]  # the files that are read


@dataclass(frozen=True)
class RawFiles:
    """The files of a data set."""

    source: Path  # the archive, or its unpacked folder
    paths: dict[str, Path]  # of the files that are read, by name
    members: list[str]  # paths of all files within the archive, or the folder
    readme: bytes  # the first MiB of README or README.txt
    sha256: str  # in hex, of the archive; of a folder, that of the lines which `sha256sum` prints for the files, sorted

    @property
    def is_generated(self) -> bool:
        """Whether the files say that they were generated, and are not the published ones."""
        return self.readme.startswith(GENERATED_MARK.encode())

    def where(self, name: str) -> str:
        """A file, for errors."""
        return f"{self.source}: {name}"


def open_raw_files(kind: RawKind, source: Path, scratch: Path, *, show_progress: bool = False) -> RawFiles:
    """Find the files of a data set in a folder, a zip file or a tar file, which is unpacked into a folder of `scratch`.

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


def _unpack(source: Path, names: tuple[str, ...], folder: Path, hint: str, show_progress: bool) -> list[str]:
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
        for member, open_member in (_zip_members if is_zip else _tar_members)(source, budget):
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


def _zip_members(source: Path, budget: _Budget) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Paths of the files in a zip file, and how to open each."""

    @contextlib.contextmanager
    def open_member(info: zipfile.ZipInfo) -> Iterator[_LimitedStream]:
        # Other methods expand a block as a whole, whatever its size; no data set has a password.
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise ValueError(
                f"{source}: {info.filename} is encrypted or compressed by method {info.compress_type}; zip files are "
                "read where members are stored or deflated: pack it again, or unpack it and give the folder"
            )
        with archive.open(info) as stream:
            yield _LimitedStream(stream, budget)

    with zipfile.ZipFile(source) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                yield info.filename, partial(open_member, info)


def _tar_members(source: Path, budget: _Budget) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Paths of the files in a tar file, and how to open each before the next one; links and devices are passed over."""
    with source.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        plain = _LimitedStream(gzip.GzipFile(fileobj=file) if is_gzip else file, budget)
        with tarfile.open(fileobj=plain, mode="r|", bufsize=_BLOCK) as archive:  # type: ignore[call-overload]
            for info in archive:
                if info.isfile() and not info.issparse():  # holes take no room in the archive
                    yield info.name, partial(archive.extractfile, info)
        while plain.read(_BLOCK):  # to the end of the file, where gzip compares its checksum
            pass


class _Budget:
    """How many bytes an archive has expanded to, and may."""

    def __init__(self, source: Path, on_bytes: Callable[[int], object]) -> None:
        self._source, self._on_bytes, self._spent = source, on_bytes, 0
        self._most = max(_MOST_EXPANSION * source.stat().st_size, _ALWAYS_ALLOWED)

    def spend(self, count: int) -> None:
        self._spent += count
        self._on_bytes(count)
        if self._spent > self._most:
            raise ValueError(
                f"{self._source} has {self._source.stat().st_size:,} bytes and expands to {self._spent:,} or more; an "
                f"archive may expand to {_MOST_EXPANSION} times its size, and always to {_ALWAYS_ALLOWED:,}: download "
                "it again or, if you trust it, unpack it and give the folder"
            )


class _LimitedStream:
    """A stream whose bytes are counted against a budget."""

    def __init__(self, stream: Any, budget: _Budget) -> None:
        self._stream, self._budget = stream, budget

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._budget.spend(len(data))
        return data


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
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
