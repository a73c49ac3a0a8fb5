"""Files of lengths for `evenrank simulate`: parquet, csv, npy and jsonl, or a folder of parquet files.

A file in, its column of lengths out, or the two columns of a histogram, as int64. pyarrow reads; that the values are
lengths is checked here. Of a file of events, whose rows are events, a user's length is the number of them.
"""

from __future__ import annotations

import csv
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset

# Columns that make a file a histogram.
HISTOGRAM = ("length", "count")
_TYPES = (".parquet", ".csv", ".npy", ".jsonl")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
# A float64 counts no further.
_LARGEST_FLOAT = 2.0**53
# Numbers identify rows, or date them, if so many of so many differ and half of them are above _LARGE, ...
_DISTINCT, _LARGE, _FEWEST_ROWS = 0.9, 100_000, 32
# ... or if so many rows have each of as many consecutive numbers once.
_NUMBERED_ROWS = 1_000


@dataclass(frozen=True)
class _Part:
    """What was read of one file."""

    path: Path  # of the file
    columns: dict[str, Any]  # by name; of a column of lists the length of each
    may_identify: bool = False  # whether a column has a name, and numbers that may identify rows; lists have lengths

    def place(self, row: int) -> str:
        """What to call a row, counted from 0."""
        return f"row {row + 1}"

    def kind(self, name: str) -> str:
        """What the values of a column are."""
        return name if list(self.columns) == list(HISTOGRAM) else "length"


def read_lengths(path: Path, column: str | None) -> dict[str, np.ndarray]:
    """The lengths of a file, or a histogram of them.

    Args:
        path: a parquet, csv, npy or jsonl file, or a folder of parquet files.
        column: of lengths, or of lists whose items count; None if there is one column, or a histogram.

    Returns:
        One column, or those of HISTOGRAM, by name: int64 `(rows,)`, at least one row, values of at least 0.

    Raises:
        ValueError: a type of file that is not read, a file that is none of its type, no such column, or values that are
            no lengths, such as identifiers.
    """
    parts = _read_parts(path, column)
    names = list(parts[0].columns)
    for part in parts:
        if list(part.columns) != names:
            raise ValueError(
                f"{part.path} has lengths in {', '.join(part.columns)}, {parts[0].path} in {', '.join(names)}; all "
                "files of a folder have the same: name the column by --column"
            )
    may_identify = names != list(HISTOGRAM) and parts[0].may_identify
    if may_identify:
        _require_other_name(path, names[0])
    columns = {name: np.concatenate([_counts(part, name) for part in parts]) for name in names}
    if may_identify:
        _require_no_identifiers(path, names[0], columns[names[0]])
    return columns


def count_events(path: Path, column: str) -> np.ndarray:
    """How many rows, which are events, each user has.

    Args:
        path: a parquet, csv or jsonl file of events, or a folder of parquet files, over which a user's may be spread.
        column: of users, integers or text.

    Returns:
        int64 `(users,)`, at least one, in the order in which users first occur.

    Raises:
        ValueError: a type of file that is not read, no such column, or a row that names no user.
    """
    chunks = [chunk for part in _read_parts(path, column, of_events=True) for chunk in _users(part, column).chunks]
    kinds = sorted({str(chunk.type) for chunk in chunks})
    if len(kinds) > 1:
        raise ValueError(
            f"column {column!r} of {path} holds {' in one file and '.join(kinds)} in another; all files of a folder "
            "have the same: convert it"
        )
    return pc.value_counts(pa.chunked_array(chunks)).field("counts").to_numpy(zero_copy_only=False).astype(np.int64)


def _read_parts(path: Path, column: str | None, *, of_events: bool = False) -> list[_Part]:
    """What is read of a file or, as data sets are written, of a folder of them.

    Args:
        path: of the file, or the folder.
        column: as for `read_lengths`.
        of_events: the column holds users, which are kept as they are.

    Raises:
        ValueError: what cannot be read, or has no row.
    """
    # A data set that was written as shards is a folder with such a name, too.
    files = _shards(path) if path.is_dir() else [path]
    parts = [_read(file, column, of_events) for file in files]
    if not any(len(values) for part in parts for values in part.columns.values()):
        raise ValueError(f"{path} has no row; balancing needs some: check the file")
    return parts


