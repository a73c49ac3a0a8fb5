"""The nesting of a batch: branches, leaves with an entry per row, and metadata; see `rows.py` for what is which."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, TypeAlias

import torch

from commons.sequence_batch.fields import ROW_COUNT_FIELDS, batch_items, copy_batch, row_count_values
from commons.sequence_batch.row_leaves import COLUMN, LeafType, tensor_leaf_type

Path: TypeAlias = tuple[Any, ...]
BranchKind: TypeAlias = Literal["tensordict", "dataclass", "mapping", "namedtuple", "sequence"]


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a batch and what it is: a leaf, a branch, or metadata.

    Attributes:
        value: the value.
        leaf_type: the kind of leaf; None for the others.
        kind: the kind of branch; None for the others.
        children: of a branch, by key, in order.
    """

    value: Any
    leaf_type: LeafType[Any] | None = None
    kind: BranchKind | None = None
    children: dict[Any, Node] = field(default_factory=dict)

    @property
    def has_rows(self) -> bool:
        """Whether this is no metadata."""
        return self.leaf_type is not None or self.kind is not None


LeafFunction: TypeAlias = Callable[[Path, LeafType[Any], list[Any]], Any]


@dataclass(frozen=True)
class Constant:
    """An object that a TensorDict keeps for all rows; wrapped, so that a list is not taken for a column."""

    value: Any


def parse(value: Any, below_dataclass: bool = False) -> Node:
    """The tree that a batch is.

    Args:
        value: a batch or a part of it.
        below_dataclass: whether it is part of a dataclass, where lists are plain values.

    Raises:
        TypeError: a tensorclass.
        ValueError: a TensorDict without batch dimension, or whose rows differ in shape.
    """
    leaf_type = tensor_leaf_type(value)
    if leaf_type is not None:
        return Node(value, leaf_type)
    if isinstance(value, (str, int, float, bytes, NoneType, Constant)):  # what metadata mostly is
        return Node(value)
    if isinstance(value, (list, tuple)) and not _holds_tensors(value):
        return Node(value, COLUMN) if isinstance(value, list) and not below_dataclass else Node(value)
    kind, values = _children(value)
    if kind is None:
        return Node(value)
    children = {key: parse(child, below_dataclass or kind == "dataclass") for key, child in values.items()}
    # What holds no rows is metadata, of a type that need not be one that can be made again.
    if kind != "tensordict" and not any(child.has_rows for child in children.values()):
        return Node(value)
    return Node(value, None, kind, children)


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Path and node of everything in a tree, depth first; a path is the tuple of keys that lead to it."""
    yield path, node
    for key, child in node.children.items():
        yield from walk(child, (*path, key))


def map_trees(nodes: Sequence[Node], function: LeafFunction, rows: int, real: int, path: Path = ()) -> Node:
    """A tree like the first one, each leaf made by `function(path, leaf_type, leaves at that path)`.

    Args:
        nodes: one or more trees of the same structure and metadata.
        function: makes a leaf of `rows` rows.
        rows: rows of the result.
        real: how many of them are no padding.
        path: where in the batch the trees are.

    Raises:
        ValueError: trees that differ.
    """
    first = nodes[0]
    if first.leaf_type is not None:
        _require_same(path, [node.leaf_type is first.leaf_type for node in nodes], nodes)
        return Node(function(path, first.leaf_type, [node.value for node in nodes]), first.leaf_type)
    if first.kind is None:
        _require_same(path, [not node.has_rows and is_equal(node.value, first.value) for node in nodes], nodes)
        return first
    keys = first.children.keys()
    _require_same(path, [type(n.value) is type(first.value) and n.children.keys() == keys for n in nodes], nodes)
    counts = {}  # set, not compared
    if first.kind == "dataclass":
        counts = {name: first.children[name] for name in ROW_COUNT_FIELDS if name in keys}
        counts |= {name: Node(count) for name, count in row_count_values(type(first.value), rows, real).items()}
    children = {
        key: map_trees([node.children[key] for node in nodes], function, rows, real, (*path, key))
        for key in keys
        if key not in counts
    } | counts
    value = _rebuild(first.value, first.kind, {key: child.value for key, child in children.items()}, rows)
    return Node(value, None, first.kind, children)


def _rebuild(prototype: Any, kind: BranchKind, children: dict[Any, Any], rows: int) -> Any:
    """A branch of the type of `prototype` around new children of `rows` rows."""
    if kind == "tensordict":
        return make_tensordict(children, [rows, *prototype.batch_size[1:]], prototype.device)
    if kind == "dataclass":
        return copy_batch(prototype, children)
    if kind == "namedtuple":
        return type(prototype)._make(children.values())
    if kind == "sequence":
        return type(prototype)(children.values())
    try:
        # A copy keeps what a subclass has beside its items, such as the factory of a defaultdict.
        result = copy.copy(prototype)
        for key, child in children.items():
            result[key] = child
    except TypeError:
        raise TypeError(
            f"the batch holds a {type(prototype).__name__}, whose items cannot be set; its rows become a mapping of "
            "the same type: pass a dict"
        ) from None
    return result


def make_tensordict(children: dict[Any, Any], batch_size: Sequence[int], device: Any) -> Any:
    """A TensorDict of tensors, TensorDicts, lists with an object per row, arrays, and objects for all rows."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    result = TensorDict({}, batch_size=batch_size, device=device)
    for key, child in children.items():
        if isinstance(child, list):
            result.set(key, NonTensorStack(*(NonTensorData(item) for item in child)))
        elif isinstance(child, torch.Tensor) or is_tensordict(child):
            result.set(key, child)
        else:
            result.set_non_tensor(key, child.value if isinstance(child, Constant) else child)
    return result


