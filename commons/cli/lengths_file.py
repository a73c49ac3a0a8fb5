"""Files of lengths for `evenrank simulate`: parquet, csv, npy and jsonl, read alike and checked row by row.

A file in, its column of lengths out, or the two columns of a histogram, as int64. A value that is no length is named
with the line it stands in, or with its row, counted from 1. Files of events: `commons.cli.event_counts`.
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

from commons.cli.identifiers import require_no_identifiers, require_other_name

# Columns that make a file a histogram.
HISTOGRAM = ("length", "count")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
# A float64 counts no further.
_LARGEST_FLOAT = 2.0**53


@dataclass(frozen=True)
class Part:
    """What was read of one file.

    Attributes:
        path: of the file.
        columns: by name; of a column of lists the length of each.
        place: what to call a row, counted from 0, such as "line 3".
        may_identify: whether a column has a name, and numbers that may identify rows; lists have lengths.
    """

    path: Path
    columns: dict[str, Any]
    place: Callable[[int], str]
    may_identify: bool = False

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
            no lengths, such as identifiers.
    """
    parts = read_parts(path, column)
    names = list(parts[0].columns)
    for part in parts:
        if list(part.columns) != names:
            raise ValueError(
                f"{part.path} has lengths in {', '.join(part.columns)}, {parts[0].path} in {', '.join(names)}; all "
                "files of a folder have the same: name the column by --column"
            )
    may_identify = names != list(HISTOGRAM) and parts[0].may_identify
    if may_identify:
        require_other_name(path, names[0])
    if len(parts) == 1:
        columns = {name: _counts(parts[0], name) for name in names}
    else:
        columns = {name: np.concatenate([_counts(part, name) for part in parts]) for name in names}
    if may_identify:
        require_no_identifiers(path, names[0], columns[names[0]])
    return columns


def read_parts(path: Path, column: str | None, *, of_events: bool = False) -> list[Part]:
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


def _read(path: Path, column: str | None, of_events: bool) -> Part:
    readers: dict[str, Callable[[Path, str | None, bool], Part]] = {
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
        return reader(path, column, of_events)
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


def _read_parquet(path: Path, column: str | None, of_events: bool) -> Part:
    with pq.ParquetFile(path) as parquet:
        wanted = _wanted(path, parquet.schema_arrow.names, column)
        has_lists = any(is_list(parquet.schema_arrow.field(name).type) for name in wanted)
        # A batch at a time: of lists only the lengths are kept.
        chunks: list[list[Any]] = [[] for _ in wanted]
        for batch in parquet.iter_batches(columns=wanted):
            for of_column, values in zip(chunks, batch.columns):
                of_column.append(values if of_events else _sizes(values))
    columns = {name: _chunked(values) for name, values in zip(wanted, chunks)}
    return Part(path, columns, _row, may_identify=not has_lists)


def _chunked(arrays: list[Any]) -> Any:
    return pa.chunked_array(arrays) if arrays else pa.chunked_array([], pa.int64())


def _read_csv(path: Path, column: str | None, of_events: bool) -> Part:
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
        # Users as they are written: 7 and 007 are two of them.
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()) if of_events else None
        ),
    )
    return Part(path, _columns(table), lambda row: _line(path, row + (not unnamed), delimiter), not unnamed)


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


def _read_npy(path: Path, column: str | None, of_events: bool) -> Part:
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
    return Part(path, {"lengths": pa.array(values, from_pandas=False)}, _row)


def _read_jsonl(path: Path, column: str | None, of_events: bool) -> Part:
    first = next(_json_lines(path), None)
    if first is None:
        raise ValueError(f"{path} is empty; it holds lengths: check the file")
    number, line = first
    try:
        row = _json_value(path, number, line)
    except json.JSONDecodeError:
        raise ValueError(f"{path} does not begin with a line of JSON: check the file") from None
    if isinstance(row, (int, float)) and not isinstance(row, bool):
        return _read_csv(path, column, of_events)  # a number per line
    if not isinstance(row, dict):
        raise ValueError(
            f"{path} begins with {line.strip()[:40]!r}; a line is a length, or an object with it as a field: "
            'write {"length": 12}'
        )
    wanted = _wanted(path, list(row), column)
    has_lists = any(isinstance(row[name], list) for name in wanted)
    # What lists hold the reader finds out; users are all like the first.
    of_users = {int: pa.int64(), str: pa.string()}
    types = {name: of_users.get(type(row[name])) if of_events else pa.float64() for name in wanted}
    kinds = [] if has_lists or None in types.values() else list(types.items())
    options = pyarrow.json.ParseOptions(
        explicit_schema=pa.schema(kinds), unexpected_field_behavior="ignore" if kinds else "infer"
    )
    try:
        table = pyarrow.json.read_json(_without_mark(path), parse_options=options).select(wanted)
    except pa.ArrowException:
        if not of_events:
            _require_json(path, wanted, list if has_lists else (int, float))
        raise
    columns = _columns(table)
    if not of_events:
        columns = {name: _chunked([_sizes(chunk) for chunk in column.chunks]) for name, column in columns.items()}
    return Part(path, columns, lambda row: _json_line(path, row), may_identify=not has_lists)


def _json_value(path: Path, number: int, line: str) -> Any:
    """What a line holds; json.JSONDecodeError for what is no JSON."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError(f"{path} line {number} is nested too deeply to be read: check the file") from None


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
            row = _json_value(path, number, line)
        except json.JSONDecodeError as error:
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
    return pc.cast(pc.list_value_length(values), pa.int64()) if is_list(values.type) else values


def is_list(kind: Any) -> bool:
    """Whether a type of arrow is that of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _counts(part: Part, name: str) -> np.ndarray:
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


def _no_number(part: Part, name: str) -> str:
    """What to say of a column of text: the first value that is no number, and its place where others are numbers."""
    column, what = part.columns[name], f"column {name!r} of {part.path}"
    values = column.to_pylist()
    given = [(row, value) for row, value in enumerate(values) if value is not None]
    # Text may be written like numbers, as "12" in parquet or 1_000 in csv.
    row, first = next((each for each in given if not _is_number(each[1])), given[0])
    shown = repr(first if len(first) <= 40 else f"{first[:39]}…")
    if not _is_number(first) and any(_is_number(value) for _, value in given):
        return f"{what} holds {shown} in {part.place(row)}; a {part.kind(name)} is an integer of at least 0: correct it"
    return f"{what} holds text, such as {shown}; lengths are integers: choose another, or convert it"
