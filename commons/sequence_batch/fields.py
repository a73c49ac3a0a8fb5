"""Items of a batch dataclass: its fields and attributes, the items that count rows, and the `per_rank` items.

Attributes that `__post_init__` sets count as fields; results of a cached_property do not, and are computed again. A
batch of other rows is made without the constructor, which may change its arguments (for example, shift labels that
count from 1): the items have already passed through it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from commons.checks import as_count, kind_of

Path: TypeAlias = tuple[Any, ...]  # the keys that lead to a value in a batch
B = TypeVar("B")

# Plain fields that count rows: they differ between ranks, so ranks do not compare them and moving rows sets them.
ROW_COUNT_FIELDS = ("batch_size", "actual_batch_size")

# Names of plain values that may differ between ranks, by class.
_PER_RANK: dict[type, frozenset[str]] = {}

_NO_VALUE = object()


def path_name(path: Path) -> str:
    """The text of a path for messages."""
    return ".".join(map(str, path)) or "the batch itself"


@functools.cache
def field_names(batch_type: type) -> tuple[str, ...]:
    """The fields of a dataclass, in the order of declaration; TypeError for another class."""
    return tuple(item.name for item in dataclasses.fields(batch_type))


def batch_items(batch: Any) -> dict[str, Any]:
    """All items of a batch by name: its fields in the order of declaration, then other attributes.

    Fields without a value, names that start with two underscores and results of a cached_property are left out.
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
    """Make a batch from the result of `batch_items`, without its constructor."""
    try:
        batch = object.__new__(batch_type)
    except TypeError:  # subclass of a built-in type, such as outputs of transformers: a dict that its constructor fills
        taken = {item.name for item in dataclasses.fields(batch_type) if item.init}  # type: ignore[arg-type]
        return batch_type(**{name: value for name, value in items.items() if name in taken})
    for name, value in items.items():
        object.__setattr__(batch, name, value)  # works for frozen dataclasses too
    return batch


def copy_batch(batch: B, changes: Mapping[str, Any]) -> B:
    """A copy of a batch with the items in `changes` replaced, made without its constructor."""
    return make_batch(type(batch), {**batch_items(batch), **changes})


def stated_count(batch: Any, name: str) -> int | None:
    """The value of one of ROW_COUNT_FIELDS in a dataclass; None if the batch does not state it.

    A `batch_size` below 0 states nothing and is not changed when rows move: it is the default of TorchEasyRec's Batch.

    Raises:
        ValueError: not an integer.
    """
    count = getattr(batch, name, None)
    if count is None or (name == "batch_size" and isinstance(count, int) and count < 0):
        return None
    return count if type(count) is int and count >= 0 else as_count(count, name, 0)


def counts_rows(name: Any, value: Any) -> bool:
    """Whether an item of a dataclass counts its rows."""
    return name in ROW_COUNT_FIELDS and (name != "batch_size" or not isinstance(value, int) or value >= 0)


def row_count_items(batch_type: type, rows: int, real: int | None) -> dict[str, int | None]:
    """The values of a dataclass's fields that count rows, for `rows` rows of which `real` are not padding."""
    names = field_names(batch_type)
    return {name: count for name, count in zip(ROW_COUNT_FIELDS, (rows, real)) if name in names}


def changed_counts(batch: Any, rows: int, real: int | None) -> dict[str, int | None]:
    """`row_count_items` of a batch, without a `batch_size` that states nothing."""
    counts = row_count_items(type(batch), rows, real)
    return {name: count for name, count in counts.items() if counts_rows(name, getattr(batch, name, None))}


def can_state_padding(batch_type: type) -> bool:
    """Whether batches of a dataclass can state padding."""
    return "actual_batch_size" in field_names(batch_type)


def declare_per_rank(batch_type: type, names: Iterable[str]) -> None:
    """Let plain values of a dataclass differ between ranks, see `register_batch_type`; declarations add up."""
    if added := frozenset(names):
        _PER_RANK[batch_type] = _PER_RANK.get(batch_type, frozenset()) | added
        per_rank_names.cache_clear()


@functools.cache
def per_rank_names(batch_type: type) -> frozenset[str]:
    """Names of the plain values of a dataclass that may differ between ranks, including inherited names."""
    return frozenset().union(*(_PER_RANK[each] for each in batch_type.__mro__ if each in _PER_RANK))


def require_dataclass(batch: Any) -> None:
    """Raise TypeError unless `batch` is an instance of a dataclass."""
    if not hasattr(type(batch), "__dataclass_fields__"):
        raise TypeError(
            f"the batch is {kind_of(batch)}; a batch must be an instance of a dataclass: "
            "decorate its class with @dataclass, or put it into a field of one, such as BaseBatch(features)"
        )
