"""A batch dataclass, opened: its tensors and plain values by path, and the branches that lead to them.

Fields of the dataclass are tensors, KeyedJaggedTensors, JaggedTensors and plain values, or hold these at any depth:
dicts, lists, tuples and namedtuples, dataclasses, TensorDicts and KeyedTensors are branches (`rows.py` has the table).
Most batches have no branch at all; what these need is done without parsing anything.

Children of a dict or TensorDict are laid out in a sorted order, so that batches whose dicts were filled in another
order are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, TypeAlias, TypeVar

import torch

from commons.sequence_batch.batch_tree import Node, names_below, parse, stated_counts
from commons.sequence_batch.branches import Constant, child_at, children_of, rebuild
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
from commons.sequence_batch.row_leaves import COLUMN

B = TypeVar("B")
# What holds rows, plain values, and branches.
Opened: TypeAlias = tuple[dict[Path, RowField], dict[Path, Any], dict[Path, Node]]

_SCALARS = frozenset([str, int, float, bool, bytes, complex, NoneType])


class _Changes(dict[Any, Any]):
    """What changes in a branch, by key."""


def open_batch(batch: Any) -> Opened:
    """The one walk over a batch: what holds rows, plain values and branches, each by path and depth first.

    Raises:
        TypeError: a tensorclass, or Python objects per row in a TensorDict.
        ValueError: as `children_of`.
    """
    opened: Opened = ({}, {}, {})
    leaves, plain, _ = opened
    for name, value in batch_items(batch).items():
        if type(value) in _SCALARS:
            plain[(name,)] = value
        elif is_row_field(value):
            leaves[(name,)] = value
        elif holds_scalars(value):
            plain[(name,)] = value
        else:
            own = names_below(per_rank_names(type(batch)), name)
            _open(parse(value, below_dataclass=True, own=own), (name,), opened)
    return opened


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
    """A copy of a batch with other values at some paths, of its branches too; no dataclass runs its constructor.

    Args:
        batch: the batch.
        values: by path.
        rows: of the copy, padding included, where they are others: then every leaf is among the values.
        real: how many of these are no padding.
    """
    changes = _Changes()
    for path, value in values.items():
        branch = changes
        if len(path) > 1:
            for key in path[:-1]:
                branch = branch.setdefault(key, _Changes())
        branch[path[-1]] = value
    return _replaced(batch, changes, rows, real)


def row_counts(batch: Any, opened: Opened | None = None) -> tuple[int, int]:
    """Rows of a batch with padding, and real ones: `actual_batch_size` where the batch states it, else all.

    Args:
        batch: the batch.
        opened: what `open_batch` gives of it, where the caller has it.

    Raises:
        TypeError: not a dataclass.
        ValueError: no row field, fields that disagree with one another or with `batch_size`, an `actual_batch_size`
            outside the batch, or several that differ.
    """
    require_dataclass(batch)
    leaves, _, branches = open_batch(batch) if opened is None else opened
    counts = {path: num_rows_of(_name_of(path), value) for path, value in leaves.items()}
    if not counts:
        raise ValueError(
            f"{type(batch).__name__} has no KeyedJaggedTensor or tensor field; a batch needs at least one: add it"
        )
    declared = stated_count(batch, "batch_size")
    if declared is not None:
        counts = {("batch_size",): declared, **counts}
    rows = common_count(
        type(batch).__name__,
        counts | stated_counts("batch_size", branches.items()) if branches else counts,
        "every tensor's first dimension and every KeyedJaggedTensor's stride must be the batch size: pad or trim them",
        path_name,
    )
    actual = stated_count(batch, "actual_batch_size")
    stated: dict[Path, int] = {} if actual is None else {("actual_batch_size",): actual}
    if branches:
        stated |= stated_counts("actual_batch_size", branches.items())
    return rows, real_within(stated, rows)


def batch_rows(batch: Any) -> int:
    """Number of rows, padding included, that all fields of the batch agree on; raises as `row_counts`."""
    return row_counts(batch)[0]


def real_rows(batch: Any) -> int:
    """Number of rows that are no padding; raises as `row_counts`."""
    return row_counts(batch)[1]


def batch_device(batch: Any) -> torch.device:
    """Device of the batch, taken from its first row field that is no branch, or its first."""
    declared = (getattr(batch, name, None) for name in field_names(type(batch)))
    value = next((value for value in declared if is_row_field(value)), None)
    if value is None:
        value = next((value for _, value in row_fields(batch)), None)
    if value is None:
        raise ValueError(f"{type(batch).__name__} has no KeyedJaggedTensor or tensor field; a batch needs one: add it")
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


def holds_scalars(value: Any) -> bool:
    """Whether a value is a list, tuple or dict of scalars alone, as most containers of a batch are."""
    kind = type(value)
    if kind is dict:
        return _SCALARS.issuperset(map(type, value.values()))
    return (kind is list or kind is tuple) and _SCALARS.issuperset(map(type, value))


def text_of_plain(plain: Mapping[Path, Any]) -> str | None:
    """Plain values as a text that no others have, types included; None where it takes more than scalars to say."""
    for value in plain.values():
        keys_are_plain = type(value) is not dict or _SCALARS.issuperset(map(type, value))
        if not keys_are_plain or not (type(value) in _SCALARS or holds_scalars(value)):
            return None
    return repr(plain)


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


def _replaced(value: Any, changes: _Changes, rows: int | None, real: int | None) -> Any:
    is_dataclass = dataclasses.is_dataclass(value)
    kind, children = ("dataclass", {}) if is_dataclass else children_of(value)
    made = {
        key: _replaced(child_at(value, key), change, rows, real) if type(change) is _Changes else change
        for key, change in changes.items()
    }
    if is_dataclass:
        return copy_batch(value, made if rows is None else made | row_count_values(value, rows, real))
    assert kind is not None  # noqa: S101  only branches have paths below them
    if rows is None:
        rows = value.batch_size[0] if kind == "tensordict" else 0
    return rebuild(value, kind, children | made, rows)


def _device_of(value: RowField) -> torch.device:
    return value.device if isinstance(value, torch.Tensor) else value.values().device


def _name_of(path: Path) -> str:
    return path[0] if len(path) == 1 else path_name(path)
