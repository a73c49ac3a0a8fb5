"""What a batch is made of: which fields hold rows, how many, and which are plain values.

Every field of a batch dataclass is either a *row field* (a KeyedJaggedTensor or a tensor whose first dimension is
the batch) or a plain value. Selecting, exchanging and describing a batch are written against this one distinction, so
that a subclass may add fields without further code. Attributes that `__post_init__` sets beside the fields count as
fields; what a cached_property has computed does not, and is computed anew.

A batch of other rows is never made by the constructor: the constructor may change what it is given (labels that count
from 1, say), and these values have been through it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from commons.sequence_batch.torchrec_types import is_keyed_jagged

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

RowField: TypeAlias = "KeyedJaggedTensor | torch.Tensor"
B = TypeVar("B")
K = TypeVar("K")

# Plain fields that count rows: they differ between ranks and are set, not compared, when rows move.
ROW_COUNT_FIELDS = ("batch_size", "actual_batch_size")

# Attribute of a batch that copies of it as a whole inherit, so that they can be told from other batches like it.
IDENTITY = "__batch_identity__"


def batch_items(batch: Any) -> dict[str, Any]:
    """All that a batch holds, by name: its fields in the order of declaration, then other attributes.

    Left out are fields that have no value, names of Python itself, and what a cached_property has computed.
    """
    items = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch) if hasattr(batch, item.name)}
    others = {
        name: value
        for name, value in getattr(batch, "__dict__", {}).items()
        if name not in items
        and not name.startswith("__")
        and not isinstance(getattr(type(batch), name, None), functools.cached_property)
    }
    return items | dict(sorted(others.items()))


def make_batch(batch_type: type[B], items: Mapping[str, Any]) -> B:
    """A batch that holds what `batch_items` says, made without its constructor."""
    try:
        batch = object.__new__(batch_type)
    except TypeError:  # kin of a built-in type, such as the outputs of transformers: a dict that its constructor fills
        taken = {item.name for item in dataclasses.fields(batch_type) if item.init}  # type: ignore[arg-type]
        return batch_type(**{name: value for name, value in items.items() if name in taken})
    for name, value in items.items():
        object.__setattr__(batch, name, value)  # of frozen dataclasses too
    return batch


def copy_batch(batch: B, changes: Mapping[str, Any]) -> B:
    """A copy of a batch, made without its constructor, that holds other values under some names."""
    return make_batch(type(batch), {**batch_items(batch), **changes})


def is_row_field(value: Any) -> bool:
    """Whether a value of a batch holds rows."""
    return isinstance(value, torch.Tensor) or is_keyed_jagged(value)


def row_fields(batch: Any) -> Iterator[tuple[str, RowField]]:
    """Name and value of every KeyedJaggedTensor and tensor, in the order of `batch_items`."""
    for name, value in batch_items(batch).items():
        if is_row_field(value):
            yield name, value


def row_count_values(batch_type: type, rows: int, real: int) -> dict[str, int]:
    """The fields of a dataclass that count rows, with their values."""
    names = {item.name for item in dataclasses.fields(batch_type)}
    return {name: count for name, count in zip(ROW_COUNT_FIELDS, (rows, real)) if name in names}


def can_state_padding(batch_type: type) -> bool:
    """Whether batches of a dataclass can say which rows are padding."""
    return "actual_batch_size" in row_count_values(batch_type, 0, 0)


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
        ValueError: a tensor that is 0-dimensional, nested or sparse; a KeyedJaggedTensor with variable batch per key,
            duplicate keys, values or weights of more than one dimension or of different numbers, lengths that are no
            multiple of its rows, or offsets that do not begin at 0 (looked at on CPU only).
    """
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided:
            kind = "nested tensor" if value.is_nested else f"tensor of layout {value.layout}"
            raise ValueError(
                f"field {name!r} is a {kind}; rows that move are those of dense tensors and of KeyedJaggedTensors: "
                "convert it to one of these"
            )
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
    _require_flat(name, value)
    return value.stride()


