"""Lengths of rows for `evenrank simulate`: from a file, a histogram, or a distribution that is named."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import torch

from commons.datasets.random_distribution import RandomDistribution

# Columns that make a file a histogram.
_HISTOGRAM = ("length", "count")
# Rows that are drawn from a distribution for its summary.
_SUMMARY_ROWS = 200_000
_DISTRIBUTIONS = "zipf:EXPONENT:LONGEST, lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:LONGEST"


class Lengths(ABC):
    """Where lengths come from.

    Attributes:
        name: as the user named it.
    """

    name: str

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Rows that there are; None for as many as one asks for."""

    @abstractmethod
    def take(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """int64 `(count,)`, lengths in the order in which they are loaded; at most `num_rows`, none of them twice."""

    @abstractmethod
    def summary(self, rng: np.random.Generator) -> np.ndarray:
        """int64 `(n,)`, lengths to describe the whole by."""


@dataclass(frozen=True, eq=False)
class ListedLengths(Lengths):
    """One length per row.

    Attributes:
        name: of the file.
        values: int64 `(num_rows,)`.
        in_order: whether rows are loaded in the order of the file; in a random one otherwise.
    """

    name: str
    values: np.ndarray
    in_order: bool = False

    @property
    def num_rows(self) -> int | None:
        """See Lengths."""
        return len(self.values)

    def take(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See Lengths."""
        if self.in_order:
            return self.values[:count]
        return self.values[rng.permutation(len(self.values))[:count]]

    def summary(self, rng: np.random.Generator) -> np.ndarray:
        """See Lengths."""
        return self.values


@dataclass(frozen=True, eq=False)
class DrawnLengths(Lengths):
    """Lengths that are drawn, as many as are asked for.

    Attributes:
        name: as the user named it.
        draw: so many lengths, int64.
    """

    name: str
    draw: Callable[[int, np.random.Generator], np.ndarray]

    @property
    def num_rows(self) -> int | None:
        """See Lengths."""
        return None

    def take(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See Lengths."""
        return self.draw(count, rng)

    def summary(self, rng: np.random.Generator) -> np.ndarray:
        """See Lengths."""
        return self.draw(_SUMMARY_ROWS, rng)


def find_lengths(source: str, column: str | None, *, in_order: bool = False, with_replacement: bool = False) -> Lengths:
    """Lengths as a user names them.

    Args:
        source: a parquet, csv, npy or jsonl file, a folder of parquet files, or a distribution: "zipf:1.2:4096",
            "lognormal:130:1.4". A file with the columns `length` and `count` is a histogram.
        column: of lengths, or of lists whose lengths count; None if there is one column only.
        in_order: rows are loaded as they lie in the file.
        with_replacement: rows are drawn as often as needed, where the file is a sample of more data.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown distribution, file type or column, or lengths that are no counts.
    """
    path = Path(source)
    named = re.fullmatch(r"([A-Za-z_]+):([^/\\]*)", source)
    if named and not path.exists():
        if column is not None or in_order or with_replacement:
            raise ValueError(
                f"lengths is {source!r}, a distribution; --column, --in-order and --with-replacement belong to a file: "
                "leave them out"
            )
        return DrawnLengths(source, _distribution(source, named[1], named[2].split(":")))
    if not path.exists():
        known = "" if path.suffix else f"; distributions are {_DISTRIBUTIONS}"
        raise FileNotFoundError(f"{source} does not exist; --lengths names a file of lengths{known}")
    table = _read(path, column)
    if table.num_columns == len(_HISTOGRAM):
        if in_order or with_replacement:
            raise ValueError(
                f"{source} is a histogram, from which rows are drawn; --in-order and --with-replacement belong to a "
                "file with one length per row: leave them out"
            )
        return DrawnLengths(source, _histogram(source, table))
    values = _counts(source, table.column_names[0], table.column(0))
    if with_replacement and in_order:
        raise ValueError("with_replacement and in_order exclude each other: choose one")
    if with_replacement:
        return DrawnLengths(source, lambda count, rng: values[rng.integers(0, len(values), count)])
    return ListedLengths(source, values, in_order)


def _distribution(source: str, name: str, parts: list[str]) -> Callable[[int, np.random.Generator], np.ndarray]:
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [math.nan]
    if not all(math.isfinite(number) for number in numbers) or (name, len(numbers)) not in (
        ("zipf", 2),
        ("lognormal", 2),
        ("lognormal", 3),
    ):
        raise ValueError(f"lengths is {source!r}, neither a file nor a known distribution: give {_DISTRIBUTIONS}")
    longest = numbers[-1] if (name, len(numbers)) != ("lognormal", 2) else 2.0**31
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
        # RandomDistribution is told the mean and the standard deviation.
        mean = median * math.exp(sigma**2 / 2)
        deviation = mean * math.sqrt(math.expm1(sigma**2))
        law = RandomDistribution("lognormal", low=1, high=int(longest), mean=mean, std=deviation)

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        generator = torch.Generator().manual_seed(int(rng.integers(0, 2**62)))
        return law.sample(count, generator=generator).numpy()

    return draw


def _histogram(source: str, table: pa.Table) -> Callable[[int, np.random.Generator], np.ndarray]:
    lengths, counts = (_counts(source, name, table.column(name)) for name in _HISTOGRAM)
    bounds = np.cumsum(counts)
    if bounds[-1] <= 0:
        raise ValueError(f"{source} has no row; all counts are 0: check the file")
    return lambda count, rng: lengths[np.searchsorted(bounds, rng.integers(0, bounds[-1], count), side="right")]


def _read(path: Path, column: str | None) -> pa.Table:
    """The column of lengths, or those of a histogram.

    Raises:
        ValueError: a type of file that is not read, a file that is none of its type, or no such column.
    """
    readers: dict[str, Callable[[Path, str | None], pa.Table]] = {
        ".parquet": _read_parquet,
        ".csv": _read_csv,
        ".npy": _read_npy,
        ".jsonl": _read_jsonl,
    }
    # A data set that was written as shards is a folder with such a name, too.
    reader = _read_parquet if path.is_dir() else readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} is none of {', '.join(readers)} and no folder of parquet files: convert it")
    try:
        return reader(path, column)
    except (pa.ArrowException, UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({str(error) or type(error).__name__}): check the file") from error


def _wanted(path: Path, names: list[str], column: str | None) -> list[str]:
    """The columns to read: the one named, those of a histogram, or the only one."""
    if column is not None:
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(names)}: name one of these")
        return [column]
    if all(name in names for name in _HISTOGRAM):
        return list(_HISTOGRAM)
    if len(names) != 1:
        raise ValueError(f"{path} has the columns {', '.join(names)}; lengths are one of them: name it by --column")
    return names


def _read_parquet(path: Path, column: str | None) -> pa.Table:
    files = [path]
    if path.is_dir():  # what begins with a dot or an underscore, such as vocabularies beside shards, is no shard
        files = sorted(
            file
            for file in path.rglob("*.parquet")
            if file.is_file() and not any(part[0] in "._" for part in file.relative_to(path).parts)
        )
        if not files:
            raise ValueError(f"{path} is a folder without parquet files: name a file of lengths")
    parts = []
    for file in files:
        with pq.ParquetFile(file) as parquet:
            wanted = _wanted(file, parquet.schema_arrow.names, column)
            # A batch at a time: of lists only the lengths are kept.
            parts += [
                pa.Table.from_arrays([_sizes(values) for values in batch.columns], names=wanted)
                for batch in parquet.iter_batches(columns=wanted)
            ]
    if not parts:
        raise ValueError(f"{path} has no row; balancing needs some: check the file")
    return pa.concat_tables(parts)


def _read_csv(path: Path, column: str | None) -> pa.Table:
    with path.open(encoding="utf-8-sig") as file:
        first = file.readline().strip().split(",")
    if not any(first):
        raise ValueError(f"{path} is empty, or begins with an empty line; it holds lengths: check the file")
    names = [name.strip().strip('"') for name in first]
    unnamed = all(_is_number(name) for name in names)
    if unnamed:
        names = list(_HISTOGRAM) if len(names) == len(_HISTOGRAM) else [f"column {i}" for i in range(len(names))]
    wanted = _wanted(path, names, column)
    return pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=names, skip_rows=0 if unnamed else 1),
        convert_options=pyarrow.csv.ConvertOptions(include_columns=wanted),
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_npy(path: Path, column: str | None) -> pa.Table:
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
    return pa.table({"lengths": pa.array(values, from_pandas=False)})


