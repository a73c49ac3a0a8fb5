"""CSV members of raw archives, read as a stream of checked columns.

Input: a stream of a CSV file with a header line, and the wanted columns. Output: columns, batch by batch. Arrow parses
whole blocks at once and says which row is wrong.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from commons.datasets.raw_archive import LONGEST_LINE, bounded_line, overlong_line, shortened

_BLOCK = 8 << 20
_ARROW_TYPES = {"int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(), "text": pa.string()}
# What Arrow says of a row, with its number, the header line left out.
_BAD_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): .*?invalid value '(.*)'", re.DOTALL)
_BAD_ROW = re.compile(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)
_REMEDY = "mend it or download the archive again"


@dataclass(frozen=True)
class CsvColumn:
    """A column.

    Attributes:
        name: in the header.
        dtype: of the result: "int32", "int64", "float32" where numbers may have a fraction, or "text".
        low: smallest number.
        high: largest number.
        rule: what the column holds, for errors: "seconds since 1970".

    """

    name: str
    dtype: str
    low: float = 0
    high: float = 0
    rule: str = "a text"

    def first_outside(self, values: np.ndarray) -> int | None:
        """The first number out of range, NaN included; None if there is none."""
        if self.dtype == "text" or not len(values) or (values.min() >= self.low and values.max() <= self.high):
            return None
        return int((~((values >= self.low) & (values <= self.high))).argmax())


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
    where: str, stream: io.RawIOBase | io.BytesIO, layout: CsvLayout, on_bytes: Callable[[int], object]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the columns of a member.

    Args:
        where: archive and member, for errors.
        stream: the member.
        layout: of the member.
        on_bytes: called with the number of bytes read.

    Yields:
        The line number of the batch's first row, and the columns by name: arrays `(num_rows,)`, or lists of text.

    Raises:
        ValueError: a missing column, or a malformed or overlong line, which is named by its number.

    """
    lines = _Lines(stream, on_bytes)
    header = _fields(lines.first(f"{where} line 1"), f"{where} line 1")
    missing = [column.name for column in layout.columns if header.count(column.name) != 1]
    if missing:
        raise ValueError(
            f"{where} has columns {', '.join(header) or 'none'}, but not {', '.join(missing)}, or not once; it is to "
            f"be {layout.title}: give the archive as published"
        )
    line = 2
    try:
        reader = pcsv.open_csv(
            lines,
            # With threads the errors would not say which row.
            read_options=pcsv.ReadOptions(block_size=_BLOCK, column_names=header, use_threads=False),
            parse_options=pcsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pcsv.ConvertOptions(
                include_columns=[column.name for column in layout.columns],
                column_types={column.name: _ARROW_TYPES[column.dtype] for column in layout.columns},
                null_values=[],
                check_utf8=any(column.dtype == "text" for column in layout.columns),
            ),
        )
        for batch in reader:
            columns = {}
            for column in layout.columns:
                values = batch.column(column.name)
                columns[column.name] = values.to_pylist() if column.dtype == "text" else values.to_numpy()
                index = column.first_outside(columns[column.name])
                if index is not None:
                    raise _bad_value(where, line + index, column, str(columns[column.name][index]))
            yield line, columns
            line += batch.num_rows
    except pa.ArrowInvalid as error:
        nothing_read = line == 2 and "Empty CSV" in str(error)
        if not (nothing_read and (layout.may_be_empty or lines.is_overlong)):
            raise _described(str(error), where, layout, header, nothing_read) from error
    if lines.is_overlong:
        raise overlong_line(f"{where} line {line}")


def _described(problem: str, where: str, layout: CsvLayout, header: list[str], is_empty: bool) -> ValueError:
    """The error for what Arrow says."""
    if is_empty:
        return ValueError(
            f"{where} has no line below its header; it is to be {layout.title}: download the archive again"
        )
    if found := _BAD_ROW.match(problem):
        row, expected, got, text = found.groups()
        return ValueError(
            f"{where} line {int(row) + 1} is {shortened(text)}, {got} fields; the header has {expected}: {_REMEDY}"
        )
    if found := _BAD_VALUE.match(problem):
        place, row, text = found.groups()
        column = next(each for each in layout.columns if each.name == header[int(place)])
        return _bad_value(where, int(row) + 1, column, text)
    first = problem.splitlines()[0]
    return ValueError(f"{where} cannot be read ({first}); it is to be {layout.title}: download the archive again")


def _bad_value(where: str, line: int, column: CsvColumn, text: str) -> ValueError:
    return ValueError(
        f"{where} line {line} has {column.name} {shortened(text)}; {column.name} is {column.rule}: {_REMEDY}"
    )


def _fields(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error as error:
        raise ValueError(
            f"{where} is no line of a CSV file ({error}); fields are separated by commas and lines by line feeds: "
            "download the archive again"
        ) from error


class _Lines(io.RawIOBase):
    """A stream whose header line is taken off first, whose bytes are counted, and which ends at an overlong line."""

    def __init__(self, stream: io.RawIOBase | io.BytesIO, on_bytes: Callable[[int], object]) -> None:
        super().__init__()
        self._buffered = io.BufferedReader(stream, _BLOCK)
        self._on_bytes = on_bytes
        self._tail = b""  # of a line whose end has not been read
        self.is_overlong = False

    def first(self, where: str) -> str:
        line = bounded_line(self._buffered, where)
        self._on_bytes(len(line))
        return line.decode("utf-8-sig", errors="replace")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Whole lines, as many as fit."""
        if self.is_overlong:
            return b""
        new = self._buffered.read(size - len(self._tail))
        self._on_bytes(len(new))
        block = self._tail + new
        end = block.rfind(b"\n") + 1 if new else 0
        start = 0
        while len(block) - start > LONGEST_LINE:
            found = block.rfind(b"\n", start, start + LONGEST_LINE)
            if found < 0:
                self.is_overlong = True
                return block[:start]
            start = found + 1
        self._tail = block[end:] if end else b""
        return block[:end] if end else block