def _require_flat(name: str, jagged: KeyedJaggedTensor) -> None:
    """Raise ValueError for a KeyedJaggedTensor whose values, weights, lengths or offsets do not belong together."""
    values, weights = jagged.values(), jagged.weights_or_none()
    for what, tensor in (("values", values), ("weights", weights)):
        if tensor is not None and tensor.dim() != 1:
            raise ValueError(
                f"field {name!r} has {what} of shape {tuple(tensor.shape)}; those of a KeyedJaggedTensor have one "
                "dimension: flatten them, or use one key per column"
            )
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(
            f"field {name!r} has {weights.numel()} weights and {values.numel()} values; every value has one weight: "
            "match them"
        )
    lengths, segments = jagged.lengths(), len(jagged.keys()) * jagged.stride()
    if lengths.numel() != segments:
        raise ValueError(
            f"field {name!r} has {lengths.numel()} lengths for {len(jagged.keys())} keys and {jagged.stride()} rows; "
            f"there is one per key and row, {segments} in all: match them"
        )
    offsets = jagged.offsets_or_none()
    # On a device the look at the first offset would wait for everything before it.
    if offsets is not None and offsets.device.type == "cpu" and offsets.numel() and int(offsets[0]):
        raise ValueError(
            f"field {name!r} has offsets that begin at {int(offsets[0])}; those of a KeyedJaggedTensor begin at 0: cut "
            "off the values before, and subtract it"
        )


def require_no_grad(items: Mapping[str, Any]) -> None:
    """Raise ValueError if one of `batch_items` requires grad, and name it: rows that move leave the graph."""
    for name, value in items.items():
        if not is_row_field(value):
            continue
        tensors = [value] if isinstance(value, torch.Tensor) else [value.values(), value.weights_or_none()]
        if any(tensor is not None and tensor.requires_grad for tensor in tensors):
            raise ValueError(
                f"field {name!r} requires grad; gradients do not follow rows to other ranks: detach it before the "
                "shuffle, and compute what needs gradients from the shuffled batch"
            )


def batch_rows(batch: Any, items: Mapping[str, Any] | None = None) -> int:
    """Number of rows, padding included, that all fields of the batch agree on.

    Args:
        batch: the batch.
        items: its `batch_items`, where the caller has them.

    Raises:
        TypeError: not a dataclass.
        ValueError: no row field, or fields that disagree with one another or with `batch_size`.
    """
    require_dataclass(batch)
    items = batch_items(batch) if items is None else items
    counts = {name: num_rows_of(name, value) for name, value in items.items() if is_row_field(value)}
    if not counts:
        raise ValueError(
            f"{type(batch).__name__} has no KeyedJaggedTensor or tensor field; a batch needs at least one: add it"
        )
    declared = getattr(batch, "batch_size", None)
    if declared is not None:
        counts = {"batch_size": int(declared), **counts}
    return common_count(
        type(batch).__name__,
        counts,
        "every tensor's first dimension and every KeyedJaggedTensor's stride must be the batch size: pad or trim them",
    )


def common_count(batch_name: str, counts: Mapping[K, int], rule: str, shown: Callable[[K], str] = str) -> int:
    """The number of rows that is the same in all fields; ValueError, with the rule and the remedy, if it is not."""
    if len(set(counts.values())) > 1:
        named = {shown(field): count for field, count in counts.items()}
        raise ValueError(f"fields of {batch_name} disagree on the number of rows: {named}; {rule}")
    return next(iter(counts.values()))


def row_counts(batch: Any, items: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Rows of a batch with padding, and real ones: `actual_batch_size` where the batch states it, else all.

    Args:
        batch: the batch.
        items: its `batch_items`, where the caller has them.

    Raises:
        TypeError, ValueError: as `batch_rows`; also an `actual_batch_size` outside the batch.
    """
    rows = batch_rows(batch, items)
    actual = getattr(batch, "actual_batch_size", None)
    if actual is None:
        return rows, rows
    return rows, real_within(actual, rows)


def real_within(stated: int, rows: int) -> int:
    """The number of real rows that a batch of `rows` rows states; ValueError for one outside the batch."""
    if not 0 <= stated <= rows:
        raise ValueError(
            f"actual_batch_size is {stated}, batch_size is {rows}; real rows are counted within the batch: give a "
            "number between 0 and batch_size"
        )
    return int(stated)


def real_rows(batch: Any) -> int:
    """Number of rows that are no padding."""
    return row_counts(batch)[1]


def batch_device(batch: Any) -> torch.device:
    """Device of the batch, taken from its first row field."""
    declared = (getattr(batch, item.name, None) for item in dataclasses.fields(batch))
    value = next((value for value in declared if is_row_field(value)), None)
    if value is None:
        value = next((value for _, value in row_fields(batch)), None)
    if value is None:
        raise ValueError(f"{type(batch).__name__} has no KeyedJaggedTensor or tensor field; a batch needs one: add it")
    return value.device() if is_keyed_jagged(value) else value.device
