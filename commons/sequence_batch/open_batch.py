"""A batch as a tree: its leaves, plain values and branches by path, found in one walk.

`rows.py` has the table of leaves, branches and metadata. Children of a dict or TensorDict are sorted, so that batches
are equal whose dicts were filled in different orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from commons.checks import kind_of
from commons.sequence_batch.branches import (
    BranchKind,
    Constant,
    RowObjects,
    child_at,
    children_of,
    rebuild_branch,
)
from commons.sequence_batch.fields import (
    Path,
    changed_counts,
    copy_batch,
    counts_rows,
    field_names,
    path_name,
    per_rank_names,
    require_dataclass,
    stated_count,
)
from commons.sequence_batch.row_fields import RowField
from commons.sequence_batch.row_leaves import describe_leaf, device_of, is_moved, tensor_kind

B = TypeVar("B")

_SCALARS = frozenset([str, int, float, bool, bytes, complex, NoneType])


class Branch(NamedTuple):
    """A value that contains leaves."""

    value: Any
    kind: BranchKind
    keys: tuple[Any, ...]  # keys of its children, in the order of the value


@dataclass(eq=False)  # not frozen, which is slower, because every batch makes a Tree
class Tree(Generic[B]):
    """All values of a batch by path, depth first."""

    leaves: dict[Path, Any]  # values with an entry per row
    plain: dict[Path, Any]  # metadata
    branches: dict[Path, Branch]  # every branch before the branches below it

    @cached_property
    def fields(self) -> dict[Path, RowField]:
        """Descriptions of the leaves, without their rows."""
        return {path: describe_leaf(path, value) for path, value in self.leaves.items()}

    @property
    def batch(self) -> B:
        """The batch itself."""
        return self.branches[()].value if self.branches else {**self.leaves, **self.plain}[()]

    @property
    def metadata(self) -> dict[Path, Any]:
        """The plain values, except the fields of dataclasses that count rows."""
        return {path: value for path, value in self.plain.items() if not self.counts_rows(path, value)}

    @property
    def own_paths(self) -> list[Path]:
        """Paths of plain values that may differ between ranks, see `register_batch_type`."""
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
        """Whether a plain value is a field of a dataclass that counts its rows."""
        return path != () and counts_rows(path[-1], value) and self.branches[path[:-1]].kind == "dataclass"


def open_tree(batch: B) -> Tree[B]:
    """Open a batch of any kind.

    Raises:
        TypeError: a tensorclass.
        ValueError: as for `children_of`.
    """
    tree: Tree[B] = Tree({}, {}, {})
    _open(batch, (), False, tree)
    return tree


def open_batch(batch: B) -> Tree[B]:
    """Open a batch of a shuffler, which moves only tensors, so arrays are plain values; raises as `open_tree`."""
    tree = open_tree(batch)
    if not all(map(is_moved, tree.leaves.values())):
        for path in [path for path, value in tree.leaves.items() if isinstance(value, np.ndarray)]:
            tree.plain[path] = tree.leaves.pop(path)
    return tree


def _open(value: Any, path: Path, lists_are_plain: bool, tree: Tree[Any]) -> None:
    """Add a value to a tree; `lists_are_plain`: whether it is below a dataclass, where lists are metadata."""
    kind, children = children_of(value) if path == () or _has_rows(value, lists_are_plain) else (None, {})
    if isinstance(value, np.ndarray) or is_moved(value) or _is_column(value, lists_are_plain):
        tree.leaves[path] = value
    elif kind is None:  # metadata, which is not rebuilt
        tree.plain[path] = value
    else:
        tree.branches[path] = Branch(value, kind, tuple(children))
        lists_are_plain = kind == "dataclass" or (lists_are_plain and kind != "tensordict")
        keys: Sequence[Any] = tuple(children)
        if kind in ("mapping", "tensordict"):
            keys = sorted(children, key=lambda key: (type(key).__name__, str(key)))
        for key in keys:
            child, at = children[key], (*path, key)
            if is_moved(child) or isinstance(child, RowObjects):
                tree.leaves[at] = child
            elif isinstance(child, Constant):
                tree.plain[at] = child.value
            elif (lists_are_plain or type(child) is not list) and holds_scalars(child):  # a fast path for most metadata
                tree.plain[at] = child
            else:
                _open(child, at, lists_are_plain, tree)


def _is_column(value: Any, lists_are_plain: bool) -> bool:
    """Whether a value is a list with a Python object per row."""
    return isinstance(value, list) and not lists_are_plain and not _has_rows(value, True)


def _has_rows(value: Any, lists_are_plain: bool) -> bool:
    """Whether a value is or contains a leaf, at any depth."""
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
    """The value of a batch at a path; AttributeError, LookupError or TypeError if there is none."""
    value = getattr(batch, path[0])
    for key in path[1:]:
        value = child_at(value, key)
    return value


def rebuild(tree: Tree[B], values: Mapping[Path, Any], rows: int | None = None, real: int | None = None) -> Tree[B]:
    """A tree with the leaves and plain values in `values` replaced; dataclasses are made without their constructors.

    Args:
        tree: the original.
        values: new values by path; all leaves if the number of rows changes.
        rows: the new number of rows, including padding; None if it does not change.
        real: how many of them are real.
    """
    made = {**tree.leaves, **tree.plain, **values}
    leaves, plain = ({path: made[path] for path in each} for each in (tree.leaves, tree.plain))
    branches: dict[Path, Branch] = {}
    for path, (value, kind, keys) in reversed(tree.branches.items()):
        children = {key: made[(*path, key)] for key in keys}
        if kind == "tensordict":
            children = {key: Constant(each) if (*path, key) in plain else each for key, each in children.items()}
        elif kind == "dataclass" and rows is not None:
            for name, count in changed_counts(value, rows, real).items():
                children[name] = plain[(*path, name)] = count
        made[path] = rebuild_branch(value, kind, children, rows)
        branches[path] = Branch(made[path], kind, keys)
    return Tree(leaves, plain, dict(reversed(branches.items())))


def replace_rows(batch: Any, values: Mapping[Path, Any], rows: int | None = None, real: int | None = None) -> Any:
    """A copy of a batch with the values at some paths replaced; see `rebuild`."""
    if all(len(path) == 1 for path in values):  # a fast path for batches without branches, as most are
        counts = {} if rows is None else changed_counts(batch, rows, real)
        return copy_batch(batch, {path[0]: value for path, value in values.items()} | counts)
    return rebuild(open_batch(batch), values, rows, real).batch


def count_tree(tree: Tree[Any]) -> tuple[int, int]:
    """The number of rows with padding, and of real rows: `actual_batch_size` if a dataclass states it, else all.

    Raises:
        ValueError: no leaf, leaves with different numbers of rows, a `batch_size` that differs from them, an
            `actual_batch_size` outside the batch, or different values of `actual_batch_size`.
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
            "or trim them, turn a list with a tensor per row into a jagged nested tensor (a JaggedTensor if a shuffler "
            "moves it), or a list that belongs to the whole batch into a tuple"
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
    """The number of rows with padding, and of real rows, of a batch of a shuffler.

    Raises:
        TypeError: not a dataclass, or a list with a Python object per row.
        ValueError: as for `count_tree`, or a leaf that cannot move.
    """
    require_dataclass(batch)
    tree = open_batch(batch) if tree is None else tree
    if not tree.leaves:
        raise _no_rows(batch)
    for path, leaf in tree.fields.items():
        leaf.require_movable(tree.leaves[path])
    return count_tree(tree)


