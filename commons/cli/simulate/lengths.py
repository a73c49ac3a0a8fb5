"""Lengths of rows for `evenrank simulate`: from a file, a histogram, or a named distribution.

Files are parquet, csv, npy and jsonl, or a folder of parquet files; in a file of events, a user's length is the number
of the user's events. DuckDB reads the files; this module checks that the values are lengths.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import torch

from commons.datasets.random.distribution import STEEPEST, RandomDistribution
from commons.datasets.sequences.event_store import sql_name
from commons.datasets.sequences.source_files import each_once, require_no_table

_DISTRIBUTIONS = "zipf:EXPONENT:LONGEST, lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:LONGEST"
# Columns that make a file a histogram.
_HISTOGRAM = ["length", "count"]
_TYPES = (".parquet", ".csv", ".npy", ".jsonl")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
_MOST, _LONGEST = 2**53, 2.0**31  # longest row of files, limited by float64, and of distributions
# Returns `count` lengths, int64.
_Take = Callable[[int, np.random.Generator], np.ndarray]


class Lengths(NamedTuple):
    """Lengths of rows: a known number of rows, or random draws."""

    name: str  # the user's name for them, a file or a distribution
    take: _Take  # lengths in the order in which rows are loaded; at most `num_rows`, without repetition
    num_rows: int | None = None  # number of rows; None for any number


@dataclass
class LengthReading:
    """Options for reading lengths from a file."""

    # The column of lengths, or of lists whose items are counted; None if the file has one column.
    column: str | None = None
    # The column of users in a file of events: a user's length is the number of events. None: the file has lengths.
    group_by: str | None = None
    in_order: bool = False  # load rows in the order of the file, instead of in a random order
    with_replacement: bool = False  # draw rows as often as needed, if the file is a sample of more data

    def find(self, source: str) -> Lengths:
        """Lengths of a parquet, csv, npy or jsonl file, a folder of parquet files, or a distribution ("zipf:1.2:4096").

        A file with the columns `length` and `count` is a histogram.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: an unknown distribution, file type or column, or values that are not lengths.
        """
        if not source:
            raise ValueError(f"lengths is ''; it names a file or a distribution: {_DISTRIBUTIONS}")
        path = Path(source)
        if re.fullmatch(r"[A-Za-z_]+:[^/\\]*", source) and not path.exists():
            if self.column is not None or self.group_by is not None or self.in_order or self.with_replacement:
                raise ValueError(
                    f"lengths is {source!r}, a distribution; --column, --group-by, --in-order and --with-replacement "
                    "belong to a file: leave them out"
                )
            return Lengths(source, _distribution(source))
        if not path.exists():
            remedy = "correct the path" if path.suffix else f"correct the path, or give {_DISTRIBUTIONS}"
            remedy = "copy it to this machine" if "://" in source else remedy
            raise FileNotFoundError(f"{source} does not exist; --lengths names a file of lengths: {remedy}")
        if self.column is not None and self.group_by is not None:
            raise ValueError(
                f"--column is {self.column} and --group-by is {self.group_by}; lengths are either read from a column "
                "or counted by user: give one of them"
            )
        if self.with_replacement and self.in_order:
            raise ValueError("with_replacement and in_order exclude each other: choose one")
        columns = [_count_events(path, self.group_by)] if self.group_by else _read_lengths(path, self.column)
        if len(columns) > 1 and (self.in_order or self.with_replacement):
            raise ValueError(
                f"{source} is a histogram, from which rows are drawn; --in-order and --with-replacement need a file "
                "with one length per row: leave them out"
            )
        return self.of(source, *columns) if len(columns) == 1 else Lengths(source, _histogram(source, *columns))

    def of(self, name: str, values: np.ndarray) -> Lengths:
        """Lengths of known rows; `values` is int64 `(rows,)`."""
        rows = len(values)
        if self.with_replacement:
            return Lengths(name, lambda count, rng: values[rng.integers(0, rows, count)])
        if self.in_order:
            return Lengths(name, lambda count, rng: values[:count], rows)
        return Lengths(name, lambda count, rng: values[rng.permutation(rows)[:count]], rows)


def _distribution(source: str) -> _Take:
    name, *parts = source.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    first, second, third = (*numbers, _LONGEST, _LONGEST, _LONGEST)[:3]
    is_zipf = name == "zipf" and len(numbers) == 2 and 1 < first <= STEEPEST
    is_lognormal = name == "lognormal" and len(numbers) in (2, 3) and 0 < first < math.inf and 0 <= second <= 10
    longest = second if is_zipf else third
    if not (is_zipf or is_lognormal) or not 1 <= longest <= _LONGEST or longest != int(longest):
        raise ValueError(
            f"lengths is {source!r}, neither a file nor a known distribution: give {_DISTRIBUTIONS}, with an exponent "
            f"above 1, at most {STEEPEST}, a positive median, a sigma of 0 to 10, and a whole number for the longest "
            "row, 1 to 2**31"
        )
    if is_zipf:
        law = RandomDistribution("zipf", low=1, high=int(longest), alpha=first)
    else:
        # RandomDistribution needs the mean and the standard deviation.
        mean = first * math.exp(second**2 / 2)
        deviation = mean * math.sqrt(math.expm1(second**2))
        law = RandomDistribution("lognormal", low=1, high=int(longest), mean=mean, std=deviation)

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        generator = torch.Generator().manual_seed(int(rng.integers(0, 2**62)))
        return law.sample(count, generator=generator).numpy()

    return draw


def _histogram(source: str, lengths: np.ndarray, counts: np.ndarray) -> _Take:
    bounds, total = np.cumsum(counts), sum(counts.tolist())  # a sum of Python integers, which do not overflow
    if total == 0:
        raise ValueError(f"{source} has no row; all counts are 0: check the file")
    if total >= 2**63:
        raise ValueError(f"the counts of {source} add up to {total}; there are fewer than 2**63 rows: scale them down")
    return lambda count, rng: lengths[np.searchsorted(bounds, rng.integers(0, total, count), side="right")]


def _read_lengths(path: Path, column: str | None) -> list[np.ndarray]:
    """Read one column, or the two of a histogram: int64 `(rows,)`, at least one row, values of at least 0."""
    rows = _open(path)
    names = _columns_to_read(path, rows.columns, column)
    lists = [name for name in names if _is_list(rows, name)]
    if not lists and names[0].lower().endswith("id"):
        raise ValueError(
            f"the name of column {names[0]!r} of {path} ends in 'id', like an identifier and not a length: count the "
            f"events of each id by --group-by {shlex.quote(names[0])}, name the column of lengths by --column, or, if "
            "these are lengths, save only the numbers by numpy.save"
        )
    # Cast through text, because DuckDB casts booleans to numbers; trim, because otherwise the csv reader casts and
    # raises.
    numbers = [
        f"len({sql_name(name)})" if name in lists else f"try_cast(trim({sql_name(name)}::VARCHAR) AS DOUBLE)"
        for name in names
    ]
    found = _fetch(path, rows.project(", ".join(f'{number} AS "{at}"' for at, number in enumerate(numbers))))
    return [_whole(path, rows, name, found[str(at)]) for at, name in enumerate(names)]


def _count_events(path: Path, column: str) -> np.ndarray:
    """The number of rows, which are events, of each user, int64 `(users,)`, users in the order of first occurrence."""
    rows = _open(path)
    what = f"column {_columns_to_read(path, rows.columns, column)[0]!r} of {path}"
    if _is_list(rows, column):
        raise ValueError(
            f"{what} has lists; users must be integers or text: to count the items of the lists, give "
            f"--column {shlex.quote(column)}"
        )
    users = rows.project(f"nullif({sql_name(column)}::VARCHAR, '') AS user, row_number() OVER () AS row")
    counted = users.aggregate("user IS NULL AS unknown, count(*) AS events, min(row) AS first", "user")
    found = _fetch(path, counted.order("first"))
    if found["unknown"].any():
        row = found["first"][found["unknown"].argmax()]
        raise ValueError(
            f"{what} has no value in row {row}, counted from 1; every event needs a user: remove such rows"
        )
    return found["events"].astype(np.int64)


def _open(path: Path, *, with_places: bool = False) -> duckdb.DuckDBPyRelation:
    """Open the rows of a file, or of a folder of parquet files.

    With `with_places`, rows of parquet files have two more columns: `filename`, and `file_row_number`, counted from 0.
    """
    database, files = duckdb.connect(config={"autoinstall_known_extensions": False}), [str(path)]
    if path.is_dir():  # skip names that begin with a dot or an underscore, such as vocabularies
        found = [(file, file.relative_to(path).parts) for file in sorted(path.rglob("*.parquet")) if file.is_file()]
        files = list(map(str, each_once(file for file, parts in found if not any(part[0] in "._" for part in parts))))
        if not files:
            raise ValueError(f"{path} is a folder without parquet files: name a file of lengths")
    kind = ".parquet" if path.is_dir() else path.suffix.lower()
    if kind not in _TYPES:
        remedy = "unpack it" if kind in _COMPRESSED else "convert it"
        raise ValueError(f"{path} is neither a {', '.join(_TYPES)} file nor a folder of parquet files: {remedy}")
    if kind == ".parquet":
        require_no_table(files)
    with _readable(path):
        if kind == ".parquet":
            # A file's columns are found by name, and widened where the files' types differ.
            names = [glob.escape(file) for file in files]
            return database.read_parquet(names, union_by_name=True, filename=with_places, file_row_number=with_places)
        if kind == ".npy":
            return database.from_arrow(pa.table({"lengths": np.load(path, allow_pickle=False)}))
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline().strip("\r\n ")  # a tab at the start is a column without a name
        if not first.strip():
            raise ValueError("it is empty, or begins with an empty line")
        if kind == ".jsonl" and not _is_number(first):
            return database.read_json(
                glob.escape(str(path)), format="newline_delimited", sample_size=-1, hive_partitioning=False
            )
        # Delimited by commas, semicolons or tabs; without a header if the first line has only numbers.
        outside_quotes = re.sub(r'"[^"]*"', "", first)
        delimiter = next((mark for mark in ",;\t" if mark in outside_quotes), ",")
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
        has_names = not all(map(_is_number, names))
        numbered = [f"column {number}" for number in range(1, len(names) + 1)]
        if has_names:  # a column may have no name, such as the index that pandas writes
            names = [name or number for name, number in zip(names, numbered)]
        else:
            names = _HISTOGRAM if len(names) == len(_HISTOGRAM) else numbered
        # Read as text, so that users 7 and 007 differ and errors show the text of the file.
        columns = dict.fromkeys(names, "VARCHAR")
        rows = database.read_csv(
            glob.escape(str(path)),
            columns=columns,
            header=has_names,
            sep=delimiter,
            auto_detect=False,
            allow_quoted_nulls=False,  # only an empty line is null
            hive_partitioning=False,  # a folder such as "day=1" is a name
        )
        # In a file of one column, an empty line is a row.
        return rows.filter(f"{sql_name(names[0])} IS NOT NULL") if len(names) == 1 else rows


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a ValueError of one line for a file that cannot be read as its type."""
    try:
        yield
    except UnicodeDecodeError as error:
        what = "is compressed: unpack it" if error.object[:2] == b"\x1f\x8b" else "is not UTF-8 text: convert it"
        raise ValueError(f"{path} {what}") from error
    except (duckdb.Error, pa.ArrowException, ValueError, EOFError, csv.Error) as error:  # ValueError: from numpy
        reason = " ".join(str(error).splitlines()[0].rpartition("Error: ")[2].split())
        if path.suffix.lower() == ".jsonl":  # DuckDB counts the first line as line 2
            reason = next(_lines_without_json(path), reason)
        raise ValueError(f"{path} cannot be read ({reason}): check the file") from error


