"""Branches of a batch, the values that contain leaves: their kinds, their children, and how to rebuild a branch.

A branch is rebuilt from a prototype in this process (`rebuild_branch`), or from a description that ranks compare and
messages contain (`BranchField`), which looks the class up by name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from commons.checks import kind_of, with_article
from commons.sequence_batch.fields import Path, batch_items, make_batch, path_name
from commons.sequence_batch.jagged import is_type_of, torchrec_class
from commons.sequence_batch.plain_values import find_type, known_type, type_name
from commons.sequence_batch.row_leaves import tensor_kind

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedTensor

BranchKind: TypeAlias = Literal["tensordict", "keyed", "dataclass", "mapping", "namedtuple", "sequence"]

# Factories of a defaultdict that a receiver accepts: it must not run any other callable that a sender names.
_FACTORIES: dict[str, Any] = {each.__name__: each for each in (list, dict, set, tuple, int, float, str, bool)}


class UnsendableError(TypeError):
    """A value that torch's DataLoader workers cannot send either: they would hang."""


@dataclass(frozen=True)
class Constant:
    """An object of a TensorDict for all rows; the wrapper distinguishes a list from a list with an object per row."""

    value: Any


@functools.cache
def branch_kind(value_type: type) -> BranchKind | None:
    """The kind of branch that values of a type can be; None for other types. TypeError for a tensorclass.

    Cached by type, because `isinstance` of mappings is slow and every value of every batch is checked.
    """
    tensordict = sys.modules.get("tensordict")  # a TensorDict exists only if its module was imported
    if tensordict is not None and issubclass(value_type, tensordict.TensorDictBase):
        return "tensordict"
    if tensordict is not None and tensordict.is_tensorclass(value_type):
        raise TypeError(
            f"the batch holds {with_article(value_type.__name__)}, a tensorclass; rows are taken from a TensorDict: "
            "pass to_tensordict()"
        )
    if is_type_of(value_type, "KeyedTensor"):
        return "keyed"
    if hasattr(value_type, "__dataclass_fields__"):
        return "dataclass"
    if issubclass(value_type, Mapping):
        return "mapping"
    if issubclass(value_type, tuple) and hasattr(value_type, "_fields"):
        return "namedtuple"
    return "sequence" if issubclass(value_type, (list, tuple)) else None


class RowObjects(list[Any]):
    """The objects of a TensorDict's NonTensorStack, one per row: a leaf, also if they hold tensors."""


def children_of(value: Any) -> tuple[BranchKind | None, dict[Any, Any]]:
    """The kind and the children of a value whose type can be a branch; None and an empty dict for other types.

    Raises:
        TypeError: a tensorclass.
        ValueError: a TensorDict without batch dimension, or with rows of different shapes; a KeyedTensor whose rows are
            not its first dimension.
    """
    kind = branch_kind(type(value))  # type: ignore[arg-type]  # types are hashable
    if kind is None:
        return None, {}
    if kind == "dataclass":
        return kind, batch_items(value)
    if kind == "tensordict":
        return kind, _tensordict_children(value)
    if kind == "keyed":
        _require_rows_first(value)
        return kind, {"values": value.values()}
    if kind == "mapping":
        return kind, dict(value)
    return kind, dict(zip(value._fields, value) if kind == "namedtuple" else enumerate(value))


def child_at(value: Any, key: Any) -> Any:
    """The child of a branch with this key."""
    kind = branch_kind(type(value))  # type: ignore[arg-type]
    if kind == "keyed":
        return value.values()
    return value[key] if kind in ("mapping", "sequence", "tensordict") else getattr(value, key)


