"""Generated archives in the raw formats of public data sets: marked as such, and never half written."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from commons.datasets.public.raw_files import GENERATED_MARK

_TIME = 946_684_800  # of every file, so that the same contents give the same bytes
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


def write_archive(
    output: str | Path,
    top: str,
    url: str,
    readme: str,
    write: Callable[[Path, np.random.Generator], np.ndarray],
    *,
    num_users: int,
    seed: int,
) -> GeneratedArchive:
    """Write files and pack them; the archive appears when it is complete.

    Args:
        output: a path that ends in `.zip` or `.tar.gz` becomes such a file, any other a folder.
        top: the folder that holds everything in a zip or tar file, such as "ml-20m".
        url: of the published data.
        readme: name of the file that says that the data are generated; the preprocessor knows them by its first words.
        write: writes the files into a folder with a source of randomness; returns the length of every user's history.
        num_users: to be drawn.
        seed: of what is drawn; the same seed gives the same files.

    Raises:
        FileExistsError: something is at `output`.
        ValueError: `num_users` below 1 or above 99,999,999, or a negative seed.
    """
    output = Path(output)
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
        contents = Path(temporary, top)
        contents.mkdir()
        lengths = write(contents, np.random.default_rng(seed))
        (contents / readme).write_text(
            f"{GENERATED_MARK}: this is not {top}.\n\nThe files have the format of {top} ({url}), and the lengths its\n"
            "statistics. Users, items and feedback were drawn at random; none of them is real.\n\n"
            f"users: {num_users}\ninteractions: {lengths.sum()}\nseed: {seed}\n"
        )
        for path in [contents, *contents.rglob("*")]:
            os.utime(path, (_TIME, _TIME))
        _packed(contents, output.name).rename(output)
    return GeneratedArchive(output, num_users, int(lengths.sum()), int(lengths.max()))


def _packed(contents: Path, name: str) -> Path:
    """The archive of a folder, or the folder itself, by the ending of a name."""
    if name.endswith(".zip"):
        return Path(shutil.make_archive(str(contents.with_name("packed")), "zip", contents.parent, contents.name))
    if not name.endswith(".tar.gz"):
        return contents
    packed = contents.with_name("packed.tar.gz")
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:  # a higher level takes most of the time
        archive.add(contents, contents.name)
    return packed
