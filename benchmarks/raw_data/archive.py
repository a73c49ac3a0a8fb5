"""Generated archives in the raw formats of public data sets: marked as such, and never half written."""

from __future__ import annotations

import contextlib
import gzip
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commons.datasets.public.raw_files import GENERATED_MARK

# Fixed, so that the same contents give the same bytes.
_TIME = 946_684_800
_MOST_USERS = 99_999_999


@dataclass(frozen=True)
class GeneratedArchive:
    """What was written: where, users, interactions of all of them, and of the one with the most."""

    path: Path
    num_users: int
    num_interactions: int
    max_length: int

    @property
    def mean_length(self) -> float:
        """Interactions per user."""
        return self.num_interactions / self.num_users


def readme(name: str, url: str, num_users: int, num_interactions: int, seed: int) -> str:
    """What an archive says of itself; its first words are what the preprocessor knows generated data by."""
    return (
        f"{GENERATED_MARK}: this is not {name}.\n\nThe files have the format of {name} ({url}), and the lengths its\n"
        "statistics. Users, items and feedback were drawn at random; none of them is real.\n\n"
        f"users: {num_users}\ninteractions: {num_interactions}\nseed: {seed}\n"
    )


@contextlib.contextmanager
def generated_archive(output: Path, top: str, *, num_users: int, seed: int) -> Iterator[Path]:
    """The folder to write files into; they become an archive when the block ends without an error.

    Args:
        output: a path that ends in `.zip` or `.tar.gz` becomes such a file, any other a folder.
        top: the folder that holds everything in a zip or tar file, such as "ml-20m".
        num_users: that are to be drawn.
        seed: of what is drawn.

    Raises:
        FileExistsError: something is at `output`.
        ValueError: `num_users` below 1 or above 99,999,999, or a negative seed.
    """
    if not 1 <= num_users <= _MOST_USERS:
        raise ValueError(
            f"num_users is {num_users}; an archive has at least one user, and user ids have at most eight digits: give "
            f"1 to {_MOST_USERS:,}"
        )
    if seed < 0:
        raise ValueError(f"seed is {seed}; seeds are not negative: give 0 or more")
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists and is not overwritten: remove it, or give another path")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        contents, packed = Path(temporary, top), Path(temporary, "packed")
        contents.mkdir()
        yield contents
        files = sorted(file for file in contents.rglob("*") if file.is_file())
        if output.name.endswith(".zip"):
            _pack_zip(packed, files, contents.parent)
        elif output.name.endswith(".tar.gz"):
            _pack_tar(packed, files, contents.parent)
        else:
            packed = contents
        packed.rename(output)


def _pack_zip(target: Path, files: list[Path], root: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            os.utime(file, (_TIME, _TIME))
            archive.write(file, file.relative_to(root))


def _pack_tar(target: Path, files: list[Path], root: Path) -> None:
    with (
        target.open("wb") as file,
        # Level 1: packing takes most of the time otherwise. No name and no time in the header.
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in files:
            info = tarfile.TarInfo(str(member.relative_to(root)))
            info.size, info.mtime = member.stat().st_size, _TIME
            with member.open("rb") as source:
                archive.addfile(info, source)
