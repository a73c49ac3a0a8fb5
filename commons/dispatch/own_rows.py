"""GATHER: the rows of one rank in a call that moves rows, and the gather of all ranks' workloads and schemas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from commons.dispatch.exchange import DispatchChannel
from commons.dispatch.home import differentiable_leaves, leaf_paths
from commons.dispatch.trim import Trim, find_windows
from commons.dispatch.widen import Padding, padding_of
from commons.distributed.gather.schema_agreement import find_difference
from commons.sequence_batch.branches import BranchField
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.plain_values import PlainField, differences
from commons.sequence_batch.row_leaves import device_of, is_moved
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.schema import BatchSchema


@dataclass(frozen=True, eq=False)
class OwnRows:
    """The rows of one rank with their description; made by `OwnRows.of`."""

    rows: Rows[Any] | None  # the real rows; None without a batch
    # The values per row that are gathered, such as workloads: int64 `(rows,)` by name; None for a column not given.
    columns: Mapping[str, np.ndarray | None]
    schema: BatchSchema | None = None  # must be equal on all ranks; None without a batch
    devices: Mapping[str, str] = field(default_factory=dict)  # device types of the fields; must be equal on all ranks
    trims: Sequence[Trim] = ()  # the padded sequences to trim
    padding: Any = None  # `padding_of` the rows
    differentiable: Sequence[int] = ()  # numbers of the leaves that require gradients

    @classmethod
    def of(
        cls,
        batch: Any | None,
        given: Mapping[str, Any],
        columns_of: Callable[[Rows[Any]], Mapping[str, np.ndarray | None]],
        trims: Sequence[Trim],
    ) -> OwnRows:
        """Drop padding, and describe all that must be equal on all ranks.

        Args:
            batch: this rank's batch; None for no rows.
            given: the caller's arguments with a value per row, by name; without a batch, None or empty.
            columns_of: makes the columns from the parsed batch, int64 `(rows,)` with padding, or None; their names are
                equal on all ranks.
            trims: the padded sequences to trim.

        Raises:
            KeyError: a field to trim that the batch does not have.
            ValueError: values given without a batch; a field to trim that has the wrong shape; a field that requires
                grad and is jagged or trimmed.
            TypeError: a batch that cannot be sent.
        """
        if batch is None:
            for name, values in given.items():
                if values is not None and len(values):
                    raise ValueError(
                        f"batch is None and there are {len(values)} {name}; a rank without rows has no {name}: pass "
                        "the batch, or None for all"
                    )
            return cls(None, dict.fromkeys(given), trims=trims)
        rows = Rows.of(batch)
        columns = columns_of(rows)
        windows = find_windows(rows, trims)
        cut = {path for window in windows for path in window.fields}
        devices = {path_name(path): device_of(leaf).type for path, leaf in rows.leaves.items() if is_moved(leaf)}
        schema = _comparable(rows.schema, cut)
        _ = schema.text  # raises here for keys that JSON cannot hold, where the error reaches all ranks
        real = {name: None if column is None else column[: rows.real] for name, column in columns.items()}
        rows = rows.without_padding()
        differentiable = differentiable_leaves(rows)
        for path in leaf_paths(rows, differentiable):
            if path in cut:
                raise ValueError(
                    f"field {path_name(path)!r} requires grad and is trimmed; gradients do not follow trimmed rows: "
                    "pass detach(), or leave it out of Trim.fields"
                )
        padding = padding_of(rows, trims, windows) if trims else None
        return cls(rows, real, schema, devices, trims, padding, differentiable)

    @property
    def count(self) -> int:
        """Number of real rows."""
        return 0 if self.rows is None else self.rows.count

    @property
    def text(self) -> str:
        """The description of the batch for other ranks, without the columns, as JSON; empty without a batch."""
        if self.schema is None:
            return ""
        states = {name: _ABSENT if column is None else _GIVEN for name, column in self.columns.items()}
        given = states if self.count else None  # without rows, columns may be missing
        return json.dumps([self.schema.text, self.devices, given, self.differentiable, self.padding])


class AllRows(NamedTuple):
    """What is gathered of the rows of all ranks."""

    columns: dict[str, np.ndarray | None]  # int64 `(rows of all ranks,)`, rank by rank; None if no rank gives it
    padding: Padding  # of padded sequences
    differentiable: list[int]  # numbers of the leaves that require gradients on any rank


def gather_rows(channel: DispatchChannel, own: OwnRows, rows_per_rank: np.ndarray) -> AllRows:
    """Gather the columns of all ranks, and compare the batches' descriptions.

    Raises:
        ValueError: on all ranks: batches or given columns that differ between ranks, or a field whose padding has
            different values.
        RankMissingError: a rank is missing after the timeout.
    """
    text, most = own.text, int(rows_per_rank.max())
    message = np.zeros(1 + len(own.columns) * most, dtype=np.int64)
    message[0] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    for position, column in enumerate(own.columns.values()):
        if column is not None:
            message[1 + position * most :][: own.count] = column
    gathered = channel.gather(message, channel.step, "gather of workloads")
    alike = (gathered[:, 0] == gathered[0, 0]).all()
    texts = [text] if alike else channel.gather_text(text, channel.step)
    received = {rank: json.loads(each) for rank, each in zip(channel.members, texts) if each}
    described = {rank: (schema, devices, given) for rank, (schema, devices, given, *_) in received.items()}
    # Ranks with rows first, because only their descriptions list the given columns.
    described = dict(sorted(described.items(), key=lambda each: not each[1][2]))
    if (found := find_difference(described, _differences)) is not None:
        what, other = found
        mine, its = (BatchSchema.from_text(schema) for schema, *_ in (next(iter(described.values())), other))
        raise ValueError(f"{what}; {_MIXED}{mine.way_out(its)}")
    tables = gathered[:, 1:].reshape(channel.world_size, len(own.columns), most)
    is_row = np.arange(most) < rows_per_rank[:, None]
    states = next((given for _, _, given in described.values()), None) or {}
    return AllRows(
        {
            name: tables[:, position][is_row] if states.get(name) == _GIVEN else None
            for position, name in enumerate(own.columns)
        },
        Padding.of({rank: padding for rank, (*_, padding) in received.items() if padding}),
        sorted({number for *_, differentiable, _ in received.values() for number in differentiable}),
    )


_GIVEN, _ABSENT = "given", "absent"
_MIXED = (
    "type, keys, dtypes, shapes of rows, metadata and the values given per row must be the same on all ranks: make "
    "them equal, name fields of different widths in Trim.fields"
)


def _comparable(schema: BatchSchema, cut: set[Path]) -> BatchSchema:
    """A schema without the widths of padded sequences; equal schemas have equal texts."""

    def comparable(field: Any) -> Any:
        if field.path in cut:
            return replace(field, trailing=(-1, *field.trailing[1:]))
        if isinstance(field, PlainField):
            return replace(field, json="" if field.per_rank else field.canonical())
        return replace(field, keys=()) if isinstance(field, BranchField) else field

    return BatchSchema(tuple(map(comparable, schema.fields)))


def _differences(first: tuple[str, Any, Any], other: tuple[str, Any, Any]) -> list[str]:
    """The first differences between two descriptions: schemas as text, devices, and the columns given."""
    of_schema = (
        [] if first[0] == other[0] else BatchSchema.from_text(first[0]).differences(BatchSchema.from_text(other[0]))
    )
    others = differences(first[1], other[1]) or (differences(first[2], other[2]) if other[2] else [])
    return (of_schema or [f"{name!r}: {mine} and {its}" for name, mine, its in others])[:3]