def _read_jsonl(path: Path, column: str | None) -> pa.Table:
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        raise ValueError(f"{path} is empty; it holds lengths: check the file")
    try:
        row = json.loads(first)
    except ValueError:
        raise ValueError(f"{path} does not begin with a line of JSON: check the file") from None
    if isinstance(row, (int, float)) and not isinstance(row, bool):
        return _read_csv(path, column)  # a number per line
    if not isinstance(row, dict):
        raise ValueError(
            f"{path} begins with {first.strip()[:40]!r}; a line is a length, or an object with it as a field: "
            'write {"length": 12}'
        )
    wanted = _wanted(path, list(row), column)
    kinds = {name: pa.list_(pa.null()) if isinstance(row[name], list) else pa.float64() for name in wanted}
    if any(isinstance(row[name], list) for name in wanted):  # what the lists hold is for the reader to find out
        table = pyarrow.json.read_json(path).select(wanted)
        return pa.table({name: pa.chunked_array([_sizes(c) for c in table[name].chunks]) for name in wanted})
    options = pyarrow.json.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior="ignore")
    return pyarrow.json.read_json(path, parse_options=options).select(wanted)


def _sizes(values: Any) -> Any:
    """Lengths of lists; other values as they are."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return pc.cast(pc.list_value_length(values), pa.int64())
    return values


def _counts(source: str, name: str, column: Any) -> np.ndarray:
    """A column as int64.

    Raises:
        ValueError: no rows, or anything but integers of at least 0, with the first row that has it.
    """
    if len(column) == 0:
        raise ValueError(f"{source} has no row; balancing needs some: check the file")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(f"column {name!r} of {source} holds {column.type}; lengths are integers: choose another")
    if column.null_count:
        row = pc.index(column.is_null(), pa.scalar(True))
        raise ValueError(
            f"column {name!r} of {source} has no value in row {row}; every row has a length: leave such rows out"
        )
    values = column.to_numpy()
    wrong = values < 0 if values.dtype.kind in "iu" else ~((values >= 0) & (values < 2.0**53) & (values % 1 == 0))
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"column {name!r} of {source} holds {values[row]} in row {row}; a length is an integer of at least 0: "
            "correct it"
        )
    if values.dtype == np.uint64 and values.max() >= 2**63:
        raise ValueError(f"column {name!r} of {source} holds {values.max()}; lengths are below 2**63: correct it")
    return np.ascontiguousarray(values, dtype=np.int64)
