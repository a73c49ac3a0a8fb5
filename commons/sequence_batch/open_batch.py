"""A batch as a tree, opened in one walk: its leaves and plain values by path, and the branches that lead to them.

`rows.py` has the table of what is a leaf, a branch or metadata. Children of a dict or TensorDict are laid out in a
sorted order, so that batches whose dicts were filled in another order are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from commons.sequence_batch.branches import (
    BranchKind,
    Constant,
    child_at,
    children_of,
    rebuild_branch,
)
from commons.sequence_batch.fields import (
    ROW_COUNT_FIELDS,
    Path,
    copy_batch,
    counts_rows,
    field_names,
    path_name,
    per_rank_names,
    require_dataclass,
    row_count_items,
    stated_count,
)
from commons.sequence_batch.row_fields import RowField
from commons.sequence_batch.row_leaves import describe_leaf, device_of, is_moved, tensor_kind

B = TypeVar("B")

_SCALARS = frozenset([str, int, float, bool, bytes, complex, NoneType])


class Branch(NamedTuple):
    """A value that leads to leaves."""

    value: Any
    kind: BranchKind
    keys: tuple[Any, ...]  # of its children, as the value has them


@dataclass(eq=False)  # not frozen: one is made per batch
class Tree(Generic[B]):
    """All that a batch holds, by path and depth first."""

    leaves: dict[Path, Any]  # what has an entry per row
    plain: dict[Path, Any]  # metadata
    branches: dict[Path, Branch]  # each before those below it
    _fields: dict[Path, RowField] | None = field(default=None, init=False)

    @property
    def fields(self) -> dict[Path, RowField]:
        """What the leaves are, but for their rows."""
        if self._fields is None:
            self._fields = {path: describe_leaf(path, value) for path, value in self.leaves.items()}
        return self._fields

    @property
    def batch(self) -> B:
        """The batch itself."""
        return self.branches[()].value if self.branches else {**self.leaves, **self.plain}[()]

    @property
    def metadata(self) -> dict[Path, Any]:
        """The plain values but for the fields of dataclasses that count rows."""
        return {path: value for path, value in self.plain.items() if not self.counts_rows(path, value)}

    @property
    def own_paths(self) -> list[Path]:
        """Plain values that are each rank's own, see `register_batch_type`."""
        own = tuple(
            path_name((*path, name))
            for path, branch in self.branches.items()
            if branch.kind == "dataclass"
            for name in per_rank_names(type(branch.value))  # type: ignore[arg-type]  # types are hashable
        )
        if not own:
            return []
        below = tuple(f"{name}." for name in own)
        return [path for path in self.plain if path_name(path) in own or path_name(path).startswith(below)]

    def counts_rows(self, path: Path, value: Any) -> bool:
        """Whether a plain value is the field of a dataclass that counts its rows."""
        counts = path != () and path[-1] in ROW_COUNT_FIELDS and counts_rows(path[-1], value)
        return counts and self.branches[path[:-1]].kind == "dataclass"


def open_tree(batch: B) -> Tree[B]:
    """Open a batch of any kind.

    Raises:
        TypeError: a tensorclass.
        ValueError: as `children_of`.
    """
    tree: Tree[B] = Tree({}, {}, {})
    _open(batch, (), False, tree)
    return tree


def open_batch(batch: B) -> Tree[B]:
    """Open a batch of a shuffler, which moves the rows of tensors: arrays are plain values; raises as `open_tree`."""
    tree = open_tree(batch)
    if not all(map(is_moved, tree.leaves.values())):
        for path in [path for path, value in tree.leaves.items() if isinstance(value, np.ndarray)]:
            tree.plain[path] = tree.leaves.pop(path)
    return tree