def _lines_without_json(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                json.loads(line.strip() or "0")
            except (ValueError, RecursionError):
                yield f"line {number} is not JSON"


def _fetch(path: Path, rows: duckdb.DuckDBPyRelation) -> dict[str, np.ndarray]:
    """Fetch columns; ValueError if there is no row."""
    with _readable(path):
        found = rows.fetchnumpy()
    if not len(next(iter(found.values()))):
        raise ValueError(f"{path} has no row; balancing needs rows: check the file")
    return found


def _columns_to_read(path: Path, names: list[str], column: str | None) -> list[str]:
    """The columns to read: the named column, the two of a histogram, or the only column."""
    if column is not None:
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(names)}: name one of these")
        return [column]
    if set(_HISTOGRAM) <= set(names):
        return _HISTOGRAM
    if len(names) != 1:
        unnamed = " (its first line: the columns have no names)" if any(map(_is_number, names)) else ""
        raise ValueError(
            f"{path} has the columns {', '.join(names)}{unnamed}; lengths are in one column: name it by "
            "--column, or in a file of events the column of users by --group-by"
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_list(rows: duckdb.DuckDBPyRelation, name: str) -> bool:
    return str(rows.types[rows.columns.index(name)]).endswith("]")


def _whole(path: Path, rows: duckdb.DuckDBPyRelation, name: str, values: np.ndarray) -> np.ndarray:
    """A column as int64; ValueError, with the first wrong row, for values that are not integers of at least 0."""
    numbers = np.ma.filled(values.astype(np.float64), np.nan)
    wrong = ~((numbers >= 0) & (np.trunc(numbers) == numbers) & (numbers <= _MOST))
    if wrong.any():
        row = int(wrong.argmax())
        of_files = ""
        if path.is_dir():
            rows, of_files = _open(path, with_places=True), ", filename, file_row_number + 1"
        value, *place = rows.project(sql_name(name) + of_files).limit(1, offset=row).fetchall()[0]
        path, number = place or (path, row + 1)
        shown = "no value" if value is None else repr(value)[:42]
        raise ValueError(
            f"column {name!r} of {path} holds {shown} in row {number}, counted from 1; a "
            f"{name if name == 'count' else 'length'} is an integer from 0 to {_MOST:,}: correct it, or choose another "
            "column"
        )
    return numbers.astype(np.int64)
