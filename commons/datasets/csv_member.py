"""CSV members of raw archives, read as a stream of checked columns.

Input: a stream of a CSV file with a header line, and the wanted columns. Output: numpy columns, batch by batch. Arrow
parses whole blocks at once; only when a block is wrong is the file read again, line by line, to name the line.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from commons.datasets.raw_archive import RawArchive, bounded_line

_BLOCK = 8 << 20
_NUMBER = {True: re.compile(r"\d{1,18}"), False: re.compile(r"\d{1,9}(\.\d{1,9})?")}
_ARROW_TYPES = {"int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32()}
_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class CsvColumn:
    """A column of numbers.

    Attributes:
        name: in the header.
        dtype: of the result: "int32", "int64", or "float32" where numbers may have a fraction.
        low: smallest number.
        high: largest number.
        rule: what the column holds, for errors: "seconds since 1970".

    """

    name: str
    dtype: str
    low: float
    high: float
    rule: str

    def fits(self, text: str) -> bool:
        """Whether a field holds such a number."""
        return bool(_NUMBER[self.dtype != "float32"].fullmatch(text)) and self.low <= float(text) <= self.high


@dataclass(frozen=True)
class CsvLayout:
    """A CSV file.

    Attributes:
        title: what it is, for errors.
        columns: those that are read; others are passed over.
        may_be_empty: there need be nothing below the header.

    """

    title: str
    columns: tuple[CsvColumn, ...]
    may_be_empty: bool = False


def read_csv_member(
    archive: RawArchive, name: str, stream: io.RawIOBase, layout: CsvLayout, on_bytes: Callable[[int], object]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Read the columns of a member.

    Args:
        archive: that holds the member; a malformed line is looked for in a fresh stream of it.
        name: of the member.
        stream: the member.
        layout: of the member.
        on_bytes: called with the number of bytes read.

    Yields:
        The line number of the batch's first row, and the columns by name, each `(num_rows,)`.

    Raises:
        ValueError: a missing column, or a malformed or overlong line, which is named by its number.

    """
    where = f"{archive.path}: {name}"
    counting = _CountingStream(stream, on_bytes)
    header = _fields(counting.first_line(f"{where} line 1"), f"{where} line 1")
    _check_header(header, where, layout.title, [column.name for column in layout.columns])
    line, problem = 2, ""
    try:
        reader = pcsv.open_csv(
            counting,
            read_options=pcsv.ReadOptions(block_size=_BLOCK, column_names=header),
            parse_options=pcsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pcsv.ConvertOptions(
                include_columns=[column.name for column in layout.columns],
                column_types={column.name: _ARROW_TYPES[column.dtype] for column in layout.columns},
                null_values=[],
                check_utf8=False,
            ),
        )
        for batch in reader:
            columns = {column.name: batch.column(column.name).to_numpy() for column in layout.columns}
            if not all(_in_range(columns[column.name], column) for column in layout.columns):
                problem = "a number is out of range"
                break
            yield line, columns
            line += batch.num_rows
    except pa.ArrowInvalid as error:
        problem = str(error).splitlines()[0]
        if counting.is_empty and layout.may_be_empty:
            return
    if problem:
        with contextlib.closing(archive.streams([name])) as streams:
            _raise_for_line(next(streams)[1], where, layout, problem)


def _in_range(values: np.ndarray, column: CsvColumn) -> bool:
    # NaN is no number within bounds.
    return not len(values) or bool(values.min() >= column.low and values.max() <= column.high)


def _check_header(header: list[str], where: str, title: str, names: Sequence[str]) -> None:
    missing = [name for name in names if header.count(name) != 1]
    if missing:
        raise ValueError(
            f"{where} has columns {', '.join(header) or 'none'}, but not {', '.join(missing)}, or not once; it is to "
            f"be {title}: give the archive as published"
        )


def _raise_for_line(stream: io.RawIOBase, where: str, layout: CsvLayout, problem: str) -> NoReturn:
    """Raise ValueError for the first malformed line."""
    header: list[str] = []
    number = 0
    for number, line in enumerate(_lines(io.BufferedReader(stream, _BLOCK), where), start=1):
        fields = _fields(line, f"{where} line {number}")
        if number == 1:
            header = fields
        elif len(fields) != len(header):
            raise ValueError(
                f"{where} line {number} is {_shorten(','.join(fields))}, {len(fields)} fields; the header has "
                f"{len(header)}: mend it or download the archive again"
            )
        else:
            for column in layout.columns:
                text = fields[header.index(column.name)]
                if not column.fits(text):
                    raise ValueError(
                        f"{where} line {number} has {column.name} {_shorten(text)}; {column.name} is {column.rule}: "
                        "mend it or download the archive again"
                    )
    if number < 2:
        raise ValueError(
            f"{where} has no line below its header; it is to be {layout.title}: download the archive again"
        )
    raise ValueError(f"{where} cannot be read ({problem}); it is to be {layout.title}: download the archive again")


def _lines(reader: Any, where: str) -> Iterator[str]:
    """Lines of a buffered reader."""
    for number in itertools.count(1):
        line = bounded_line(reader, f"{where} line {number}")
        if not line:
            return
        yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace")


def _fields(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error as error:
        raise _no_csv(where, error) from error


def _no_csv(where: str, error: csv.Error) -> ValueError:
    return ValueError(
        f"{where} is no line of a CSV file ({error}); fields are separated by commas and lines by line feeds: download "
        "the archive again"
    )


def read_text_columns(data: bytes, names: Sequence[str], where: str, title: str) -> dict[str, list[str]]:
    """Columns of a small CSV file as text.

    Args:
        data: the file.
        names: of the columns; others are passed over.
        where: archive and member, for errors.
        title: what the file is, for errors.

    Raises:
        ValueError: a missing column, a line with another number of fields than the header, or one of more than 64 KiB.

    """
    rows = csv.reader(_lines(io.BytesIO(data), where))
    columns: dict[str, list[str]] = {name: [] for name in names}
    try:
        _fill_columns(columns, rows, where, title)
    except csv.Error as error:
        raise _no_csv(f"{where} line {rows.line_num}", error) from error
    return columns


def _fill_columns(columns: dict[str, list[str]], rows: Any, where: str, title: str) -> None:
    header: list[str] = next(rows, [])
    _check_header(header, where, title, list(columns))
    # One string for all rows that hold it.
    known: dict[str, dict[str, str]] = {name: {} for name in columns}
    places = [(header.index(name), values, known[name]) for name, values in columns.items()]
    for fields in rows:
        if len(fields) != len(header):
            raise ValueError(
                f"{where} line {rows.line_num} is {_shorten(','.join(fields))}, {len(fields)} fields; the header has "
                f"{len(header)}: mend it or download the archive again"
            )
        for place, values, texts in places:
            values.append(texts.setdefault(fields[place], fields[place]))


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= _LONGEST_SHOWN else repr(text[:_LONGEST_SHOWN]) + " …"


class _CountingStream(io.RawIOBase):
    """A stream whose header line is taken off first, and whose bytes are counted."""

    def __init__(self, stream: io.RawIOBase, on_bytes: Callable[[int], object]) -> None:
        super().__init__()
        self._buffered = io.BufferedReader(stream, _BLOCK)
        self._on_bytes = on_bytes
        self.is_empty = True  # below the header

    def first_line(self, where: str) -> str:
        line = bounded_line(self._buffered, where)
        self._on_bytes(len(line))
        return line.decode("utf-8-sig", errors="replace")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._buffered.readinto(buffer)
        self.is_empty = self.is_empty and count == 0
        self._on_bytes(count)
        return count
