"""What a batch is made of: which fields hold rows, how many, and which are plain values.

Every field of a batch dataclass is either a *row field* (a KeyedJaggedTensor or a tensor whose first dimension is
the batch) or a plain value. Selecting, exchanging and describing a batch are written against this one distinction, so
that a subclass may add fields without further code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from commons.sequence_batch.torchrec_types import is_keyed_jagged

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

RowField: TypeAlias = "KeyedJaggedTensor | torch.Tensor"

# Plain fields that count rows: they differ between ranks and are set, not compared, when rows move.
ROW_COUNT_FIELDS = ("batch_size", "actual_batch_size")


def is_row_field(value: Any) -> bool:
    """Whether a value of a batch holds rows."""
    return isinstance(value, torch.Tensor) or is_keyed_jagged(value)


def row_fields(batch: Any) -> Iterator[tuple[str, RowField]]:
    """Name and value of every KeyedJaggedTensor and tensor field, in the order of declaration."""
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if is_row_field(value):
            yield field.name, value


def plain_fields(batch: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of every field that holds no rows and counts none."""
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if not is_row_field(value) and field.name not in ROW_COUNT_FIELDS:
            yield field.name, value


def require_dataclass(batch: Any) -> None:
    """Raise TypeError unless `batch` is an instance of a dataclass."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise TypeError(
            f"the batch is a {type(batch).__name__}; a batch must be an instance of a dataclass: "
            "decorate the class with @dataclasses.dataclass"
        )


def num_rows_of(name: str, value: RowField) -> int:
    """Rows of one field.

    Raises:
        ValueError: a 0-dimensional tensor, a KeyedJaggedTensor with variable batch per key, or one with duplicate keys.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise ValueError(
                f"field {name!r} is a 0-dimensional tensor; a tensor field must have the batch as its first dimension: "
                "make it a Python number, or repeat it for every row"
            )
        return value.shape[0]
    if value.variable_stride_per_key():
        raise ValueError(
            f"field {name!r} has a variable batch per key (strides {value.stride_per_key()}); all keys must have the "
            "same number of rows: build the KeyedJaggedTensor without stride_per_key_per_rank"
        )
    if value.inverse_indices_or_none() is not None:
        raise ValueError(
            f"field {name!r} has inverse_indices; they point into rows that are about to move: expand the "
            "KeyedJaggedTensor to one row per sample first"
        )
    keys = value.keys()
    if len(set(keys)) != len(keys):
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"field {name!r} has duplicate keys {repeated}; keys must be unique: rename or merge them")
    return value.stride()


def batch_rows(batch: Any) -> int:
    """Number of rows, padding included, that all fields of the batch agree on.

    Raises:
        TypeError: not a dataclass.
        ValueError: no row field, or fields that disagree with one another or with `batch_size`.
    """
    require_dataclass(batch)
    counts = {name: num_rows_of(name, value) for name, value in row_fields(batch)}
    if not counts:
        raise ValueError(
            f"{type(batch).__name__} has no KeyedJaggedTensor or tensor field; a batch needs at least one: add it"
        )
    declared = getattr(batch, "batch_size", None)
    if declared is not None:
        counts = {"batch_size": int(declared), **counts}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"fields of {type(batch).__name__} disagree on the number of rows: {counts}; every tensor's first "
            "dimension and every KeyedJaggedTensor's stride must be the batch size: pad or trim them"
        )
    return next(iter(counts.values()))


def row_counts(batch: Any) -> tuple[int, int]:
    """Rows of a batch with padding, and real ones: `actual_batch_size` where the batch states it, else all.

    Raises:
        TypeError, ValueError: as `batch_rows`; also an `actual_batch_size` outside the batch.
    """
    rows = batch_rows(batch)
    actual = getattr(batch, "actual_batch_size", None)
    if actual is None:
        return rows, rows
    if not 0 <= actual <= rows:
        raise ValueError(
            f"actual_batch_size is {actual}, batch_size is {rows}; real rows are counted within the batch: give a "
            "number between 0 and batch_size"
        )
    return rows, int(actual)


def real_rows(batch: Any) -> int:
    """Number of rows that are no padding."""
    return row_counts(batch)[1]


def batch_device(batch: Any) -> torch.device:
    """Device of the batch, taken from its first row field."""
    for _, value in row_fields(batch):
        return value.device() if is_keyed_jagged(value) else value.device
    raise ValueError(f"{type(batch).__name__} has no KeyedJaggedTensor or tensor field; a batch needs one: add it")
