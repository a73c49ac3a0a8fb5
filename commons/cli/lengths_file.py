"""Files of lengths for `evenrank simulate`: parquet, csv, npy and jsonl, read alike and checked row by row.

A file in, its column of lengths out, or the two columns of a histogram, as int64. A value that is no length is named
with the line it stands in, or with its row, counted from 1.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

# Columns that make a file a histogram.
HISTOGRAM = ("length", "count")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
# A float64 counts no further.
_LARGEST_FLOAT = 2.0**53


@dataclass(frozen=True)
class _Part:
    """What was read of one file.

    Attributes:
        path: of the file.
        columns: by name.
        place: what to call a row, counted from 0, such as "line 3".
    """

    path: Path
    columns: dict[str, Any]
    place: Callable[[int], str]

    def kind(self, name: str) -> str:
        """What the values of a column are."""
        return name if list(self.columns) == list(HISTOGRAM) else "length"


def _row(index: int) -> str:
    return f"row {index + 1}"


def read_lengths(path: Path, column: str | None) -> dict[str, np.ndarray]:
    """The lengths of a file, or a histogram of them.

    Args:
        path: a parquet, csv, npy or jsonl file, or a folder of parquet files.
        column: of lengths, or of lists whose items count; None if there is one column, or a histogram.

    Returns:
        One column, or those of HISTOGRAM, by name: int64 `(rows,)`, at least one row, values of at least 0.

    Raises:
        ValueError: a type of file that is not read, a file that is none of its type, no such column, or values that are
            no lengths.
    """
    if path.is_dir():  # a data set that was written as shards is a folder with such a name, too
        parts = [_read(file, column) for file in _shards(path)]
    else:
        parts = [_read(path, column)]
    names = list(parts[0].columns)
    for part in parts:
        if list(part.columns) != names:
            raise ValueError(
                f"{part.path} has lengths in {', '.join(part.columns)}, {parts[0].path} in {', '.join(names)}; all "
                "files of a folder have the same: name the column by --column"
            )
    if not any(len(part.columns[names[0]]) for part in parts):
        raise ValueError(f"{path} has no row; balancing needs some: check the file")
    if len(parts) == 1:
        return {name: _counts(parts[0], name) for name in names}
    return {name: np.concatenate([_counts(part, name) for part in parts]) for name in names}


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


def _read(path: Path, column: str | None) -> _Part:
    readers: dict[str, Callable[[Path, str | None], _Part]] = {
        ".parquet": _read_parquet,
        ".csv": _read_csv,
        ".npy": _read_npy,
        ".jsonl": _read_jsonl,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        remedy = "unpack it" if path.suffix.lower() in _COMPRESSED else "convert it"
        raise ValueError(f"{path} is none of {', '.join(readers)} and no folder of parquet files: {remedy}")
    try:
        return reader(path, column)
    except UnicodeDecodeError as error:
        what = "is compressed: unpack it" if error.object[:2] == b"\x1f\x8b" else "is no text in UTF-8: convert it"
        raise ValueError(f"{path} {what}") from error
    except (pa.ArrowException, EOFError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read ({str(error) or type(error).__name__}): check the file") from error


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


def _read_parquet(path: Path, column: str | None) -> _Part:
    with pq.ParquetFile(path) as parquet:
        wanted = _wanted(path, parquet.schema_arrow.names, column)
        # A batch at a time: of lists only the lengths are kept.
        chunks: list[list[Any]] = [[] for _ in wanted]
        for batch in parquet.iter_batches(columns=wanted):
            for of_column, values in zip(chunks, batch.columns):
                of_column.append(_sizes(values))
    return _Part(path, {name: _chunked(values) for name, values in zip(wanted, chunks)}, _row)


def _chunked(arrays: list[Any]) -> Any:
    return pa.chunked_array(arrays) if arrays else pa.chunked_array([], pa.int64())


def _read_csv(path: Path, column: str | None) -> _Part:
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
    if not first.strip():
        raise ValueError(f"{path} is empty, or begins with an empty line; it holds lengths: check the file")
    delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    names = [name.strip() for name in next(csv.reader([first.rstrip("\r\n")], delimiter=delimiter))]
    unnamed = all(_is_number(name) for name in names)
    if unnamed:
        names = list(HISTOGRAM) if len(names) == len(HISTOGRAM) else [f"column {i + 1}" for i in range(len(names))]
    wanted = _wanted(path, names, column)
    table = pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=names, skip_rows=0 if unnamed else 1),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter),
        convert_options=pyarrow.csv.ConvertOptions(include_columns=wanted),
    )
    return _Part(path, _columns(table), lambda row: _line(path, row + (not unnamed), delimiter))


def _columns(table: pa.Table) -> dict[str, Any]:
    return {name: table[name] for name in table.column_names}


def _line(path: Path, row: int, delimiter: str) -> str:
    """The line of a csv file where a row ends, counted from 1; the row from 0, without empty lines."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        next(itertools.islice((values for values in reader if values), row, None), None)
        return f"line {reader.line_num}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_npy(path: Path, column: str | None) -> _Part:
    if column is not None:
        raise ValueError(f"{path} is an array, which has no columns: leave out --column")
    try:
        values = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as an array of numbers ({error}): save one by numpy.save") from error
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ValueError(
            f"{path} has shape {values.shape} and dtype {values.dtype}; lengths are integers of shape (rows,): save "
            "those"
        )
    return _Part(path, {"lengths": pa.array(values, from_pandas=False)}, _row)


