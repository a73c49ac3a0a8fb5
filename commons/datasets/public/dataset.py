"""The description of a public data set, and the reader of its raw files: events, users and items.

DuckDB reads the text files, CSV or lines of fields, and checks every value by its type; its errors name the line.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from commons.datasets.public.raw_files import RawFiles, RawKind, open_raw_files
from commons.datasets.sequences.event_store import EventStore, sql_name, sql_text
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.writer import SequenceSource, preprocess

_LONGEST_LINE = 1 << 20
_LONGEST_HEADER = 1 << 16
_LONGEST_SHOWN = 100
_MOST_IN_MEMORY = 256 << 20


@dataclass(frozen=True)
class TextLayout:
    """The layout of a CSV file with a header, or of a Latin-1 file with another separator and without a header."""

    title: str  # description for errors: of the file or, without a header, of a line
    # SQL type of each column by name: of the columns of a CSV file that are read or, without a header, of all columns.
    columns: Mapping[str, str]
    separator: str = ","
    may_be_empty: bool = False  # whether a file may have no rows

    @property
    def has_header(self) -> bool:
        """Whether it is a CSV file."""
        return self.separator == ","


class TextFile:
    """A reader of one text file of a data set, with errors that name the line."""

    def __init__(self, files: RawFiles, name: str, layout: TextLayout) -> None:
        self.path, self.where, self._layout = files.paths[name], files.where(name), layout
        with self.path.open("rb") as file:
            if any(b"\0" in block for block in iter(lambda: file.read(_LONGEST_LINE), b"")):  # which DuckDB skips
                raise ValueError(f"{self.where} has NUL bytes, as after a broken download: download it again")
        self._names = self._header() if layout.has_header else list(layout.columns)

    def add_to(self, store: EventStore, event: Mapping[str, str]) -> None:
        """Add the file's events to the store; `event` is SQL of the layout's columns, by column of the store.

        Raises:
            ValueError: a malformed line, named by file and line.
        """
        before = store.num_rows
        selected = ", ".join(f"{sql} AS {column}" for column, sql in event.items())
        with self._rows() as rows:
            store.add(f"SELECT {selected} FROM {rows}")  # noqa: S608
        self._require_lines(store.num_rows - before)

    def listed(self, store: EventStore) -> pa.Table:
        """All lines of a file with one line per user or item, sorted by id, the layout's first column.

        Raises:
            ValueError: a malformed line, a file of more than 256 MiB, or a repeated id.
        """
        size, key = self.path.stat().st_size, next(iter(self._layout.columns))
        if size > _MOST_IN_MEMORY:
            raise ValueError(
                f"{self.where} has {size:,} bytes; it is read into memory and may have at most {_MOST_IN_MEMORY:,}: "
                "give the archive as published"
            )
        with self._rows() as rows:
            table = store.query(f"FROM {rows} ORDER BY {sql_name(key)}")
        self._require_lines(table.num_rows)
        ids = table[key].to_numpy()
        again = ids[1:][ids[1:] == ids[:-1]]
        if len(again):
            raise ValueError(f"{self.where} has {key} {again[0]} again; every {key} has one line: remove one of them")
        return table.combine_chunks()

    @contextlib.contextmanager
    def _rows(self) -> Iterator[str]:
        """A context with SQL of the file's rows; DuckDB's errors inside become ValueErrors that name the line."""
        layout, quote = self._layout, '"' if self._layout.has_header else ""
        places = [f"c{place}" for place in range(len(self._names))]  # a file may have two columns of one name
        types = (sql_text(layout.columns.get(name, "VARCHAR")) for name in self._names)
        options = {
            "columns": "{" + ", ".join(f"{place}: {kind}" for place, kind in zip(places, types)) + "}",
            "force_not_null": f"[{', '.join(map(sql_text, places))}]",
            "delim": sql_text(layout.separator),
            "header": layout.has_header,
            "quote": sql_text(quote),
            "escape": sql_text(quote),
            "encoding": sql_text("utf-8" if layout.has_header else "latin-1"),
            "max_line_size": _LONGEST_LINE,
            "auto_detect": False,
        }
        stated = ", ".join(f"{key} = {value}" for key, value in options.items())
        values = ", ".join(f"c{self._names.index(name)} AS {sql_name(name)}" for name in layout.columns)
        try:
            yield f"(SELECT {values} FROM read_csv({sql_text(glob.escape(str(self.path)))}, {stated}))"  # noqa: S608
        except duckdb.Error as error:
            # The line, its number and what is wrong, without DuckDB's own remedies.
            lines = re.split(r"\n\n|\nPossible", str(error))[0].splitlines()
            shown = " ".join(line[:_LONGEST_SHOWN] for line in lines if line)
            shown = re.sub(r'column "c(\d+)"', lambda found: f"column {self._names[int(found[1])]!r}", shown)
            raise ValueError(
                f"{self.where} cannot be read ({shown}); it must be {layout.title}: repair it or download the archive "
                "again"
            ) from error

    def _require_lines(self, num_rows: int) -> None:
        """Raise ValueError for a file without rows, unless the layout allows it."""
        if num_rows == 0 and not self._layout.may_be_empty:
            found = "has no line below its header" if self._layout.has_header else "is empty"
            raise ValueError(f"{self.where} {found}; it must be {self._layout.title}: download the archive again")

    def _header(self) -> list[str]:
        with self.path.open(encoding="utf-8-sig", errors="replace") as file:
            header = next(csv.reader([file.readline(_LONGEST_HEADER)]), [])
        missing = [name for name in self._layout.columns if header.count(name) != 1]
        if missing:
            raise ValueError(
                f"{self.where} has columns {', '.join(header)[:_LONGEST_SHOWN] or 'none'}; it must be "
                f"{self._layout.title}, with {', '.join(missing)} exactly once: give the archive as published"
            )
        return header


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
        for name in self.event_files:
            TextFile(files, name, self.layout).add_to(store, self.event)
        for part, (name, _) in self.listings.items():
            _require_listed(store, part, listed[part], files.where(name))
        if not store.num_rows:
            raise ValueError(f"{files.source} has no interactions in {', '.join(self.event_files)}: download it again")
        return self.describe(store, listed, generated=files.is_generated, sha256=files.sha256)


def _require_listed(store: EventStore, part: str, listed: pa.Table, where: str) -> None:
    """Raise ValueError for the least user or item of the events that is missing from the listing `where`."""
    missing = store.query(
        f"SELECT min({part}) AS value FROM events ANTI JOIN known ON {part} = known.value",  # noqa: S608
        known=pa.table({"value": listed.column(0)}),
    )["value"][0].as_py()
    if missing is not None:
        raise ValueError(
            f"{where} does not list {listed.column_names[0]} {missing}, which has interactions; all files must come "
            "from one archive: download it again"
        )
