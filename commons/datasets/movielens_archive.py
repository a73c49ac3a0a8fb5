"""The raw MovieLens-1M archive: what its three files hold, read and checked.

Input: `ml-1m.zip` as published, or its unpacked folder. Output: tables, in the order of the files. Every line is
checked by one regular expression, run over the whole file at once; the first that does not fit is named by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commons.datasets.generated_archive import GENERATED_MARK
from commons.datasets.raw_archive import open_archive

ENCODING = "latin-1"


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
        sha256: checksum of the archive; see RawArchive.checksum.

    """

    ratings: pa.Table
    users: pa.Table
    movies: pa.Table
    generated: bool
    sha256: str


def read_movielens_archive(source: str | Path) -> MovieLensArchive:
    """Read and check an archive.

    Args:
        source: `ml-1m.zip` or the folder it unpacks to.

    Raises:
        FileNotFoundError: nothing at `source`.
        ValueError: a truncated or damaged zip file, an archive of something else, or a malformed line, which is named
            by file and number.

    """
    archive = open_archive(
        source,
        ["ml-1m"],
        "the source is ml-1m.zip as published, or its unpacked folder: correct the path, or write a generated archive "
        "with `evenrank generate ml-1m --output ml-1m.zip`",
    )
    archive.require(FILE_NAMES, "MovieLens-1M", "give the path of ml-1m.zip or of its unpacked folder")
    tables = {
        layout.file_name: _parse_lines(archive.read(layout.file_name), layout, f"{source}: {layout.file_name}")
        for layout in (_RATINGS, _USERS, _MOVIES)
    }
    ratings, users, movies = (tables[name] for name in FILE_NAMES)
    for table, column, file_name in ((users, "user_id", "users.dat"), (movies, "movie_id", "movies.dat")):
        _check_unique(table[column].to_numpy(), f"{source}: {file_name}", column)
        _check_known(ratings[column].to_numpy(), table[column].to_numpy(), f"{source}: ratings.dat", column, file_name)
    generated = archive.readme().startswith(GENERATED_MARK.encode(ENCODING))
    return MovieLensArchive(ratings, users, movies, generated, archive.checksum(FILE_NAMES))


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
