"""Generated archives in the raw formats of public data sets: how they are marked, written and replaced."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from commons.available_memory import require_memory
from commons.datasets.raw_archive import GENERATED_MARK
from commons.whole_folder import check_replaceable, owned_folder, parents_of, require_there, whole_folder

# Fixed, so that the same contents give the same bytes.
_ZIP_TIME = (2000, 1, 1, 0, 0, 0)
_TAR_TIME = 946_684_800
_ENDINGS = (".zip", ".tar.gz")
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


@dataclass(frozen=True)
class ArchiveForm:
    """What a data set's archive looks like.

    Attributes:
        folder: that holds everything in a zip or tar file: "ml-20m".
        readme: name of its README.
        file_names: all files besides it, such as "data/user_features_1k.csv".

    """

    folder: str
    readme: str
    file_names: tuple[str, ...]


@contextlib.contextmanager
def generated_archive(output: Path, form: ArchiveForm) -> Iterator[Path]:
    """The folder to write files into; they become an archive when the block ends without an error.

    Args:
        output: a path that ends in `.zip` or `.tar.gz` becomes such a file, any other a folder.
        form: of the archive.

    Raises:
        FileExistsError: something at `output` that is not an earlier generated archive of the same kind.

    """
    what = "generated archive"
    if not output.name.endswith(_ENDINGS):
        with whole_folder(output, may_replace=lambda path: _is_generated(path, form), what=what) as folder:
            _make_parents(folder, form)
            yield folder
        return
    _check_output(output, form)
    folder = output.with_name(f".{output.name}.unfinished")
    with parents_of(output), owned_folder(folder, output, what) as is_there:
        contents, packed = folder / "contents", folder / "packed"
        contents.mkdir()
        _make_parents(contents, form)
        yield contents
        names = [form.readme, *sorted(form.file_names)]
        if output.suffix == ".zip":
            _pack_zip(packed, contents, names, form.folder)
        else:
            _pack_tar(packed, contents, names, form.folder)
        require_there(is_there(), folder, output)
        packed.replace(output)


def check_request(output: Path, form: ArchiveForm, *, num_users: int, seed: int, bytes_per_user: int) -> None:
    """Look at what a generator is asked for, before it draws anything.

    Args:
        output: where the archive goes.
        form: of the archive.
        num_users: that are to be drawn.
        seed: of what is drawn.
        bytes_per_user: memory that the generator takes.

    Raises:
        FileExistsError: something at `output` that is not an earlier generated archive of the same kind.
        ValueError: `num_users` below 1, above 99,999,999 or more than there is memory for, or a negative seed.

    """
    if not 1 <= num_users <= _MOST_USERS:
        raise ValueError(
            f"num_users is {num_users}; an archive has at least one user, and user ids have at most eight digits: give "
            f"1 to {_MOST_USERS:,}"
        )
    require_memory(num_users * bytes_per_user, f"num_users is {num_users:,}", "give fewer")
    if seed < 0:
        raise ValueError(f"seed is {seed}; seeds are not negative: give 0 or more")
    _check_output(output, form)


def _check_output(output: Path, form: ArchiveForm) -> None:
    check_replaceable(output, lambda path: _is_generated(path, form), "generated archive")


def _make_parents(folder: Path, form: ArchiveForm) -> None:
    for name in form.file_names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)


def _is_generated(path: Path, form: ArchiveForm) -> bool:
    """Whether an archive says of itself that it was generated, and holds nothing else; or is an empty folder."""
    mark = GENERATED_MARK.encode()
    is_file = path.name.endswith(_ENDINGS)
    if is_file != path.is_file():
        return False
    try:
        if not is_file:
            found = {str(PurePosixPath(entry.relative_to(path))) for entry in path.rglob("*") if not entry.is_dir()}
            known = {form.readme, *form.file_names}
            if not found:
                return True
            with (path / form.readme).open("rb") as file:
                return found <= known and file.read(len(mark)) == mark
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                if archive.getinfo(f"{form.folder}/{form.readme}").compress_type != zipfile.ZIP_DEFLATED:
                    return False
                with archive.open(f"{form.folder}/{form.readme}") as readme:
                    return readme.read(len(mark)) == mark
        with tarfile.open(path) as members:
            first = members.next()
            stream = members.extractfile(first) if first is not None and first.isfile() else None
            return stream is not None and stream.read(len(mark)) == mark
    except (OSError, KeyError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error):
        return False


def _pack_zip(target: Path, contents: Path, names: list[str], folder: str) -> None:
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            info = zipfile.ZipInfo(f"{folder}/{name}", _ZIP_TIME)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            info.file_size = (contents / name).stat().st_size  # tells whether sizes need 64 bits
            with (contents / name).open("rb") as source, archive.open(info, "w") as member:
                shutil.copyfileobj(source, member, 1 << 20)


def _pack_tar(target: Path, contents: Path, names: list[str], folder: str) -> None:
    with (
        target.open("wb") as file,
        # Level 1: packing takes most of the time otherwise. No name and no time in the header.
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mtime = (contents / name).stat().st_size, _TAR_TIME
            with (contents / name).open("rb") as source:
                archive.addfile(info, source)