def batch_rows(batch: Any) -> int:
    """Number of rows of a batch, including padding; raises as `row_counts`."""
    return row_counts(batch)[0]


def real_rows(batch: Any) -> int:
    """Number of real rows of a batch; raises as `row_counts`."""
    return row_counts(batch)[1]


def batch_device(batch: Any) -> torch.device:
    """Device of a batch: that of its first field that is a leaf, else of its first leaf below a branch."""
    declared = (getattr(batch, name, None) for name in field_names(batch.__class__))
    value = next((value for value in declared if is_moved(value)), None)
    if value is None:
        value = next((value for _, value in row_fields(batch)), None)
    if value is None:
        raise _no_rows(batch)
    return device_of(value)


def require_one_device(leaves: Mapping[Path, Any]) -> None:
    """Raise ValueError, with names, for row fields on devices of more than one type."""
    kinds = {device_of(value).type: path for path, value in leaves.items()}
    if len(kinds) > 1:
        named = {path_name(path): kind for kind, path in kinds.items()}
        raise ValueError(f"fields are on different devices: {named}; all fields must be on one: move them to it")


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
    """Whether a value is a scalar, or a list, tuple or dict of only scalars, as most metadata of a batch are."""
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
        f"the batch is {kind_of(batch)} without rows; a batch holds tensors, arrays or lists with an entry per "
        "row: add one"
    )
