"""A batch as a tree, opened in one walk: its tensors and plain values by path, and the branches that lead to them.

`rows.py` has the table of what is a leaf, a branch or metadata. Most batches of the shuffler are dataclasses without a
branch: `open_batch` parses nothing of these. It lays out children of a dict or TensorDict in a sorted order, so that
batches whose dicts were filled in another order are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeAlias, TypeVar

import torch

from commons.sequence_batch.branches import (
    BranchKind,
    Constant,
    child_at,
    children_of,
    is_equal,
    rebuild,
    traits_of,
)
from commons.sequence_batch.fields import (
    ROW_COUNT_FIELDS,
    Path,
    RowField,
    batch_items,
    common_count,
    copy_batch,
    field_names,
    is_row_field,
    num_rows_of,
    path_name,
    per_rank_names,
    real_within,
    require_dataclass,
    row_count_values,
    stated_count,
)
from commons.sequence_batch.row_leaves import COLUMN, LeafType, tensor_leaf_type

B = TypeVar("B")

_SCALARS = frozenset([str, int, float, bool, bytes, complex, NoneType])


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


# What holds rows, plain values, and branches.
Opened: TypeAlias = tuple[dict[Path, RowField], dict[Path, Any], dict[Path, Node]]
LeafFunction: TypeAlias = Callable[[Path, LeafType[Any], list[Any]], Any]


def parse(value: Any, below_dataclass: bool = False, own: frozenset[str] = frozenset()) -> Node:
    """The tree that a batch is; TypeError and ValueError as `children_of`.

    `below_dataclass` is whether the value is part of a dataclass, where lists are plain values; `own` are dotted names
    below it of what is each rank's own, "" for all of it.
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
    children = {key: parse(child, holds_plain_lists, _names_below(own, key)) for key, child in values.items()}
    # What holds no rows is metadata, of a type that need not be one that can be made again.
    if kind != "tensordict" and not any(child.has_rows for child in children.values()):
        return Node(value, per_rank="" in own)
    return Node(value, None, kind, children)


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Path and node of everything in a tree, depth first."""
    yield path, node
    for key, child in node.children.items():
        yield from walk(child, (*path, key))


def open_batch(batch: Any) -> Opened:
    """What of a batch holds rows, its plain values and its branches, each by path and depth first.

    TypeError for a tensorclass, or Python objects per row in a TensorDict; ValueError as `children_of`.
    """
    opened: Opened = ({}, {}, {})
    leaves, plain, _ = opened
    for name, value in batch_items(batch).items():
        if type(value) in _SCALARS:
            plain[(name,)] = value
        elif is_row_field(value):
            leaves[(name,)] = value
        elif _holds_scalars(value):
            plain[(name,)] = value
        else:
            own = _names_below(per_rank_names(type(batch)), name)
            _open(parse(value, below_dataclass=True, own=own), (name,), opened)
    return opened


def _open(node: Node, path: Path, opened: Opened) -> None:
    leaves, plain, branches = opened
    if is_row_field(node.value):
        leaves[path] = node.value
        return
    if node.leaf_type is COLUMN:
        raise TypeError(
            f"field {path_name(path)!r} holds a Python object per row; rows that move to other ranks are those of "
            "tensors: make it a tensor, or leave it out"
        )
    if node.kind is None:
        plain[path] = node.value.value if isinstance(node.value, Constant) else node.value
        return
    branches[path] = node
    keys = list(node.children)
    if node.kind in ("mapping", "tensordict"):
        keys.sort(key=lambda key: (type(key).__name__, str(key)))
    for key in keys:
        _open(node.children[key], (*path, key), opened)


def row_fields(batch: Any) -> Iterator[tuple[Path, RowField]]:
    """Path and value of every tensor, KeyedJaggedTensor and JaggedTensor, in the order of `open_batch`."""
    yield from open_batch(batch)[0].items()


def value_at(batch: Any, path: Path) -> Any:
    """What a batch holds at a path; AttributeError, LookupError or TypeError if there is nothing."""
    value = getattr(batch, path[0])
    for key in path[1:]:
        value = child_at(value, key)
    return value


def replace_rows(batch: B, values: Mapping[Path, Any], rows: int | None = None, real: int | None = None) -> B:
    """A copy of a batch, or of a branch, with other values at some paths; no dataclass runs its constructor.

    Where the copy has another number of `rows`, padding included and `real` of them real, every leaf is among the
    values.
    """
    made: dict[Any, Any] = {}
    below: dict[Any, dict[Path, Any]] = {}
    for path, value in values.items():
        if len(path) == 1:
            made[path[0]] = value
        else:
            below.setdefault(path[0], {})[path[1:]] = value
    for key, changes in below.items():
        made[key] = replace_rows(child_at(batch, key), changes, rows, real)
    if dataclasses.is_dataclass(batch):
        return copy_batch(batch, made if rows is None else made | row_count_values(batch, rows, real))
    kind, children = children_of(batch)
    assert kind is not None  # noqa: S101  only branches have paths below them
    if rows is None:
        rows = batch.batch_size[0] if kind == "tensordict" else 0  # type: ignore[attr-defined]
    return rebuild(batch, kind, children | made, rows)


def row_counts(batch: Any, opened: Opened | None = None) -> tuple[int, int]:
    """Rows of a batch with padding, and real ones: `actual_batch_size` where the batch states it, else all.

    Raises:
        TypeError: not a dataclass.
        ValueError: no row field, fields that disagree with one another or with `batch_size`, an `actual_batch_size`
        outside the batch, or several that differ.
    """
    require_dataclass(batch)
    leaves, _, branches = open_batch(batch) if opened is None else opened
    counts = {
        path: num_rows_of(path[0] if len(path) == 1 else path_name(path), value) for path, value in leaves.items()
    }
    if not counts:
        raise _no_rows(batch)
    declared, actual = stated_count(batch, "batch_size"), stated_count(batch, "actual_batch_size")
    if declared is not None:
        counts = {("batch_size",): declared, **counts}
    stated: dict[Path, int] = {} if actual is None else {("actual_batch_size",): actual}
    if branches:
        counts |= stated_counts("batch_size", branches.items())
        stated |= stated_counts("actual_batch_size", branches.items())
    rows = common_count(
        type(batch).__name__,
        counts,
        "every tensor's first dimension and every KeyedJaggedTensor's stride must be the batch size: pad or trim them",
        path_name,
    )
    return rows, real_within(stated, rows)


def batch_rows(batch: Any) -> int:
    """Number of rows, padding included, that all fields of the batch agree on; raises as `row_counts`."""
    return row_counts(batch)[0]


def real_rows(batch: Any) -> int:
    """Number of rows that are no padding; raises as `row_counts`."""
    return row_counts(batch)[1]


def batch_device(batch: Any) -> torch.device:
    """Device of the batch, taken from its first row field that is no branch, or its first."""
    declared = (getattr(batch, name, None) for name in field_names(batch.__class__))
    value = next((value for value in declared if is_row_field(value)), None)
    if value is None:
        value = next((value for _, value in row_fields(batch)), None)
    if value is None:
        raise _no_rows(batch)
    return _device_of(value)


def require_one_device(leaves: Mapping[Path, RowField]) -> None:
    """Raise ValueError, with names, for row fields that lie on devices of more than one type."""
    kinds = {_device_of(value).type: path for path, value in leaves.items()}
    if len(kinds) > 1:
        named = {path_name(path): kind for kind, path in kinds.items()}
        raise ValueError(f"fields lie on different devices: {named}; a batch lies on one: move them to it")


def require_no_grad(leaves: Mapping[Path, RowField]) -> None:
    """Raise ValueError, with its name, for a row field that requires grad: rows that move leave the graph."""
    for path, value in leaves.items():
        tensors = [value] if isinstance(value, torch.Tensor) else [value.values(), value.weights_or_none()]
        if any(tensor is not None and tensor.requires_grad for tensor in tensors):
            raise ValueError(
                f"field {path_name(path)!r} requires grad; gradients do not follow rows to other ranks: detach it "
                "before the shuffle, and compute what needs gradients from the shuffled batch"
            )


def counts_rows(path: Path, value: Any, branches: Mapping[Path, Node]) -> bool:
    """Whether a plain value is the field of a dataclass that counts its rows."""
    if path[-1] not in ROW_COUNT_FIELDS or (len(path) > 1 and branches[path[:-1]].kind != "dataclass"):
        return False
    return path[-1] != "batch_size" or not isinstance(value, int) or value >= 0


def text_of_plain(plain: Mapping[Path, Any]) -> str | None:
    """Plain values as a text that no others have, types included; None where they are more than scalars."""
    for value in plain.values():
        if type(value) in _SCALARS:
            continue
        if not _holds_scalars(value) or (type(value) is dict and not _SCALARS.issuperset(map(type, value))):
            return None
    return repr(plain)


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
    """A tree like the first one, each leaf of `rows` rows made by `function(path, leaf_type, leaves at that path)`.

    `real` rows of the result are no padding. ValueError unless the trees have one structure and the same metadata.
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
    }
    return _rebuilt(first, children | counts, rows)


