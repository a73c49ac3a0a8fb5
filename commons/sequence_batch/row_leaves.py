"""The kind of every leaf of a batch, and what is done with leaves of any kind."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.jagged import is_type_of
from commons.sequence_batch.jagged_fields import JaggedField, KeyedJaggedField, NestedField, require_flat
from commons.sequence_batch.row_fields import ArrayField, ColumnField, DenseField, RowField

KINDS: tuple[type[RowField], ...] = (DenseField, KeyedJaggedField, JaggedField, NestedField, ArrayField, ColumnField)


_MOVED: tuple[type[RowField] | None, ...] = (DenseField, KeyedJaggedField, JaggedField)


@functools.cache
def _kind_of_type(value_type: type) -> type[RowField] | None:
    """By type, because `isinstance` is slow for TorchRec's classes, and every value of every batch comes here."""
    if issubclass(value_type, torch.Tensor):
        return DenseField
    if is_type_of(value_type, "KeyedJaggedTensor"):
        return KeyedJaggedField
    if is_type_of(value_type, "JaggedTensor"):
        return JaggedField
    return ArrayField if issubclass(value_type, np.ndarray) else None


def tensor_kind(value: Any) -> type[RowField] | None:
    """The kind of a tensor-like value; None for anything else, lists too: `open_batch` decides which are columns."""
    kind = _kind_of_type(type(value))  # type: ignore[arg-type]  # types are hashable
    return NestedField if kind is DenseField and value.is_nested else kind


def leaf_kind(value: Any) -> type[RowField]:
    """The kind of a leaf."""
    return tensor_kind(value) or ColumnField


def describe_leaf(path: Path, value: Any) -> RowField:
    """What a leaf is, but for its rows."""
    return leaf_kind(value).of(path, value)


def is_moved(value: Any) -> bool:
    """Whether a value of a batch is a tensor, a KeyedJaggedTensor or a JaggedTensor: what a shuffler moves."""
    return _kind_of_type(type(value)) in _MOVED  # type: ignore[arg-type]


def require_movable(path: Path, value: Any) -> None:
    """Raise ValueError or TypeError for a leaf that a shuffler cannot move; reads nothing from a device."""
    kind = leaf_kind(value)
    if kind is ColumnField:
        raise TypeError(
            f"field {path_name(path)!r} holds a Python object per row; rows that move to other ranks are those of "
            "tensors: make it a tensor, or leave it out"
        )
    if kind is NestedField:
        raise ValueError(
            f"field {path_name(path)!r} is a nested tensor; rows that move are those of dense tensors, of "
            "KeyedJaggedTensors and of JaggedTensors: convert it to one of these"
        )
    if kind is JaggedField:
        require_flat(path, value, {"weights": value.weights_or_none()})


def device_of(value: Any) -> torch.device:
    """Device of a tensor, or of the values of a jagged one."""
    return value.device if isinstance(value, torch.Tensor) else value.values().device
