"""A user's own parquet files: from an event log, or from a table of users with lists, to the columnar files.

A row is an event, or a user with lists of items, times and actions, which DuckDB unnests; a user may have several such
rows. Types are checked first; the query that reads values checks them. An id is the position of the raw value among the
sorted raw values. All events are kept, equal events too, sorted by time. A contextual feature has the value of the
user's latest event.

Memory contains the distinct users, items and values of context, and a batch.
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dacite
import duckdb
import numpy as np
import pyarrow as pa

from commons.console import reason_of
from commons.datasets.sequences.event_columns import ACTIONS, Action, EventColumns
from commons.datasets.sequences.event_store import EventStore, plain_array, sql_name, sql_text
from commons.datasets.sequences.file import SequenceFile, SequenceSchema
from commons.datasets.sequences.source_files import find_parquet, read_columns
from commons.datasets.sequences.writer import SequenceSource, preprocess

logger = logging.getLogger(__name__)

DATASET_NAME = "parquet"
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_EPOCH = {1: "epoch_ms({}) // 1000", 1_000: "epoch_ms({})", 1_000_000: "epoch_us({})", 1_000_000_000: "epoch_ns({})"}
_YEAR_3000 = 32_503_680_000
# Columns that the query adds: file and number of the row, and whether the row is a user without events.
_FILE, _ROW, _IS_EMPTY = "__evenrank_file", "__evenrank_row", "__evenrank_is_empty"
_ROW_COUNTER = "file_row_number"
_WHOLE_ROWS = (
    "every event has a user, an item, a time and its actions, and lists of a row have equal lengths: fill or remove "
    "such rows"
)
_NO_ACTION = 'an action is 0 or 1, or a condition: write for example "{0} >= 4" or "{0} == buy"'


def preprocess_parquet(columns: EventColumns, source: str | Path, output: str | Path, **options: Any) -> Path:
    """Write the columnar files of a parquet file, or of a folder with parquet files at any depth, as `preprocess`.

    Raises:
        ValueError: no parquet file, a column that is missing or of another type, a null in users, items, times or
            actions, lists of different lengths, files without rows, or an output within the source.
    """
    # Not Path.resolve(), which raises RuntimeError for a loop of links.
    target = Path(os.path.realpath(Path(output) / f"{DATASET_NAME}.parquet"))
    if Path(os.path.realpath(source)) in (target, *target.parents):
        raise ValueError(
            f"output {output} is within source {source}, and every file of the source is read: give another output"
        )
    return preprocess(DATASET_NAME, partial(_read, columns), source, output, **options)


def _schema_of(columns: EventColumns, made_with: EventColumns, timestamps_per_second: int | None) -> SequenceSchema:
    """The schema of a user's own data set.

    `columns` are the selected columns, `made_with` the columns of preprocessing: bit i is its i-th action.
    """
    actions = columns.actions or ()
    return SequenceSchema(
        dataset_name=DATASET_NAME,
        contextual_feature_names=tuple(dict.fromkeys(columns.context or ())),  # a name given twice is one token
        item_feature_name=str(columns.item),
        action_feature_name=ACTIONS if actions else None,
        tasks=tuple(partial(np.bitwise_and, 1 << (made_with.actions or ()).index(action)) for action in actions),
        timestamps_per_second=timestamps_per_second,
        user_feature_name=str(columns.user),
        action_names=tuple(made_with.actions or ()) if actions else (),
        task_names=tuple(actions),
    )


def stored_schema(path: str | Path, given: EventColumns | None = None) -> SequenceSchema:
    """The schema of a data set that `preprocess_parquet` has written.

    Args:
        path: the output folder, or the data set in it.
        given: columns that must agree with those of preprocessing; actions and context may be a selection.

    Raises:
        FileNotFoundError: the data set does not exist.
        ValueError: it is damaged, or columns do not agree.
    """
    file = SequenceFile(path, DATASET_NAME, [])
    options = file.metadata.options
    try:
        made_with = dacite.from_dict(EventColumns, dict(options["columns"]), dacite.Config(strict=True, cast=[tuple]))
        per_second = options["timestamps_per_second"]
        if not (made_with.user and made_with.item):
            raise ValueError("no column of users or of items")
        if not (per_second is None or (isinstance(per_second, int) and per_second > 0)):
            raise ValueError(f"timestamps_per_second is {per_second!r}")
    except (ValueError, KeyError, TypeError, dacite.DaciteError) as error:
        raise ValueError(
            f"options of the manifest are damaged ({' '.join(str(error).split())}); preprocess the data again"
        ) from error
    return _schema_of((given or EventColumns()).chosen_from(made_with, str(file.path)), made_with, per_second)


def _read(columns: EventColumns, source: Path, store: EventStore) -> SequenceSource:
    files = EventFiles(source, columns)
    files.add_to(store)
    users, items = (store.values(part).drop_null() for part in ("user", "item"))
    for name, found in (("users", users), ("items", items)):
        if not len(found):
            raise ValueError(f"{source} has no {name} in any row; a data set needs some: give other files")
        if len(found) >= 2**31:
            raise ValueError(f"{source} has {len(found):,} {name}; ids have 31 bits: keep fewer of them")
    _warn_of_unused_actions(columns.actions or (), store, source)
    latest = store.latest(list(files.context.values())) if files.context else {}
    schema = _schema_of(columns, columns, files.timestamps_per_second)
    return SequenceSource(
        schema=dataclasses.replace(schema, action_feature_name=ACTIONS),
        users=users,
        context={name: plain_array(latest[key]) for name, key in files.context.items()},
        vocabularies={name: store.values(key) for name, key in files.context.items()},
        items=items,
        action_vocabulary_size=1 << len(columns.actions or ()),
        generated=False,
        options={"columns": dataclasses.asdict(columns), "timestamps_per_second": files.timestamps_per_second},
    )


def _warn_of_unused_actions(actions: Collection[str], store: EventStore, source: Path) -> None:
    """Log the actions that no event has, such as a condition with a misspelt value."""
    bits = store.query("SELECT coalesce(bit_or(action), 0)::INTEGER AS bits FROM events")["bits"][0].as_py()
    unused = [action for bit, action in enumerate(actions) if not bits & (1 << bit)]
    if unused:
        named = " or ".join(map(repr, unused))
        logger.warning("no event of %s has the action %s; its label is 0: correct it, if it is misspelt", source, named)


class EventFiles:
    """A parquet file or a folder of parquet files, with checked columns; errors as `preprocess_parquet`."""

    def __init__(self, source: Path, columns: EventColumns) -> None:
        self.source = source
        self._columns = columns
        self._paths = find_parquet(source)
        schemas = {path: read_columns(path) for path in self._paths}
        first = schemas[self._paths[0]]
        columns.require_complete(first.names, str(source))
        self._actions = columns.parse_actions(first.names)
        # Without the user column, which the writer always has, even if it is also a contextual feature.
        names = [name for name in columns.context or () if name != columns.user]
        self.context = {name: f"context_{index}" for index, name in enumerate(names)}  # its name in the store
        listed = [columns.item, columns.time, *(action.column for action in self._actions)]
        read = [str(name) for name in (columns.user, *listed, *names) if name]
        for path, schema in schemas.items():
            self._require_columns(path, schema.names, read)
        self._types = {name: _common_type(name, schemas) for name in read}
        kinds = {name: [_value_type(schema.field(name).type) for schema in schemas.values()] for name in read}
        self._float32 = {name for name in read if any(map(pa.types.is_float32, kinds[name]))}  # in some file
        # DuckDB counts the rows of a file, unless a column has the counter's name.
        found = {name.lower() for schema in schemas.values() for name in schema.names}
        self._row = "NULL" if _ROW_COUNTER in found else _ROW_COUNTER
        self._is_lists = _is_list(self._types[str(columns.item)])
        self._listed = dict.fromkeys(str(name) for name in listed if name) if self._is_lists else {}
        self._check_lists()
        # Types of the values or, for lists, of their entries.
        self._kinds = {name: _value_type(kind) for name, kind in self._types.items()}
        self.timestamps_per_second, time = self._time()
        self._selected = self._select(time)

    def add_to(self, store: EventStore) -> None:
        """Add all events in the order of the files' names.

        A row with lists becomes one row per event; a row with empty lists becomes a row with null item and time.
        ValueError for a damaged file, a null, or an invalid value.
        """
        paths = ", ".join(sql_text(glob.escape(str(path))) for path in self._paths)
        is_empty = f"len(coalesce({sql_name(self._columns.item)}, [])) = 0" if self._is_lists else "false"
        values = [f"{self._row} AS {_ROW}", *map(self._unnested, self._types), _FILE, f"{is_empty} AS {_IS_EMPTY}"]
        # Folders such as "day=1" are names: their values would replace those of a column.
        options = f"union_by_name=true, hive_partitioning=false, filename={sql_text(_FILE)}"
        rows = f"(SELECT {', '.join(values)} FROM read_parquet([{paths}], {options}))"  # noqa: S608
        try:
            store.add(f"SELECT {self._selected} FROM {rows}")  # noqa: S608
        except duckdb.Error as error:
            _, is_ours, message = reason_of(error).partition("Error: column ")
            if is_ours:
                raise ValueError(f"column {message}") from None
            found = "has values out of range" if isinstance(error, duckdb.ConversionException) else "is damaged"
            raise ValueError(f"{self.source} {found} ({reason_of(error)}): write it again") from error

    def _unnested(self, name: str) -> str:
        """SQL of a column; of a list, one row per entry. Unnest itself would fill shorter lists of a row with nulls."""
        if name not in self._listed:
            return sql_name(name)
        value, items = sql_name(name), sql_name(self._columns.item)
        entries = f"CASE WHEN len({value}) > 0 THEN {value} ELSE [NULL] END"
        uneven = f"len({value}) <> len(coalesce({items}, []))"
        checked = _checked(name, entries, uneven, "' has a list of another length than the items'", _WHOLE_ROWS)
        return f"unnest({checked}) AS {value}"

    def _select(self, time: str) -> str:
        """SQL of the store's columns; DuckDB raises an error for an invalid value."""
        columns = self._columns
        plain = {"user": columns.user, "item": columns.item, **{key: name for name, key in self.context.items()}}
        values = {key: self._plain(str(name)) for key, name in plain.items()}
        bits = [
            f"CASE WHEN {self._done_by(action)} THEN {1 << bit} ELSE 0 END" for bit, action in enumerate(self._actions)
        ]
        values["action"] = f"({' + '.join(bits) or '0'})::SMALLINT"
        values["time"] = f"TRY_CAST({time} AS BIGINT)"
        return ", ".join(f"{value} AS {key}" for key, value in values.items())

    def _plain(self, name: str) -> str:
        """SQL of a user, an item or a contextual feature: BIGINT, VARCHAR or BLOB."""
        value, kind = sql_name(name), self._kinds[name]
        if not (pa.types.is_boolean(kind) or _family(kind) in ("integer", "text", "binary")):
            raise ValueError(
                f"{self._where(name)} is of type {kind}; it must have integers, strings or booleans: convert it"
            )
        if pa.types.is_uint64(kind):
            value = _checked(
                name, value, f"{value} >= {2**63}", f"' has the integer ' || {value}", "ids are below 2^63: convert it"
            )
        if _family(kind) != "binary":
            value = f"{value}::{'VARCHAR' if _family(kind) == 'text' else 'BIGINT'}"  # VARCHAR also for UUIDs
        if name in self.context:
            return value
        return _without_nulls(name, value, "false" if name == self._columns.user else _IS_EMPTY)

    def _time(self) -> tuple[int | None, str]:
        """The units per second of the store's times, None without times, and SQL of the times."""
        name = self._columns.time
        if name is None:
            return None, f"CASE WHEN NOT {_IS_EMPTY} THEN 0 END"
        value, kind, stated = sql_name(name), self._kinds[name], _PER_SECOND[self._columns.time_unit]
        found = f"' has the time ' || {value}"
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            unit = _PER_SECOND[kind.unit] if pa.types.is_timestamp(kind) else 1
            time = _EPOCH[unit].format(value)
            endless = f"coalesce({time}, {-(2**63)}) = {-(2**63)} AND {value} IS NOT NULL"
            found, rule = "' has the time infinity or NaT'", "a time is finite: correct it"
            return unit, _without_nulls(name, _checked(name, time, endless, found, rule))
        if not _is_number(kind):
            raise ValueError(
                f"{self._where(name)} is of type {kind}; times are timestamps, dates or numbers since 1970: convert it"
            )
        most, year = min((_YEAR_3000 * stated, 3000), (2**63, 2262))  # 63 bits of nanoseconds end in 2262
        unit, scaled, late = stated, value, f"{value} >= {most}"
        if pa.types.is_floating(kind):
            # Microseconds: as precise as a double is for seconds since 1970. Rounded, because 0.123 is slightly less.
            unit = max(stated, 1_000_000)
            scaled = f"round({value}::DOUBLE * {unit // stated})"
            late += f" OR isnan({value})"
        rule = (
            f"it is no number or lies beyond the year {year} in {self._columns.time_unit!r}: set columns.time_unit to "
            "'ms', 'us' or 'ns', or correct the times"
        )
        early = f"{value} <= -{most}"  # -2^63 is NaT, no time, in nanoseconds
        scaled = _checked(name, scaled, early, found, "it is long before 1970: correct it")
        return unit, _without_nulls(name, _checked(name, scaled, late, found, rule))

    def _done_by(self, action: Action) -> str:
        """SQL that is true for events with the action; a condition is false for a null, and only != is true for NaN."""
        name, kind, where = action.column, self._kinds[action.column], self._where(action.column)
        value, is_text = sql_name(name), _family(kind) == "text"
        if not (is_text or _is_number(kind) or pa.types.is_boolean(kind)):
            raise ValueError(f"{where} is of type {kind}; actions are numbers, booleans or texts: convert the column")
        if action.operator is None:
            if is_text:
                raise ValueError(f"{where} is of type {kind}; {_NO_ACTION.format(name)}")
            done = value if pa.types.is_boolean(kind) else f"{value} = 1"
            wrong = "false" if pa.types.is_boolean(kind) else f"{value} NOT IN (0, 1)"
            return _without_nulls(name, _checked(name, done, wrong, f"' has ' || {value}", _NO_ACTION.format(name)))
        compares_number = isinstance(action.value, (int, float))
        if is_text and compares_number and action.operator not in ("==", "!="):
            raise ValueError(
                f"{where} is of type {kind}, {action.text!r} compares with a number; texts are ordered alphabetically, "
                "so 10 is less than 9: convert the column to numbers, or correct the condition"
            )
        is_boolean = pa.types.is_boolean(kind) and action.value_text.lower() in ("true", "false")
        if not (is_text or is_boolean or (_is_number(kind) and compares_number)):
            raise ValueError(
                f"{where} is of type {kind}, which cannot be compared as in {action.text!r}: correct the condition"
            )
        other = sql_text(action.value_text)
        if isinstance(action.value, int) and not is_text:
            other = str(action.value)
        elif not (is_text or is_boolean):
            # The lowest precision of the column in the files: 4.1 is not equal to the float32 nearest to it.
            if pa.types.is_float16(kind):  # which DuckDB reads as float32
                other = sql_text(str(float(np.float16(action.value))))
            precision = "FLOAT" if name in self._float32 else "DOUBLE"
            value, other = f"{value}::{precision}", f"{other}::{precision}"
        no_nan = f" AND NOT isnan({value})" if pa.types.is_floating(kind) and action.operator != "!=" else ""
        return f"coalesce({value} {action.operator} {other}{no_nan}, false)"

    def _where(self, name: str) -> str:
        return f"column {name!r} of {self.source}"

    def _check_lists(self) -> None:
        columns = self._columns
        if not self._is_lists and columns.time is None:
            raise ValueError(
                f"columns.time is not given, and a row of {self.source} is an event; events are sorted by time: give "
                "the column with --columns.time"
            )
        for name, kind in self._types.items():
            if _is_list(kind) and name not in self._listed:
                others = "one row per user with lists" if self._is_lists else f"{columns.item!r} is not"
                raise ValueError(
                    f"{self._where(name)} is a list, and {others}; users and context are single values, and either all "
                    "of items, times and actions are lists or none is: name another column"
                )
            if name in self._listed and not _is_list(kind):
                raise ValueError(f"{self._where(name)} is of type {kind}; it must be a list, like items: convert it")

    def _require_columns(self, path: Path, names: Collection[str], read: Collection[str]) -> None:
        """Raise ValueError unless a file has one column of each name. DuckDB renames "A" beside "a" to "A_1"."""
        for name in read:
            alike = [each for each in names if each.lower() in (name.lower(), name.lower().rstrip("_0123456789"))]
            if len({each.lower() for each in alike}) < len(alike):
                raise ValueError(
                    f"columns {', '.join(map(repr, alike))} of {path} have one name in SQL, which ignores case, and "
                    f"{name!r} is read: rename all but one"
                )
            if name not in names:
                raise ValueError(
                    f"{path} has no column {name!r}, which other files of {self.source} have; its columns are "
                    f"{', '.join(names)}: write it again, or move it elsewhere"
                )


