"""GATHER: what one rank brings to a call that moves rows, and what every rank knows of all of them after one gather."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from commons.dispatch.exchange import DispatchChannel
from commons.dispatch.home import MOST_LEAVES, differentiable_leaves, leaf_paths
from commons.dispatch.trim import Trim, find_windows
from commons.dispatch.widen import Padding, padding_of
from commons.distributed.gather.schema_agreement import find_difference
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.plain_values import PlainField, differences
from commons.sequence_batch.row_leaves import device_of, is_moved
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.schema import BatchSchema, BranchField

# Numbers of a rank before its columns: digests of its two texts, a bit for each differentiable leaf, and for each
# column that it gives.
_HEAD = 4


@dataclass(frozen=True, eq=False)
class OwnRows:
    """What one rank brings; made by `OwnRows.of`."""

    rows: Rows[Any] | None  # its real rows; None for none at all
    # By name, int64 `(rows,)`: what all ranks are to know of each row; None for what is not given.
    columns: Mapping[str, np.ndarray | None]
    described: str = ""  # what must be equal on all ranks, as JSON; empty without a batch
    padding: str = ""  # `padding_of` its rows, as JSON
    differentiable: Sequence[int] = ()  # leaves that require gradients

    @classmethod
    def of(
        cls,
        batch: Any | None,
        given: Mapping[str, Any],
        columns_of: Callable[[Rows[Any]], Mapping[str, np.ndarray | None]],
        trims: Sequence[Trim],
    ) -> OwnRows:
        """Leave out padding, and describe what has to be equal on all ranks.

        Args:
            batch: this rank's; None for none.
            given: what the caller gives for each row, by name; nothing without a batch.
            columns_of: makes of it int64 `(rows,)`, padding included, or None; the same names on all ranks.
            trims: how its padded sequences are cut.

        Raises:
            KeyError: a field to trim that is not there.
            ValueError: something given without a batch; a field to trim that has the wrong shape; a field that requires
                grad and is jagged or trimmed.
            TypeError: a batch that cannot be sent.
        """
        if batch is None:
            for name, values in given.items():
                if values is not None and len(values):
                    raise ValueError(
                        f"batch is None and there are {len(values)} {name}; a rank without rows has none: pass the "
                        "batch, or None for all"
                    )
            return cls(None, dict.fromkeys(given))
        rows = Rows.of(batch)
        columns = columns_of(rows)
        windows = find_windows(rows, trims)
        cut = {path for window in windows for path in window.fields}
        devices = {path_name(path): device_of(leaf).type for path, leaf in rows.leaves.items() if is_moved(leaf)}
        described = json.dumps([_comparable(rows.schema, cut).text, devices])
        real = {name: None if column is None else column[: rows.real] for name, column in columns.items()}
        rows = rows.without_padding()
        differentiable = differentiable_leaves(rows)
        for path in leaf_paths(rows, differentiable):
            if path in cut:
                raise ValueError(
                    f"field {path_name(path)!r} requires grad and is trimmed; gradients follow rows as they are: pass "
                    "detach(), or leave it out of Trim.fields"
                )
        padding = json.dumps(padding_of(rows, trims, windows)) if trims else ""
        return cls(rows, real, described, padding, differentiable)

    @property
    def count(self) -> int:
        """Real rows."""
        return 0 if self.rows is None else self.rows.count


def gather_rows(
    channel: DispatchChannel, own: OwnRows, rows_per_rank: np.ndarray
) -> tuple[dict[str, np.ndarray | None], Padding, list[int]]:
    """What all ranks bring.

    Returns:
        Each column int64 `(rows of all ranks,)`, rank by rank, None where no rank gives it; what padded sequences are
        like on all ranks; and the leaves that require gradients on any.

    Raises:
        ValueError: batches or given columns that differ between ranks, or a field whose padding has different values;
            on all.
        RankMissingError: a rank did not take part in time.
    """
    most, columns = int(rows_per_rank.max()), own.columns.values()
    message = np.zeros(_HEAD + len(columns) * most, dtype=np.int64)
    message[:_HEAD] = (
        _digest(own.described),
        _digest(own.padding),
        _bits(own.differentiable),
        _bits([place for place, column in enumerate(columns) if column is not None]),
    )
    for place, column in enumerate(columns):
        if column is not None:
            message[_HEAD + place * most :][: own.count] = column
    gathered = channel.gather(message, channel.step, "gather of workloads")
    described, padding, differentiable, given = gathered[:, :_HEAD].T
    if len(np.unique(described[described > 0])) > 1:
        _raise_for_difference(channel.gather_text(own.described, channel.step))
    _require_same_columns(list(own.columns), given, np.flatnonzero(rows_per_rank))
    texts = [own.padding]
    if len(np.unique(padding)) > 1:
        texts = channel.gather_text(own.padding, channel.step)
    tables = gathered[:, _HEAD:].reshape(channel.world_size, len(columns), most)
    is_row = np.arange(most) < rows_per_rank[:, None]
    is_given, followed = (np.bitwise_or.reduce(each) for each in (given, differentiable))
    return (
        {name: tables[:, place][is_row] if is_given >> place & 1 else None for place, name in enumerate(own.columns)},
        Padding.of({rank: json.loads(text) for rank, text in zip(channel.names, texts) if text}),
        [number for number in range(MOST_LEAVES) if followed >> number & 1],
    )


_MIXED = (
    "rows can be mixed where type, keys, dtypes, shapes of rows and metadata are the same on all ranks, and what is "
    "given for each row: make them equal, name what differs in width in Trim.fields"
)


def _comparable(schema: BatchSchema, cut: set[Path]) -> BatchSchema:
    """A schema with padded sequences of any width, whose text is that of all equal ones."""

    def comparable(field: Any) -> Any:
        if field.path in cut:
            return replace(field, trailing=(-1, *field.trailing[1:]))
        if isinstance(field, PlainField):
            return replace(field, json="" if field.per_rank else field.canonical())
        return replace(field, keys=()) if isinstance(field, BranchField) else field

    return BatchSchema(tuple(map(comparable, schema.fields)))


def _bits(numbers: Sequence[int]) -> int:
    return sum(1 << number for number in numbers)


def _digest(text: str) -> int:
    """63 bits of a text, 0 of none."""
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 | 1 if text else 0


def _raise_for_difference(texts: list[str]) -> None:
    """Raise ValueError for ranks whose batches differ, in what `OwnRows.described` says of them."""
    described = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    schemas = {rank: (BatchSchema.from_text(text), beside) for rank, (text, beside) in described.items()}
    found = find_difference(schemas, _differences)
    if found is not None:
        what, (other, _) = found
        raise ValueError(f"{what}; {_MIXED}{next(iter(schemas.values()))[0].way_out(other)}")


def _require_same_columns(names: list[str], given: np.ndarray, ranks: np.ndarray) -> None:
    """ValueError unless all ranks with rows give the same columns, by the bits of `given`, int64 `(ranks of all,)`."""
    for place, name in enumerate(names):
        of_ranks = given[ranks] >> place & 1
        if len(np.unique(of_ranks)) > 1:
            other = int(np.argmax(of_ranks != of_ranks[0]))
            states = [("absent", "given")[of_ranks[index]] for index in (0, other)]
            raise ValueError(
                f"the batches of ranks {ranks[0]} and {ranks[other]} differ: {name!r}: {' and '.join(states)}; {_MIXED}"
            )


def _differences(first: tuple[BatchSchema, Any], other: tuple[BatchSchema, Any]) -> list[str]:
    """What differs first between two descriptions."""
    beside = [f"{name!r}: {mine} and {its}" for name, mine, its in differences(first[1], other[1])]
    return (first[0].differences(other[0]) or beside)[:3]
