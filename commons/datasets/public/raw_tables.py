"""Text files of raw data sets, CSV or lines of fields, read by DuckDB and checked value by value.

Where something does not fit, the file is read again line by line, to name the line, its value and the rule.
"""

from __future__ import annotations

import codecs
import csv
import glob
import itertools
import re
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from commons.datasets.public.raw_files import RawFiles
from commons.datasets.sequences.event_store import EventStore, sql_text

_LONGEST_LINE = 1 << 20
_LONGEST_SHOWN = 80
_MOST_IN_MEMORY = 256 << 20
_REMEDY = "mend it or download the archive again"


class Column(NamedTuple):
    """A column of a text file."""

    name: str  # in the header, if there is one
    type: str = "VARCHAR"  # in SQL
    pattern: str | None = None  # a regular expression that a value matches as a whole; None for any text
    rule: str = "a text"  # the same in words, for errors: "seconds since 1970"

    def fits(self, value: str) -> bool:
        """Whether a text is a value of the column."""
        return self.pattern is None or re.fullmatch(self.pattern, value) is not None

    def sql(self, value: str) -> str:
        """The column, of SQL of its text; DuckDB's error for another text."""
        if self.pattern is None:
            return value
        fits = f"regexp_full_match({value}, {sql_text(self.pattern)})"
        return f"CASE WHEN {fits} THEN {value}::{self.type} ELSE error('no {self.name}') END"


# Type, pattern and rule of ids.
ID = ("INTEGER", r"\d{1,8}", "a number of 0 to 99,999,999")


@dataclass(frozen=True)
class TextLayout:
    """A CSV file with a header, or lines in Latin-1 whose fields are parted otherwise, without one."""

    title: str  # what it is, for errors; of a file without a header, what a line is
    columns: tuple[Column, ...]  # those that are read, others of a CSV file are passed over; all those of a line
    separator: str = ","
    may_be_empty: bool = False  # there need be no line, or none below the header

    @property
    def has_header(self) -> bool:
        """Whether it is a CSV file."""
        return self.separator == ","

    @property
    def encoding(self) -> str:
        """Of the text."""
        return "utf-8" if self.has_header else "latin-1"

    def split(self, line: bytes) -> list[str]:
        """The fields of a line; csv.Error where it has none."""
        text = line.decode(self.encoding, errors="replace").rstrip("\r\n")
        return next(csv.reader([text], strict=True), []) if self.has_header else text.split(self.separator)


class Listed(NamedTuple):
    """What users, or items, there are."""

    values: pa.Array | pa.ChunkedArray  # all of them
    name: str  # their column in the files of events, for errors
    listing: str  # the file that has them


class RawTables:
    """The text files of a data set, read into a store."""

    def __init__(self, files: RawFiles, store: EventStore) -> None:
        self._files, self._store = files, store

    def add_events(
        self, names: Sequence[str], layout: TextLayout, event: Mapping[str, str], listed: Mapping[str, Listed]
    ) -> None:
        """Put the events of files into the store.

        Args:
            names: of the files with events, in the order in which ties of time are broken.
            layout: of these files.
            event: SQL of the columns of the store, of those of the layout.
            listed: by column of the store, what values there may be.

        Raises:
            ValueError: a malformed line, or a value that is not listed, named by file and line.

        """
        first_rows = []
        for name in names:
            first_rows.append(self._store.num_rows)
            with _Reading(self._files, name, layout) as relation:
                selected = ", ".join(f"{sql} AS {column}" for column, sql in event.items())
                self._store.add(f"SELECT {selected} FROM {relation}")  # noqa: S608
            if self._store.num_rows == first_rows[-1] and not layout.may_be_empty:
                raise _no_lines(self._files.where(name), layout)
        for column, known in listed.items():
            found = self._store.query(
                f"SELECT rowid AS number, {column} AS value FROM events ANTI JOIN known ON {column} = known.value "  # noqa: S608
                "ORDER BY rowid LIMIT 1",
                known=pa.table({"value": known.values}),
            )
            if found.num_rows:
                row = found["number"][0].as_py()
                index = bisect(first_rows, row) - 1
                line = _line_of(self._files.paths[names[index]], row - first_rows[index], layout)
                raise ValueError(
                    f"{self._files.where(names[index])} line {line} has {known.name} {found['value'][0]}, which "
                    f"{known.listing} does not list; both files come from one archive: download it again"
                )

    def listing(self, name: str, layout: TextLayout) -> pa.Table:
        """All lines of a file that has one for each user or item, sorted by the first column of the layout, their ids.

        Raises:
            ValueError: a malformed line, a file of more than 256 MiB, or an id that stands twice.

        """
        path, key = self._files.paths[name], layout.columns[0].name
        size = path.stat().st_size
        if size > _MOST_IN_MEMORY:
            raise ValueError(
                f"{self._files.where(name)} has {size:,} bytes; it is held in memory, and may have "
                f"{_MOST_IN_MEMORY:,}: give the archive as published"
            )
        with _Reading(self._files, name, layout) as relation:
            table = self._store.query(f"FROM {relation}")
        if not table.num_rows:
            raise _no_lines(self._files.where(name), layout)
        ids = table[key].to_numpy()
        order = np.argsort(ids, kind="stable")
        again = order[1:][ids[order[1:]] == ids[order[:-1]]]
        if len(again):
            row = int(again.min())
            raise ValueError(
                f"{self._files.where(name)} line {_line_of(path, row, layout)} has {key} {ids[row]} again; every {key} "
                "has one line: remove the line"
            )
        return table.take(pa.array(order)).combine_chunks()