def _common_type(name: str, schemas: Mapping[Path, pa.Schema]) -> pa.DataType:
    """The widest type of a column in the files, as which DuckDB reads it; ValueError for types of several families.

    The type null, which pandas writes for a column without values, counts only if all files have it.
    """
    kinds = {path: schema.field(name).type for path, schema in schemas.items()}
    known = {path: kind for path, kind in kinds.items() if not pa.types.is_null(_value_type(kind))} or kinds
    first, expected = next(iter(known.items()))
    for path, kind in known.items():
        if _family(kind) != _family(expected):
            raise ValueError(
                f"column {name!r} is of type {expected} in {first} and {kind} in {path}; a column has one type: "
                "convert one of them"
            )
    return max(known.values(), key=_width)


def _checked(name: str, value: str, wrong: str, found: str, rule: str) -> str:
    """SQL of a value, or of an error with `found`, the row and the rule where the SQL condition `wrong` is true."""
    head = sql_text(f"column {name!r} of ")
    where = f"coalesce(' in row ' || ({_ROW} + 1) || ', counted from 1', '') || {sql_text('; ' + rule)}"
    return f"CASE WHEN {wrong} THEN error({head} || {_FILE} || {found} || {where}) ELSE {value} END"


def _without_nulls(name: str, value: str, allowed: str = _IS_EMPTY) -> str:
    return _checked(name, value, f"({sql_name(name)} IS NULL) <> {allowed}", "' has a null'", _WHOLE_ROWS)


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if _is_list(kind) else kind


def _width(kind: pa.DataType) -> int:
    """Larger for a type that can represent more values, among types of one family where that matters."""
    kind = _value_type(kind)
    if pa.types.is_timestamp(kind):
        return _PER_SECOND[kind.unit]
    return kind.bit_width if pa.types.is_floating(kind) else int(pa.types.is_uint64(kind))


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _family(kind: pa.DataType) -> str:
    """The common type as which values of several types are read."""
    if _is_list(kind):
        return f"list of {_family(kind.value_type)}"
    families = {
        "integer": pa.types.is_integer(kind),
        "float": pa.types.is_floating(kind),
        "text": str(kind) in ("string", "large_string", "string_view", "extension<arrow.uuid>"),
        "binary": str(kind) in ("binary", "large_binary", "binary_view") or pa.types.is_fixed_size_binary(kind),
        "timestamp": pa.types.is_timestamp(kind),
    }
    return next((name for name, holds in families.items() if holds), str(kind))
