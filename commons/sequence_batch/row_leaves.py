"""Kinds of values that hold one entry per row, and what can be done with their rows.

A kind is a class: to support another one, add it to `tensor_leaf_type`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from commons.sequence_batch.fields import num_rows_of, require_sum, require_weights
from commons.sequence_batch.host_copies import attach_host_copy, host_copy
from commons.sequence_batch.jagged import (
    is_any_jagged,
    is_keyed_jagged,
    new_jagged,
    new_keyed_jagged,
    select_kjt_rows,
)

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

V = TypeVar("V")


class LeafType(ABC, Generic[V]):
    """What one kind of value can do with its rows; `name` says in messages which field the value is."""

    @abstractmethod
    def count(self, value: V, name: str) -> int:
        """Number of rows; ValueError for a value without a row dimension."""

    @abstractmethod
    def select(self, value: V, rows: torch.Tensor) -> V:
        """Rows by index, int64 `(N,)` on the CPU, in new storage; any order, repeats allowed."""

    @abstractmethod
    def traits(self, value: V) -> dict[str, Any]:
        """What values must have in common to be concatenated."""

    @abstractmethod
    def join(self, values: Sequence[V]) -> V:
        """Rows of all values, whose traits are equal, in turn."""

    @abstractmethod
    def padding(self, value: V, num_rows: int) -> V:
        """`num_rows` rows of padding that `join` takes beside `value`: empty where rows are jagged, else zeros."""

    @abstractmethod
    def tensors(self, value: V) -> list[torch.Tensor]:
        """The tensors that the value is made of; none for Python objects."""


class _DenseTensor(LeafType[torch.Tensor]):
    """A tensor `(rows, ...)`."""

    def count(self, value: torch.Tensor, name: str) -> int:
        return num_rows_of(name, value)

    def select(self, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        selected = take(value, 0, rows.to(value.device))
        known = host_copy(value)
        if known is not None and known is not value:
            attach_host_copy(selected, take(known, 0, rows))
        return selected

    def traits(self, value: torch.Tensor) -> dict[str, Any]:
        return {"dtype": value.dtype, "row shape": tuple(value.shape[1:]), "device": value.device}

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values))

    def padding(self, value: torch.Tensor, num_rows: int) -> torch.Tensor:
        return value.new_zeros(num_rows, *value.shape[1:])

    def tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value]


class _NestedTensor(LeafType[torch.Tensor]):
    """A nested tensor of layout torch.jagged. Its result is contiguous: gaps between rows are left out."""

    def count(self, value: torch.Tensor, name: str) -> int:
        if value.layout != torch.jagged:
            raise ValueError(
                f"field {name!r} is a nested tensor of layout {value.layout}; rows are taken from the layout "
                "torch.jagged: build it with torch.nested.nested_tensor(..., layout=torch.jagged)"
            )
        return value.size(0)

    def select(self, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        offsets, lengths = nested_offsets(value), nested_lengths(value)
        on_device = rows.to(offsets.device)
        positions, selected = segment_positions(offsets[:-1], lengths, on_device)
        axis = ragged_axis(value) - 1
        return nested_from_lengths(take(value.values(), axis, positions), selected, axis + 1)

    def traits(self, value: torch.Tensor) -> dict[str, Any]:
        shape = list(value.shape[1:])
        axis = ragged_axis(value)
        shape[axis - 1] = -1
        return {"dtype": value.dtype, "row shape": tuple(shape), "ragged dimension": axis, "device": value.device}

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        # Selecting all rows leaves gaps out, so that the values can be put end to end.
        dense = [self.select(value, torch.arange(value.size(0))) for value in values]
        axis = ragged_axis(values[0])
        lengths = torch.cat([nested_lengths(value) for value in dense])
        return nested_from_lengths(torch.cat([value.values() for value in dense], dim=axis - 1), lengths, axis)

    def padding(self, value: torch.Tensor, num_rows: int) -> torch.Tensor:
        axis = ragged_axis(value)
        no_values = value.values().narrow(axis - 1, 0, 0).detach().clone()
        return nested_from_lengths(no_values, nested_offsets(value).new_zeros(num_rows), axis)

    def tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value.values(), nested_lengths(value)]


class _Array(LeafType[np.ndarray]):
    """A numpy array `(rows, ...)`; one of dtype object holds a Python object per row."""

    def count(self, value: np.ndarray, name: str) -> int:
        require_plain_array(value, name)
        if value.ndim == 0:
            raise ValueError(
                f"field {name!r} is a 0-dimensional array; an array must have the batch as its first dimension: make "
                "it a Python number, or repeat it for every row"
            )
        return value.shape[0]

    def select(self, value: np.ndarray, rows: torch.Tensor) -> np.ndarray:
        return value[rows.numpy()]

    def traits(self, value: np.ndarray) -> dict[str, Any]:
        # Strings of different widths are of one kind: joining widens them.
        dtype = value.dtype.kind if value.dtype.kind in "US" else value.dtype
        return {"dtype": dtype, "row shape": value.shape[1:]}

    def join(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(values))

    def padding(self, value: np.ndarray, num_rows: int) -> np.ndarray:
        shape = (num_rows, *value.shape[1:])
        return np.full(shape, None, dtype=object) if value.dtype == object else np.zeros(shape, dtype=value.dtype)

    def tensors(self, value: np.ndarray) -> list[torch.Tensor]:
        return []


class _Column(LeafType[list[Any]]):
    """A list of Python objects, one per row."""

    def count(self, value: list[Any], name: str) -> int:
        return len(value)

    def select(self, value: list[Any], rows: torch.Tensor) -> list[Any]:
        return [value[row] for row in rows.tolist()]

    def traits(self, value: list[Any]) -> dict[str, Any]:
        return {}

    def join(self, values: Sequence[list[Any]]) -> list[Any]:
        return [item for value in values for item in value]

    def padding(self, value: list[Any], num_rows: int) -> list[Any]:
        return [None] * num_rows

    def tensors(self, value: list[Any]) -> list[torch.Tensor]:
        return []


class _KeyedJagged(LeafType["KeyedJaggedTensor"]):
    """A KeyedJaggedTensor with one number of rows for all keys."""

    def count(self, value: KeyedJaggedTensor, name: str) -> int:
        rows = num_rows_of(name, value)
        require_sum(name, sum(value.length_per_key()), value.values().numel())
        return rows

    def select(self, value: KeyedJaggedTensor, rows: torch.Tensor) -> KeyedJaggedTensor:
        return select_kjt_rows(value, rows)

    def traits(self, value: KeyedJaggedTensor) -> dict[str, Any]:
        return {"keys": tuple(value.keys()), **_jagged_traits(value)}

    def join(self, values: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        keys = values[0].keys()
        per_key = [value.length_per_key() for value in values]

        def by_key(parts: list[torch.Tensor]) -> torch.Tensor:
            pieces = [part.split(sizes) for part, sizes in zip(parts, per_key)]
            return torch.cat([piece[key] for key in range(len(keys)) for piece in pieces])

        weights = [weights for value in values if (weights := value.weights_or_none()) is not None]
        lengths = torch.cat([value.lengths().view(len(keys), value.stride()) for value in values], dim=1)
        return new_keyed_jagged(
            keys,
            by_key([value.values() for value in values]),
            by_key(weights) if weights else None,
            lengths.flatten(),
            lengths.shape[1],
            [sum(sizes) for sizes in zip(*per_key)],
        )

    def padding(self, value: KeyedJaggedTensor, num_rows: int) -> KeyedJaggedTensor:
        weights, lengths = value.weights_or_none(), value.lengths().new_zeros(len(value.keys()) * num_rows)
        no_weights = None if weights is None else weights.new_empty(0)
        none_of_each = [0] * len(value.keys())
        return new_keyed_jagged(value.keys(), value.values().new_empty(0), no_weights, lengths, num_rows, none_of_each)

    def tensors(self, value: KeyedJaggedTensor) -> list[torch.Tensor]:
        weights = value.weights_or_none()
        return [value.values(), value.lengths(), *([] if weights is None else [weights])]


class _Jagged(LeafType["JaggedTensor"]):
    """A JaggedTensor: values `(sum(lengths), ...)`, weights too, over lengths `(rows,)`.

    Its offsets may leave values out, before the first row and after the last; results have those of the rows alone.
    """

    def count(self, value: JaggedTensor, name: str) -> int:
        values, weights, lengths = value.values(), value.weights_or_none(), value.lengths()
        require_weights(name, values, weights)
        total, (first, last) = int(lengths.sum()), _ends(value)
        if last - first != total or not 0 <= first <= last <= values.shape[0]:
            raise ValueError(
                f"field {name!r} has offsets from {first} to {last}, lengths that add up to {total}, and "
                f"{values.shape[0]} values; offsets lie within the values and differ by the lengths: correct them"
            )
        return lengths.numel()

    def select(self, value: JaggedTensor, rows: torch.Tensor) -> JaggedTensor:
        lengths = value.lengths()
        positions, selected = segment_positions(value.offsets()[:-1], lengths, rows.to(lengths.device))
        weights = value.weights_or_none()
        taken = None if weights is None else take(weights, 0, positions)
        return new_jagged(take(value.values(), 0, positions), taken, selected)

    def traits(self, value: JaggedTensor) -> dict[str, Any]:
        return {"element shape": tuple(value.values().shape[1:]), **_jagged_traits(value)}

    def join(self, values: Sequence[JaggedTensor]) -> JaggedTensor:
        joined, lengths, *weights = (torch.cat(parts) for parts in zip(*map(self.tensors, values)))
        return new_jagged(joined, weights[0] if weights else None, lengths)

    def padding(self, value: JaggedTensor, num_rows: int) -> JaggedTensor:
        weights = value.weights_or_none()
        no_weights = None if weights is None else weights[:0].detach().clone()
        return new_jagged(value.values()[:0].detach().clone(), no_weights, value.lengths().new_zeros(num_rows))

    def tensors(self, value: JaggedTensor) -> list[torch.Tensor]:
        weights, rows = value.weights_or_none(), slice(*_ends(value))
        return [value.values()[rows], value.lengths(), *([] if weights is None else [weights[rows]])]


def require_plain_array(value: np.ndarray, name: str) -> None:
    """Raise TypeError for an array of a subclass, whose rows would be joined and sent as those of a plain one."""
    if type(value) not in (np.ndarray, np.memmap):
        remedy = "np.ma.getdata and np.ma.getmaskarray" if isinstance(value, np.ma.MaskedArray) else "np.asarray"
        raise TypeError(
            f"field {name!r} is a {type(value).__name__}; rows are taken from plain arrays, and what it has beside its "
            f"values would be lost: pass what {remedy} give of it"
        )


def _jagged_traits(value: KeyedJaggedTensor | JaggedTensor) -> dict[str, Any]:
    values, weights = value.values(), value.weights_or_none()
    return {
        "dtype": values.dtype,
        "dtype of weights": None if weights is None else weights.dtype,
        "dtype of lengths": value.lengths().dtype,
        "device": values.device,
    }


def _ends(value: JaggedTensor) -> tuple[int, int]:
    """Where the first row of a JaggedTensor begins and the last one ends."""
    offsets = value.offsets()
    return (int(offsets[0]), int(offsets[-1])) if offsets.numel() else (0, 0)


DENSE_TENSOR, NESTED_TENSOR, ARRAY = _DenseTensor(), _NestedTensor(), _Array()
KEYED_JAGGED, JAGGED, COLUMN = _KeyedJagged(), _Jagged(), _Column()


def tensor_leaf_type(value: Any) -> LeafType[Any] | None:
    """The kind of a tensor-like value; None for anything else, lists too: `rows.py` says which of them are columns."""
    if isinstance(value, torch.Tensor):  # asked once: a nested tensor takes its time to answer
        return NESTED_TENSOR if value.is_nested else DENSE_TENSOR
    if isinstance(value, np.ndarray):
        return ARRAY
    if is_keyed_jagged(value):
        return KEYED_JAGGED
    return JAGGED if is_any_jagged(value) else None


# Unsigned integers, for which torch has no index_select, as the integers that their bytes are taken for.
_TAKEN_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take(value: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """`value.index_select(axis, positions)`, of unsigned integers too."""
    dtype = _TAKEN_AS.get(value.dtype)
    if dtype is None:
        return value.index_select(axis, positions)
    return value.view(dtype).index_select(axis, positions).view(value.dtype)


def segment_positions(
    starts: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the elements of the segments `rows` lie, segment after segment, and the lengths of these segments.

    Segment i begins at `starts[i]` and has `lengths[i]` elements.
    """
    selected = lengths.index_select(0, rows)
    ends = selected.cumsum(0, dtype=torch.int64)
    shifts = starts.index_select(0, rows) - (ends - selected)
    positions = torch.repeat_interleave(shifts, selected.to(torch.int64))
    return positions + torch.arange(positions.numel(), device=positions.device), selected


def ragged_axis(value: torch.Tensor) -> int:
    """The dimension of a jagged nested tensor whose size differs between rows."""
    return int(value._ragged_idx)  # type: ignore[attr-defined]  # torch has no public name for it


def nested_offsets(value: torch.Tensor) -> torch.Tensor:
    """int64 `(rows + 1,)`: where each row of a jagged nested tensor starts."""
    return value.offsets()  # type: ignore[attr-defined]


def nested_lengths(value: torch.Tensor) -> torch.Tensor:
    """int64 `(rows,)`: elements of each row of a jagged nested tensor, gaps after it not counted."""
    lengths = value.lengths()  # type: ignore[attr-defined]
    return nested_offsets(value).diff() if lengths is None else lengths


def nested_from_lengths(values: torch.Tensor, lengths: torch.Tensor, ragged: int) -> torch.Tensor:
    """A jagged nested tensor of rows that lie end to end in `values`, along dimension `ragged - 1`."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)
