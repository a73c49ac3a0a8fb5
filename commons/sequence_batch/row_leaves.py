"""The kinds of leaves, and functions for leaves of any kind."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from commons.sequence_batch.fields import Path
from commons.sequence_batch.jagged import is_type_of
from commons.sequence_batch.jagged_fields import JaggedField, KeyedJaggedField, NestedField, ragged_axis
from commons.sequence_batch.row_fields import ArrayField, ColumnField, DenseField, RowField

KINDS: tuple[type[RowField], ...] = (DenseField, KeyedJaggedField, JaggedField, NestedField, ArrayField, ColumnField)

_MOVED: frozenset[type[RowField] | None] = frozenset([DenseField, KeyedJaggedField, JaggedField])


@functools.cache
def _kind_of_type(value_type: type) -> type[RowField] | None:
    """Cached by type, because `isinstance` is slow for TorchRec's classes and every value of every batch is checked."""
    if issubclass(value_type, torch.Tensor):
        return DenseField
    if is_type_of(value_type, "KeyedJaggedTensor"):
        return KeyedJaggedField
    if is_type_of(value_type, "JaggedTensor"):
        return JaggedField
    return ArrayField if issubclass(value_type, np.ndarray) else None


def tensor_kind(value: Any) -> type[RowField] | None:
    """The kind of a tensor or array; None for other values: `open_tree` decides which lists are leaves."""
    kind = _kind_of_type(type(value))  # type: ignore[arg-type]  # types are hashable
    return NestedField if kind is DenseField and value.is_nested else kind


def describe_leaf(path: Path, value: Any) -> RowField:
    """Describe a leaf, without its rows."""
    return (tensor_kind(value) or ColumnField).of(path, value)


def is_moved(value: Any) -> bool:
    """Whether a shuffler moves a value: a tensor, a KeyedJaggedTensor or a JaggedTensor."""
    return _kind_of_type(type(value)) in _MOVED  # type: ignore[arg-type]


def pinned(path: Path, value: Any) -> Any:
    """A leaf with its tensors in pinned host memory; arrays and lists are not copied."""
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    return describe_leaf(path, value).map(value, torch.Tensor.pin_memory) if is_moved(value) else value


def device_of(value: Any) -> torch.device:
    """Device of a tensor, or of a jagged tensor's values."""
    return value.device if isinstance(value, torch.Tensor) else value.values().device


def share_offsets(leaves: dict[Path, Any]) -> dict[Path, Any]:
    """The leaves; nested tensors of equal lengths have one tensor of offsets, without which torch refuses `a * b`."""
    known: list[torch.Tensor] = []
    shared = {}
    for path, value in leaves.items():
        if tensor_kind(value) is not NestedField or value.lengths() is not None:
            continue
        offsets = value.offsets()
        found = next((each for each in known if each is offsets or _is_equal(each, offsets)), None)
        if found is None:
            known.append(offsets)
        elif found is not offsets:
            shared[path] = torch.nested.nested_tensor_from_jagged(value.values(), found, jagged_dim=ragged_axis(value))
    return leaves | shared


def _is_equal(first: torch.Tensor, other: torch.Tensor) -> bool:
    return first.device == other.device and first.dtype == other.dtype and torch.equal(first, other)
