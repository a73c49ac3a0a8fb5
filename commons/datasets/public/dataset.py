"""The description of a public data set, and the reader of its raw files: events, users and items.

DuckDB reads the text files, CSV or lines of fields, and checks every value. After an error the file is read again line
by line, so that the message has the line number, the value and the rule.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from commons.console import reason_of
from commons.datasets.public.raw_files import RawFiles, RawKind, open_raw_files
from commons.datasets.sequences.event_store import EventStore, sql_name, sql_text
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.writer import SequenceSource, preprocess

_LONGEST_LINE = 1 << 20
_LONGEST_SHOWN = 80
_MOST_IN_MEMORY = 256 << 20
_REMEDY = "repair it or download the archive again"


class Column(NamedTuple):
    """A column of a text file."""

    name: str  # name in the header, if there is one
    type: str = "VARCHAR"  # type in SQL
    pattern: str | None = None  # a regular expression that matches a whole value; None for any text
    rule: str = "a text"  # the pattern in words, for errors: "seconds since 1970"

    def fits(self, value: str) -> bool:
        """Whether a text is a value of the column."""
        return self.pattern is None or re.fullmatch(self.pattern, value, re.ASCII) is not None

    def sql(self, value: str) -> str:
        """SQL of the typed column, from the SQL of its text; DuckDB raises an error for an invalid text."""
        if self.pattern is None:
            return value
        choices = self.pattern.replace(r"\.", ".").split("|")
        fits = f"regexp_full_match({value}, {sql_text(self.pattern)})"
        if all(choice.replace(".", "").isalnum() for choice in choices):  # a list of plain values: IN is faster
            fits = f"{value} IN ({', '.join(map(sql_text, choices))})"
        return f"CASE WHEN {fits} THEN {value}::{self.type} ELSE error('no {self.name}') END"


# Type, pattern and rule of ids.
ID = ("INTEGER", r"\d{1,8}", "a number of 0 to 99,999,999")


@dataclass(frozen=True)
class TextLayout:
    """The layout of a CSV file with a header, or of a Latin-1 file with another separator and without a header."""

    title: str  # description for errors: of the file or, without a header, of a line
    columns: tuple[Column, ...]  # the columns of a CSV file that are read or, without a header, all columns
    separator: str = ","
    may_be_empty: bool = False  # whether a file may have no rows

    @property
    def has_header(self) -> bool:
        """Whether it is a CSV file."""
        return self.separator == ","

    @property
    def encoding(self) -> str:
        """Encoding of the text."""
        return "utf-8" if self.has_header else "latin-1"

    def split(self, line: bytes) -> list[str]:
        """The fields of a line; raises csv.Error for a malformed line."""
        text = line.decode(self.encoding, errors="replace").rstrip("\r\n")
        return next(csv.reader([text], strict=True), []) if self.has_header else text.split(self.separator)


class TextFile:
    """A reader of one text file of a data set, with errors that name the line."""

    def __init__(self, files: RawFiles, name: str, layout: TextLayout) -> None:
        self.path, self.where, self._layout = files.paths[name], files.where(name), layout
        self._names = self._header() if layout.has_header else [column.name for column in layout.columns]
        self.first_row = 0  # row of the store at which this file's events begin

    def add_to(self, store: EventStore, event: Mapping[str, str]) -> None:
        """Add the file's events to the store; `event` is SQL of the layout's columns, by column of the store.

        Raises:
            ValueError: a malformed line, named by file and line.
        """
        self.first_row = store.num_rows
        selected = ", ".join(f"{sql} AS {column}" for column, sql in event.items())
        with self._rows() as rows:
            store.add(f"SELECT {selected} FROM {rows}")  # noqa: S608
        self._require_lines(store.num_rows - self.first_row)

    def listed(self, store: EventStore) -> pa.Table:
        """All lines of a file with one line per user or item, sorted by id, the layout's first column.

        Raises:
            ValueError: a malformed line, a file of more than 256 MiB, or a repeated id.
        """
        size, key = self.path.stat().st_size, self._layout.columns[0].name
        if size > _MOST_IN_MEMORY:
            raise ValueError(
                f"{self.where} has {size:,} bytes; it is read into memory and may have at most {_MOST_IN_MEMORY:,}: "
                "give the archive as published"
            )
        with self._rows() as rows:
            table = store.query(f"FROM {rows}")
        self._require_lines(table.num_rows)
        ids = table[key].to_numpy()
        order = np.argsort(ids, kind="stable")
        again = order[1:][ids[order[1:]] == ids[order[:-1]]]
        if len(again):
            row = int(again.min())
            raise ValueError(
                f"{self.line_of(row)} has {key} {ids[row]} again; every {key} has one line: remove the line"
            )
        return table.take(pa.array(order)).combine_chunks()

    def line_of(self, row: int) -> str:
        """File and line number of a row, for errors; empty lines are not rows."""
        with self.path.open("rb") as file:
            lines = (number for number, line in enumerate(file, 1) if line.strip())
            return f"{self.where} line {next(itertools.islice(lines, row + self._layout.has_header, None))}"

    @contextlib.contextmanager
    def _rows(self) -> Iterator[str]:
        """A context with SQL of the file's rows; DuckDB's errors inside become ValueErrors that name the line."""
        layout = self._layout
        options = {
            "columns": "{" + ", ".join(f"'c{place}': 'VARCHAR'" for place in range(len(self._names))) + "}",
            "delim": sql_text(layout.separator),
            "header": layout.has_header,
            "quote": sql_text('"' if layout.has_header else ""),
            "escape": sql_text('"' if layout.has_header else ""),
            "encoding": sql_text(layout.encoding),
            "max_line_size": _LONGEST_LINE,
            "auto_detect": False,
        }
        stated = ", ".join(f"{key} = {value}" for key, value in options.items())
        texts = {each: f"coalesce(c{self._names.index(each.name)}, '')" for each in layout.columns}
        values = ", ".join(f"{each.sql(text)} AS {sql_name(each.name)}" for each, text in texts.items())
        with self.path.open("rb") as file:
            has_nul = any(b"\0" in block for block in iter(lambda: file.read(_LONGEST_LINE), b""))
        try:
            if has_nul:  # DuckDB skips NUL bytes, with which a broken download may end
                raise duckdb.InvalidInputException("it has NUL bytes")
            yield f"(SELECT {values} FROM read_csv({sql_text(glob.escape(str(self.path)))}, {stated}))"  # noqa: S608
        except duckdb.Error as error:
            raise self._first_wrong() or ValueError(
                f"{self.where} cannot be read ({reason_of(error)}); it must be {layout.title}: download the archive "
                "again"
            ) from error

    def _require_lines(self, num_rows: int) -> None:
        """Raise ValueError for a file without rows, unless the layout allows it."""
        if num_rows == 0 and not self._layout.may_be_empty:
            found = "has no line below its header" if self._layout.has_header else "is empty"
            raise ValueError(f"{self.where} {found}; it must be {self._layout.title}: download the archive again")

    def _header(self) -> list[str]:
        with self.path.open("rb") as file:
            line = file.readline(_LONGEST_LINE + 1)
        self._require_short(line, 1)
        try:
            header = self._layout.split(line.removeprefix(codecs.BOM_UTF8))
        except csv.Error as error:
            raise ValueError(
                f"{self.where} line 1 is no line of a CSV file ({error}); fields are separated by commas and lines by "
                "line feeds: download the archive again"
            ) from error
        missing = [column.name for column in self._layout.columns if header.count(column.name) != 1]
        if missing:
            raise ValueError(
                f"{self.where} has columns {', '.join(header) or 'none'}; it must be {self._layout.title}, with "
                f"{', '.join(missing)} exactly once: give the archive as published"
            )
        return header

    def _first_wrong(self) -> ValueError | None:
        """An error about the first invalid line, if there is one."""
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
                self._require_short(line, number)
                rule = None
                if line.strip() and (number > 1 or not self._layout.has_header):
                    rule = self._broken_rule(line)
                if rule is not None:
                    return ValueError(f"{self.where} line {number} {rule}: {_REMEDY}")
        return None

    def _broken_rule(self, line: bytes) -> str | None:
        """The error in a line, in words; None for a valid line."""
        layout, num_fields = self._layout, len(self._names)
        try:
            fields = layout.split(line)
        except csv.Error:
            fields = []
        values = dict(zip(self._names, fields))
        wrong = [each for each in layout.columns if len(fields) == num_fields and not each.fits(values[each.name])]
        if len(fields) == num_fields and not wrong:
            return None
        text = _shortened(line.decode(layout.encoding, errors="replace").rstrip("\r\n"))
        if not layout.has_header:
            return f"is {text}; a line is {layout.title}"
        if not wrong:
            return f"is {text}, {len(fields)} fields; the header has {num_fields}"
        return f"has {wrong[0].name} {_shortened(values[wrong[0].name])}; {wrong[0].name} is {wrong[0].rule}"

    def _require_short(self, line: bytes, number: int) -> None:
        if len(line) > _LONGEST_LINE:
            raise ValueError(
                f"{self.where} line {number} has more than {_LONGEST_LINE:,} bytes, the maximum of a line: {_REMEDY}"
            )


@dataclass(frozen=True)
class PublicDataset:
    """The description of a public data set; `PUBLIC_DATASETS` lists all by name."""

    schema: SequenceSchema  # schema of its columnar files
    raw: RawKind  # its published archive
    event_files: tuple[str, ...]  # files of events; the order breaks ties between equal times
    layout: TextLayout  # layout of the event files
    # SQL of the layout's columns, by column of the store; "order" and "user-id" need these quotes.
    event: Mapping[str, str]
    action_vocabulary_size: int  # actions lie in `[0, action_vocabulary_size)`
    # Name and layout of the file that lists every "user" or "item"; the layout's first column is the id, the other
    # columns of users are contextual features. Without a file, users or items are those of the events.
    listings: Mapping[str, tuple[str, TextLayout]] = field(default_factory=dict)
    check: Callable[[RawFiles], None] = lambda files: None  # raises ValueError for the files of another data set

    def preprocess(self, source: str | Path, output: str | Path, **options: Any) -> Path:
        """Write the columnar files; arguments and errors as for `writer.preprocess`."""
        return preprocess(self.schema.dataset_name, self._read, source, output, **options)

    def describe(
        self, store: EventStore, listed: Mapping[str, pa.Table], *, generated: bool, sha256: str = ""
    ) -> SequenceSource:
        """The SequenceSource of events in the store and of listings sorted by id."""
        columns = {part: [column.combine_chunks() for column in table.columns] for part, table in listed.items()}
        users, *context = columns.get("user") or [store.values("user")]
        return SequenceSource(
            schema=self.schema,
            users=users,
            context=dict(zip(listed["user"].column_names[1:], context)) if context else {},
            items=columns["item"][0] if "item" in columns else store.values("item"),
            action_vocabulary_size=self.action_vocabulary_size,
            generated=generated,
            sha256=sha256,
        )

    def _read(self, source: Path, store: EventStore) -> SequenceSource:
        names = (*self.event_files, *(name for name, _ in self.listings.values()))
        files = open_raw_files(self.raw, names, source, store.folder, show_progress=store.show_progress)
        self.check(files)
        listed = {part: TextFile(files, *listing).listed(store) for part, listing in self.listings.items()}
        events = [TextFile(files, name, self.layout) for name in self.event_files]
        for file in events:
            file.add_to(store, self.event)
        for part, (name, _) in self.listings.items():
            _require_listed(store, part, listed[part], name, events)
        if not store.num_rows:
            raise ValueError(f"{files.source} has no interactions in {', '.join(self.event_files)}: download it again")
        return self.describe(store, listed, generated=files.is_generated, sha256=files.sha256)


def _require_listed(store: EventStore, part: str, listed: pa.Table, name: str, events: Sequence[TextFile]) -> None:
    """Raise ValueError for the first event whose user or item is missing from the listing in file `name`."""
    found = store.query(
        f"SELECT rowid AS number, {part} AS value FROM events ANTI JOIN known ON {part} = known.value "  # noqa: S608
        "ORDER BY rowid LIMIT 1",
        known=pa.table({"value": listed.column(0)}),
    )
    if found.num_rows:
        row = found["number"][0].as_py()
        file = next(file for file in reversed(events) if file.first_row <= row)
        raise ValueError(
            f"{file.line_of(row - file.first_row)} has {listed.column_names[0]} {found['value'][0]}, which {name} does "
            "not list; both files must come from one archive: download it again"
        )


def _shortened(text: str) -> str:
    """The beginning of a text, quoted."""
    return repr(text) if len(text) <= _LONGEST_SHOWN else repr(text[:_LONGEST_SHOWN]) + " …"
