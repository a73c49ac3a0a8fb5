"""Leaves with rows of different lengths: JaggedTensors, KeyedJaggedTensors and nested tensors; see row_fields.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.host_copies import attach_host_copy, host_copy
from commons.sequence_batch.jagged import permute_segments, torchrec_class
from commons.sequence_batch.row_fields import RowField, short_name, take

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


@dataclass(unsafe_hash=True)
class JaggedField(RowField):
    """A JaggedTensor: values `(sum(lengths), *row_shape)`, weights too, over lengths `(rows,)`.

    It may have values before its first offset and after its last; results have only the values of the rows.
    """

    label = "jagged"

    keys: tuple[str, ...]  # the last part of its path
    values_dtype: torch.dtype
    weights_dtype: torch.dtype | None
    lengths_dtype: torch.dtype
    row_shape: tuple[int, ...] | None  # shape of an entry; None for a KeyedJaggedTensor

    @property
    def is_label(self) -> bool:
        """Whether its values are labels and not tokens."""
        return self.path[:1] == ("labels",)

    @property
    def is_lookup(self) -> bool:
        """Whether its values are embedding lookups: true for KeyedJaggedTensors except labels."""
        return self.row_shape is None and not self.is_label

    @classmethod
    def of(cls, path: Path, value: JaggedTensor) -> JaggedField:
        keys = (str(path[-1]) if path else "",)
        return cls(path, keys, *_jagged_dtypes(value), tuple(value.values().shape)[1:])

    def count(self, value: JaggedTensor) -> int:
        return value.lengths().numel()

    def require_movable(self, value: JaggedTensor) -> None:
        require_flat(self.path, value, {"weights": value.weights_or_none()})

    def check(self, value: JaggedTensor) -> None:
        _require_weights(self.path, value)
        total, (first, last) = int(value.lengths().sum()), _ends(value)
        num_values = value.values().shape[0]
        if last - first != total or not 0 <= first <= last <= num_values:
            raise ValueError(
                f"field {self.name!r} has offsets from {first} to {last}, lengths that add up to {total}, "
                f"and {num_values} values; offsets lie within the values and differ by the lengths: correct them"
            )

    def select(self, value: JaggedTensor, rows: torch.Tensor) -> JaggedTensor:
        lengths = value.lengths()
        positions, selected = _segment_positions(value.offsets()[:-1], lengths, rows.to(lengths.device))
        values, weights = value.values(), value.weights_or_none()
        parts = [take(part, 0, positions) for part in (values, *([] if weights is None else [weights]))]
        return self.made_of(None, [parts[0], selected, *parts[1:]])

    def join(self, values: Sequence[JaggedTensor]) -> JaggedTensor:
        return self.made_of(None, [torch.cat(parts) for parts in zip(*map(self.tensors, values))])

    def tensors(self, value: JaggedTensor) -> list[torch.Tensor]:
        weights, rows = value.weights_or_none(), slice(*_ends(value))
        return [value.values()[rows], value.lengths(), *([] if weights is None else [weights[rows]])]

    def empty(self, rows: int, device: torch.device | None = None) -> Any:
        num_keys = len(self.keys)
        tensors = [
            torch.empty((0, *(self.row_shape or ())), dtype=self.values_dtype, device=device),
            torch.zeros(num_keys * rows, dtype=self.lengths_dtype, device=device),
        ]
        if self.weights_dtype is not None:
            tensors.append(torch.empty(0, dtype=self.weights_dtype, device=device))
        return self.made_of([rows, [0] * num_keys], tensors)

    def made_of(self, content: Any, tensors: Sequence[torch.Tensor]) -> Any:
        values, lengths, *weights = tensors
        return self.jagged(values, weights[0] if weights else None, lengths, *(content or (0, None)))

    def jagged(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        stride: int,
        length_per_key: list[int] | None,
    ) -> KeyedJaggedTensor | JaggedTensor:
        """Make a jagged tensor of `stride` rows from lengths `(keys · stride,)`; `length_per_key` has their sums."""
        if self.row_shape is not None:
            return torchrec_class("JaggedTensor")(values=values, weights=weights, lengths=lengths)
        keys, made = list(self.keys), torchrec_class("KeyedJaggedTensor")
        return made(keys, values, weights, lengths, stride=stride, length_per_key=length_per_key)

    def summary(self) -> str:
        weights = "" if self.weights_dtype is None else f", weights {short_name(self.weights_dtype)}"
        what = list(self.keys) if self.row_shape is None else f"elements {list(self.row_shape)}"
        return f"jagged {what} {short_name(self.values_dtype)}{weights}, lengths {short_name(self.lengths_dtype)}"


@dataclass(unsafe_hash=True)
class KeyedJaggedField(JaggedField):
    """A KeyedJaggedTensor with one number of rows for all keys."""

    @classmethod
    def of(cls, path: Path, value: KeyedJaggedTensor) -> KeyedJaggedField:
        return cls(path, tuple(value.keys()), *_jagged_dtypes(value), None)

    def count(self, value: KeyedJaggedTensor) -> int:
        if value.variable_stride_per_key():
            raise ValueError(
                f"field {self.name!r} has a variable batch per key (strides {value.stride_per_key()}); every key must "
                "have one row per sample: expand its rows, and leave out stride_per_key_per_rank and inverse_indices"
            )
        if value.inverse_indices_or_none() is not None:
            raise ValueError(
                f"field {self.name!r} has inverse_indices; they point into rows that are about to move: expand the "
                "KeyedJaggedTensor to one row per sample first"
            )
        keys, rows, num_lengths = self.keys, value.stride(), value.lengths().numel()
        if len(set(keys)) != len(keys):
            repeated = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(
                f"field {self.name!r} has duplicate keys {repeated}; keys must be unique: rename or merge them"
            )
        require_flat(self.path, value, {"values": value.values(), "weights": value.weights_or_none()})
        if num_lengths != len(keys) * rows:
            raise ValueError(
                f"field {self.name!r} has {num_lengths} lengths for {len(keys)} keys and {rows} rows; there is one per "
                f"key and row, {len(keys) * rows} in all: match them"
            )
        return rows

    def require_movable(self, value: KeyedJaggedTensor) -> None:
        pass  # `count` raises for all values that cannot move

    def check(self, value: KeyedJaggedTensor) -> None:
        self.count(value)
        require_sum(self.path, sum(value.length_per_key()), value.values().numel())

    def select(self, value: KeyedJaggedTensor, rows: torch.Tensor) -> KeyedJaggedTensor:
        num_rows, num_keys = value.stride(), len(self.keys)
        on_device = rows.to(value.device())
        lengths = value.lengths().view(num_keys, num_rows)
        selected = lengths.index_select(1, on_device)  # (keys, N)
        starts = torch.arange(num_keys, device=on_device.device).unsqueeze(1) * num_rows
        permute = (starts + on_device.unsqueeze(0)).flatten().to(torch.int32)  # (keys · N,)
        known = host_copy(value.lengths())
        on_host = None if known is None else known.view(num_keys, num_rows).index_select(1, rows)
        # Without a host copy of the lengths, this read of the sums is the only synchronisation.
        per_key = (selected if on_host is None else on_host).sum(dim=1).tolist()
        values, _, *weights = self.tensors(value)
        parts = [permute_segments(permute, lengths.flatten(), part, sum(per_key)) for part in (values, *weights)]
        result = self.made_of([rows.numel(), per_key], [parts[0], selected.flatten(), *parts[1:]])
        if on_host is not None:
            attach_host_copy(result.lengths(), on_host.flatten())
        return result

    def join(self, values: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        strides, per_key = [value.stride() for value in values], [value.length_per_key() for value in values]
        rows_per_key, joined = [[stride] * len(self.keys) for stride in strides], []
        for position, parts in enumerate(zip(*map(self.tensors, values))):
            # `tensors` has the lengths at position 1.
            pieces = [part.split(sizes) for part, sizes in zip(parts, rows_per_key if position == 1 else per_key)]
            joined.append(torch.cat([piece[key] for key in range(len(self.keys)) for piece in pieces] or parts))
        return self.made_of([sum(strides), [sum(sizes) for sizes in zip(*per_key)]], joined)

    def tensors(self, value: KeyedJaggedTensor) -> list[torch.Tensor]:
        weights = value.weights_or_none()
        return [value.values(), value.lengths(), *([] if weights is None else [weights])]

    def content(self, value: KeyedJaggedTensor) -> tuple[Any, list[torch.Tensor]]:
        # Lengths on a device are not summed here, because reading the sums would synchronise.
        on_host = value.lengths().device.type == "cpu"
        per_key = value.length_per_key() if on_host else value.length_per_key_or_none()
        return [value.stride(), per_key], self.tensors(value)


@dataclass(unsafe_hash=True)
class NestedField(RowField):
    """A nested tensor of layout torch.jagged. Results are contiguous, without gaps between rows."""

    label = "nested tensor"

    dtype: torch.dtype
    row_shape: tuple[int, ...]  # -1 in the dimension in which rows differ
    ragged: int  # the dimension in which rows differ

    @classmethod
    def of(cls, path: Path, value: torch.Tensor) -> NestedField:
        if value.layout != torch.jagged:  # `count` raises for it
            return cls(path, value.dtype, (), 0)
        ragged, sizes = ragged_axis(value), value.values().shape  # not value.shape, which verl's 3D tensors misstate
        return cls(path, value.dtype, (*sizes[: ragged - 1], -1, *sizes[ragged:]), ragged)

    def count(self, value: torch.Tensor) -> int:
        if value.layout != torch.jagged:
            raise ValueError(
                f"field {self.name!r} is a nested tensor of layout {value.layout}; rows are taken from the layout "
                "torch.jagged: build it with torch.nested.nested_tensor(..., layout=torch.jagged)"
            )
        return value.size(0)

    def require_movable(self, value: torch.Tensor) -> None:
        raise ValueError(
            f"field {self.name!r} is a nested tensor; a shuffler moves rows of dense tensors, KeyedJaggedTensors and "
            "JaggedTensors: convert it to one of these"
        )

    def check(self, value: torch.Tensor) -> None:
        self.count(value)

    def select(self, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        offsets: torch.Tensor = value.offsets()  # type: ignore[attr-defined]
        positions, selected = _segment_positions(offsets[:-1], _nested_lengths(value), rows.to(offsets.device))
        return self.made_of(None, [take(value.values(), self.ragged - 1, positions), selected])

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        parts, lengths = zip(*(self.content(value)[1] for value in values))
        return self.made_of(None, [torch.cat(parts, dim=self.ragged - 1), torch.cat(lengths)])

    def tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value.values(), _nested_lengths(value)]

    def content(self, value: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        return None, self.tensors(self.select(value, torch.arange(value.size(0), device="cpu")))

    def empty(self, rows: int, device: torch.device | None = None) -> torch.Tensor:
        values = torch.empty([max(0, size) for size in self.row_shape], dtype=self.dtype, device=device)
        return self.made_of(None, [values, torch.zeros(rows, dtype=torch.int64, device=device)])

    def made_of(self, content: None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        values, lengths = tensors
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=self.ragged)


def require_sum(path: Path, total: int, num_values: int) -> None:
    """Raise ValueError unless the lengths of a jagged tensor add up to its values."""
    if total != num_values:
        raise ValueError(
            f"field {path_name(path)!r} has lengths that add up to {total} and {num_values} values; every value "
            f"belongs to one row: {'correct the lengths or add values' if num_values < total else 'remove the others'}"
        )


def require_flat(path: Path, jagged: KeyedJaggedTensor | JaggedTensor, flat: dict[str, torch.Tensor | None]) -> None:
    """Raise ValueError for weights or offsets that do not fit the values, or for a tensor with several dimensions."""
    for what, tensor in flat.items():
        if tensor is not None and tensor.dim() != 1:
            raise ValueError(
                f"field {path_name(path)!r} has {what} of shape {tuple(tensor.shape)}; {what} of a "
                f"{type(jagged).__name__} have one dimension: flatten them, or use one key per column"
            )
    _require_weights(path, jagged)
    offsets = jagged.offsets_or_none()
    # On a device, reading the first offset would synchronise.
    if offsets is not None and offsets.device.type == "cpu" and offsets.numel() and int(offsets[0]):
        raise ValueError(
            f"field {path_name(path)!r} has offsets that begin at {int(offsets[0])}; offsets of a "
            f"{type(jagged).__name__} begin at 0: cut off the values before, and subtract it"
        )


def _require_weights(path: Path, jagged: KeyedJaggedTensor | JaggedTensor) -> None:
    values, weights = jagged.values(), jagged.weights_or_none()
    if weights is not None and weights.shape[0] != values.shape[0]:
        raise ValueError(
            f"field {path_name(path)!r} has {weights.shape[0]} weights and {values.shape[0]} values; every value has "
            "one weight: match them"
        )


def _jagged_dtypes(value: KeyedJaggedTensor | JaggedTensor) -> tuple[torch.dtype, torch.dtype | None, torch.dtype]:
    weights = value.weights_or_none()
    return value.values().dtype, None if weights is None else weights.dtype, value.lengths().dtype


def _ends(value: JaggedTensor) -> tuple[int, int]:
    """The start of the first row of a JaggedTensor and the end of the last row, as positions in its values."""
    offsets = value.offsets()
    return (int(offsets[0]), int(offsets[-1])) if offsets.numel() else (0, 0)


def _segment_positions(
    starts: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of the elements of the segments `rows`, segment after segment, and the lengths of these segments.

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


def _nested_lengths(value: torch.Tensor) -> torch.Tensor:
    """The number of elements of each row of a jagged nested tensor, without gaps between rows, int64 `(rows,)`."""
    lengths = value.lengths()  # type: ignore[attr-defined]
    return value.offsets().diff() if lengths is None else lengths  # type: ignore[attr-defined]
