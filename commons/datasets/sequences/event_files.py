"""Parquet files of events as a stream of checked batches for an event store.

Every file is read in small batches from front to back, also within a row group, so that memory does not depend on how
large the files or their row groups are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from commons.datasets.sequences.event_columns import Action, EventColumns

_EVENTS = 1 << 16
_READ_AHEAD = 1 << 20
# Files that DuckDB reads by their names, as tables.
_CONVERTIBLE = (".csv", ".tsv", ".json", ".jsonl")
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_YEAR_3000 = 32_503_680_000
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{"==": pc.equal, "!=": pc.not_equal, ">=": pc.greater_equal, "<=": pc.less_equal},
    **{">": pc.greater, "<": pc.less},
}


class EventFiles:
    """Parquet files, a file or a folder of them, whose columns have been checked.

    Raises:
        FileNotFoundError: nothing at `source`, or no file in it.
        ValueError: no parquet file, a column that is missing, of another type, or a list where it may not be one.

    """

    def __init__(self, source: Path, columns: EventColumns) -> None:
        self.source = source
        self._columns = columns
        self._paths = _find(source)
        self.num_bytes = sum(path.stat().st_size for path in self._paths)  # of all files
        # The users are a context too if they are named as one; the writer has their column already.
        names = [name for name in columns.context or () if name != columns.user]
        # By column, its name in batches.
        self.context = {name: f"context_{index}" for index, name in enumerate(names)}
        self._schema = _open(self._paths[0]).schema_arrow
        columns.require_complete(self._schema.names, str(source))
        self._actions = columns.parse_actions(self._schema.names)
        self._types: dict[str | None, pa.DataType] = {}  # of vocabularies, in the files read so far
        self._is_lists = _is_list(self._schema.field(columns.item).type)
        self._check_lists()
        self.timestamps_per_second = self._unit_of_times()  # what a second counts in the times of batches

    def batches(self, on_bytes: Callable[[int], object]) -> Iterator[dict[str, Any]]:
        """All events in the order of the files' names, as columns of an `EventStore`.

        The events of a row with lists are rows of their own; a row with empty lists is one whose item and time are
        null.

        Args:
            on_bytes: called with the number of bytes read.

        Raises:
            ValueError: a damaged file, one with other columns, a null, or a value that is none of its column.

        """
        columns = self._columns
        wanted = [columns.user, columns.item, columns.time, *(columns.context or ())]
        names = list(dict.fromkeys(str(name) for name in [*wanted, *(a.column for a in self._actions)] if name))
        for path in self._paths:
            file = _open(path)
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(
                    f"{path} has no column {missing[0]!r}, which other files of {self.source} have; its columns are "
                    f"{', '.join(file.schema_arrow.names)}: write it again, or take it out"
                )
            first, share = 0, path.stat().st_size / max(file.metadata.num_rows, 1)
            try:
                for batch in file.iter_batches(self._rows_at_once(file), columns=names, use_threads=False):
                    yield self._checked(batch, _Place(path, first))
                    first += batch.num_rows
                    on_bytes(int(share * batch.num_rows))
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path} is damaged ({_one_line(error)}): write it again") from error

    def _rows_at_once(self, file: pq.ParquetFile) -> int:
        """So many that they have about as many events as are read at a time."""
        if not self._is_lists:
            return _EVENTS
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        events = sum(own.num_values for own in columns if own.path_in_schema.startswith(f"{self._columns.item}."))
        return max(_EVENTS * file.metadata.num_rows // max(events, file.metadata.num_rows, 1), 1)

    def _checked(self, batch: pa.RecordBatch, place: _Place) -> dict[str, Any]:
        columns = self._columns
        found = {"user": self._plain(place.without_nulls(batch, columns.user), columns.user, place)}
        for name, key in self.context.items():
            found[key] = self._plain(batch.column(name), name, place)
        lists = place.without_nulls(batch, columns.item) if self._is_lists else None

        def entries(name: str | None, *, has_nulls: bool = False) -> pa.Array:
            if lists is not None:
                return place.entries(batch, name, lists, str(columns.item), has_nulls=has_nulls)
            return batch.column(name) if has_nulls else place.without_nulls(batch, name)

        items = self._plain(entries(columns.item), columns.item, place)
        times = self._times(entries(columns.time), place) if columns.time else np.zeros(len(items), np.int64)
        actions = np.zeros(len(items), np.int16)
        for bit, action in enumerate(self._actions):
            # A condition does not hold for a null.
            values = entries(action.column, has_nulls=action.operator is not None)
            actions += _holds(action, values, place).astype(np.int16) << np.int16(bit)
        found |= {"item": items, "time": pa.array(times), "action": pa.array(actions)}
        return found if lists is None else _by_event(found, lists)

    def _plain(self, values: pa.Array, name: str | None, place: _Place) -> pa.Array:
        """Values of a vocabulary, whose type is the same in all files."""
        plain = _plain_values(values, place.column(name))
        first = self._types.setdefault(name, plain.type)
        if first != plain.type:
            raise ValueError(
                f"column {name!r} of {self.source} is of type {first} in one file and {plain.type} in another; its "
                "values are of one type: convert one"
            )
        return plain

    def _check_lists(self) -> None:
        columns = self._columns
        plain = [columns.user, *(columns.context or ())]
        if not self._is_lists:
            plain += [columns.time, *(action.column for action in self._actions)]
        for name in plain:
            if name is not None and _is_list(self._schema.field(name).type):
                others = "one row per user with lists" if self._is_lists else f"{columns.item!r} is not"
                raise ValueError(
                    f"column {name!r} of {self.source} is a list, and {others}; users and context are single values, "
                    "and items, times and actions are all lists or none: name another column"
                )
        if not self._is_lists and columns.time is None:
            raise ValueError(
                f"columns.time is not given, and a row of {self.source} is an event; events are sorted by time: name "
                "the column of times with --columns.time"
            )

    def _unit_of_times(self) -> int | None:
        """What a second counts in the column of times once it is int64."""
        if self._columns.time is None:
            return None
        kind = self._schema.field(self._columns.time).type
        kind = kind.value_type if _is_list(kind) else kind
        if pa.types.is_timestamp(kind):
            return _PER_SECOND[kind.unit]
        if pa.types.is_date(kind):
            return 1
        if pa.types.is_integer(kind):
            return _PER_SECOND[self._columns.time_unit]
        if pa.types.is_floating(kind):
            # Fractions of a second are kept, others have none that matter.
            return max(_PER_SECOND[self._columns.time_unit], 1_000)
        raise ValueError(
            f"column {self._columns.time!r} of {self.source} is of type {kind}; times are timestamps, dates or numbers "
            "since 1970: convert it"
        )

    def _times(self, values: pa.Array, place: _Place) -> np.ndarray:
        name, unit = self._columns.time, self.timestamps_per_second or 1
        if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
            units = {number: unit for unit, number in _PER_SECOND.items()}
            return values.cast(pa.timestamp(units[unit]), safe=False).cast(pa.int64()).to_numpy()
        numbers = values.to_numpy(zero_copy_only=False)
        stated, most = _PER_SECOND[self._columns.time_unit], _YEAR_3000 * _PER_SECOND[self._columns.time_unit]
        first, last = numbers.min(initial=0), numbers.max(initial=0)
        if not last <= most:  # NaN is not
            raise ValueError(
                f"{place.column(name)} has the time {last:.15g}, which is no number or lies beyond the year 3000 in "
                f"{self._columns.time_unit!r}: set columns.time_unit to 'ms', 'us' or 'ns', or correct the times"
            )
        if first < -most:
            raise ValueError(f"{place.column(name)} has the time {first:.15g}, long before 1970: correct it")
        if np.issubdtype(numbers.dtype, np.floating):
            numbers = np.floor(numbers.astype(np.float64) * (unit // stated))
        return numbers.astype(np.int64)


@dataclass(frozen=True)
class _Place:
    """Where a batch is: its file, and the number of its first row there."""

    path: Path
    first: int

    def column(self, name: str | None) -> str:
        return f"column {name!r} of {self.path}"

    def without_nulls(self, batch: pa.RecordBatch, name: str | None) -> pa.Array:
        values = batch.column(name)
        if values.null_count:
            row = self.first + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise self._null(name, f"row {row}")
        return values

    def entries(
        self, batch: pa.RecordBatch, name: str | None, like: pa.Array, like_name: str, *, has_nulls: bool
    ) -> pa.Array:
        """The entries of lists that are as long as others."""
        lists = self.without_nulls(batch, name)
        if not _is_list(lists.type):
            raise ValueError(f"{self.column(name)} is of type {lists.type}; it is a list, as the items are: convert")
        own, lengths = (pc.list_value_length(each).to_numpy(zero_copy_only=False) for each in (lists, like))
        if not np.array_equal(own, lengths):
            row = int(np.flatnonzero(own != lengths)[0])
            raise ValueError(
                f"{self.column(name)} has {own[row]} entries in row {self.first + row}, {like_name!r} has "
                f"{lengths[row]}; lists of a row belong together: make them equally long"
            )
        values = lists.flatten()
        if values.null_count and not has_nulls:
            raise self._null(name, f"a list of the rows from {self.first} on")
        return values

    def _null(self, name: str | None, where: str) -> ValueError:
        return ValueError(
            f"{self.column(name)} has a null in {where}; every event has a user, an item, a time and its actions: fill "
            "or remove such rows"
        )


def _find(source: Path) -> list[Path]:
    if not source.exists():
        raise FileNotFoundError(
            f"{source} does not exist; the source is a parquet file or a folder of them: correct it"
        )
    if source.is_file():
        return [source]
    # Names that begin with a dot or an underscore are left out, as those of marks and logs.
    files = sorted(ds.dataset(source, format="parquet").files) if source.is_dir() else []
    if not files:
        raise FileNotFoundError(f"{source} has no parquet file; the source is one, or a folder of them: correct it")
    return list(map(Path, files))


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_AHEAD, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        if path.suffixes[:1] and path.suffixes[0] in _CONVERTIBLE:
            copy = f"COPY '{path}' TO '{path.with_name(path.name.split('.')[0])}.parquet'"
            raise ValueError(
                f"{path} is no parquet file; DuckDB, which is installed, makes one of it: python -c "
                f'"import duckdb; duckdb.sql(\\"{copy}\\")"'
            ) from error
        raise ValueError(f"{path} is no parquet file, or damaged ({_one_line(error)}): write it again") from error


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _holds(action: Action, values: pa.Array, place: _Place) -> np.ndarray:
    """Whether an action was done: bool `(num_events,)`."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if action.operator is None:
        if pa.types.is_boolean(values.type):
            return values.to_numpy(zero_copy_only=False)
        is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        numbers = values.to_numpy(zero_copy_only=False) if is_number else np.empty(0)
        outside = (numbers != 0) & (numbers != 1)
        if not is_number or outside.any():
            found = f"has {numbers[outside][0]}" if is_number else f"is of type {values.type}"
            raise ValueError(
                f"{place.column(action.column)} {found}; an action is 0 or 1, or a condition: write for example "
                f'"{action.column} >= 4" or "{action.column} == buy"'
            )
        return numbers == 1
    if _is_text(values.type) and isinstance(action.value, (int, float)) and action.operator not in ("==", "!="):
        raise ValueError(
            f"{place.column(action.column)} is of type {values.type}, {action.text!r} compares with a number; texts "
            "have the order of the alphabet, in which 10 is less than 9: make the column numbers, or correct the "
            "condition"
        )
    try:
        holds = _OPERATORS[action.operator](values, _like(values.type, action))
        return holds.fill_null(False).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise ValueError(
            f"{place.column(action.column)} is of type {values.type}, and cannot be compared as {action.text!r} says "
            f"({_one_line(error)}): correct the condition"
        ) from error


