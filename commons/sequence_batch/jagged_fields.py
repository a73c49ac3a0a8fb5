"""Leaves whose rows differ in length: JaggedTensors, KeyedJaggedTensors and nested tensors; see row_fields.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.jagged import new_jagged, new_keyed_jagged, select_kjt_rows
from commons.sequence_batch.row_fields import RowField, short_name, take

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True)
class JaggedField(RowField):
    """A JaggedTensor: values `(sum(lengths), *row_shape)`, weights too, over lengths `(rows,)`.

    Its offsets may leave values out, before the first row and after the last; results have those of the rows alone.
    """

    label = "jagged"

    keys: tuple[str, ...]  # the last part of its path
    values_dtype: torch.dtype
    weights_dtype: torch.dtype | None
    lengths_dtype: torch.dtype
    row_shape: tuple[int, ...] | None  # of an entry; None for a KeyedJaggedTensor

    @property
    def is_label(self) -> bool:
        """Whether its values are no tokens."""
        return self.path[:1] == ("labels",)

    @property
    def is_lookup(self) -> bool:
        """Whether its values are embedding lookups: those of KeyedJaggedTensors but the labels."""
        return self.row_shape is None and not self.is_label

    @staticmethod
    def facts(path: Path, value: JaggedTensor) -> tuple[Any, ...]:
        values = value.values()
        return path, (str(path[-1]) if path else "",), *_jagged_dtypes(value), tuple(values.shape[1:])

    @staticmethod
    def count(path: Path, value: JaggedTensor) -> int:
        return value.lengths().numel()

    @staticmethod
    def check(path: Path, value: JaggedTensor) -> None:
        _require_weights(path, value)
        total, (first, last) = int(value.lengths().sum()), _ends(value)
        num_values = value.values().shape[0]
        if last - first != total or not 0 <= first <= last <= num_values:
            raise ValueError(
                f"field {path_name(path)!r} has offsets from {first} to {last}, lengths that add up to {total}, and "
                f"{num_values} values; offsets lie within the values and differ by the lengths: correct them"
            )

    @staticmethod
    def select(value: JaggedTensor, rows: torch.Tensor) -> JaggedTensor:
        lengths = value.lengths()
        positions, selected = segment_positions(value.offsets()[:-1], lengths, rows.to(lengths.device))
        weights = value.weights_or_none()
        taken = None if weights is None else take(weights, 0, positions)
        return new_jagged(take(value.values(), 0, positions), taken, selected)

    @staticmethod
    def join(values: Sequence[JaggedTensor]) -> JaggedTensor:
        joined, lengths, *weights = (torch.cat(parts) for parts in zip(*map(JaggedField.tensors, values)))
        return new_jagged(joined, weights[0] if weights else None, lengths)

    @staticmethod
    def tensors(value: JaggedTensor) -> list[torch.Tensor]:
        weights, rows = value.weights_or_none(), slice(*_ends(value))
        return [value.values()[rows], value.lengths(), *([] if weights is None else [weights[rows]])]

    def empty(self, rows: int, device: torch.device | None = None) -> Any:
        shape, lengths = (0, *(self.row_shape or ())), len(self.keys) * rows
        return self.jagged(
            torch.empty(shape, dtype=self.values_dtype, device=device),
            None if self.weights_dtype is None else torch.empty(0, dtype=self.weights_dtype, device=device),
            torch.zeros(lengths, dtype=self.lengths_dtype, device=device),
            rows,
            [0] * len(self.keys),
        )

    def made_of(self, content: Any, tensors: Sequence[torch.Tensor]) -> Any:
        values, lengths, *weights = tensors
        return self.jagged(values, weights[0] if weights else None, lengths, *(content or (0, [])))

    def jagged(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        stride: int,
        length_per_key: list[int],
    ) -> KeyedJaggedTensor | JaggedTensor:
        """The jagged tensor of `stride` rows, with lengths `(keys · stride,)` whose sums are `length_per_key`."""
        return new_jagged(values, weights, lengths)

    def summary(self) -> str:
        weights = "" if self.weights_dtype is None else f", weights {short_name(self.weights_dtype)}"
        what = list(self.keys) if self.row_shape is None else f"elements {list(self.row_shape)}"
        return f"jagged {what} {short_name(self.values_dtype)}{weights}, lengths {short_name(self.lengths_dtype)}"


@dataclass(frozen=True)
class KeyedJaggedField(JaggedField):
    """A KeyedJaggedTensor with one number of rows for all keys."""

    @staticmethod
    def facts(path: Path, value: KeyedJaggedTensor) -> tuple[Any, ...]:
        return path, tuple(value.keys()), *_jagged_dtypes(value), None

    @staticmethod
    def count(path: Path, value: KeyedJaggedTensor) -> int:
        if value.variable_stride_per_key():
            raise ValueError(
                f"field {path_name(path)!r} has a variable batch per key (strides {value.stride_per_key()}); all keys "
                "must have the same number of rows: build the KeyedJaggedTensor without stride_per_key_per_rank"
            )
        if value.inverse_indices_or_none() is not None:
            raise ValueError(
                f"field {path_name(path)!r} has inverse_indices; they point into rows that are about to move: expand "
                "the KeyedJaggedTensor to one row per sample first"
            )
        keys, rows, num_lengths = value.keys(), value.stride(), value.lengths().numel()
        if len(set(keys)) != len(keys):
            repeated = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(
                f"field {path_name(path)!r} has duplicate keys {repeated}; keys must be unique: rename or merge them"
            )
        require_flat(path, value, {"values": value.values(), "weights": value.weights_or_none()})
        if num_lengths != len(keys) * rows:
            raise ValueError(
                f"field {path_name(path)!r} has {num_lengths} lengths for {len(keys)} keys and {rows} rows; there is "
                f"one per key and row, {len(keys) * rows} in all: match them"
            )
        return rows

    @staticmethod
    def check(path: Path, value: KeyedJaggedTensor) -> None:
        KeyedJaggedField.count(path, value)
        require_sum(path, sum(value.length_per_key()), value.values().numel())

    @staticmethod
    def select(value: KeyedJaggedTensor, rows: torch.Tensor) -> KeyedJaggedTensor:
        return select_kjt_rows(value, rows)

    @staticmethod
    def join(values: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
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

    @staticmethod
    def tensors(value: KeyedJaggedTensor) -> list[torch.Tensor]:
        weights = value.weights_or_none()
        return [value.values(), value.lengths(), *([] if weights is None else [weights])]

    @classmethod
    def content(cls, path: Path, value: KeyedJaggedTensor) -> tuple[Any, list[torch.Tensor]]:
        return [value.stride(), value.length_per_key()], cls.tensors(value)

    def jagged(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        stride: int,
        length_per_key: list[int],
    ) -> KeyedJaggedTensor:
        return new_keyed_jagged(self.keys, values, weights, lengths, stride, length_per_key)


@dataclass(frozen=True)
class NestedField(RowField):
    """A nested tensor of layout torch.jagged. Its results are contiguous: gaps between rows are left out."""

    label = "nested tensor"

    dtype: torch.dtype
    row_shape: tuple[int, ...]  # -1 where rows differ
    ragged: int  # the dimension in which they do

    @staticmethod
    def facts(path: Path, value: torch.Tensor) -> tuple[Any, ...]:
        ragged = ragged_axis(value)
        return path, value.dtype, (*value.shape[1:ragged], -1, *value.shape[ragged + 1 :]), ragged

    @staticmethod
    def count(path: Path, value: torch.Tensor) -> int:
        if value.layout != torch.jagged:
            raise ValueError(
                f"field {path_name(path)!r} is a nested tensor of layout {value.layout}; rows are taken from the "
                "layout torch.jagged: build it with torch.nested.nested_tensor(..., layout=torch.jagged)"
            )
        return value.size(0)

    @staticmethod
    def select(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        offsets, lengths = nested_offsets(value), nested_lengths(value)
        positions, selected = segment_positions(offsets[:-1], lengths, rows.to(offsets.device))
        ragged = ragged_axis(value)
        return nested_from_lengths(take(value.values(), ragged - 1, positions), selected, ragged)

    @staticmethod
    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        ragged, compact = ragged_axis(values[0]), [_without_gaps(value) for value in values]
        lengths = torch.cat([nested_lengths(value) for value in compact])
        return nested_from_lengths(torch.cat([value.values() for value in compact], dim=ragged - 1), lengths, ragged)

    @staticmethod
    def tensors(value: torch.Tensor) -> list[torch.Tensor]:
        return [value.values(), nested_lengths(value)]

    @classmethod
    def content(cls, path: Path, value: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        return None, cls.tensors(_without_gaps(value))

    def empty(self, rows: int, device: torch.device | None = None) -> torch.Tensor:
        values = torch.empty([max(0, size) for size in self.row_shape], dtype=self.dtype, device=device)
        return nested_from_lengths(values, torch.zeros(rows, dtype=torch.int64, device=device), self.ragged)

    def made_of(self, content: None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        values, lengths = tensors
        return nested_from_lengths(values, lengths, self.ragged)


def require_sum(path: Path, total: int, num_values: int) -> None:
    """Raise ValueError unless the lengths of a jagged tensor add up to its values."""
    if total != num_values:
        raise ValueError(
            f"field {path_name(path)!r} has lengths that add up to {total} and {num_values} values; values must be "
            "exactly those of the rows: remove the others"
        )


def require_flat(path: Path, jagged: KeyedJaggedTensor | JaggedTensor, flat: dict[str, torch.Tensor | None]) -> None:
    """Raise ValueError for weights and offsets that do not fit the values, and for tensors of several dimensions."""
    name, kind = path_name(path), type(jagged).__name__
    for what, tensor in flat.items():
        if tensor is not None and tensor.dim() != 1:
            raise ValueError(
                f"field {name!r} has {what} of shape {tuple(tensor.shape)}; those of a {kind} have one dimension: "
                "flatten them, or use one key per column"
            )
    _require_weights(path, jagged)
    offsets = jagged.offsets_or_none()
    # On a device the look at the first offset would wait for everything before it.
    if offsets is not None and offsets.device.type == "cpu" and offsets.numel() and int(offsets[0]):
        raise ValueError(
            f"field {name!r} has offsets that begin at {int(offsets[0])}; those of a {kind} begin at 0: cut off the "
            "values before, and subtract it"
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
    """Where the first row of a JaggedTensor begins and the last one ends."""
    offsets = value.offsets()
    return (int(offsets[0]), int(offsets[-1])) if offsets.numel() else (0, 0)


def _without_gaps(value: torch.Tensor) -> torch.Tensor:
    """A nested tensor whose rows lie end to end."""
    return NestedField.select(value, torch.arange(value.size(0)))


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
