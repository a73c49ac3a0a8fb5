"""Lengths of rows for `evenrank simulate`: from a file, a histogram, or a distribution that is named.

Files are parquet, csv, npy and jsonl, or a folder of parquet files; of a file of events a user's length is the number
of them. pyarrow reads; that the values are lengths is checked here.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset
import torch

from commons.datasets.random.distribution import RandomDistribution

# Rows that are drawn from a distribution for its summary.
_SUMMARY_ROWS = 200_000
_DISTRIBUTIONS = "zipf:EXPONENT:LONGEST, lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:LONGEST"
# Columns that make a file a histogram.
_HISTOGRAM = ["length", "count"]
_TYPES = (".parquet", ".csv", ".npy", ".jsonl")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
_LARGEST_FLOAT = 2.0**53  # a float64 counts no further
# Numbers identify rows, or date them, if so many of so many differ and half of them are above _LARGE, ...
_DISTINCT, _LARGE, _FEWEST_ROWS = 0.9, 100_000, 32
# ... or if so many rows have each of as many consecutive numbers once.
_NUMBERED_ROWS = 1_000

# So many lengths, int64.
_Draw = Callable[[int, np.random.Generator], np.ndarray]


class Lengths(NamedTuple):
    """Lengths of rows: all that there are, or a way to draw them."""

    name: str  # as the user named them
    values: np.ndarray | None = None  # int64 `(num_rows,)`; None for lengths that are drawn
    draw: _Draw | None = None  # None for those of `values`
    in_order: bool = False  # whether rows are loaded in the order of the file; in a random one otherwise

    @property
    def num_rows(self) -> int | None:
        """Rows that there are; None for any number."""
        return None if self.values is None else len(self.values)

    def take(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """int64 `(count,)`, lengths in the order in which they are loaded; at most `num_rows`, none of them twice."""
        if self.draw is not None:
            return self.draw(count, rng)
        assert self.values is not None  # noqa: S101  one of them is given
        return self.values[:count] if self.in_order else self.values[rng.permutation(len(self.values))[:count]]

    def summary(self, rng: np.random.Generator) -> np.ndarray:
        """int64 `(n,)`, lengths to describe the whole by."""
        return self.take(_SUMMARY_ROWS, rng) if self.values is None else self.values


def find_lengths(
    source: str,
    column: str | None,
    *,
    group_by: str | None = None,
    in_order: bool = False,
    with_replacement: bool = False,
) -> Lengths:
    """Lengths as a user names them.

    Args:
        source: a parquet, csv, npy or jsonl file, a folder of parquet files, or a distribution: "zipf:1.2:4096",
            "lognormal:130:1.4". A file with the columns `length` and `count` is a histogram.
        column: of lengths, or of lists whose items count; None if there is one column only.
        group_by: column of users, where rows are events: a user's length is the number of them.
        in_order: rows are loaded as they lie in the file.
        with_replacement: rows are drawn as often as needed, where the file is a sample of more data.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown distribution, file type or column, or lengths that are no counts.
    """
    if not source:
        raise ValueError(f"lengths is ''; it names a file or a distribution: {_DISTRIBUTIONS}")
    path = Path(source)
    named = re.fullmatch(r"([A-Za-z_]+):([^/\\]*)", source)
    if named and not path.exists():
        if column is not None or group_by is not None or in_order or with_replacement:
            raise ValueError(
                f"lengths is {source!r}, a distribution; --column, --group-by, --in-order and --with-replacement "
                "belong to a file: leave them out"
            )
        return Lengths(source, draw=_distribution(source, named[1], named[2].split(":")))
    if not path.exists():
        known = "" if path.suffix else f"; distributions are {_DISTRIBUTIONS}"
        known = " on this machine: copy it here" if "://" in source else known
        raise FileNotFoundError(f"{source} does not exist; --lengths names a file of lengths{known}")
    if column is not None and group_by is not None:
        raise ValueError(
            f"--column is {column} and --group-by is {group_by}; the one holds lengths, of the other they are counted: "
            "give one of them"
        )
    columns = _read_lengths(path, column) if group_by is None else [_count_events(path, group_by)]
    if len(columns) > 1:
        if in_order or with_replacement:
            raise ValueError(
                f"{source} is a histogram, from which rows are drawn; --in-order and --with-replacement belong to a "
                "file with one length per row: leave them out"
            )
        return Lengths(source, draw=_histogram(source, *columns))
    if with_replacement and in_order:
        raise ValueError("with_replacement and in_order exclude each other: choose one")
    (values,) = columns
    if with_replacement:
        return Lengths(source, draw=lambda count, rng: values[rng.integers(0, len(values), count)])
    return Lengths(source, values, in_order=in_order)


def _distribution(source: str, name: str, parts: list[str]) -> _Draw:
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [math.nan]
    kind = (name, len(numbers))
    if not all(map(math.isfinite, numbers)) or kind not in (("zipf", 2), ("lognormal", 2), ("lognormal", 3)):
        raise ValueError(f"lengths is {source!r}, neither a file nor a known distribution: give {_DISTRIBUTIONS}")
    longest = numbers[-1] if kind != ("lognormal", 2) else 2.0**31
    if longest != int(longest) or not 1 <= longest <= 2**31:
        raise ValueError(f"lengths is {source!r}; the longest row has a whole number of items, 1 to 2**31: correct it")
    if name == "zipf":
        if numbers[0] <= 1:
            raise ValueError(f"lengths is {source!r}; a Zipf distribution has an exponent above 1: raise it")
        law = RandomDistribution("zipf", low=1, high=int(longest), alpha=numbers[0])
    else:
        median, sigma = numbers[:2]
        if median <= 0 or not 0 <= sigma <= 10:
            raise ValueError(f"lengths is {source!r}; a median is positive and a sigma in [0, 10]: correct it")
        # RandomDistribution takes the mean and the standard deviation.
        mean = median * math.exp(sigma**2 / 2)
        deviation = mean * math.sqrt(math.expm1(sigma**2))
        law = RandomDistribution("lognormal", low=1, high=int(longest), mean=mean, std=deviation)

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        generator = torch.Generator().manual_seed(int(rng.integers(0, 2**62)))
        return law.sample(count, generator=generator).numpy()

    return draw


def _histogram(source: str, lengths: np.ndarray, counts: np.ndarray) -> _Draw:
    total = sum(counts.tolist())  # of Python's integers, which do not overflow
    if total == 0:
        raise ValueError(f"{source} has no row; all counts are 0: check the file")
    if total >= 2**63:
        raise ValueError(f"the counts of {source} add up to {total}; there are fewer than 2**63 rows: scale them down")
    bounds = np.cumsum(counts)
    return lambda count, rng: lengths[np.searchsorted(bounds, rng.integers(0, total, count), side="right")]


class _Part(NamedTuple):
    """What was read of one file."""

    path: Path
    columns: dict[str, Any]  # by name; of a column of lists the length of each
    may_identify: bool = False  # whether a column has a name, and numbers that may identify rows; lists have lengths


def _read_lengths(path: Path, column: str | None) -> list[np.ndarray]:
    """One column, or the two of a histogram: int64 `(rows,)`, at least one row, values of at least 0."""
    parts = _read_parts(path, column)
    names = list(parts[0].columns)
    for part in parts:
        if list(part.columns) != names:
            raise ValueError(
                f"{part.path} has lengths in {', '.join(part.columns)}, {parts[0].path} in {', '.join(names)}; all "
                "files of a folder have the same: name the column by --column"
            )
    may_identify = names != _HISTOGRAM and parts[0].may_identify
    if may_identify and names[0].lower().endswith("id"):
        raise ValueError(
            f"column {names[0]!r} of {path} ends in 'id', as identifiers do, which are no lengths: count the events of "
            f"each by --group-by {shlex.quote(names[0])}, name the column of lengths by --column, or save the numbers "
            "alone by numpy.save if they are lengths"
        )
    columns = [np.concatenate([_counts(part, name) for part in parts]) for name in names]
    if may_identify:
        _require_no_identifiers(path, names[0], columns[0])
    return columns


def _count_events(path: Path, column: str) -> np.ndarray:
    """How many rows, which are events, each user has: int64 `(users,)`, in the order in which users first occur."""
    chunks = [chunk for part in _read_parts(path, column, of_events=True) for chunk in _users(part, column).chunks]
    kinds = sorted({str(chunk.type) for chunk in chunks})
    if len(kinds) > 1:
        raise ValueError(
            f"column {column!r} of {path} holds {' in one file and '.join(kinds)} in another; all files of a folder "
            "have the same: convert it"
        )
    return pc.value_counts(pa.chunked_array(chunks)).field("counts").to_numpy(zero_copy_only=False).astype(np.int64)


def _read_parts(path: Path, column: str | None, *, of_events: bool = False) -> list[_Part]:
    """A file or, as data sets are written, a folder of them; of events the column is kept as it is."""
    files = [path]
    if path.is_dir():  # without what begins with a dot or an underscore, such as vocabularies beside
        files = sorted(
            file
            for file in path.rglob("*.parquet")
            if file.is_file() and not any(part[0] in "._" for part in file.relative_to(path).parts)
        )
        if not files:
            raise ValueError(f"{path} is a folder without parquet files: name a file of lengths")
    parts = [_read(file, column, of_events) for file in files]
    if not any(len(values) for part in parts for values in part.columns.values()):
        raise ValueError(f"{path} has no row; balancing needs some: check the file")
    return parts


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
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline().strip()
        if not first:
            raise ValueError(f"{path} is empty, or begins with an empty line; it holds lengths: check the file")
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


def _read_table(path: Path, file_format: Any, column: str | None, of_events: bool, named: bool = True) -> _Part:
    """A file by pyarrow; of lists only the lengths are kept, batch by batch."""
    table = pyarrow.dataset.dataset(path, format=file_format)
    wanted = _wanted(path, table.schema.names, column)
    lists = [name for name in wanted if _is_list(table.schema.field(name).type) and not of_events]
    fields = {name: pc.field(name) for name in wanted}
    read = table.to_table(fields | {name: pc.list_value_length(fields[name]).cast(pa.int64()) for name in lists})
    return _Part(path, {name: read[name] for name in wanted}, may_identify=named and not lists)


def _read_csv(path: Path, first: str, column: str | None, of_events: bool) -> _Part:
    """Commas, semicolons or tabs; without a header where the first line has nothing but numbers."""
    delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    unnamed = all(_is_number(name) for name in names)
    if unnamed:
        names = _HISTOGRAM if len(names) == len(_HISTOGRAM) else [f"column {i + 1}" for i in range(len(names))]
    wanted = _wanted(path, names, column)
    # Users as they are written: 7 and 007 are two of them.
    users = dict.fromkeys(wanted, pa.string()) if of_events else None
    file_format = pyarrow.dataset.CsvFileFormat(
        pyarrow.csv.ParseOptions(delimiter=delimiter),
        read_options=pyarrow.csv.ReadOptions(column_names=names, skip_rows=0 if unnamed else 1),
        convert_options=pyarrow.csv.ConvertOptions(column_types=users),
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
    if all(names.count(name) == 1 for name in _HISTOGRAM):
        return _HISTOGRAM
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


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _counts(part: _Part, name: str) -> np.ndarray:
    """A column as int64; ValueError for anything but integers of at least 0, with the first row that has it."""
    column, what = part.columns[name], f"column {name!r} of {part.path}"
    kind = name if list(part.columns) == _HISTOGRAM else "length"
    if len(column) == 0:
        return np.empty(0, np.int64)
    if pa.types.is_string(column.type):
        # Text may be written like numbers, as "12" in parquet or 1_000 in csv.
        values = column.to_pylist()
        row = next((row for row, value in enumerate(values) if value is not None and not _is_number(value)), 0)
        shown = repr(str(values[row])[:40])
        raise ValueError(
            f"{what} holds text, such as {shown} in row {row + 1}; a {kind} is an integer of at least 0: correct it, "
            "convert the column, or choose another"
        )
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(f"{what} holds {column.type}; lengths are integers: choose another, or convert it")
    if column.null_count:
        row = pc.index(column.is_null(), pa.scalar(True)).as_py()
        raise ValueError(f"{what} has no value in row {row + 1}; every row has a length: leave such rows out")
    values = column.to_numpy()
    whole = values.dtype.kind in "iu"
    wrong = values < 0 if whole else ~((values >= 0) & (np.trunc(values) == values))
    most = np.uint64(2**63 - 1) if whole else _LARGEST_FLOAT
    for is_wrong, rule in ((wrong, "is an integer of at least 0"), (values > most, f"is at most {int(most)}")):
        if is_wrong.any():
            row = int(is_wrong.argmax())
            value = str(values[row]).removesuffix(".0")
            raise ValueError(f"{what} holds {value} in row {row + 1}; a {kind} {rule}: correct it")
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
        raise ValueError(f"{what} has no value in row {row + 1}; every event has one of the users: leave such rows out")
    return column


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
