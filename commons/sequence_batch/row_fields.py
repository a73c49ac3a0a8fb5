"""Leaves: values of a batch with one entry per row. Each kind of leaf is a class, and its instances describe values.

An instance has all properties of a value except its rows; its methods take values with these properties. This file has
the kinds that are not jagged; see also jagged_fields.py and row_leaves.py.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from commons.checks import kind_of
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.host_copies import attach_host_copy, host_copy
from commons.sequence_batch.plain_values import decode_plain, encode_plain


@dataclass(unsafe_hash=True)  # never changed, but not frozen, which is slower: every batch makes one per field
class RowField(ABC):
    """The description of a leaf at a path, without its rows."""

    label: ClassVar[str]  # name of the kind in messages

    path: Path

    @property
    def name(self) -> str:
        """The text of its path for messages."""
        return path_name(self.path)

    @classmethod
    @abstractmethod
    def of(cls, path: Path, value: Any) -> RowField:
        """Describe a value of this kind."""

    @abstractmethod
    def count(self, value: Any) -> int:
        """Number of rows; ValueError for a value without a row dimension. Never synchronises."""

    @abstractmethod
    def select(self, value: Any, rows: torch.Tensor) -> Any:
        """Rows by index, int64 `(N,)` on the CPU, in new storage; any order, repeats allowed."""

    @abstractmethod
    def join(self, values: Sequence[Any]) -> Any:
        """The rows of all values, value after value."""

    def tensors(self, value: Any) -> list[torch.Tensor]:
        """The tensors of a value; empty for arrays and Python objects."""
        return []

    @abstractmethod
    def empty(self, rows: int, device: torch.device | None = None) -> Any:
        """`rows` rows of padding: empty rows of a jagged value, zeros, or None for Python objects."""

    def require_movable(self, value: Any) -> None:  # noqa: B027  most kinds can
        """Raise ValueError or TypeError for a value that a shuffler cannot move; never synchronises."""

    def check(self, value: Any) -> None:  # noqa: B027  most kinds need none
        """Raise ValueError or TypeError for an inconsistent value; may synchronise."""

    def content(self, value: Any) -> tuple[Any, list[torch.Tensor]]:
        """The parts of a value, data for JSON and tensors; TypeError for a part that JSON cannot hold."""
        return None, self.tensors(value)

    def made_of(self, content: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """The value with this `content`."""
        return tensors[0]

    def map(self, value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The value with `function` applied to its tensors."""
        content, tensors = self.content(value)
        return self.made_of(content, list(map(function, tensors)))

    def summary(self) -> str:
        """The text for messages."""
        facts = [getattr(self, each.name) for each in dataclasses.fields(self)[1:]]
        return " ".join(
            [self.label, *(str(list(each)) if isinstance(each, tuple) else short_name(each) for each in facts)]
        )


