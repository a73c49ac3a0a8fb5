"""Text files of raw data sets, read by Arrow as a stream of checked batches: CSV, or lines that match a pattern.

The first line that does not fit is named by its number, with its value and the rule. (DuckDB's own CSV reader would
take "1.5", "0x1F" and "1_000" for integers, and pass over empty lines.)
"""

from __future__ import annotations

import csv
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from commons.console import progress_bar
from commons.datasets.public.raw_files import RawFiles
from commons.datasets.sequences.event_store import EventStore

# A line lies within a block and the next one, so it has at least so many bytes; longer ones are refused by Arrow.
_BLOCK = _LONGEST_LINE = 1 << 20
_LONGEST_SHOWN = 80
_MOST_IN_MEMORY = 256 << 20
# What Arrow says of a row, with its number, the header line left out.
_BAD_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): .*?invalid value '(.*)'", re.DOTALL)
_BAD_ROW = re.compile(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)
_REMEDY = "mend it or download the archive again"

_Batches = Iterator[pa.RecordBatch]
_OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class Column:
    """A column of a CSV file: texts, or numbers within a range."""

    name: str  # in the header
    type: pa.DataType  # of the result
    low: float = 0  # smallest number
    high: float = 0  # largest number
    rule: str = "a text"  # what the column holds, for errors: "seconds since 1970"
    step: float = 0  # numbers are multiples of it; 0 for any

    def first_wrong(self, column: pa.Array) -> int | None:
        """The row of the first number out of range, NaN included; None if there is none."""
        if pa.types.is_string(self.type) or not len(column):
            return None
        values = column.to_numpy()
        right = (values >= self.low) & (values <= self.high)
        if self.step:
            right &= np.fmod(values, self.step) == 0
        return None if right.all() else int(right.argmin())


@dataclass(frozen=True)
class CsvLayout:
    """A CSV file with a header line."""

    title: str  # what it is, for errors
    columns: tuple[Column, ...]  # those that are read; others are passed over
    may_be_empty: bool = False  # there need be nothing below the header
    first_line: ClassVar[int] = 2

    def read(self, files: RawFiles, name: str, on_bytes: _OnBytes) -> _Batches:
        """All rows, batch by batch.

        Raises:
            ValueError: a missing column, or a malformed or overlong line, which is named by its number.

        """
        where, line = files.where(name), 2
        with files.paths[name].open("rb") as file:
            header = self._header(file, where)
            convert = pcsv.ConvertOptions(
                include_columns=[column.name for column in self.columns],
                column_types={column.name: column.type for column in self.columns},
                null_values=[],
            )
            try:
                for line, batch in _read_arrow(file, where, 2, header, pcsv.ParseOptions(), convert, on_bytes):
                    for column in self.columns:
                        index = column.first_wrong(batch.column(column.name))
                        if index is not None:
                            value = batch.column(column.name).to_numpy()[index]
                            raise self._bad_value(where, line + index, column, value)
                    yield batch
                    line += batch.num_rows
            except pa.ArrowInvalid as error:
                raise self._described(str(error), where, header) from error
        if line == 2 and not self.may_be_empty:
            raise ValueError(
                f"{where} has no line below its header; it is to be {self.title}: download the archive again"
            )

    def _header(self, file: IO[bytes], where: str) -> list[str]:
        line = file.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise _overlong_line(where, 1)
        try:
            header = next(csv.reader([line.decode("utf-8-sig", errors="replace").rstrip("\r\n")]), [])
        except csv.Error as error:
            raise ValueError(
                f"{where} line 1 is no line of a CSV file ({error}); fields are separated by commas and lines by line "
                "feeds: download the archive again"
            ) from error
        missing = [column.name for column in self.columns if header.count(column.name) != 1]
        if missing:
            raise ValueError(
                f"{where} has columns {', '.join(header) or 'none'}, but not {', '.join(missing)}, or not once; it is "
                f"to be {self.title}: give the archive as published"
            )
        return header

    def _described(self, problem: str, where: str, header: list[str]) -> ValueError:
        """The error for what Arrow says."""
        if found := _BAD_ROW.match(problem):
            row, expected, got, text = found.groups()
            return ValueError(
                f"{where} line {int(row) + 1} is {_shortened(text)}, {got} fields; the header has {expected}: {_REMEDY}"
            )
        if found := _BAD_VALUE.match(problem):
            place, row, text = found.groups()
            column = next(each for each in self.columns if each.name == header[int(place)])
            return self._bad_value(where, int(row) + 1, column, text)
        return ValueError(
            f"{where} cannot be read ({problem.splitlines()[0]}); it is to be {self.title}: download the archive again"
        )

    def _bad_value(self, where: str, line: int, column: Column, value: object) -> ValueError:
        return ValueError(
            f"{where} line {line} has {column.name} {_shortened(str(value))}; {column.name} is {column.rule}: {_REMEDY}"
        )