def rebuild_branch(prototype: Any, kind: BranchKind, children: dict[Any, Any], rows: int | None) -> Any:
    """A branch of the prototype's type with new children and `rows` rows; None for the prototype's number of rows."""
    if kind == "tensordict":
        rows = prototype.batch_size[0] if rows is None else rows
        device = prototype.device
        if device is not None:  # the new tensors may be on another device
            tensors = (child for child in children.values() if isinstance(child, torch.Tensor))
            device = next((tensor.device for tensor in tensors), device)
        return _make_tensordict(children, [rows, *prototype.batch_size[1:]], device)
    if kind == "keyed":
        return _make_keyed(prototype.keys(), prototype.length_per_key(), children)
    if kind != "mapping":
        return _make(kind, type(prototype), children)
    try:
        # A copy keeps other attributes of a subclass, such as the factory of a defaultdict.
        return _filled(copy.copy(prototype), children)
    except TypeError:
        raise TypeError(
            f"the batch holds {kind_of(prototype)}, whose items cannot be set; its rows become a mapping of "
            "the same type: pass a dict"
        ) from None


@dataclass(frozen=True)
class BranchField:
    """The description of a branch: a dict, list, tuple, namedtuple, dataclass, TensorDict or KeyedTensor."""

    path: Path
    described: tuple[Any, ...]  # its kind, and all that rebuilds it except its children and the number of rows
    # Keys of its children in the batch's order; dicts of ranks may have different orders, and the first rank's is used.
    keys: tuple[Any, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, path: Path, kind: BranchKind, value: Any, keys: tuple[Any, ...]) -> BranchField:
        """Describe a branch; TypeError for a branch that another rank could not rebuild."""
        if kind == "tensordict":
            described: tuple[Any, ...] = kind, tuple(value.batch_size[1:])
        elif kind == "keyed":
            described = kind, tuple(value.keys()), tuple(value.length_per_key())
        elif type(value) is defaultdict:
            described = "defaultdict", _factory_name(value.default_factory, path)
        else:
            if kind != "dataclass":
                _require_only_items(value, path)
            # A class of this name may be defined anew, or be another one on another rank.
            host_fields = getattr(type(value), "host_fields", ()) if kind == "dataclass" and path == () else ()
            described = kind, type_name(type(value), path_name(path)), *host_fields
        return cls(path, described, keys)

    @property
    def kind(self) -> str:
        """The kind; "defaultdict" is a separate kind here."""
        return self.described[0]

    @property
    def batch_type(self) -> Any:
        """The class of the branch; KeyError if this process has not imported it."""
        found = find_type(self.described[1])
        return found if dataclasses.is_dataclass(found) else known_type(self.described[1], (Mapping, list, tuple))

    def made_of(self, children: dict[Any, Any], rows: int, device: torch.device | None) -> Any:
        """Rebuild the branch with children of `rows` rows; the device is used for a TensorDict only."""
        kind, *content = self.described
        if kind == "tensordict":
            return _make_tensordict(children, [rows, *content[0]], device)
        if kind == "keyed":
            return _make_keyed(content[0], content[1], children)
        if kind == "defaultdict":
            return defaultdict(None if content[0] is None else _FACTORIES[content[0]], children)
        return _filled(self.batch_type(), children) if kind == "mapping" else _make(kind, self.batch_type, children)

    def summary(self) -> str:
        """The text for messages."""
        kind, *content = self.described
        if kind == "keyed":
            return f"KeyedTensor {list(content[0])} of widths {list(content[1])}"
        if kind in ("tensordict", "defaultdict"):
            return kind
        return content[0].rpartition(":")[2] + "".join(f", host field {name!r}" for name in content[1:])


def _make(kind: str, made: Any, children: dict[Any, Any]) -> Any:
    """Make a dataclass, namedtuple, list or tuple."""
    if kind == "dataclass":
        return make_batch(made, children)
    if kind == "namedtuple":
        return made._make(children[name] for name in made._fields)
    return made(children[index] for index in range(len(children)))


def _make_keyed(keys: Sequence[str], widths: Sequence[int], children: dict[Any, Any]) -> KeyedTensor:
    return torchrec_class("KeyedTensor")(list(keys), list(widths), children["values"])


def _filled(mapping: Any, children: dict[Any, Any]) -> Any:
    for key, child in children.items():
        mapping[key] = child
    return mapping


