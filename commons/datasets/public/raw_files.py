"""Raw files of public data sets, from their folder, or unpacked from a zip file or a tar file.

Only the files of the data set are unpacked, by their names without folders, so that no path in an archive can point
elsewhere. Their total size is limited to 100 times the size of the archive, or 64 MiB if that is more.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from commons.console import progress_bar

# First words of the README of an archive with generated data.
GENERATED_MARK = "GENERATED DATA"
_BLOCK = 1 << 20
_MOST_EXPANSION, _ALWAYS_ALLOWED = 100, 64 << 20
_READMES = ("README", "README.txt")
_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"PK"
# Path and size of a file in an archive, and the function that opens it.
_Member = tuple[str, int, Callable[[], Any]]


@dataclass(frozen=True)
class RawKind:
    """The archive in which a data set is published."""

    title: str  # name of the data set, for errors
    archive: str  # file name of the archive
    folder: str  # folder of the files within the archive


@dataclass(frozen=True)
class RawFiles:
    """The files of a data set."""

    source: Path  # the archive, or its unpacked folder
    paths: dict[str, Path]  # paths of the files that are read, by name
    members: list[str]  # paths of all files within the archive or the folder
    readme: bytes  # the first MiB of README or README.txt
    sha256: str  # hex digest of the archive; for a folder, of the sorted lines that `sha256sum` prints for its files

    @property
    def is_generated(self) -> bool:
        """Whether the README marks the files as generated, not published."""
        return self.readme.startswith(GENERATED_MARK.encode())

    def where(self, name: str) -> str:
        """Source and name of a file, for errors."""
        return f"{self.source}: {name}"


def open_raw_files(
    kind: RawKind, names: tuple[str, ...], source: Path, scratch: Path, *, show_progress: bool = False
) -> RawFiles:
    """Find the files `names` of a data set in a folder or an archive; an archive is unpacked to `scratch`.

    Raises:
        FileNotFoundError: `source` does not exist.
        ValueError: a damaged file, no zip or tar file, an archive that expands beyond the limit, or a missing file.
    """
    hint = f"the source is {kind.archive} as published, or its unpacked folder: correct the path"
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; {hint}")
    inner = PurePosixPath(kind.folder).name
    if source.is_dir():
        root = next((folder for folder in (source / kind.folder, source / inner) if folder.is_dir()), source)
        members = sorted(entry.name for entry in root.iterdir() if entry.is_file())
    elif source.is_file():
        root = scratch / "unpacked"
        root.mkdir()
        members = _unpack(source, names, root, hint, show_progress)
    else:
        raise ValueError(f"{source} is neither a file nor a folder; {hint}")
    paths = {name: root / name for name in names if (root / name).is_file()}
    missing = [name for name in names if name not in paths]
    if missing:
        shown = ", ".join(members[:8]) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
        raise ValueError(
            f"{source} has no {', '.join(missing)}; {kind.title} has {', '.join(names)}, found: "
            f"{shown or 'nothing'}: give the path of {kind.archive} or of its unpacked folder"
        )
    sha256 = "" if source.is_dir() else _sha256_of(source)
    if source.is_dir():
        lines = "".join(f"{_sha256_of(paths[name])}  {name}\n" for name in sorted(names))
        sha256 = hashlib.sha256(lines.encode()).hexdigest()
    # The README may be in the folder above the data folder.
    above = [root.resolve().parent] if "/" in kind.folder and root.resolve().name == inner else []
    readmes = [folder / name for folder in (root, *above) for name in _READMES if (folder / name).is_file()]
    readme = b""
    if readmes:
        with readmes[0].open("rb") as file:
            readme = file.read(_BLOCK)
    return RawFiles(source, paths, members, readme, sha256)


def _unpack(source: Path, names: tuple[str, ...], folder: Path, hint: str, show_progress: bool) -> list[str]:
    """Unpack some files of an archive and its README; returns the paths of all files in the archive."""
    with source.open("rb") as file:
        start = file.read(2)
    is_zip = source.suffix == ".zip" or start == _ZIP_MAGIC
    if start and start != _GZIP_MAGIC and not is_zip and not tarfile.is_tarfile(source):
        raise ValueError(f"{source} is neither a zip file nor a tar file; {hint}")
    size = source.stat().st_size
    found: dict[str, str] = {}
    expanded, most = 0, max(_MOST_EXPANSION * size, _ALWAYS_ALLOWED)
    try:
        with progress_bar(f"unpack {source.name}", None, "B", show=show_progress) as progress:
            for member, num_bytes, open_member in (_zip_members if is_zip else _tar_members)(source):
                name = PurePosixPath(member).name
                # The first file of each name is used: archives made on macOS repeat names.
                if member.startswith("__MACOSX/") or name.startswith("._") or name in found:
                    continue
                found[name] = str(PurePosixPath(member))
                if name not in (*names, *_READMES):
                    continue
                expanded += num_bytes  # the archive's own number; the readers stop there
                if expanded > most:
                    break
                with open_member() as stream, (folder / name).open("xb") as target:
                    shutil.copyfileobj(stream, target, _BLOCK)
                progress.update(num_bytes)
    except Exception as error:  # of many kinds, by the format and the damage
        # An OSError without a number is from the decompressor of bzip2; with EINVAL, a damaged directory of a zip file
        # has an offset before the start of the file. Others are of the disk.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        kind = "zip file" if is_zip else "tar file"
        raise ValueError(f"{source} is no complete {kind} ({error}): download it again") from error
    if expanded > most:
        raise ValueError(
            f"{source} has {size:,} bytes and expands to {expanded:,} or more; an archive may expand to "
            f"{_MOST_EXPANSION} times its size, or to {_ALWAYS_ALLOWED:,} bytes: download it again or, if you trust "
            "it, unpack it and give the folder"
        )
    return list(found.values())


def _zip_members(source: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(source) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                yield info.filename, info.file_size, partial(archive.open, info)


def _tar_members(source: Path) -> Iterator[_Member]:
    """Files of a tar file, each opened before the next one is read; links and devices are skipped."""
    with source.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        plain: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
        with tarfile.open(fileobj=plain, mode="r|", bufsize=_BLOCK) as archive:
            for info in archive:
                if info.isfile() and not info.issparse():  # a sparse file could expand without limit
                    yield info.name, info.size, partial(archive.extractfile, info)
        while plain.read(_BLOCK):  # read to the end of the file, where gzip compares its checksum
            pass


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
