"""What a batch dataclass is made of: which values hold rows, how many, and which are plain values.

Attributes that `__post_init__` sets count as fields; what a cached_property has computed is left out, and computed
again. A batch of other rows is made without the constructor, which may change its arguments (labels that count from 1,
say): these values have been through it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from commons.sequence_batch.jagged import is_any_jagged, is_keyed_jagged

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

RowField: TypeAlias = "KeyedJaggedTensor | JaggedTensor | torch.Tensor"
Path: TypeAlias = tuple[Any, ...]  # the keys that lead to a value in a batch
B = TypeVar("B")
K = TypeVar("K")

# Plain fields that count rows: they differ between ranks and are set, not compared, when rows move.
ROW_COUNT_FIELDS = ("batch_size", "actual_batch_size")

# By class, names of plain values that are each rank's own.
_PER_RANK: dict[type, frozenset[str]] = {}

_NO_VALUE = object()

# Attribute of a batch that copies of it as a whole inherit, so that they can be told from other batches like it.
IDENTITY = "__batch_identity__"


def path_name(path: Path) -> str:
    """A path as messages show it."""
    return ".".join(map(str, path)) or "the batch itself"


@functools.cache
def field_names(batch_type: type) -> tuple[str, ...]:
    """The fields of a dataclass, in the order of declaration; TypeError for another class."""
    return tuple(item.name for item in dataclasses.fields(batch_type))


def batch_items(batch: Any) -> dict[str, Any]:
    """All that a batch holds, by name: its fields in the order of declaration, then other attributes.

    Left out are fields without a value, names of Python itself, and what a cached_property has computed.
    """
    items = {}
    for name in field_names(batch.__class__):
        value = getattr(batch, name, _NO_VALUE)
        if value is not _NO_VALUE:
            items[name] = value
    for name in sorted(getattr(batch, "__dict__", items).keys() - items.keys()):
        if not name.startswith("__") and not isinstance(getattr(type(batch), name, None), functools.cached_property):
            items[name] = batch.__dict__[name]
    return items


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
    """Whether a value of a batch holds rows and is no branch."""
    return isinstance(value, torch.Tensor) or is_any_jagged(value)


def stated_count(batch: Any, name: str) -> int | None:
    """What a dataclass says of its rows in one of ROW_COUNT_FIELDS; None where it says nothing.

    A `batch_size` below 0 says nothing, and is left as it is when rows move: it is the default of TorchEasyRec's Batch.
    """
    count = getattr(batch, name, None)
    return None if count is None or (name == "batch_size" and count < 0) else int(count)


def row_count_values(batch: Any, rows: int, real: int | None) -> dict[str, Any]:
    """The fields of a dataclass that count rows, with other values; not a `batch_size` below 0."""
    names = row_count_names(type(batch))
    if (getattr(batch, "batch_size", None) or 0) < 0:
        names.discard("batch_size")
    return {name: count for name, count in zip(ROW_COUNT_FIELDS, (rows, real)) if name in names}


def row_count_names(batch_type: type) -> set[str]:
    """The fields of a dataclass that count rows."""
    return {name for name in ROW_COUNT_FIELDS if name in field_names(batch_type)}


def declare_per_rank(batch_type: type, names: Iterable[str]) -> None:
    """Let plain values of a dataclass differ between ranks, see `register_batch_type`; declarations add up."""
    if added := frozenset(names):
        _PER_RANK[batch_type] = _PER_RANK.get(batch_type, frozenset()) | added


def per_rank_names(batch_type: type) -> frozenset[str]:
    """Names of the plain values of a dataclass that may differ between ranks, inherited ones included."""
    return frozenset().union(*(_PER_RANK[each] for each in batch_type.__mro__ if each in _PER_RANK))


def can_state_padding(batch_type: type) -> bool:
    """Whether batches of a dataclass can say which rows are padding."""
    return "actual_batch_size" in row_count_names(batch_type)


def require_dataclass(batch: Any) -> None:
    """Raise TypeError unless `batch` is an instance of a dataclass."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise TypeError(
            f"the batch is a {type(batch).__name__}; a batch must be an instance of a dataclass: "
            "decorate the class with @dataclasses.dataclass"
        )


