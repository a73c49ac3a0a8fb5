"""The nesting of a batch: branches, leaves with an entry per row, and metadata; see `rows.py` for what is which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeAlias

from commons.sequence_batch.branches import BranchKind, Constant, children_of, is_equal, rebuild, traits_of
from commons.sequence_batch.fields import (
    ROW_COUNT_FIELDS,
    Path,
    path_name,
    per_rank_names,
    row_count_values,
    stated_count,
)
from commons.sequence_batch.row_leaves import COLUMN, LeafType, tensor_leaf_type


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a batch and what it is: a leaf, a branch, or metadata."""

    value: Any  # the value
    leaf_type: LeafType[Any] | None = None  # the kind of leaf; None for the others
    kind: BranchKind | None = None  # the kind of branch; None for the others
    children: dict[Any, Node] = field(default_factory=dict)  # of a branch, by key, in order
    per_rank: bool = False  # of metadata, whether it is each rank's own, see `register_batch_type`

    @property
    def has_rows(self) -> bool:
        """Whether this is no metadata."""
        return self.leaf_type is not None or self.kind is not None


LeafFunction: TypeAlias = Callable[[Path, LeafType[Any], list[Any]], Any]


def parse(value: Any, below_dataclass: bool = False, own: frozenset[str] = frozenset()) -> Node:
    """The tree that a batch is.

    Args:
        value: a batch or a part of it.
        below_dataclass: whether it is part of a dataclass, where lists are plain values.
        own: dotted names below this value of what is each rank's own; "" for all of it.

    Raises:
        TypeError, ValueError: as `children_of`.
    """
    if isinstance(value, (str, int, float, bytes, NoneType, Constant)):  # what metadata mostly is
        return Node(value, per_rank="" in own)
    leaf_type = tensor_leaf_type(value)
    if leaf_type is not None:
        return Node(value, leaf_type)
    if isinstance(value, (list, tuple)) and not _holds_tensors(value):
        is_column = isinstance(value, list) and not below_dataclass
        return Node(value, COLUMN) if is_column else Node(value, per_rank="" in own)
    kind, values = children_of(value)
    if kind is None:
        return Node(value, per_rank="" in own)
    own = own | per_rank_names(type(value)) if kind == "dataclass" else own
    holds_plain_lists = kind != "tensordict" and (below_dataclass or kind == "dataclass")
    children = {key: parse(child, holds_plain_lists, names_below(own, key)) for key, child in values.items()}
    # What holds no rows is metadata, of a type that need not be one that can be made again.
    if kind != "tensordict" and not any(child.has_rows for child in children.values()):
        return Node(value, per_rank="" in own)
    return Node(value, None, kind, children)


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Path and node of everything in a tree, depth first; a path is the tuple of keys that lead to it."""
    yield path, node
    for key, child in node.children.items():
        yield from walk(child, (*path, key))


def stated_counts(name: str, nodes: Iterable[tuple[Path, Node]]) -> dict[Path, int]:
    """What branches say of their rows: dataclasses in the field of that name, TensorDicts in their batch_size."""
    stated: dict[Path, int] = {}
    for path, node in nodes:
        if node.kind == "tensordict" and name == "batch_size":
            stated[(*path, name)] = node.value.batch_size[0]
        elif node.kind == "dataclass" and (count := stated_count(node.value, name)) is not None:
            stated[(*path, name)] = count
    return stated


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
        same = [not node.has_rows and (first.per_rank or is_equal(node.value, first.value)) for node in nodes]
        _require_same(path, same, nodes)
        return first
    keys = first.children.keys()
    traits = traits_of(first.kind, first.value)
    _require_same(path, [traits_of(n.kind, n.value) == traits and n.children.keys() == keys for n in nodes], nodes)
    counts = {}  # set, not compared
    if first.kind == "dataclass":
        counts = {name: first.children[name] for name in ROW_COUNT_FIELDS if name in keys}
        counts |= {name: Node(count) for name, count in row_count_values(first.value, rows, real).items()}
    children = {
        key: map_trees([node.children[key] for node in nodes], function, rows, real, (*path, key))
        for key in keys
        if key not in counts
    } | counts
    value = rebuild(first.value, first.kind, {key: child.value for key, child in children.items()}, rows)
    return Node(value, None, first.kind, children)


def take_own(node: Node, other: Node, rows: int) -> Node:
    """A tree of `rows` rows with what is each rank's own as another tree of the same structure has it."""
    if node.per_rank:
        return other
    children = {key: take_own(child, other.children[key], rows) for key, child in node.children.items()}
    if node.kind is None or all(children[key] is child for key, child in node.children.items()):
        return node
    value = rebuild(node.value, node.kind, {key: child.value for key, child in children.items()}, rows)
    return Node(value, None, node.kind, children)


def names_below(own: frozenset[str], key: Any) -> frozenset[str]:
    """Of dotted names those below a key, without it; "" where the key itself is named."""
    if not own or "" in own:
        return own
    name = str(key)
    below = (each.removeprefix(name) for each in own if each == name or each.startswith(f"{name}."))
    return frozenset(each.removeprefix(".") for each in below)


def _holds_tensors(value: Any) -> bool:
    """Whether there is a tensor or an array in a value, at any depth."""
    if isinstance(value, (str, int, float, bytes, NoneType)):
        return False
    if tensor_leaf_type(value) is not None:
        return True
    kind, children = children_of(value)
    return kind == "tensordict" or any(_holds_tensors(child) for child in children.values())


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
