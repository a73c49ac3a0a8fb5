"""The raw MovieLens-1M archive: what its three files hold, read and checked, and how such an archive is written.

Input: `ml-1m.zip` as published, or its unpacked folder. Output: tables, in the order of the files. Every line is
checked by one regular expression, run over the whole file at once; the first that does not fit is named by its number.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

ENCODING = "latin-1"
# First words of the README of an archive that the generator wrote; the published README begins otherwise.
GENERATED_MARK = "GENERATED DATA"
# Fixed, so that the same contents give the same bytes.
_ZIP_TIME = (2000, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class _LineFormat:
    """Layout of one file: a name, an RE2 pattern and an Arrow type for every field."""

    file_name: str
    description: str
    fields: Mapping[str, tuple[str, pa.DataType]]

    @property
    def pattern(self) -> str:
        return "^" + "::".join(f"(?P<{name}>{pattern})" for name, (pattern, _) in self.fields.items()) + "\r?$"


# At most nine digits: they fit an int32.
_ID = (r"\d{1,9}", pa.int32())
_RATINGS = _LineFormat(
    "ratings.dat",
    "UserID::MovieID::Rating::Timestamp with a rating of 1 to 5",
    {"user_id": _ID, "movie_id": _ID, "rating": ("[1-5]", pa.int8()), "timestamp": (r"\d{1,18}", pa.int64())},
)
_USERS = _LineFormat(
    "users.dat",
    "UserID::Gender::Age::Occupation::Zip-code with a gender of F or M",
    {"user_id": _ID, "gender": ("[FM]", pa.string()), "age": _ID, "occupation": _ID, "zip": (r"[^:\r]+", pa.string())},
)
_MOVIES = _LineFormat(
    "movies.dat",
    "MovieID::Title::Genres",
    {"movie_id": _ID, "title": (".+", pa.string()), "genres": (r"[^:\r]+", pa.string())},
)
FILE_NAMES = (_RATINGS.file_name, _USERS.file_name, _MOVIES.file_name)


@dataclass(frozen=True)
class MovieLensArchive:
    """The tables of an archive.

    Attributes:
        ratings: user_id int32, movie_id int32, rating int8 (1 to 5), timestamp int64 (seconds since 1970).
        users: user_id int32, gender string, age int32, occupation int32, zip string; user ids are unique.
        movies: movie_id int32, title string, genres string; movie ids are unique.
        generated: whether the archive says that it was generated, and is not the published one.

    """

    ratings: pa.Table
    users: pa.Table
    movies: pa.Table
    generated: bool


def read_movielens_archive(source: str | Path) -> MovieLensArchive:
    """Read and check an archive.

    Args:
        source: `ml-1m.zip` or the folder it unpacks to.

    Raises:
        FileNotFoundError: nothing at `source`.
        ValueError: a truncated or damaged zip file, an archive of something else, or a malformed line, which is named
            by file and number.

    """
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(
            f"{source} does not exist; the source is ml-1m.zip as published, or its unpacked folder: correct the path, "
            "or write a generated archive with `evenrank generate ml-1m --output ml-1m.zip`"
        )
    contents, readme = _read_folder(source) if source.is_dir() else _read_zip(source)
    tables = {
        layout.file_name: _parse_lines(contents[layout.file_name], layout, f"{source}: {layout.file_name}")
        for layout in (_RATINGS, _USERS, _MOVIES)
    }
    ratings, users, movies = (tables[name] for name in FILE_NAMES)
    for table, column, file_name in ((users, "user_id", "users.dat"), (movies, "movie_id", "movies.dat")):
        _check_unique(table[column].to_numpy(), f"{source}: {file_name}", column)
        _check_known(ratings[column].to_numpy(), table[column].to_numpy(), f"{source}: ratings.dat", column, file_name)
    return MovieLensArchive(ratings, users, movies, readme.startswith(GENERATED_MARK.encode(ENCODING)))


def _read_folder(folder: Path) -> tuple[dict[str, bytes], bytes]:
    # The archive unpacks to a folder of its own: take that one too.
    if (folder / "ml-1m").is_dir():
        folder = folder / "ml-1m"
    found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    _check_members(folder, list(found))
    contents = {name: found[name].read_bytes() for name in FILE_NAMES}
    return contents, found["README"].read_bytes() if "README" in found else b""


def _read_zip(path: Path) -> tuple[dict[str, bytes], bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            # Archives made on macOS repeat every name under __MACOSX.
            members = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
            by_name = {PurePosixPath(name).name: name for name in reversed(members)}
            _check_members(path, members, list(by_name))
            contents = {name: archive.read(by_name[name]) for name in FILE_NAMES}
            return contents, archive.read(by_name["README"]) if "README" in by_name else b""
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ValueError(
            f"{path} is no complete zip file ({error}); the source is ml-1m.zip as published: download it again"
        ) from error


def _check_members(source: Path, members: list[str], names: list[str] | None = None) -> None:
    missing = [name for name in FILE_NAMES if name not in (members if names is None else names)]
    if missing:
        shown = ", ".join(members[:8]) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
        raise ValueError(
            f"{source} has no {', '.join(missing)}; MovieLens-1M has {', '.join(FILE_NAMES)}, found: "
            f"{shown or 'nothing'}: give the path of ml-1m.zip or of its unpacked folder"
        )


def _parse_lines(data: bytes, layout: _LineFormat, where: str) -> pa.Table:
    """Columns of a file of `::`-separated lines; `where` names the file in errors."""
    lines = pc.split_pattern(pa.scalar(data.decode(ENCODING)), "\n").values
    if lines[-1].as_py() == "":
        lines = lines.slice(0, len(lines) - 1)
    if len(lines) == 0:
        raise ValueError(f"{where} is empty; its lines are {layout.description}: download the archive again")
    fields = pc.extract_regex(lines, layout.pattern)
    if fields.null_count:
        index = int(np.flatnonzero(fields.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(
            f"{where} line {index + 1} is {_shorten(lines[index].as_py())}; a line is {layout.description}: mend it "
            "or download the archive again"
        )
    return pa.table({name: fields.field(name).cast(dtype) for name, (_, dtype) in layout.fields.items()})


def _check_unique(ids: np.ndarray, where: str, column: str) -> None:
    order = np.argsort(ids, kind="stable")
    repeated = order[1:][ids[order[1:]] == ids[order[:-1]]]
    if repeated.size:
        index = int(repeated.min())
        raise ValueError(
            f"{where} line {index + 1} has {column} {ids[index]} again; every {column} has one line: remove the line"
        )


def _check_known(ids: np.ndarray, known: np.ndarray, where: str, column: str, file_name: str) -> None:
    unknown = np.flatnonzero(~np.isin(ids, known))
    if unknown.size:
        index = int(unknown[0])
        raise ValueError(
            f"{where} line {index + 1} has {column} {ids[index]}, which {file_name} does not list; both files come "
            "from one archive: download it again"
        )


def _shorten(line: str, limit: int = 80) -> str:
    return repr(line) if len(line) <= limit else repr(line[:limit]) + " …"


def check_archive_output(output: Path) -> None:
    """Raise FileExistsError where writing an archive would replace something else."""
    if not output.exists():
        return
    is_kind = output.is_file() if output.suffix == ".zip" else output.is_dir()
    if not is_kind or not _is_replaceable(output):
        raise FileExistsError(
            f"{output} exists and is no generated archive of this kind; it is not overwritten: give another path"
        )


def _is_replaceable(archive: Path) -> bool:
    """Whether an archive says of itself that it was generated, and holds nothing else; or is an empty folder."""
    try:
        if archive.is_dir():
            names = {path.name for path in archive.iterdir()}
            readme = (archive / "README").read_bytes() if names else GENERATED_MARK.encode(ENCODING)
            return names <= {"README", *FILE_NAMES} and readme.startswith(GENERATED_MARK.encode(ENCODING))
        with zipfile.ZipFile(archive) as members:
            return members.read("ml-1m/README").startswith(GENERATED_MARK.encode(ENCODING))
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error):
        return False


def write_movielens_archive(output: Path, contents: Mapping[str, bytes]) -> None:
    """Write an archive, of which nothing is seen before it is complete.

    Args:
        output: a path that ends in `.zip` becomes a zip file with a folder ml-1m, any other a folder.
        contents: bytes by file name.

    Raises:
        FileExistsError: something at `output` that is not an earlier archive of the same kind.

    """
    check_archive_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".zip":
        _write_zip(output, contents)
    else:
        _write_folder(output, contents)


def _write_zip(path: Path, contents: Mapping[str, bytes]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(aside, "w") as archive:
            for name, data in contents.items():
                info = zipfile.ZipInfo(f"ml-1m/{name}", _ZIP_TIME)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                archive.writestr(info, data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _write_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        aside.chmod(0o755)
        for name, data in contents.items():
            (aside / name).write_bytes(data)
        if path.is_dir():
            shutil.rmtree(path)
        aside.replace(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