def take_own(node: Node, other: Node, rows: int) -> Node:
    """A tree of `rows` rows with what is each rank's own as another tree of the same structure has it."""
    if node.per_rank:
        return other
    children = {key: take_own(child, other.children[key], rows) for key, child in node.children.items()}
    if node.kind is None or all(children[key] is child for key, child in node.children.items()):
        return node
    return _rebuilt(node, children, rows)


def _rebuilt(node: Node, children: dict[Any, Node], rows: int) -> Node:
    assert node.kind is not None  # noqa: S101  it is a branch
    value = rebuild(node.value, node.kind, {key: child.value for key, child in children.items()}, rows)
    return Node(value, None, node.kind, children)


def _holds_scalars(value: Any) -> bool:
    """Whether a value is a list, tuple or dict of scalars alone, as most containers of a batch are."""
    kind = type(value)
    if kind is dict:
        return _SCALARS.issuperset(map(type, value.values()))
    return (kind is list or kind is tuple) and _SCALARS.issuperset(map(type, value))


def _holds_tensors(value: Any) -> bool:
    """Whether there is a tensor or an array in a value, at any depth."""
    if isinstance(value, (str, int, float, bytes, NoneType)):
        return False
    if tensor_leaf_type(value) is not None:
        return True
    kind, children = children_of(value)
    return kind == "tensordict" or any(_holds_tensors(child) for child in children.values())


def _names_below(own: frozenset[str], key: Any) -> frozenset[str]:
    """Of dotted names those below a key, without it; "" where the key itself is named."""
    if not own or "" in own:
        return own
    name = str(key)
    below = (each.removeprefix(name) for each in own if each == name or each.startswith(f"{name}."))
    return frozenset(each.removeprefix(".") for each in below)


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


def _no_rows(batch: Any) -> ValueError:
    return ValueError(
        f"{type(batch).__name__} has no KeyedJaggedTensor or tensor field; a batch needs at least one: add it"
    )


def _device_of(value: RowField) -> torch.device:
    return value.device if isinstance(value, torch.Tensor) else value.values().device