def _like(kind: pa.DataType, action: Action) -> pa.Scalar:
    """What an action's column is compared with."""
    if _is_text(kind):
        return pa.scalar(action.value_text, kind)
    if pa.types.is_boolean(kind) and str(action.value).lower() in ("true", "false"):
        return pa.scalar(str(action.value).lower() == "true")
    return pa.scalar(action.value)


def _by_event(columns: dict[str, pa.Array], lists: pa.Array) -> dict[str, pa.Array]:
    """Columns of rows and of the entries of their lists as columns of the entries; see `EventFiles.batches`."""
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    empty = np.flatnonzero(lengths == 0)
    owners = pa.array(np.concatenate([np.repeat(np.arange(len(lengths)), lengths), empty]))
    return {
        name: pa.concat_arrays([values, pa.nulls(len(empty), values.type)])
        if name in ("item", "time", "action")
        else values.take(owners)
        for name, values in columns.items()
    }


def _plain_values(array: pa.Array, what: str) -> pa.Array:
    """An array as int64, large_string or large_binary, dictionaries resolved; ValueError for other types."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.int8()).cast(pa.int64())
    if pa.types.is_integer(kind):
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:
            raise ValueError(f"{what} has integers of 2^63 and more; ids are below that: convert it") from None
    if _is_text(kind):
        return array.cast(pa.large_string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.large_binary())
    raise ValueError(f"{what} is of type {kind}; such a column holds integers, strings or booleans: convert it")


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