def _make_tensordict(children: dict[Any, Any], batch_size: Sequence[int], device: Any) -> Any:
    """Make a TensorDict of tensors, TensorDicts, lists with an object per row, arrays, and objects for all rows."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

    result = TensorDict({}, batch_size=batch_size, device=device)
    for key, child in children.items():
        if isinstance(child, list):
            result.set(key, NonTensorStack(*(NonTensorData(item) for item in child)))
        elif isinstance(child, (torch.Tensor, TensorDictBase)):
            result.set(key, child)
        else:
            result.set_non_tensor(key, child.value if isinstance(child, Constant) else child)
    return result


def is_equal(value: Any, other: Any) -> bool:
    """Whether two values are equal metadata; False if they cannot be compared."""
    if value is other:
        return True
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            return value.dtype == other.dtype and torch.equal(value, other)
        # NaN counts as equal metadata, although it does not equal itself.
        if bool(value == other) or (value != value and other != other):
            return True
    if type(value) is not type(other) or not isinstance(value, (list, tuple, dict)) or len(value) != len(other):
        return False
    if isinstance(value, dict):
        return all(key in other and is_equal(held, other[key]) for key, held in value.items())
    return all(map(is_equal, value, other))


def _tensordict_children(value: Any) -> dict[Any, Any]:
    from tensordict import NonTensorData, NonTensorStack

    if not value.batch_size:
        raise ValueError(
            "the batch holds a TensorDict of batch_size []; rows are its first batch dimension: set its batch_size to "
            "[rows]"
        )
    children: dict[Any, Any] = {}
    for key in value.keys():
        try:
            child = value.get(key)
        except RuntimeError as error:
            raise ValueError(
                f"{key!r} of the {type(value).__name__} has rows of different shapes; rows are taken from one tensor: "
                "call densify(layout=torch.jagged) first"
            ) from error
        if isinstance(child, NonTensorStack):
            child = RowObjects(child.tolist())
        elif isinstance(child, NonTensorData):
            held = child.data
            # A tensor with rows would be a value of the TensorDict itself, so a tensor here is for all rows.
            child = Constant(held) if isinstance(held, torch.Tensor) or tensor_kind(held) is None else held
        children[key] = child
    return children


def _require_rows_first(value: KeyedTensor) -> None:
    widths, values, keys = value.length_per_key(), value.values(), value.keys()
    if value.key_dim() != 1:
        raise ValueError(
            f"the KeyedTensor of keys {keys} has key_dim {value.key_dim()}; rows are the first dimension of its values "
            "and keys the second: make it with key_dim=1, or pass to_dict()"
        )
    if values.dim() < 2 or values.shape[1] != sum(widths):
        raise ValueError(
            f"the KeyedTensor of keys {keys} has values of shape {tuple(values.shape)} and widths {widths}; values are "
            "(rows, sum of the widths): correct length_per_key"
        )


def _factory_name(factory: Any, path: Path) -> str | None:
    """The name of a defaultdict's factory in a message; TypeError for a factory that a receiver must not run."""
    if factory is None:
        return None
    name = next((name for name, known in _FACTORIES.items() if known is factory), None)
    if name is None:
        found = sys.modules.get(getattr(factory, "__module__", ""))
        for part in getattr(factory, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        error = TypeError if found is factory else UnsendableError
        raise error(
            f"{path_name(path)!r} is a defaultdict whose factory is {factory!r}; factories that can be sent are "
            f"{', '.join(_FACTORIES)}: pass dict(...) of it"
        )
    return name


def _require_only_items(value: Any, path: Path) -> None:
    """Raise TypeError for a mapping or sequence that cannot be rebuilt from its items only."""
    made = kind_of(value)
    known: dict[str, Any] = {}
    if isinstance(value, Mapping):
        try:
            empty = type(value)()
        except TypeError as error:
            raise TypeError(
                f"{path_name(path)!r} is {made}, which cannot be made without arguments ({error}); a receiver fills "
                "an empty mapping with the items: pass dict(...) of it"
            ) from error
        known = getattr(empty, "__dict__", {})
    for name, held in getattr(value, "__dict__", {}).items():
        holds_items = isinstance(held, Mapping) and held.keys() == getattr(value, "keys", dict)()
        if not holds_items and not (name in known and is_equal(held, known[name])):
            raise TypeError(
                f"{path_name(path)!r} is {made} with the attribute {name!r}; only its items are sent: pass a dict, "
                "list or tuple of them"
            )