def num_rows_of(name: str, value: RowField) -> int:
    """Rows of one field.

    ValueError for a tensor that is 0-dimensional, nested or sparse; for a KeyedJaggedTensor with variable batch per
    key, duplicate keys, or lengths that are no multiple of its rows; and for values, weights and offsets that do not
    belong together (offsets are looked at on CPU only).
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
    if not is_keyed_jagged(value):
        _require_flat(name, value, ("weights",))
        return value.lengths().numel()
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
    _require_flat(name, value, ("values", "weights"))
    lengths, segments = value.lengths(), len(keys) * value.stride()
    if lengths.numel() != segments:
        raise ValueError(
            f"field {name!r} has {lengths.numel()} lengths for {len(keys)} keys and {value.stride()} rows; there is "
            f"one per key and row, {segments} in all: match them"
        )
    return value.stride()


def _require_flat(name: str, jagged: KeyedJaggedTensor | JaggedTensor, flat: tuple[str, ...]) -> None:
    """Raise ValueError for values, weights and offsets that do not belong together, or have too many dimensions."""
    values, weights, kind = jagged.values(), jagged.weights_or_none(), type(jagged).__name__
    for what, tensor in (("values", values), ("weights", weights)):
        if what in flat and tensor is not None and tensor.dim() != 1:
            raise ValueError(
                f"field {name!r} has {what} of shape {tuple(tensor.shape)}; those of a {kind} have one dimension: "
                "flatten them, or use one key per column"
            )
    require_weights(name, values, weights)
    offsets = jagged.offsets_or_none()
    # On a device the look at the first offset would wait for everything before it.
    if offsets is not None and offsets.device.type == "cpu" and offsets.numel() and int(offsets[0]):
        raise ValueError(
            f"field {name!r} has offsets that begin at {int(offsets[0])}; those of a {kind} begin at 0: cut off the "
            "values before, and subtract it"
        )


def require_weights(name: str, values: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Raise ValueError unless a jagged tensor has a weight for every value, or none."""
    if weights is not None and weights.shape[0] != values.shape[0]:
        raise ValueError(
            f"field {name!r} has {weights.shape[0]} weights and {values.shape[0]} values; every value has one weight: "
            "match them"
        )


def require_sum(name: str, total: int, num_values: int) -> None:
    """Raise ValueError unless the lengths of a jagged tensor add up to its values."""
    if total != num_values:
        raise ValueError(
            f"field {name!r} has lengths that add up to {total} and {num_values} values; values must be exactly those "
            "of the rows: remove the others"
        )


def common_count(batch_name: str, counts: Mapping[K, int], rule: str, shown: Callable[[K], str] = str) -> int:
    """The number of rows that all fields have; ValueError, with the rule and the remedy, if they disagree."""
    if len(set(counts.values())) > 1:
        named = {shown(field): count for field, count in counts.items()}
        raise ValueError(f"fields of {batch_name} disagree on the number of rows: {named}; {rule}")
    return next(iter(counts.values()))


def real_within(stated: Mapping[Path, int], rows: int) -> int:
    """The real rows of a batch of `rows` rows, by what its parts state; ValueError if they disagree or lie outside."""
    if len(set(stated.values())) > 1:
        named = {path_name(path): count for path, count in stated.items()}
        raise ValueError(
            f"parts of the batch state different numbers of real rows: {named}; a row is padding in all parts or in "
            "none: make actual_batch_size equal"
        )
    real = next(iter(stated.values()), rows)
    if not 0 <= real <= rows:
        raise ValueError(
            f"actual_batch_size is {real}, batch_size is {rows}; real rows are counted within the batch: give a number "
            "between 0 and batch_size"
        )
    return real