def _open(value: Any, path: Path, lists_are_plain: bool, tree: Tree[Any]) -> None:
    """Add a value to a tree; `lists_are_plain` is whether it is part of a dataclass."""
    kind, children = children_of(value) if path == () or _has_rows(value, lists_are_plain) else (None, {})
    if isinstance(value, np.ndarray) or is_moved(value) or _is_column(value, lists_are_plain):
        tree.leaves[path] = value
    elif kind is None:  # metadata, of a type that need not be made again
        tree.plain[path] = value.value if isinstance(value, Constant) else value
    else:
        tree.branches[path] = Branch(value, kind, tuple(children))
        lists_are_plain = kind == "dataclass" or (lists_are_plain and kind != "tensordict")
        keys: Sequence[Any] = tuple(children)
        if kind in ("mapping", "tensordict"):
            keys = sorted(children, key=lambda key: (type(key).__name__, str(key)))
        for key in keys:
            child, at = children[key], (*path, key)
            if is_moved(child):
                tree.leaves[at] = child
            elif (lists_are_plain or type(child) is not list) and holds_scalars(child):  # what most of the others are
                tree.plain[at] = child
            else:
                _open(child, at, lists_are_plain, tree)


def _is_column(value: Any, lists_are_plain: bool) -> bool:
    """Whether a value is a list with a Python object per row."""
    return isinstance(value, list) and not lists_are_plain and not _has_rows(value, True)


def _has_rows(value: Any, lists_are_plain: bool) -> bool:
    """Whether there is a leaf in a value, at any depth."""
    if type(value) in _SCALARS:
        return False
    if tensor_kind(value) is not None:
        return True
    kind, children = children_of(value)
    if kind in ("sequence", "namedtuple"):
        return (isinstance(value, list) and not lists_are_plain) or any(_has_rows(each, True) for each in value)
    lists_are_plain = lists_are_plain or kind == "dataclass"
    return kind == "tensordict" or any(_has_rows(each, lists_are_plain) for each in children.values())


def row_fields(batch: Any) -> Iterator[tuple[Path, Any]]:
    """Path and value of every tensor, KeyedJaggedTensor and JaggedTensor, in the order of `open_batch`."""
    return ((path, value) for path, value in open_tree(batch).leaves.items() if is_moved(value))


def value_at(batch: Any, path: Path) -> Any:
    """What a batch holds at a path; AttributeError, LookupError or TypeError if there is nothing."""
    value = getattr(batch, path[0])
    for key in path[1:]:
        value = child_at(value, key)
    return value


def rebuild(tree: Tree[B], values: Mapping[Path, Any], rows: int | None = None, real: int | None = None) -> Tree[B]:
    """A tree with other leaves or plain values at some paths; no dataclass runs its constructor.

    Where it has another number of `rows`, padding included and `real` of them real, every leaf is among the values.
    """
    made = {**tree.leaves, **tree.plain, **values}
    leaves, plain = ({path: made[path] for path in each} for each in (tree.leaves, tree.plain))
    branches: dict[Path, Branch] = {}
    for path, (value, kind, keys) in reversed(tree.branches.items()):
        children = {key: made[(*path, key)] for key in keys}
        if kind == "tensordict":
            children = {key: Constant(each) if (*path, key) in plain else each for key, each in children.items()}
        elif kind == "dataclass" and rows is not None:
            for name, count in row_count_items(type(value), rows, real).items():
                if counts_rows(name, children.get(name)):
                    children[name] = plain[(*path, name)] = count
        made[path] = rebuild_branch(value, kind, children, rows)
        branches[path] = Branch(made[path], kind, keys)
    return Tree(leaves, plain, dict(reversed(branches.items())))


def replace_rows(batch: Any, values: Mapping[Path, Any], rows: int | None = None, real: int | None = None) -> Any:
    """A copy of a batch with other values at some paths: see `rebuild`."""
    if all(len(path) == 1 for path in values):  # most batches of a shuffler have no branches: nothing to open
        counts = {} if rows is None else row_count_items(type(batch), rows, real)
        counted = {name: count for name, count in counts.items() if counts_rows(name, getattr(batch, name))}
        return copy_batch(batch, {path[0]: value for path, value in values.items()} | counted)
    return rebuild(open_batch(batch), values, rows, real).batch


