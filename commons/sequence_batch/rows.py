"""Rows of any batch: counting, selecting, concatenating and padding them, whatever the nesting.

A batch is a tree. Its leaves hold an entry per row; everything else is metadata of the batch as a whole and is kept.

=================================================  =================================================================
value                                              what it is
=================================================  =================================================================
tensor, numpy array                                leaf: the first dimension is the batch
nested tensor of layout torch.jagged               leaf
KeyedJaggedTensor, JaggedTensor                    leaf; weights are kept
dict or other mapping, TensorDict, dataclass       branch; stays of its type
list, tuple or namedtuple with tensors in it       branch; stays of its type
list without tensors                               leaf: a Python object per row (NonTensorStack in a TensorDict)
list without tensors, below a dataclass            metadata: fields of a dataclass that are no tensors are plain values
tuple without tensors, str, number, None, other    metadata
=================================================  =================================================================

A dataclass is made again without its constructor, which may change what it is given; attributes that it has beside its
fields count as fields. What depends on the rows and is no entry per row is a property there.

So names that belong to the batch as a whole are written as a tuple, and in a dataclass objects per row are written as a
numpy array of dtype object. No decision is made by a length that happens to equal the number of rows.

Padding is stated by a dataclass with the field `actual_batch_size`, such as BaseBatch, anywhere in the tree: it comes
last and is empty, or zero. A batch without that field cannot state padding, and all its rows are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from commons.sequence_batch.batch_tree import Node, Path, map_trees, parse, path_name, walk, walk_branches
from commons.sequence_batch.row_leaves import LeafType

B = TypeVar("B")


def count_rows(batch: Any) -> int:
    """Number of rows that all leaves of a batch agree on, padding included.

    Raises:
        ValueError: leaves with different numbers of rows, a 0-dimensional tensor, or no leaf at all.
        TypeError: a tensorclass.

    >>> count_rows({"ids": torch.zeros(3, 5), "text": ["a", "b", "c"], "split": "train"})
    3

    """
    return _count(parse(batch))


def count_real_rows(batch: Any) -> int:
    """Number of rows that are no padding.

    Raises:
        ValueError: as `count_rows`; also an `actual_batch_size` outside the batch, or several that differ.
        TypeError: as `count_rows`.
    """
    return _row_counts(parse(batch))[1]


def states_padding(batch: Any) -> bool:
    """Whether a batch can say which of its rows are padding."""
    branches = (node for _, node in walk_branches(parse(batch)))
    return any(node.kind == "dataclass" and "actual_batch_size" in node.children for node in branches)


def select_rows(batch: B, indices: torch.Tensor | np.ndarray | Sequence[int]) -> B:
    """Rows of a batch as a new batch of the same type, every tensor in storage of its own.

    Args:
        batch: any batch.
        indices: integers `(N,)` in `[0, count_rows(batch))`; any order, repeats allowed. Where the batch states
            padding, a padding row may not come before a real one.

    Raises:
        ValueError: an index outside the batch, padding before a real row, or as `count_rows`.
        TypeError: as `count_rows`.

    >>> select_rows({"ids": torch.tensor([5, 6, 7]), "text": ["a", "b", "c"], "split": "train"}, [2, 0, 2])
    {'ids': tensor([7, 5, 7]), 'text': ['c', 'a', 'c'], 'split': 'train'}

    """
    tree = parse(batch)
    rows, real = _row_counts(tree)
    chosen = _as_indices(indices, rows)
    is_real = chosen < real
    num_real = int(is_real.sum())
    if not bool(is_real[:num_real].all()):
        raise ValueError(
            f"indices {chosen.tolist()} put a padding row (>= {real}) before a real one; padding comes last: sort the "
            "indices"
        )
    return _select(tree, chosen, num_real)


def concat_rows(batches: Sequence[B]) -> B:
    """Rows of several batches of one structure as one batch; all padding comes last.

    Raises:
        ValueError: no batch; or batches that differ in structure, dtype, the shape of a row, or metadata.
        TypeError: as `count_rows`.

    >>> concat_rows([{"ids": torch.tensor([5, 6])}, {"ids": torch.tensor([7])}])
    {'ids': tensor([5, 6, 7])}

    """
    if len(batches) == 0:
        raise ValueError("there are no batches to concatenate; rows come from at least one: give one or more")
    trees = [parse(batch) for batch in batches]
    counts = [_row_counts(tree) for tree in trees]
    total, total_real = (sum(column) for column in zip(*counts))
    if total > total_real:
        # A batch with padding in its middle cannot be stated: real rows and padding are joined apart.
        real = [_select(tree, torch.arange(kept), kept) for tree, (_, kept) in zip(trees, counts)]
        padding = [_select(tree, torch.arange(kept, rows), 0) for tree, (rows, kept) in zip(trees, counts)]
        trees = [parse(batch) for batch in [*real, *padding]]
    return map_trees(trees, _join, total, total_real)


def pad_rows(batch: B, num_rows: int) -> B:
    """The batch with padding at its end: empty where rows are jagged, zeros in dense fields, None among objects.

    A batch that `states_padding` knows afterwards which rows these are; for another one the caller keeps track.

    Args:
        batch: any batch.
        num_rows: rows of the result.

    Raises:
        ValueError: `num_rows` below the rows of the batch, or as `count_rows`.
        TypeError: as `count_rows`.

    >>> pad_rows({"ids": torch.tensor([5, 6]), "text": ["a", "b"]}, 3)
    {'ids': tensor([5, 6, 0]), 'text': ['a', 'b', None]}

    """
    tree = parse(batch)
    rows, real = _row_counts(tree)
    if num_rows < rows:
        raise ValueError(f"num_rows is {num_rows}, the batch has {rows} rows; padding adds rows: raise num_rows")

    def pad(path: Path, leaf_type: LeafType[Any], values: list[Any]) -> Any:
        return leaf_type.join([values[0], leaf_type.padding(values[0], num_rows - rows)])

    return map_trees([tree], pad, num_rows, real)


def map_rows(batch: B, function: Callable[[Path, LeafType[Any], Any], Any]) -> B:
    """The batch with every leaf replaced by `function(path, leaf_type, leaf)`, which keeps the number of rows."""
    tree = parse(batch)
    return map_trees([tree], lambda path, leaf_type, values: function(path, leaf_type, values[0]), *_row_counts(tree))


def row_leaves(batch: Any) -> Iterator[tuple[Path, LeafType[Any], Any]]:
    """Path, kind and value of every leaf, depth first; a path is the tuple of keys that lead to it."""
    for path, node in walk(parse(batch)):
        if node.leaf_type is not None:
            yield path, node.leaf_type, node.value


def batch_nbytes(batch: Any) -> int:
    """Bytes of the tensors and numeric arrays of a batch; Python objects are not counted."""
    total = 0
    for _, leaf_type, value in row_leaves(batch):
        total += sum(tensor.numel() * tensor.element_size() for tensor in leaf_type.tensors(value))
        if isinstance(value, np.ndarray) and value.dtype != object:
            total += value.nbytes
    return total


def pin_rows(batch: B) -> B:
    """The batch with its tensors in pinned host memory; arrays and lists stay where they are."""

    def pin(path: Path, leaf_type: LeafType[Any], value: Any) -> Any:
        return value.pin_memory() if hasattr(value, "pin_memory") else value

    return map_rows(batch, pin)


def holds_device_tensors(batch: Any) -> bool:
    """Whether any tensor of a batch lies on a device rather than on the host."""
    return any(
        tensor.device.type != "cpu" for _, leaf_type, leaf in row_leaves(batch) for tensor in leaf_type.tensors(leaf)
    )


def _row_counts(tree: Node) -> tuple[int, int]:
    """Rows with padding, and real ones."""
    rows = _count(tree)
    stated = _declared(tree, "actual_batch_size")
    if len(set(stated.values())) > 1:
        named = {path_name(path): count for path, count in stated.items()}
        raise ValueError(
            f"parts of the batch state different numbers of real rows: {named}; a row is padding in all parts or in "
            "none: make actual_batch_size equal"
        )
    real = next(iter(stated.values()), rows)
    if not 0 <= real <= rows:
        raise ValueError(
            f"actual_batch_size is {real}, the batch has {rows} rows; real rows are counted within the batch: give a "
            "number between 0 and that"
        )
    return rows, real


def _count(tree: Node) -> int:
    counts = _declared(tree, "batch_size")
    for path, node in walk(tree):
        if node.leaf_type is not None:
            counts[path] = node.leaf_type.count(node.value, path_name(path))
    name = type(tree.value).__name__
    if not counts:
        raise ValueError(
            f"the batch is a {name} without rows; a batch holds tensors, arrays or lists with an entry per row: add one"
        )
    if len(set(counts.values())) > 1:
        named = {path_name(path): count for path, count in counts.items()}
        raise ValueError(
            f"fields of the {name} disagree on the number of rows: {named}; the first dimension of every field is the "
            "batch, and a list has an entry per row: pad or trim them, or make a list that belongs to the whole batch "
            "a tuple"
        )
    return next(iter(counts.values()))


def _declared(tree: Node, name: str) -> dict[Path, int]:
    """What branches say of their rows: dataclasses in the field of that name, TensorDicts in their batch_size."""
    declared: dict[Path, int] = {}
    for path, node in walk_branches(tree):
        if node.kind == "tensordict" and name == "batch_size":
            declared[(*path, name)] = node.value.batch_size[0]
        elif node.kind == "dataclass" and name in node.children and node.children[name].value is not None:
            declared[(*path, name)] = int(node.children[name].value)
    return declared


def _as_indices(indices: Any, rows: int) -> torch.Tensor:
    """int64 `(N,)` on the CPU; ValueError unless all are rows of the batch."""
    chosen = torch.as_tensor(np.asarray(indices) if isinstance(indices, (list, tuple, range)) else indices)
    if chosen.numel() == 0:
        chosen = chosen.to(torch.int64)
    if chosen.dtype == torch.bool or chosen.is_floating_point() or chosen.dim() != 1:
        raise ValueError(
            f"indices have dtype {chosen.dtype} and shape {tuple(chosen.shape)}; rows are chosen by a one-dimensional "
            "list of integers: pass the positions of the rows"
        )
    chosen = chosen.to(device="cpu", dtype=torch.int64)
    outside = chosen[(chosen < 0) | (chosen >= rows)]
    if outside.numel():
        raise ValueError(
            f"indices hold {int(outside[0])}, the batch has {rows} rows; indices lie in [0, {rows}): remove or correct "
            "them"
        )
    return chosen


def _select(tree: Node, chosen: torch.Tensor, num_real: int) -> Any:
    return map_trees([tree], lambda _, leaf_type, values: leaf_type.select(values[0], chosen), chosen.numel(), num_real)


def _join(path: Path, leaf_type: LeafType[Any], values: list[Any]) -> Any:
    first = leaf_type.traits(values[0])
    for index, value in enumerate(values):
        other = leaf_type.traits(value)
        if other != first:
            different = [f"{name} {first[name]} and {other[name]}" for name in first if first[name] != other[name]]
            raise ValueError(
                f"batches 0 and {index} differ at {path_name(path)!r}: {'; '.join(different)}; only rows of one kind "
                "can be joined: convert, pad or trim them first"
            )
    return leaf_type.join(values)