def _shards(path: Path) -> list[Path]:
    """The parquet files of a folder; what begins with a dot or an underscore, such as vocabularies beside, is none."""
    files = sorted(
        file
        for file in path.rglob("*.parquet")
        if file.is_file() and not any(part[0] in "._" for part in file.relative_to(path).parts)
    )
    if not files:
        raise ValueError(f"{path} is a folder without parquet files: name a file of lengths")
    return files


def _read(path: Path, column: str | None, of_events: bool) -> _Part:
    kind = path.suffix.lower()
    if kind not in _TYPES:
        remedy = "unpack it" if kind in _COMPRESSED else "convert it"
        raise ValueError(f"{path} is none of {', '.join(_TYPES)} and no folder of parquet files: {remedy}")
    try:
        if kind == ".npy":
            return _read_array(path, column, of_events)
        if kind == ".parquet":
            return _read_table(path, pyarrow.dataset.ParquetFileFormat(), column, of_events)
        first = _first_line(path)
        if kind == ".csv" or _is_number(first):
            return _read_csv(path, first, column, of_events)
        if not first.startswith("{"):
            raise ValueError(
                f"{path} begins with {first[:40]!r}; a line is a length, or an object with it as a field: "
                'write {"length": 12}'
            )
        return _read_table(path, pyarrow.dataset.JsonFileFormat(), column, of_events)
    except UnicodeDecodeError as error:
        what = "is compressed: unpack it" if error.object[:2] == b"\x1f\x8b" else "is no text in UTF-8: convert it"
        raise ValueError(f"{path} {what}") from error
    except (pa.ArrowException, EOFError, csv.Error) as error:
        # What the error was, without what led to it; pyarrow counts rows of JSON from 0.
        reason = " ".join(str(error).rsplit("Invalid: ", 1)[-1].split()) or type(error).__name__
        reason = re.sub(r"in row (\d+)", lambda found: f"in row {int(found[1]) + 1}", reason)
        raise ValueError(f"{path} cannot be read ({reason}): check the file") from error


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline().strip()
    if not first:
        raise ValueError(f"{path} is empty, or begins with an empty line; it holds lengths: check the file")
    return first


def _read_table(path: Path, file_format: Any, column: str | None, of_events: bool, named: bool = True) -> _Part:
    """A file by pyarrow; of lists only the lengths are kept, batch by batch."""
    table = pyarrow.dataset.dataset(path, format=file_format)
    wanted = _wanted(path, table.schema.names, column)
    lists = [name for name in wanted if _is_list(table.schema.field(name).type) and not of_events]
    read = table.to_table(
        {
            name: pc.list_value_length(pc.field(name)).cast(pa.int64()) if name in lists else pc.field(name)
            for name in wanted
        }
    )
    return _Part(path, {name: read[name] for name in wanted}, may_identify=named and not lists)


def _read_csv(path: Path, first: str, column: str | None, of_events: bool) -> _Part:
    """Commas, semicolons or tabs; without a header where the first line has nothing but numbers."""
    delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    unnamed = all(_is_number(name) for name in names)
    if unnamed:
        names = list(HISTOGRAM) if len(names) == len(HISTOGRAM) else [f"column {i + 1}" for i in range(len(names))]
    wanted = _wanted(path, names, column)
    file_format = pyarrow.dataset.CsvFileFormat(
        pyarrow.csv.ParseOptions(delimiter=delimiter),
        read_options=pyarrow.csv.ReadOptions(column_names=names, skip_rows=0 if unnamed else 1),
        # Users as they are written: 7 and 007 are two of them.
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(wanted, pa.string()) if of_events else None
        ),
    )
    return _read_table(path, file_format, column or (None if len(wanted) > 1 else wanted[0]), of_events, not unnamed)


def _read_array(path: Path, column: str | None, of_events: bool) -> _Part:
    if column is not None:
        flag = "--group-by" if of_events else "--column"
        raise ValueError(f"{path} is an array, which has no columns: leave out {flag}")
    try:
        values = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as an array of numbers ({error}): save one by numpy.save") from error
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ValueError(
            f"{path} has shape {values.shape} and dtype {values.dtype}; lengths are integers of shape (rows,): save "
            "those"
        )
    return _Part(path, {"lengths": pa.array(values, from_pandas=False)})