def _read_jsonl(path: Path, column: str | None) -> _Part:
    first = next(_json_lines(path), None)
    if first is None:
        raise ValueError(f"{path} is empty; it holds lengths: check the file")
    _, line = first
    try:
        row = json.loads(line)
    except ValueError:
        raise ValueError(f"{path} does not begin with a line of JSON: check the file") from None
    if isinstance(row, (int, float)) and not isinstance(row, bool):
        return _read_csv(path, column)  # a number per line
    if not isinstance(row, dict):
        raise ValueError(
            f"{path} begins with {line.strip()[:40]!r}; a line is a length, or an object with it as a field: "
            'write {"length": 12}'
        )
    wanted = _wanted(path, list(row), column)
    has_lists = any(isinstance(row[name], list) for name in wanted)
    kinds = [] if has_lists else [(name, pa.float64()) for name in wanted]  # what lists hold the reader finds out
    options = pyarrow.json.ParseOptions(
        explicit_schema=pa.schema(kinds), unexpected_field_behavior="infer" if has_lists else "ignore"
    )
    try:
        table = pyarrow.json.read_json(_without_mark(path), parse_options=options).select(wanted)
    except pa.ArrowException:
        _require_json(path, wanted, list if has_lists else (int, float))
        raise
    columns = {name: _chunked([_sizes(chunk) for chunk in column.chunks]) for name, column in _columns(table).items()}
    return _Part(path, columns, lambda row: _json_line(path, row))


def _without_mark(path: Path) -> Path | io.BytesIO:
    """The file; what follows the mark of UTF-8, which some editors write at its begin and which is no JSON."""
    with path.open("rb") as file:
        return io.BytesIO(file.read()) if file.read(len(BOM_UTF8)) == BOM_UTF8 else path


def _json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not empty, each with its number, from 1."""
    with path.open(encoding="utf-8-sig") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _json_line(path: Path, row: int) -> str:
    number, _ = next(itertools.islice(_json_lines(path), row, None))
    return f"line {number}"


def _require_json(path: Path, wanted: list[str], kind: Any) -> None:
    """Raise ValueError for the first line that is no object, or none with such values."""
    for number, line in _json_lines(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is no JSON ({error}): correct it") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number} is {line.strip()[:40]!r}; the first is an object: correct it")
        for name in wanted:
            value = row.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                shown = json.dumps(value)[:40]
                raise ValueError(
                    f"{path} line {number} has {name!r} {shown}; lengths are numbers in every line, or lists in every "
                    "line: correct it"
                )


def _sizes(values: Any) -> Any:
    """Lengths of lists; other values as they are."""
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pc.cast(pc.list_value_length(values), pa.int64())
    return values


def _counts(part: _Part, name: str) -> np.ndarray:
    """A column as int64.

    Raises:
        ValueError: anything but integers of at least 0, with the first row that has it.
    """
    column, what = part.columns[name], f"column {name!r} of {part.path}"
    if len(column) == 0:
        return np.empty(0, np.int64)
    if pa.types.is_string(column.type):
        raise ValueError(_no_number(part, name))
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


def _no_number(part: _Part, name: str) -> str:
    """What to say of a column of text: the first value that is no number, and its place where others are numbers."""
    column, what = part.columns[name], f"column {name!r} of {part.path}"
    values = column.to_pylist()
    row, first = next((row, value) for row, value in enumerate(values) if value is not None and not _is_number(value))
    shown = repr(first if len(first) <= 40 else f"{first[:39]}…")
    if any(value is not None and _is_number(value) for value in values):
        return f"{what} holds {shown} in {part.place(row)}; a {part.kind(name)} is an integer of at least 0: correct it"
    return f"{what} holds text, such as {shown}; lengths are integers: choose another, or convert it"
