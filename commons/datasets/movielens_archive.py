"""The raw MovieLens-1M archive: what its three files hold, read and checked.

Input: `ml-1m.zip` as published, or its unpacked folder. Output: tables, in the order of the files; the ratings come in
batches. Every line is checked by one regular expression, run over many lines at once; the first that does not fit is
named by its number.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commons.datasets.raw_archive import GENERATED_MARK, RawArchive, bounded_line, open_archive, shortened

ENCODING = "latin-1"
_BLOCK = 4 << 20
_LINE_FEED = b"\n"


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
        users: user_id int32, gender string, age int32, occupation int32, zip string; user ids are unique.
        movies: movie_id int32, title string, genres string; movie ids are unique.
        generated: whether the archive says that it was generated, and is not the published one.
        num_bytes: of the file of ratings.

    """

    users: pa.Table
    movies: pa.Table
    generated: bool
    num_bytes: int
    _archive: RawArchive

    def rating_batches(self) -> Iterator[tuple[int, pa.Table]]:
        """The ratings, some at a time.

        Yields:
            How many bytes of the file hold them; and user_id int32, movie_id int32, rating int8 (1 to 5), timestamp
            int64 (seconds since 1970).

        Raises:
            ValueError: a malformed or overlong line, or one of an unknown user or movie, named by its number.

        """
        where = f"{self._archive.path}: {_RATINGS.file_name}"
        known = {
            "user_id": (np.sort(self.users["user_id"].to_numpy()), _USERS.file_name),
            "movie_id": (np.sort(self.movies["movie_id"].to_numpy()), _MOVIES.file_name),
        }
        with contextlib.closing(self._archive.streams([_RATINGS.file_name])) as streams:
            for first_line, num_bytes, ratings in _parse_lines(next(streams)[1], _RATINGS, where):
                for column, (ids, file_name) in known.items():
                    _check_known(ratings[column].to_numpy(), ids, where, first_line, column, file_name)
                yield num_bytes, ratings

    def checksum(self) -> str:
        """See RawArchive.checksum."""
        return self._archive.checksum(FILE_NAMES)


def read_movielens_archive(source: str | Path) -> MovieLensArchive:
    """Open an archive, and read and check its users and movies.

    Args:
        source: `ml-1m.zip` or the folder it unpacks to.

    Raises:
        FileNotFoundError: nothing at `source`.
        ValueError: a truncated or damaged zip file, one that expands more than it may, an archive of something else, or
            a malformed line, which is named by file and number.

    """
    archive = open_archive(
        source,
        ["ml-1m"],
        "the source is ml-1m.zip as published, or its unpacked folder: correct the path",
    )
    archive.require(FILE_NAMES, "MovieLens-1M", "give the path of ml-1m.zip or of its unpacked folder")
    users, movies = _read_table(archive, _USERS, "user_id"), _read_table(archive, _MOVIES, "movie_id")
    generated = archive.readme().startswith(GENERATED_MARK.encode(ENCODING))
    return MovieLensArchive(users, movies, generated, archive.sizes[_RATINGS.file_name], archive)


def _read_table(archive: RawArchive, layout: _LineFormat, id_column: str) -> pa.Table:
    where = f"{archive.path}: {layout.file_name}"
    parts = _parse_lines(io.BytesIO(archive.read(layout.file_name)), layout, where)
    table = pa.concat_tables([part for _, _, part in parts])
    _check_unique(table[id_column].to_numpy(), where, id_column)
    return table


def _parse_lines(stream: Any, layout: _LineFormat, where: str) -> Iterator[tuple[int, int, pa.Table]]:
    """Columns of a file of `::`-separated lines, with the number of the first line and the bytes of all.

    `where` names the file in errors.
    """
    reader, first_line = io.BufferedReader(stream, _BLOCK), 1
    while block := reader.read(_BLOCK):
        if not block.endswith(_LINE_FEED):
            block += bounded_line(reader, f"{where} line {first_line + block.count(_LINE_FEED)}")
        table = _parse_block(block, layout, where, first_line)
        yield first_line, len(block), table
        first_line += table.num_rows
    if first_line == 1:
        raise ValueError(f"{where} is empty; its lines are {layout.description}: download the archive again")


def _parse_block(block: bytes, layout: _LineFormat, where: str, first_line: int) -> pa.Table:
    lines = pc.split_pattern(pa.scalar(block.decode(ENCODING)), "\n").values
    if block.endswith(_LINE_FEED):
        lines = lines.slice(0, len(lines) - 1)
    fields = pc.extract_regex(lines, layout.pattern)
    if fields.null_count:
        index = int(np.flatnonzero(fields.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(
            f"{where} line {first_line + index} is {shortened(lines[index].as_py())}; a line is {layout.description}: "
            "mend it or download the archive again"
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


def _check_known(ids: np.ndarray, known: np.ndarray, where: str, first_line: int, column: str, file_name: str) -> None:
    unknown = np.flatnonzero(known[np.searchsorted(known, ids).clip(max=len(known) - 1)] != ids)
    if unknown.size:
        index = int(unknown[0])
        raise ValueError(
            f"{where} line {first_line + index} has {column} {ids[index]}, which {file_name} does not list; both files "
            "come from one archive: download it again"
        )