def _wanted(path: Path, names: list[str], column: str | None) -> list[str]:
    """The columns to read: the one named, those of a histogram, or the only one."""
    if column is not None:
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(names)}: name one of these")
        if names.count(column) > 1:
            raise ValueError(f"{path} has {names.count(column)} columns {column!r}: give them different names")
        return [column]
    if all(names.count(name) == 1 for name in HISTOGRAM):
        return list(HISTOGRAM)
    if len(names) != 1:
        unnamed = " (its first line: the columns have no names)" if any(map(_is_number, names)) else ""
        raise ValueError(
            f"{path} has the columns {', '.join(names)}{unnamed}; lengths are one of them: name it by --column"
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_list(kind: Any) -> bool:
    """Whether a type of arrow is that of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _counts(part: _Part, name: str) -> np.ndarray:
    """A column as int64.

    Raises:
        ValueError: anything but integers of at least 0, with the first row that has it.
    """
    column, what = part.columns[name], f"column {name!r} of {part.path}"
    if len(column) == 0:
        return np.empty(0, np.int64)
    if pa.types.is_string(column.type):
        # Text may be written like numbers, as "12" in parquet or 1_000 in csv.
        values = column.to_pylist()
        row = next((row for row, value in enumerate(values) if value is not None and not _is_number(value)), 0)
        shown = repr(str(values[row])[:40])
        raise ValueError(
            f"{what} holds text, such as {shown} in {part.place(row)}; a {part.kind(name)} is an integer of at least "
            "0: correct it, convert the column, or choose another"
        )
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(f"{what} holds {column.type}; lengths are integers: choose another, or convert it")
    if column.null_count:
        place = part.place(pc.index(column.is_null(), pa.scalar(True)).as_py())
        raise ValueError(f"{what} has no value in {place}; every row has a length: leave such rows out")
    values = column.to_numpy()
    whole = values.dtype.kind in "iu"
    wrong = values < 0 if whole else ~((values >= 0) & (np.trunc(values) == values))
    most = np.uint64(2**63 - 1) if whole else _LARGEST_FLOAT
    for is_wrong, rule in ((wrong, "is an integer of at least 0"), (values > most, f"is at most {int(most)}")):
        if is_wrong.any():
            row = int(is_wrong.argmax())
            value = str(values[row]).removesuffix(".0")
            raise ValueError(f"{what} holds {value} in {part.place(row)}; a {part.kind(name)} {rule}: correct it")
    return np.ascontiguousarray(values, dtype=np.int64)


def _users(part: _Part, name: str) -> Any:
    """A column of users, checked."""
    column, what = part.columns[name], f"column {name!r} of {part.path}"
    if _is_list(column.type):
        raise ValueError(
            f"{what} holds lists, which have lengths already; users are integers or text: evenrank counts them by "
            f"--column {shlex.quote(name)}"
        )
    if pa.types.is_dictionary(column.type):  # as pandas writes categories
        column = column.cast(column.type.value_type)
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if not (is_text or pa.types.is_integer(column.type)):
        raise ValueError(f"{what} holds {column.type}; users are integers or text: choose another, or convert it")
    lacks = pc.or_kleene(column.is_null(), pc.equal(column, "")) if is_text else column.is_null()
    if (row := pc.index(lacks, pa.scalar(True)).as_py()) >= 0:
        raise ValueError(
            f"{what} has no value in {part.place(row)}; every event has one of the users: leave such rows out"
        )
    return column


def _require_other_name(path: Path, column: str) -> None:
    """Raise ValueError for a column that is called like an identifier."""
    if column.lower().endswith("id"):
        raise ValueError(
            f"column {column!r} of {path} ends in 'id', as identifiers do, which are no lengths: count the events of "
            f"each by --group-by {shlex.quote(column)}, name the column of lengths by --column, or save the numbers "
            "alone by numpy.save if they are lengths"
        )


def _require_no_identifiers(path: Path, column: str, values: np.ndarray) -> None:
    """Raise ValueError where nearly all values of a column differ and are large, or where they number the rows."""
    distinct = len(np.unique(values)) if len(values) >= _FEWEST_ROWS else 0
    if distinct < _DISTINCT * len(values):
        return
    least, middle, most = int(values.min()), int(np.median(values)), int(values.max())
    if middle > _LARGE:
        rule = f"half of them above {_LARGE:,}"
    elif len(values) >= _NUMBERED_ROWS and most - least + 1 == distinct == len(values):
        rule = f"each of {least:,} to {most:,} once"
    else:
        return
    raise ValueError(
        f"column {column!r} of {path} has a value of its own in {distinct:,} of {len(values):,} rows, {rule}; such "
        "numbers identify or date rows and are no lengths: name another column by --column, count each user's events "
        "by --group-by user_id, or save the numbers alone by numpy.save if they are lengths"
    )