class _Reading:
    """A context with the SQL of a file's rows; errors of what is done with them name the line."""

    def __init__(self, files: RawFiles, name: str, layout: TextLayout) -> None:
        self._where, self._path, self._layout = files.where(name), files.paths[name], layout

    def __enter__(self) -> str:
        layout = self._layout
        names = self._header() if layout.has_header else [column.name for column in layout.columns]
        options = {
            "columns": "{" + ", ".join(f"'c{place}': 'VARCHAR'" for place in range(len(names))) + "}",
            "delim": sql_text(layout.separator),
            "header": layout.has_header,
            "quote, escape": "'\"'" if layout.has_header else "''",
            "encoding": sql_text(layout.encoding),
            "max_line_size": _LONGEST_LINE,
            "auto_detect": False,
        }
        stated = ", ".join(f"{key} = {value}" for keys, value in options.items() for key in keys.split(", "))
        texts = [f"coalesce(c{names.index(column.name)}, '')" for column in layout.columns]
        values = [f"{column.sql(text)} AS {column.name}" for column, text in zip(layout.columns, texts)]
        return f"(SELECT {', '.join(values)} FROM read_csv({sql_text(glob.escape(str(self._path)))}, {stated}))"  # noqa: S608

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, duckdb.Error) or (isinstance(error, OSError) and error.errno is None):
            said = str(error).splitlines()[0]
            raise self._first_wrong() or ValueError(
                f"{self._where} cannot be read ({said}); it is to be {self._layout.title}: download the archive again"
            ) from error

    def _header(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                line = file.readline(_LONGEST_LINE + 1)
            if len(line) > _LONGEST_LINE:
                raise self._overlong(1)
            header = self._layout.split(line.removeprefix(codecs.BOM_UTF8))
        except csv.Error as error:
            raise ValueError(
                f"{self._where} line 1 is no line of a CSV file ({error}); fields are separated by commas and lines by "
                "line feeds: download the archive again"
            ) from error
        missing = [column.name for column in self._layout.columns if header.count(column.name) != 1]
        if missing:
            raise ValueError(
                f"{self._where} has columns {', '.join(header) or 'none'}, but not {', '.join(missing)}, or not once; "
                f"it is to be {self._layout.title}: give the archive as published"
            )
        return header

    def _first_wrong(self) -> ValueError | None:
        """The error of the first line that does not fit."""
        layout = self._layout
        names = self._header() if layout.has_header else [column.name for column in layout.columns]
        with self._path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
                if len(line) > _LONGEST_LINE:
                    return self._overlong(number)
                if not line.strip() or (number == 1 and layout.has_header):
                    continue
                try:
                    fields = layout.split(line)
                except csv.Error:
                    fields = []
                wrong = None
                if len(fields) == len(names):
                    values = dict(zip(names, fields))
                    wrong = next((each for each in layout.columns if not each.fits(values[each.name])), None)
                    if wrong is None:
                        continue
                what = f"{self._where} line {number}"
                text = _shortened(line.decode(layout.encoding, errors="replace").rstrip("\r\n"))
                if not layout.has_header:
                    return ValueError(f"{what} is {text}; a line is {layout.title}: {_REMEDY}")
                if wrong is None:
                    return ValueError(f"{what} is {text}, {len(fields)} fields; the header has {len(names)}: {_REMEDY}")
                value = _shortened(values[wrong.name])
                return ValueError(f"{what} has {wrong.name} {value}; {wrong.name} is {wrong.rule}: {_REMEDY}")
        return None

    def _overlong(self, line: int) -> ValueError:
        return ValueError(
            f"{self._where} line {line} has more than {_LONGEST_LINE:,} bytes, which is the most that a line may have: "
            f"{_REMEDY}"
        )


def _line_of(path: Path, row: int, layout: TextLayout) -> int:
    """The number of the line of a row; empty lines are no rows."""
    with path.open("rb") as file:
        lines = (number for number, line in enumerate(file, 1) if line.strip())
        return next(itertools.islice(lines, row + layout.has_header, None))


def _no_lines(where: str, layout: TextLayout) -> ValueError:
    if layout.has_header:
        return ValueError(
            f"{where} has no line below its header; it is to be {layout.title}: download the archive again"
        )
    return ValueError(f"{where} is empty; its lines are {layout.title}: download the archive again")


def _shortened(text: str) -> str:
    """The beginning of a text from an archive, quoted."""
    return repr(text) if len(text) <= _LONGEST_SHOWN else repr(text[:_LONGEST_SHOWN]) + " …"
