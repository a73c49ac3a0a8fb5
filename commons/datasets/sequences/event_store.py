"""Events of users in a DuckDB database on disk: added with SQL, returned user by user, oldest first.

DuckDB reads, groups, joins and sorts out of core: above its memory limit it writes to files next to the database. Row
numbers break ties between equal times, so that the result does not depend on threads. The caller splits the sorted
events into lists, because DuckDB's list aggregates with ORDER BY do not spill to disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa

from commons.console import progress_bar
from commons.whole_folder import NO_ROOM

# For DuckDB only: Arrow's buffers and the rows being written need further memory.
_MEMORY_LIMIT = "512MB"
_MOST_THREADS = 4  # every thread needs a part of the memory
_BATCH = 1 << 18
_SECONDS_BETWEEN_UPDATES = 0.2
_Result = TypeVar("_Result")


class EventStore:
    """A table `events` of user, item, action (SMALLINT), time (BIGINT) and, if any, context columns.

    Column names are part of the SQL: they must be the caller's own, never names from a file. A row with a null item
    only adds its user. All rows must be added before the first query.
    """

    def __init__(self, folder: Path, *, show_progress: bool = False) -> None:
        folder.mkdir()
        self.folder = folder  # for the database and spilled data; created by the store, removed by its owner
        self.num_rows = 0  # rows that were added
        self.show_progress = show_progress  # on stderr, if it is a terminal
        config: dict[str, Any] = {
            "memory_limit": _MEMORY_LIMIT,
            "threads": min(_MOST_THREADS, os.cpu_count() or 1),
            "temp_directory": str(folder / "spilled"),
            # Otherwise rows lose their order, even with ORDER BY.
            "preserve_insertion_order": True,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        with _errors_named(folder):
            self._database = duckdb.connect(str(folder / "events.duckdb"), config=config)
            self._database.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
            # If only some files state a time zone, the times of the others would depend on the zone of the machine.
            self._database.execute("SET TimeZone = 'UTC'")
            # Prefetching would load whole columns of a row group into memory.
            self._database.execute("SET disable_parquet_prefetching = true")
        # Queries run on another thread, so that Ctrl-C in the main thread can interrupt them: DuckDB ignores signals.
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> EventStore:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._database.interrupt()
        self._thread.shutdown(cancel_futures=True)
        self._database.close()

    def add(self, select: str, **tables: pa.Table) -> None:
        """Add the rows of a query, in their order; the first query determines the columns of `events`."""
        create = "INSERT INTO events" if self.num_rows else "CREATE OR REPLACE TABLE events AS"
        # Statistics of parquet files leave NaN out: conditions simplified by them would be wrong for NaN. A long IN
        # would become a join, which loses the order of the rows if they are read by several threads.
        self._database.execute("SET disabled_optimizers = 'statistics_propagation, in_clause'")
        self._run(lambda: self._start(f"{create} {select}", tables), doing="read")
        self._database.execute("RESET disabled_optimizers")
        self.num_rows = self.query("SELECT count(*) AS number FROM events")["number"][0].as_py()

    def query(self, sql: str, **tables: pa.Table) -> pa.Table:
        """The result of a query, which may use the Arrow tables by their names."""
        return self._run(lambda: self._start(sql, tables).to_arrow_table())

    def _start(self, sql: str, tables: Mapping[str, pa.Table]) -> duckdb.DuckDBPyRelation:
        for name, table in tables.items():
            self._database.register(name, table)
        return self._database.sql(sql)

    def _run(self, function: Callable[[], _Result], doing: str | None = None) -> _Result:
        with (
            _errors_named(self.folder, of_files=doing is not None),
            progress_bar(doing or "", 100, "%", show=self.show_progress and doing is not None) as bar,
        ):
            future = self._thread.submit(function)
            while True:
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    return future.result(_SECONDS_BETWEEN_UPDATES)
                bar.update(max(self._database.query_progress() - bar.n, 0))

    def values(self, column: str) -> pa.Array:
        """The distinct values of a column, sorted, a null last."""
        found = self.query(f"SELECT DISTINCT {column} AS value FROM events ORDER BY value NULLS LAST")  # noqa: S608
        return plain_array(found["value"])

    def lengths(self, users: pa.Array) -> np.ndarray:
        """Number of events of each user, int64 `(num_users,)`."""
        found = self.query(
            "SELECT count(item) AS length FROM users LEFT JOIN events USING (user) GROUP BY user, place ORDER BY place",
            users=pa.table({"user": users, "place": np.arange(len(users))}),
        )
        return found["length"].to_numpy()

    def latest(self, names: list[str]) -> pa.Table:
        """For every user, sorted, the columns `names` of the latest event; the last row breaks ties of time."""
        columns = ", ".join(f"events.{name}" for name in names)
        # Only rows of users without events have no time.
        key = f"coalesce(time, {-(2**63)})::HUGEINT * {2**42} + rowid"
        last = f"SELECT user, arg_max(rowid, {key}) AS number FROM events GROUP BY user"  # noqa: S608
        return self.query(
            f"SELECT {columns} FROM events JOIN ({last}) AS last ON events.rowid = last.number ORDER BY last.user"  # noqa: S608
        )

    def histories(self, users: pa.Array, places: np.ndarray, items: pa.Array) -> Iterator[pa.RecordBatch]:
        """All events, sorted by the place of their user, then by time, then by the order in which they were added.

        `users` are all users, `places` their places, int32 `(num_users,)`, a permutation; `items` are all items,
        sorted: the id of an item is its position. The batches have item (int32 ids), action (int16) and time (int64).
        """
        tables = {
            "users": pa.table({"user": users, "place": places}),
            "items": pa.table({"item": items, "id": np.arange(len(items), dtype=np.int32)}),
        }
        sql = (
            "SELECT id AS item, action, time FROM events JOIN users USING (user) JOIN items USING (item) "
            "ORDER BY place, time, events.rowid"
        )
        reader = self._run(lambda: self._start(sql, tables).to_arrow_reader(_BATCH))
        while (batch := self._run(lambda: next(reader, None))) is not None:
            yield batch


def sql_name(column: str | None) -> str:
    """A column name, quoted for SQL."""
    return '"' + str(column).replace('"', '""') + '"'


def sql_text(value: str) -> str:
    """A text, quoted for SQL."""
    return "'" + value.replace("'", "''") + "'"


def plain_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, with large types for strings and bytes, as vocabularies are written."""
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    # Cast first: the other types have at most 2 GiB in one array.
    return column.cast(wide.get(column.type, column.type)).combine_chunks()


@contextlib.contextmanager
def _errors_named(folder: Path, *, of_files: bool = False) -> Iterator[None]:
    """Raise an OSError for DuckDB's errors about a full disk, or about too little memory.

    Other errors are raised unchanged; with `of_files`, while files are read, also input/output errors, which are about
    these files.
    """
    try:
        yield
    except duckdb.Error as error:  # of several kinds: a full disk may also show when a transaction is committed
        text = " ".join(str(error).split())
        for number in NO_ROOM:
            if os.strerror(number) in text or "max_temp_directory_size" in text:
                raise OSError(number, os.strerror(number), str(folder)) from error
        is_of_memory = isinstance(error, duckdb.OutOfMemoryException)
        if not is_of_memory and (of_files or not isinstance(error, duckdb.IOException)):
            raise
        if is_of_memory and of_files:
            raise OSError(
                f"reading exceeds DuckDB's memory ({text.partition(' Possible solutions')[0]}); lists of 2,048 rows "
                f"must fit into {_MEMORY_LIMIT}: write users with long lists as one row per event"
            ) from error
        raise OSError(f"events cannot be sorted in {folder} ({text}): give an output on a disk with room") from error
