"""GATHER: what one rank brings to a call that moves rows, and what every rank knows of all of them after one gather."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commons.dispatch.exchange import DispatchChannel
from commons.dispatch.home import MOST_LEAVES, differentiable_leaves, leaf_paths
from commons.dispatch.trim import Trim, Window, find_windows
from commons.dispatch.widen import Found, Widening, agree_on_padding, find_padding
from commons.distributed.schema_agreement import find_difference
from commons.sequence_batch.fields import path_name
from commons.sequence_batch.plain_values import differences
from commons.sequence_batch.rows import Rows

# Whether a rank gives a column: no, yes, or it has no rows to give one for.
_ABSENT, _GIVEN, _NO_ROWS = range(3)
# Numbers of a rank before those of its columns: of its schema, of its padding, and a bit for each differentiable leaf.
_FACTS = 3


@dataclass(frozen=True, eq=False)
class OwnRows:
    """What one rank brings; made by `OwnRows.of`."""

    rows: Rows[Any] | None  # its real rows; None for none at all
    # By name, int64 `(rows,)`: what all ranks are to know of each row; None for what is not given.
    columns: Mapping[str, np.ndarray | None]
    windows: Sequence[Window] = ()  # what each trim would keep of the whole
    schema: dict[str, Any] | None = None  # what must be equal on all ranks; None without a batch
    found: Found = field(default_factory=dict)  # by field, what its rows have beyond their tokens
    differentiable: Sequence[int] = ()  # leaves that require gradients

    @classmethod
    def of(cls, rows: Rows[Any] | None, columns: Mapping[str, np.ndarray | None], trims: Sequence[Trim]) -> OwnRows:
        """Leave out padding, and describe what has to be equal on all ranks.

        Args:
            rows: the batch; None for none.
            columns: int64 `(rows,)`, padding included, or None; the same names on all ranks.
            trims: how its padded sequences are cut.

        Raises:
            KeyError: a field to trim that is not there.
            ValueError: such a field of the wrong shape, or one that requires grad and is jagged, or trimmed.
            TypeError: a batch that cannot be sent.
        """
        if rows is None:
            return cls(None, dict.fromkeys(columns))
        windows = find_windows(rows, trims)
        schema = rows.schema(varying=[path for window in windows for path in window.fields])
        real = {name: None if column is None else column[: rows.real] for name, column in columns.items()}
        rows = rows if rows.real == rows.count else rows.select(range(rows.real))
        differentiable = differentiable_leaves(rows)
        cut = {path for window in windows for path in window.fields}
        for path in leaf_paths(rows, differentiable):
            if path in cut:
                raise ValueError(
                    f"field {path_name(path)!r} requires grad and is trimmed; gradients follow rows as they are: pass "
                    "detach(), or leave it out of Trim.fields"
                )
        return cls(rows, real, windows, schema, find_padding(rows, trims, windows), differentiable)

    @property
    def count(self) -> int:
        """Real rows."""
        return 0 if self.rows is None else self.rows.count


def gather_rows(
    channel: DispatchChannel, own: OwnRows, rows_per_rank: np.ndarray, num_trims: int
) -> tuple[dict[str, np.ndarray | None], Widening, list[int]]:
    """What all ranks bring.

    Returns:
        Each column int64 `(rows of all ranks,)`, rank by rank, None where no rank gives it; what padded sequences are
        like on all ranks; and the leaves that require gradients on any.

    Raises:
        ValueError: batches that differ between ranks, a column that some ranks give and others do not, or a field whose
            padding has different values; on all.
        RankMissingError: a rank did not take part in time.
    """
    most, names = int(rows_per_rank.max()), list(own.columns)
    head = np.zeros(_FACTS + len(names) + num_trims, dtype=np.int64)
    table = np.zeros((len(names), most), dtype=np.int64)
    for place, column in enumerate(own.columns.values()):
        head[_FACTS + place] = _NO_ROWS if not own.count else _ABSENT if column is None else _GIVEN
        if column is not None:
            table[place, : own.count] = column
    if own.schema is not None:
        head[:_FACTS] = _digest(own.schema), _digest(own.found), sum(1 << number for number in own.differentiable)
        head[_FACTS + len(names) :] = [window.width for window in own.windows]
    gathered = channel.gather(np.concatenate([head, table.ravel()]), channel.step, "gather of workloads")
    digests, states = gathered[:, 0], gathered[:, _FACTS : _FACTS + len(names)]
    if len(np.unique(digests[digests > 0])) > 1:
        _raise_for_difference([json.loads(text) for text in channel.gather_text(json.dumps(own.schema), channel.step)])
    _require_on_all_or_none(names, states)
    tables = gathered[:, len(head) :].reshape(channel.world_size, len(names), most)
    is_row = np.arange(most) < rows_per_rank[:, None]
    columns = {
        name: tables[:, place][is_row] if (states[:, place] == _GIVEN).any() else None
        for place, name in enumerate(names)
    }
    found = [own.found]
    if num_trims and len(np.unique(gathered[:, 1])) > 1:
        found = [json.loads(text) for text in channel.gather_text(json.dumps(own.found), channel.step)]
    padding = agree_on_padding(found, channel.names)
    widths = gathered[:, _FACTS + len(names) : len(head)].max(axis=0).tolist()
    anywhere = int(np.bitwise_or.reduce(gathered[:, 2]))
    return columns, Widening(widths, padding), [number for number in range(MOST_LEAVES) if anywhere >> number & 1]


def _digest(described: Any) -> int:
    """63 bits, never 0, of what JSON can hold."""
    text = json.dumps(described, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1 | 1


def _require_on_all_or_none(names: Sequence[str], states: np.ndarray) -> None:
    for name, state in zip(names, states.T):
        given, absent = state == _GIVEN, state == _ABSENT
        if given.any() and absent.any():
            raise ValueError(
                f"{name} are given on rank {int(np.argmax(given))} and not on rank {int(np.argmax(absent))}; the rows "
                "of all ranks are planned together: pass them on all, or on none"
            )


def _raise_for_difference(schemas: list[dict[str, Any] | None]) -> None:
    """Raise ValueError for ranks whose batches differ; None stands for a rank without a batch."""
    described = {rank: schema for rank, schema in enumerate(schemas) if schema is not None}
    found = find_difference(described, _differences)
    if found is not None:
        raise ValueError(
            f"{found[0]}; rows can be mixed where type, keys, dtypes, shapes of rows and metadata are the same on all "
            "ranks: make them equal, name what differs in width in Trim.fields, or declare metadata that are each "
            "rank's own: register_batch_type(..., per_rank=(...))"
        )


def _differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs first between two descriptions."""
    return [f"{name!r}: {mine} and {its}" for name, mine, its in differences(first, other)][:3]