def count_tree(tree: Tree[Any]) -> tuple[int, int]:
    """Rows with padding, and real ones: `actual_batch_size` where a dataclass states it, else all.

    Raises:
        ValueError: no leaf, leaves that disagree with one another or with a `batch_size`, an `actual_batch_size`
            outside the batch, or several that differ.
    """
    counts: dict[Path, int] = {}
    stated: dict[Path, int] = {}
    for path, (value, kind, _) in tree.branches.items():
        if kind == "tensordict":
            counts[(*path, "batch_size")] = value.batch_size[0]
        elif kind == "dataclass":
            for into, name in ((counts, "batch_size"), (stated, "actual_batch_size")):
                if (count := stated_count(value, name)) is not None:
                    into[(*path, name)] = count
    for path, leaf in tree.fields.items():
        counts[path] = leaf.count(tree.leaves[path])
    if not counts:
        raise _no_rows(tree.batch)
    rows = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"fields of {type(tree.batch).__name__} disagree on the number of rows: {_named(counts)}; the first "
            "dimension of every tensor, the stride of a KeyedJaggedTensor and the length of a list are the batch: pad "
            "or trim them, or make a list that belongs to the whole batch a tuple"
        )
    if len(set(stated.values())) > 1:
        raise ValueError(
            f"parts of the batch state different numbers of real rows: {_named(stated)}; a row is padding in all parts "
            "or in none: make actual_batch_size equal"
        )
    real = next(iter(stated.values()), rows)
    if not 0 <= real <= rows:
        raise ValueError(
            f"actual_batch_size is {real}, batch_size is {rows}; real rows are counted within the batch: give a number "
            "between 0 and batch_size"
        )
    return rows, real


def row_counts(batch: Any, tree: Tree[Any] | None = None) -> tuple[int, int]:
    """Rows of a batch of a shuffler with padding, and real ones.

    Raises:
        TypeError: not a dataclass, or Python objects per row.
        ValueError: as `count_tree`, or a leaf that cannot move.
    """
    require_dataclass(batch)
    tree = open_batch(batch) if tree is None else tree
    if not tree.leaves:
        raise _no_rows(batch)
    for path, leaf in tree.fields.items():
        leaf.require_movable(tree.leaves[path])
    return count_tree(tree)


def batch_rows(batch: Any) -> int:
    """Number of rows, padding included, that all fields of the batch agree on; raises as `row_counts`."""
    return row_counts(batch)[0]


def real_rows(batch: Any) -> int:
    """Number of rows that are no padding; raises as `row_counts`."""
    return row_counts(batch)[1]


def batch_device(batch: Any) -> torch.device:
    """Device of the batch, taken from its first row field that is no branch, or its first."""
    declared = (getattr(batch, name, None) for name in field_names(batch.__class__))
    value = next((value for value in declared if is_moved(value)), None)
    if value is None:
        value = next((value for _, value in row_fields(batch)), None)
    if value is None:
        raise _no_rows(batch)
    return device_of(value)


def require_one_device(leaves: Mapping[Path, Any]) -> None:
    """Raise ValueError, with names, for row fields that lie on devices of more than one type."""
    kinds = {device_of(value).type: path for path, value in leaves.items()}
    if len(kinds) > 1:
        named = {path_name(path): kind for kind, path in kinds.items()}
        raise ValueError(f"fields lie on different devices: {named}; a batch lies on one: move them to it")


def require_no_grad(leaves: Mapping[Path, Any]) -> None:
    """Raise ValueError, with its name, for a row field that requires grad: rows that move leave the graph."""
    for path, value in leaves.items():
        tensors = [value] if isinstance(value, torch.Tensor) else [value.values(), value.weights_or_none()]
        if any(tensor is not None and tensor.requires_grad for tensor in tensors):
            raise ValueError(
                f"field {path_name(path)!r} requires grad; gradients do not follow rows to other ranks: detach it "
                "before the shuffle, and compute what needs gradients from the shuffled batch"
            )


def holds_scalars(value: Any) -> bool:
    """Whether a value is a scalar, or a list, tuple or dict of scalars alone, as most metadata of a batch are."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        return _SCALARS.issuperset(map(type, value)) and _SCALARS.issuperset(map(type, value.values()))
    return (kind is list or kind is tuple) and _SCALARS.issuperset(map(type, value))


def _named(counts: Mapping[Path, int]) -> dict[str, int]:
    return {path_name(path): count for path, count in counts.items()}


def _no_rows(batch: Any) -> ValueError:
    return ValueError(
        f"the batch is a {type(batch).__name__} without rows; a batch holds tensors, arrays or lists with an entry per "
        "row: add one"
    )