@dataclass(frozen=True)
class LineLayout:
    """A file of lines without a header, in Latin-1."""

    title: str  # what a line is, for errors
    fields: Mapping[str, tuple[str, pa.DataType]]  # an RE2 pattern and a type for every field, by name
    separator: str = "::"  # between fields
    first_line: ClassVar[int] = 1

    def read(self, files: RawFiles, name: str, on_bytes: _OnBytes) -> _Batches:
        """All rows, batch by batch.

        Raises:
            ValueError: an empty file, or a malformed or overlong line, which is named by its number.

        """
        where, line = files.where(name), 1
        pattern = self.separator.join(f"(?P<{field}>{pattern})" for field, (pattern, _) in self.fields.items())
        # One column: no line has the delimiter.
        parse = pcsv.ParseOptions(delimiter="\x01", quote_char=False, double_quote=False)
        convert = pcsv.ConvertOptions(column_types={"line": pa.string()}, null_values=[])
        with files.paths[name].open("rb") as file:
            try:
                for line, batch in _read_arrow(file, where, 1, ["line"], parse, convert, on_bytes, "latin-1"):
                    found = pc.extract_regex(batch.column(0), f"^{pattern}$")
                    if found.null_count:
                        index = pc.index(found.is_null(), True).as_py()
                        raise self._bad_line(where, line + index, batch.column(0)[index].as_py())
                    yield pa.record_batch({key: found.field(key).cast(kind) for key, (_, kind) in self.fields.items()})
                    line += batch.num_rows
            except pa.ArrowInvalid as error:
                bad = _BAD_ROW.match(str(error))
                raise self._bad_line(where, int(bad[1]) if bad else line, bad[4] if bad else str(error)) from error
        if line == 1:
            raise ValueError(f"{where} is empty; its lines are {self.title}: download the archive again")

    def _bad_line(self, where: str, line: int, text: str) -> ValueError:
        return ValueError(f"{where} line {line} is {_shortened(text)}; a line is {self.title}: {_REMEDY}")


def _read_arrow(
    file: IO[bytes],
    where: str,
    line: int,
    names: list[str],
    parse: pcsv.ParseOptions,
    convert: pcsv.ConvertOptions,
    on_bytes: _OnBytes,
    encoding: str = "utf8",
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of the rest of a file with the number of their first line; the first one has the number `line`."""
    # With threads the errors would not say which row.
    read = pcsv.ReadOptions(block_size=_BLOCK, column_names=names, use_threads=False, encoding=encoding)
    parse.ignore_empty_lines = False
    done, is_first = 0, True
    try:
        for batch in pcsv.open_csv(file, read, parse, convert):
            is_first = False
            yield line, batch
            line += batch.num_rows
            on_bytes(file.tell() - done)
            done = file.tell()
    except pa.ArrowInvalid as error:
        if "straddling" in str(error):
            raise _overlong_line(where, line) from error
        if not (is_first and "Empty CSV" in str(error)):
            raise


@dataclass(frozen=True)
class Listed:
    """What users, or items, there are."""

    values: pa.Array | pa.ChunkedArray  # all of them
    name: str  # their column in the files of events, for errors
    listing: str  # the file that has them


def add_events(
    store: EventStore,
    files: RawFiles,
    names: Sequence[str],
    layout: CsvLayout | LineLayout,
    event_of: Callable[[pa.RecordBatch], Mapping[str, Any]],
    listed: Mapping[str, Listed],
    *,
    show_progress: bool,
) -> None:
    """Put the events of files into a store.

    Args:
        store: where to.
        files: of the data set.
        names: of the files with events, in the order in which ties of time are broken.
        layout: of these files.
        event_of: makes the columns of the store of those of a batch.
        listed: by column of the store, what values there may be.
        show_progress: show a progress bar on stderr, if that is a terminal.

    Raises:
        ValueError: a malformed line, or a value that is not listed, named by file and line.

    """
    first_rows = []
    size = sum(files.paths[name].stat().st_size for name in names)
    with progress_bar("read", size, "B", show=show_progress) as progress:
        for name in names:
            first_rows.append(store.num_rows)
            for batch in layout.read(files, name, progress.update):
                store.add(event_of(batch))
    for column, known in listed.items():
        if (found := store.first_missing(column, known.values)) is not None:
            row, value = found
            index = bisect(first_rows, row) - 1
            raise ValueError(
                f"{files.where(names[index])} line {row - first_rows[index] + layout.first_line} has {known.name} "
                f"{value}, which {known.listing} does not list; both files come from one archive: download it again"
            )


def read_listing(files: RawFiles, name: str, layout: CsvLayout | LineLayout, key: str) -> pa.Table:
    """All lines of a file that has one for each user or item, sorted by `key`, the column of their ids.

    Raises:
        ValueError: a file of more than 256 MiB, or an id that stands twice.

    """
    size = files.paths[name].stat().st_size
    if size > _MOST_IN_MEMORY:
        raise ValueError(
            f"{files.where(name)} has {size:,} bytes; it is held in memory, and may have {_MOST_IN_MEMORY:,}: give the "
            "archive as published"
        )
    table = pa.Table.from_batches(list(layout.read(files, name, lambda count: None))).combine_chunks()
    ids = table[key].to_numpy()
    order = np.argsort(ids, kind="stable")
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    if len(again):
        row = int(again.min())
        raise ValueError(
            f"{files.where(name)} line {row + layout.first_line} has {key} {ids[row]} again; every {key} has one line: "
            "remove the line"
        )
    return table.take(pa.array(order)).combine_chunks()


def _shortened(text: str) -> str:
    """The beginning of a text from an archive, quoted."""
    return repr(text) if len(text) <= _LONGEST_SHOWN else repr(text[:_LONGEST_SHOWN]) + " …"


def _overlong_line(where: str, line: int) -> ValueError:
    return ValueError(
        f"{where} line {line} has more than {_LONGEST_LINE:,} bytes, which is the most that a line may have: mend it "
        "or download the archive again"
    )
