"""Rows: counts, selects, concatenates and pads the rows of any batch, nested or not.

A batch is parsed once into `Rows`, which the functions of one call pass along.

A batch is a tree. Its leaves have an entry per row; everything else is metadata of the whole batch and is kept.

=================================================  =================================================================
value                                              treatment
=================================================  =================================================================
tensor, numpy array (no masked or other subclass)  leaf: the first dimension is the batch
nested tensor of layout torch.jagged               leaf; results of equal lengths share their offsets
KeyedJaggedTensor, JaggedTensor                    leaf; weights are kept
dict or other mapping, TensorDict, dataclass       branch; stays of its type
KeyedTensor of key_dim 1                           branch; its values are `(rows, sum of widths)`
list, tuple or namedtuple with tensors in it       branch; stays of its type
list without tensors, NonTensorStack               leaf: a Python object per row
list without tensors, below a dataclass            metadata: fields of a dataclass that are no tensors are plain values
tuple without tensors, str, number, None, other    metadata
=================================================  =================================================================

A dataclass is rebuilt without its constructor, which may change its arguments; its other attributes count as fields.
In a dataclass, turn values that depend on the rows, and are not entries per row, into properties.

Write names of the whole batch as a tuple, and in a dataclass, objects per row as a numpy array of dtype object. A
length that happens to equal the number of rows never decides how a value is treated.

Padding is stated by a dataclass with the field `actual_batch_size`, such as BaseBatch, anywhere in the tree: padding
rows come last and are empty or zero. A batch without this field cannot state padding, and all its rows are real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch

from commons.checks import kind_of
from commons.sequence_batch.branches import is_equal
from commons.sequence_batch.fields import Path, can_state_padding, path_name
from commons.sequence_batch.open_batch import Tree, count_tree, open_tree, rebuild
from commons.sequence_batch.row_leaves import device_of, is_moved, pinned, share_offsets
from commons.sequence_batch.schema import BatchSchema

B = TypeVar("B")


@dataclass(eq=False)
class Rows(Tree[B]):
    """A batch, parsed; made by `Rows.of`."""

    count: int  # number of rows, including padding
    real: int  # number of real rows, which come first

    @classmethod
    def of(cls, batch: B) -> Rows[B]:
        """Parse a batch.

        Raises:
            ValueError: leaves with different numbers of rows, a 0-dimensional tensor, a KeyedTensor whose rows are not
                its first dimension, no leaf, or values of `actual_batch_size` that are outside the batch or differ.
            TypeError: a tensorclass, or an array of a subclass such as a masked array.

        >>> Rows.of({"ids": torch.zeros(3, 5), "text": ["a", "b", "c"], "split": "train"}).count
        3
        """
        tree = open_tree(batch)
        for path, value in tree.leaves.items():
            tree.fields[path].check(value)
        return cls._of_tree(tree, *count_tree(tree))

    @staticmethod
    def concat(parts: Sequence[Rows[B]]) -> Rows[B]:
        """The rows of several batches of one structure; all padding comes last.

        Raises:
            ValueError: no batch, or batches that differ in structure, dtype, the shape of a row, or metadata.
        """
        if len(parts) == 0:
            raise ValueError("there are no batches to concatenate; rows come from at least one: give one or more")
        for index, part in enumerate(parts[1:], 1):
            _require_alike(parts[0], part, index)
        count, real = sum(part.count for part in parts), sum(part.real for part in parts)
        if count > real:
            # Padding must come last: join all real rows, then all padding.
            kept = [part._select(_positions(part.real), part.real) for part in parts]
            parts = kept + [part._select(_positions(part.real, part.count), 0) for part in parts]
        first = parts[0]
        return first._made(lambda path, _: first.fields[path].join([part.leaves[path] for part in parts]), count, real)

    @cached_property
    def schema(self) -> BatchSchema:
        """The batch's schema; TypeError for metadata that JSON cannot hold."""
        return BatchSchema.of_tree(self)

    @property
    def states_padding(self) -> bool:
        """Whether the batch can state padding."""
        branches = self.branches.values()
        return any(branch.kind == "dataclass" and can_state_padding(type(branch.value)) for branch in branches)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and numeric arrays, without Python objects."""
        total = 0
        for path, value in self.leaves.items():
            total += sum(tensor.numel() * tensor.element_size() for tensor in self.fields[path].tensors(value))
            if isinstance(value, np.ndarray) and value.dtype != object:
                total += value.nbytes
        return total

    def map(self, function: Callable[[Path, Any], Any]) -> Rows[B]:
        """Replace every leaf by `function(path, leaf)`, which keeps the number of rows."""
        return self._made(function, self.count, self.real)

    def select(self, indices: torch.Tensor | np.ndarray | Sequence[int]) -> Rows[B]:
        """Some of the rows; every tensor has its own storage.

        Args:
            indices: integers `(N,)` in `[0, count)`; any order, repeats allowed. If the batch states padding, a padding
                row may not come before a real row.

        Raises:
            ValueError: an index outside the batch, or padding before a real row.
            TypeError: indices that are not an array, or a field with a dtype from which rows cannot be selected.
        """
        chosen = _as_indices(indices, self.count)
        is_real = chosen < self.real
        num_real = int(is_real.sum())
        if not bool(is_real[:num_real].all()):
            raise ValueError(
                f"indices {chosen.tolist()} put a padding row (>= {self.real}) before a real one; padding comes last: "
                "sort the indices"
            )
        return self._select(chosen, num_real)

    def without_padding(self) -> Rows[B]:
        """The real rows."""
        return self if self.real == self.count else self._select(_positions(self.real), self.real)

    def pad(self, num_rows: int) -> Rows[B]:
        """Pad to `num_rows` rows, padding last: empty jagged rows, zeros in dense fields, None for Python objects.

        If the batch cannot state padding (`states_padding`), the caller keeps track of the number of real rows.

        Raises:
            ValueError: `num_rows` is below the batch's number of rows.

        >>> Rows.of({"ids": torch.tensor([5, 6]), "text": ["a", "b"]}).pad(3).batch
        {'ids': tensor([5, 6, 0]), 'text': ['a', 'b', None]}
        """
        missing = num_rows - self.count
        if missing < 0:
            raise ValueError(
                f"num_rows is {num_rows}, the batch has {self.count} rows; padding adds rows: raise num_rows"
            )

        def pad(path: Path, value: Any) -> Any:
            field, device = self.fields[path], device_of(value) if is_moved(value) else None
            return field.join([value, field.empty(missing, device)])

        return self._alike(pad, num_rows, self.real)

    def with_own_of(self, other: Rows[B] | None) -> Rows[B]:
        """The same rows with the `per_rank` values (`register_batch_type`) of another batch; None changes nothing."""
        if other is None or not (own := self.own_paths):
            return self
        return self._of_tree(rebuild(self, {path: other.plain[path] for path in own}), self.count, self.real)

    def pin(self) -> Rows[B]:
        """The same rows with their tensors in pinned host memory; arrays and lists are not copied."""
        return self.map(pinned)

    def _select(self, chosen: torch.Tensor, num_real: int) -> Rows[B]:
        def select(path: Path, value: Any) -> Any:
            try:
                return self.fields[path].select(value, chosen)
            except NotImplementedError as error:
                raise TypeError(
                    f"field {path_name(path)!r} has a dtype from which no rows can be selected ({error}); torch and "
                    "fbgemm must be able to select rows: convert it, lengths to int32 or int64"
                ) from error

        return self._alike(select, chosen.numel(), num_real)

    def _alike(self, function: Callable[[Path, Any], Any], count: int, real: int) -> Rows[B]:
        """Other rows of the same schema; keeps a schema that was already computed."""
        result = self._made(function, count, real)
        if "schema" in self.__dict__:
            result.__dict__["schema"] = self.schema
        return result

    def _made(self, function: Callable[[Path, Any], Any], count: int, real: int) -> Rows[B]:
        leaves = share_offsets({path: function(path, value) for path, value in self.leaves.items()})
        return self._of_tree(rebuild(self, leaves, count, real), count, real)

    @classmethod
    def _of_tree(cls, tree: Tree, count: int, real: int) -> Rows[B]:
        return cls(tree.leaves, tree.plain, tree.branches, count, real)


def select_rows(batch: B, indices: torch.Tensor | np.ndarray | Sequence[int]) -> B:
    """Select rows of a batch, as a batch of the same type; see `Rows.select`.

    >>> select_rows({"ids": torch.tensor([5, 6, 7]), "text": ["a", "b", "c"], "split": "train"}, [2, 0, 2])
    {'ids': tensor([7, 5, 7]), 'text': ['c', 'a', 'c'], 'split': 'train'}
    """
    return Rows.of(batch).select(indices).batch


def _require_alike(first: Tree[Any], other: Tree[Any], index: int) -> None:
    """Raise ValueError, with the path, unless batches have one structure, rows of one kind and equal metadata."""
    mine, its = _traits(first), _traits(other)
    for path, traits in mine.items():
        if path in its and is_equal(traits, its[path]):
            continue
        shown = [_shown(tree, path) for tree in (first, other)]
        if path in first.leaves and shown[0] == shown[1]:
            shown = [f"{text} on {device}" for text, (_, device) in zip(shown, (traits, its[path]))]
        rule = (
            "batches of one structure and with equal metadata can be joined: make them equal, or give a value per row"
        )
        if path in first.leaves:
            rule = "only rows of one kind can be joined: convert, pad or trim them first"
        raise ValueError(f"batches 0 and {index} differ at {path_name(path)!r}: {' and '.join(shown)}; {rule}")


def _traits(tree: Tree[Any]) -> dict[Path, Any]:
    """The properties that batches to be joined must share, by path: of branches, leaves and metadata."""
    traits: dict[Path, Any] = {}
    for path, (value, kind, keys) in tree.branches.items():
        traits[path] = type(value), set(keys), (value.keys(), value.length_per_key()) if kind == "keyed" else None
    for path, value in tree.leaves.items():
        traits[path] = tree.fields[path], device_of(value) if is_moved(value) else None
    own = tree.own_paths
    return traits | {path: value for path, value in tree.metadata.items() if path not in own}


def _shown(tree: Tree[Any], path: Path) -> str:
    """The text for messages of a batch's value at a path."""
    if path in tree.leaves:
        return tree.fields[path].summary()
    value = tree.branches[path].value if path in tree.branches else tree.plain.get(path)
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {sorted(map(str, value))}"
    if isinstance(value, (bool, int, float, str, tuple, NoneType)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return type(value).__name__


def _positions(*bounds: int) -> torch.Tensor:
    """`torch.arange` on the CPU, not on torch's default device."""
    return torch.arange(*bounds, device="cpu")


def _as_indices(indices: Any, rows: int) -> torch.Tensor:
    """int64 `(N,)` on the CPU; ValueError unless all are rows of the batch."""
    try:
        # An array is copied, because torch reads no array of negative strides, such as a reversed one.
        listed = np.array(indices) if isinstance(indices, (list, tuple, range, np.ndarray)) else indices
        chosen = torch.as_tensor(listed, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"indices are {kind_of(indices)} and not an array of integers ({error}); rows are chosen by a "
            "one-dimensional list of integers: pass the positions of the rows"
        ) from error
    if chosen.numel() == 0:
        chosen = chosen.to(torch.int64)
    if chosen.dtype == torch.bool or chosen.is_floating_point() or chosen.dim() != 1:
        raise ValueError(
            f"indices have dtype {chosen.dtype} and shape {tuple(chosen.shape)}; rows are chosen by a one-dimensional "
            "list of integers: pass the positions of the rows"
        )
    chosen = chosen.to(torch.int64)
    outside = chosen[(chosen < 0) | (chosen >= rows)]
    if outside.numel():
        raise ValueError(
            f"indices contain {int(outside[0])}, the batch has {rows} rows; indices must be in [0, {rows}): remove or "
            "correct them"
        )
    return chosen
