"""Events of users in a DuckDB database on disk: put in row by row, taken out user by user, oldest first.

DuckDB groups, joins and sorts out of core: beyond its memory limit it writes to files beside the database. Rows keep
their number, in which ties of time are broken, so that the result does not depend on threads. Lists are cut by the
caller: DuckDB's own with ORDER BY do not spill.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa

from commons.whole_folder import NO_ROOM

# Arrow's buffers and the rows that are written come on top.
_MEMORY_LIMIT = "512MB"
_MOST_THREADS = 4  # each needs a part of the memory
_ROWS_PER_INSERT = 1 << 20
_BATCH = 1 << 18
_Result = TypeVar("_Result")


class EventStore:
    """Rows of user, item, action and time, and of context if there is any.

    Names of columns are part of the queries: the caller's own, never those of a file.
    A row whose item is null stands for its user alone. All rows are added before the first query.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder  # for the database and what is spilled, made by the store and removed by its owner
        self.num_rows = 0  # that were added
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self._last_insert: Future[Any] | None = None
        config: dict[str, Any] = {
            "memory_limit": _MEMORY_LIMIT,
            "threads": min(_MOST_THREADS, os.cpu_count() or 1),
            "temp_directory": str(folder / "spilled"),
            # Without it rows would lose their order, also where a query has ORDER BY.
            "preserve_insertion_order": True,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        with _errors_named(folder):
            self._database = duckdb.connect(str(folder / "events.duckdb"), config=config)
        # DuckDB does not look at signals: the main thread waits for another one, and Ctrl-C interrupts the query.
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> EventStore:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._database.interrupt()
        self._thread.shutdown(cancel_futures=True)
        self._database.close()

    def add(self, columns: Mapping[str, Any]) -> None:
        """Add rows: user, item, action (within int16), time (int64), and context."""
        batch = pa.record_batch(dict(columns))
        self.num_rows += batch.num_rows
        self._num_waiting += batch.num_rows
        self._waiting.append(batch)
        if self._num_waiting >= _ROWS_PER_INSERT:
            self._insert()

    def _insert(self) -> None:
        """Hand what is waiting to the thread, once it is done with what it had before."""
        rows = pa.Table.from_batches(self._waiting)
        self._waiting, self._num_waiting = [], 0
        is_first = self._last_insert is None
        self._wait()
        self._last_insert = self._thread.submit(self._insert_now, rows, is_first)

    def _insert_now(self, rows: pa.Table, is_first: bool) -> None:
        self._database.register("added", rows)
        if is_first:
            self._database.execute("BEGIN")
        self._database.execute(("CREATE TABLE events AS " if is_first else "INSERT INTO events ") + "FROM added")
        self._database.unregister("added")

    def _wait(self) -> None:
        if self._last_insert is not None:
            with _errors_named(self.folder):
                self._last_insert.result()

    def _finish(self) -> None:
        """End adding."""
        if self._waiting:
            self._insert()
        if self._last_insert is not None:
            self._wait()
            self._last_insert = None
            self._run(lambda: self._database.execute("COMMIT"))

    def _run(self, function: Callable[[], _Result]) -> _Result:
        with _errors_named(self.folder):
            return self._thread.submit(function).result()

    def _query(self, sql: str, **tables: pa.Table) -> pa.Table:
        self._finish()

        def run() -> pa.Table:
            for name, table in tables.items():
                self._database.register(name, table)
            return self._database.sql(sql).to_arrow_table()

        return self._run(run)

    def values(self, column: str) -> pa.Array:
        """The different values of a column, sorted; a null is the last."""
        found = self._query(f"SELECT DISTINCT {column} AS value FROM events ORDER BY value NULLS LAST")  # noqa: S608
        return plain_array(found["value"])

    def lengths(self, users: pa.Array) -> np.ndarray:
        """How many events each of all users has: int64 `(num_users,)`."""
        found = self._query(
            "SELECT count(item) AS length FROM users LEFT JOIN events USING (user) GROUP BY user, place ORDER BY place",
            users=pa.table({"user": users, "place": np.arange(len(users))}),
        )
        return found["length"].to_numpy()

    def first_missing(self, column: str, known: pa.Array | pa.ChunkedArray) -> tuple[int, Any] | None:
        """The first row whose value of a column is none of those known, and the value; None if there is none."""
        if not self.num_rows:
            return None
        found = self._query(
            f"SELECT rowid AS number, {column} AS value FROM events ANTI JOIN known ON {column} = known.value "  # noqa: S608
            "ORDER BY rowid LIMIT 1",
            known=pa.table({"value": known}),
        )
        return (found["number"][0].as_py(), found["value"][0].as_py()) if found.num_rows else None

    def latest(self, names: list[str]) -> pa.Table:
        """For every user in order, the values of some columns in the row of the latest event, of several the last."""
        columns = ", ".join(f"events.{name}" for name in names)
        # Rows without a time are those of users without events.
        key = f"coalesce(time, {-(2**63)})::HUGEINT * {2**42} + rowid"
        last = f"SELECT user, arg_max(rowid, {key}) AS number FROM events GROUP BY user"  # noqa: S608
        return self._query(
            f"SELECT {columns} FROM events JOIN ({last}) AS last ON events.rowid = last.number ORDER BY last.user"  # noqa: S608
        )

    def histories(self, users: pa.Array, places: np.ndarray, items: pa.Array) -> Iterator[pa.RecordBatch]:
        """All events, sorted by the place of their user, then time, then the order in which they were added.

        Args:
            users: all of them.
            places: int32 `(num_users,)`, each once.
            items: all of them, sorted: the id of an item is its rank.

        Yields:
            Batches of item (int32 ids), action (int16) and time (int64).

        """
        self._finish()

        def start() -> pa.RecordBatchReader:
            self._database.register("users", pa.table({"user": users, "place": places}))
            self._database.register("items", pa.table({"item": items, "id": np.arange(len(items), dtype=np.int32)}))
            return self._database.sql(
                "SELECT id AS item, action, time FROM events JOIN users USING (user) JOIN items USING (item) "
                "ORDER BY place, time, events.rowid"
            ).to_arrow_reader(_BATCH)

        reader = self._run(start)
        while (batch := self._run(lambda: next(reader, None))) is not None:
            yield batch


def plain_array(column: pa.ChunkedArray) -> pa.Array:
    """An array of the types in which vocabularies are written."""
    values = column.combine_chunks()
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    return values.cast(wide.get(values.type, values.type))


@contextlib.contextmanager
def _errors_named(folder: Path) -> Iterator[None]:
    """Raise an OSError for what DuckDB says of a full disk, or of memory or a disk that is too small."""
    try:
        yield
    except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
        text = " ".join(str(error).split())
        for number in NO_ROOM:
            if os.strerror(number) in text or "max_temp_directory_size" in text:
                raise OSError(number, os.strerror(number), str(folder)) from error
        raise OSError(f"events cannot be sorted in {folder} ({text}): give an output on a disk with room") from error