@dataclass(unsafe_hash=True)
class DenseField(RowField):
    """A tensor `(rows, *trailing)`."""

    label = "tensor"

    dtype: torch.dtype
    trailing: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, value: torch.Tensor) -> DenseField:
        return cls(path, value.dtype, tuple(value.shape)[1:])

    def count(self, value: torch.Tensor) -> int:
        if value.layout != torch.strided:
            raise ValueError(
                f"field {self.name!r} is a tensor of layout {value.layout}; only dense and jagged tensors have rows: "
                "convert it to one of these"
            )
        if value.dim() == 0:
            raise ValueError(
                f"field {self.name!r} is a 0-dimensional tensor; a tensor field must have the batch as its "
                "first dimension: make it a Python number, or repeat it for every row"
            )
        return value.shape[0]

    def select(self, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        selected = take(value, 0, rows.to(value.device))
        known = host_copy(value)
        if known is not None and known is not value:
            attach_host_copy(selected, take(known, 0, rows))
        return selected

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values))

    def tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value]

    def empty(self, rows: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.zeros(rows, *self.trailing, dtype=self.dtype, device=device)


@dataclass(unsafe_hash=True)
class ArrayField(RowField):
    """A numpy array `(rows, *trailing)`; with dtype object, an array of Python objects."""

    label = "array"

    dtype: str  # numpy's text of the dtype; for strings without their width, because joining widens them
    trailing: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, value: np.ndarray) -> ArrayField:
        return cls(path, value.dtype.kind if value.dtype.kind in "US" else value.dtype.str, value.shape[1:])

    def count(self, value: np.ndarray) -> int:
        if value.ndim == 0:
            raise ValueError(
                f"field {self.name!r} is a 0-dimensional array; an array must have the batch as its first "
                "dimension: make it a Python number, or repeat it for every row"
            )
        return value.shape[0]

    def check(self, value: np.ndarray) -> None:
        if type(value) not in (np.ndarray, np.memmap):
            # Joining and sending keep only the values of a subclass.
            remedy = "np.ma.getdata and np.ma.getmaskarray" if isinstance(value, np.ma.MaskedArray) else "np.asarray"
            raise TypeError(
                f"field {self.name!r} is {kind_of(value)}; arrays must be plain, because all except the values "
                f"would be lost: pass the result of {remedy}"
            )

    def select(self, value: np.ndarray, rows: torch.Tensor) -> np.ndarray:
        return value[rows.numpy()]

    def join(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(values))

    def content(self, value: np.ndarray) -> tuple[Any, list[torch.Tensor]]:
        if value.dtype == object:
            return [None, list(value.shape), encode_plain(value.ravel().tolist(), self.path)], []
        if not _is_dtype_of_numpy(value.dtype):
            raise TypeError(
                f"{self.name!r} is an array of dtype {value.dtype}; only arrays of one simple dtype of numpy can be "
                "sent: pass its fields as separate arrays, or convert it"
            )
        raw = np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8)
        return [value.dtype.str, list(value.shape)], [torch.from_numpy(raw)]

    def empty(self, rows: int, device: torch.device | None = None) -> np.ndarray:
        shape, dtype = (rows, *self.trailing), np.dtype(self.dtype)
        return np.full(shape, None, dtype=object) if dtype.hasobject else np.zeros(shape, dtype=dtype)

    def made_of(self, content: Any, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        dtype, shape, *items = content
        if dtype is not None:
            return tensors[0].numpy().view(dtype).reshape(shape)
        array = np.empty(len(items[0]), dtype=object)
        for index, item in enumerate(items[0]):
            array[index] = decode_plain(item)
        return array.reshape(shape)


@dataclass(unsafe_hash=True)
class ColumnField(RowField):
    """A list of Python objects, one per row."""

    label = "list of objects"

    @classmethod
    def of(cls, path: Path, value: list[Any]) -> ColumnField:
        return cls(path)

    def count(self, value: list[Any]) -> int:
        return len(value)

    def require_movable(self, value: list[Any]) -> None:
        raise TypeError(
            f"field {self.name!r} holds a Python object per row; only rows of tensors can move to other ranks: "
            "make it a tensor, or leave it out"
        )

    def select(self, value: list[Any], rows: torch.Tensor) -> list[Any]:
        return [value[row] for row in rows.tolist()]

    def join(self, values: Sequence[list[Any]]) -> list[Any]:
        return [item for value in values for item in value]

    def content(self, value: list[Any]) -> tuple[Any, list[torch.Tensor]]:
        return encode_plain(list(value), self.path), []

    def empty(self, rows: int, device: torch.device | None = None) -> list[Any]:
        return [None] * rows

    def made_of(self, content: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
        return decode_plain(content)


# Unsigned dtypes, for which torch has no index_select, and the dtypes to view them as.
_VIEWED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take(value: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """`value.index_select(axis, positions)`, also for unsigned integers."""
    dtype = _VIEWED_AS.get(value.dtype)
    if dtype is None:
        return value.index_select(axis, positions)
    return value.view(dtype).index_select(axis, positions).view(value.dtype)


def _is_dtype_of_numpy(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype's text, which messages contain, gives the dtype back; others, such as records, read as bytes."""
    try:
        return np.dtype(dtype.str) == dtype
    except TypeError:
        return False


def short_name(dtype: Any) -> str:
    """The text of a dtype for messages."""
    return str(dtype).removeprefix("torch.")