def is_tensordict(value: Any) -> bool:
    """Whether a value is a TensorDict.

    Raises:
        TypeError: a tensorclass.
    """
    tensordict = sys.modules.get("tensordict")  # looked up: whoever has a TensorDict has imported it
    if tensordict is None or isinstance(value, type):
        return False
    if isinstance(value, tensordict.TensorDictBase):
        return True
    if tensordict.is_tensorclass(value):
        raise TypeError(
            f"the batch holds a {type(value).__name__}, a tensorclass; rows are taken from a TensorDict: pass "
            "to_tensordict()"
        )
    return False


def path_name(path: Path) -> str:
    """A path as messages show it."""
    return ".".join(str(part) for part in path) or "the batch itself"


def _children(value: Any) -> tuple[BranchKind | None, dict[Any, Any]]:
    """What a value consists of, if it is of a type that can be a branch."""
    if is_tensordict(value):
        return "tensordict", _tensordict_children(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclass", batch_items(value)
    if isinstance(value, Mapping):
        return "mapping", dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", dict(zip(value._fields, value))
    if isinstance(value, (list, tuple)):
        return "sequence", dict(enumerate(value))
    return None, {}


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
            child = child.tolist()
        elif isinstance(child, NonTensorData):
            child = child.data if tensor_leaf_type(child.data) is not None else Constant(child.data)
        children[key] = child
    return children


def _holds_tensors(value: Any) -> bool:
    """Whether there is a tensor or an array in a value, at any depth."""
    if isinstance(value, (str, int, float, bytes, NoneType)):
        return False
    if tensor_leaf_type(value) is not None:
        return True
    kind, children = _children(value)
    return kind == "tensordict" or any(_holds_tensors(child) for child in children.values())


def is_equal(value: Any, other: Any) -> bool:
    """Whether two values are the same metadata; False where they cannot be compared."""
    if value is other:
        return True
    if isinstance(value, Constant) and isinstance(other, Constant):
        return is_equal(value.value, other.value)
    try:
        # NaN is the same metadata on all ranks, although it does not equal itself.
        return bool(value == other) or (value != value and other != other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _require_same(path: Path, same: list[bool], nodes: Sequence[Node]) -> None:
    if all(same):
        return
    other = same.index(False)
    shown = f"{_summary(nodes[0].value)} and {_summary(nodes[other].value)}"
    raise ValueError(
        f"batches 0 and {other} differ at {path_name(path)!r}: {shown}; batches of one structure and with equal "
        "metadata can be joined: make them equal, or give a value per row"
    )


def _summary(value: Any) -> str:
    if isinstance(value, Constant):
        value = value.value
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {sorted(map(str, value))}"
    if isinstance(value, (bool, int, float, str, tuple, type(None))):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return type(value).__name__
