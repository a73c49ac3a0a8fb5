"""Rows of any batch: counting, selecting, concatenating and padding them, whatever the nesting.

A batch is parsed once into `Rows`, which the functions of one call pass along.

A batch is a tree. Its leaves hold an entry per row; everything else is metadata of the batch as a whole and is kept.

=================================================  =================================================================
value                                              what it is
=================================================  =================================================================
tensor, numpy array (no masked or other subclass)  leaf: the first dimension is the batch
nested tensor of layout torch.jagged               leaf
KeyedJaggedTensor, JaggedTensor                    leaf; weights are kept
dict or other mapping, TensorDict, dataclass       branch; stays of its type
KeyedTensor of key_dim 1                           branch; its values are `(rows, sum of widths)`
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

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from commons.sequence_batch.branches import Constant
from commons.sequence_batch.fields import (
    ROW_COUNT_FIELDS,
    Path,
    can_state_padding,
    common_count,
    path_name,
    real_within,
)
from commons.sequence_batch.open_batch import LeafFunction, Node, map_trees, parse, stated_counts, take_own, walk
from commons.sequence_batch.plain_values import canonical_plain, encode_plain
from commons.sequence_batch.row_leaves import LeafType

B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class Rows(Generic[B]):
    """A batch, parsed; made by `Rows.of`."""

    tree: Node  # its branches, leaves and metadata
    count: int  # rows that all leaves agree on, padding included
    real: int  # how many of them, from the first on, are no padding

    @classmethod
    def of(cls, batch: B) -> Rows[B]:
        """Parse a batch.

        Raises:
            ValueError: leaves with different numbers of rows, a 0-dimensional tensor, a KeyedTensor whose rows are not
                its first dimension, no leaf at all, an `actual_batch_size` outside the batch, or several that differ.
            TypeError: a tensorclass, or an array of a subclass such as a masked one.

        >>> Rows.of({"ids": torch.zeros(3, 5), "text": ["a", "b", "c"], "split": "train"}).count
        3

        """
        tree = parse(batch)
        return cls(tree, *_row_counts(tree))

    @staticmethod
    def concat(parts: Sequence[Rows[B]]) -> Rows[B]:
        """The rows of several batches of one structure; all padding comes last.

        Raises:
            ValueError: no batch, or batches that differ in structure, dtype, the shape of a row, or metadata.
        """
        if len(parts) == 0:
            raise ValueError("there are no batches to concatenate; rows come from at least one: give one or more")
        count, real = sum(part.count for part in parts), sum(part.real for part in parts)
        if count > real:
            # A batch with padding in its middle cannot be stated: real rows and padding are joined apart.
            kept = [part._select(torch.arange(part.real), part.real) for part in parts]
            parts = kept + [part._select(torch.arange(part.real, part.count), 0) for part in parts]
        return _mapped(parts, _join, count, real)

    @property
    def batch(self) -> B:
        """The batch itself."""
        return self.tree.value

    @property
    def states_padding(self) -> bool:
        """Whether the batch can say which of its rows are padding."""
        nodes = (node for _, node in walk(self.tree))
        return any(node.kind == "dataclass" and can_state_padding(type(node.value)) for node in nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and numeric arrays; Python objects are not counted."""
        total = 0
        for _, leaf_type, value in self.leaves():
            total += sum(tensor.numel() * tensor.element_size() for tensor in leaf_type.tensors(value))
            if isinstance(value, np.ndarray) and value.dtype != object:
                total += value.nbytes
        return total

    def leaves(self) -> Iterator[tuple[Path, LeafType[Any], Any]]:
        """Path, kind and value of every leaf, depth first."""
        for path, node in walk(self.tree):
            if node.leaf_type is not None:
                yield path, node.leaf_type, node.value

    def map(self, function: Callable[[Path, LeafType[Any], Any], Any]) -> Rows[B]:
        """Every leaf replaced by `function(path, leaf_type, leaf)`, which keeps the number of rows."""

        def apply(path: Path, leaf_type: LeafType[Any], values: list[Any]) -> Any:
            return function(path, leaf_type, values[0])

        return _mapped([self], apply, self.count, self.real)

    def select(self, indices: torch.Tensor | np.ndarray | Sequence[int]) -> Rows[B]:
        """Some of the rows, every tensor in storage of its own.

        Args:
            indices: integers `(N,)` in `[0, count)`; any order, repeats allowed. Where the batch states padding, a
                padding row may not come before a real one.

        Raises:
            ValueError: an index outside the batch, or padding before a real row.
            TypeError: something that is no array, or a field of a dtype that nothing can be selected from.
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

    def pad(self, num_rows: int) -> Rows[B]:
        """`num_rows` rows, padding last: empty where rows are jagged, zeros in dense fields, None among objects.

        A batch that `states_padding` knows afterwards which rows these are; for another one the caller keeps track.

        Raises:
            ValueError: `num_rows` below the rows of the batch.

        >>> Rows.of({"ids": torch.tensor([5, 6]), "text": ["a", "b"]}).pad(3).batch
        {'ids': tensor([5, 6, 0]), 'text': ['a', 'b', None]}

        """
        missing = num_rows - self.count
        if missing < 0:
            raise ValueError(
                f"num_rows is {num_rows}, the batch has {self.count} rows; padding adds rows: raise num_rows"
            )

        def pad(path: Path, leaf_type: LeafType[Any], values: list[Any]) -> Any:
            return leaf_type.join([values[0], leaf_type.padding(values[0], missing)])

        return _mapped([self], pad, num_rows, self.real)

    def with_own_of(self, other: Rows[B] | None) -> Rows[B]:
        """The same rows; what is each rank's own (`register_batch_type`) is that of another batch, if there is one."""
        return self if other is None else Rows(take_own(self.tree, other.tree, self.count), self.count, self.real)

    def pin(self) -> Rows[B]:
        """The same rows with their tensors in pinned host memory; arrays and lists stay where they are."""
        return self.map(lambda _, __, value: value.pin_memory() if hasattr(value, "pin_memory") else value)

    def schema(self, varying: Collection[Path] = ()) -> dict[str, Any]:
        """All but the rows, by path: kinds, dtypes, the shape of a row, and metadata as JSON holds them.

        Args:
            varying: paths of leaves whose rows may differ in their first dimension, as sequences that are padded.

        Raises:
            TypeError: metadata that JSON cannot hold.
        """
        described: dict[str, Any] = {}
        _describe(self.tree, (), varying, described)
        return described

    def _select(self, chosen: torch.Tensor, num_real: int) -> Rows[B]:
        def select(path: Path, leaf_type: LeafType[Any], values: list[Any]) -> Any:
            try:
                return leaf_type.select(values[0], chosen)
            except NotImplementedError as error:
                raise TypeError(
                    f"field {path_name(path)!r} is of a dtype from which no rows can be taken ({error}); rows are "
                    "those of dtypes that torch and fbgemm can select: convert it, lengths to int32 or int64"
                ) from error

        return _mapped([self], select, chosen.numel(), num_real)


def count_rows(batch: Any) -> int:
    """Number of rows of a batch, padding included; raises as `Rows.of`."""
    return Rows.of(batch).count


def select_rows(batch: B, indices: torch.Tensor | np.ndarray | Sequence[int]) -> B:
    """Rows of a batch as a batch: see `Rows.select`.

    >>> select_rows({"ids": torch.tensor([5, 6, 7]), "text": ["a", "b", "c"], "split": "train"}, [2, 0, 2])
    {'ids': tensor([7, 5, 7]), 'text': ['c', 'a', 'c'], 'split': 'train'}

    """
    return Rows.of(batch).select(indices).batch


def concat_rows(batches: Sequence[B]) -> B:
    """Rows of several batches as one batch: see `Rows.concat`.

    >>> concat_rows([{"ids": torch.tensor([5, 6])}, {"ids": torch.tensor([7])}])
    {'ids': tensor([5, 6, 7])}

    """
    return Rows.concat([Rows.of(batch) for batch in batches]).batch


def _mapped(parts: Sequence[Rows[B]], function: LeafFunction, count: int, real: int) -> Rows[B]:
    return Rows(map_trees([part.tree for part in parts], function, count, real), count, real)


def _describe(node: Node, path: Path, varying: Collection[Path], described: dict[str, Any]) -> None:
    name, value = ".".join(map(str, path)), node.value
    if node.leaf_type is not None:
        traits = node.leaf_type.traits(value)
        if path in varying:
            traits["row shape"] = ("any", *traits["row shape"][1:])
        if "device" in traits:
            traits["device"] = traits["device"].type
        described[name] = " ".join([type(value).__name__, *(f"{key} {trait}" for key, trait in traits.items())])
    elif node.per_rank:
        described[name] = "each rank's own"
    elif node.kind is None:
        plain = encode_plain(value.value if isinstance(value, Constant) else value, path)
        described[name] = canonical_plain(plain)  # equal dicts are equal in any order
    else:
        described[name] = f"{type(value).__module__}.{type(value).__qualname__}"
        for key, child in node.children.items():
            if not (node.kind == "dataclass" and key in ROW_COUNT_FIELDS):
                _describe(child, (*path, key), varying, described)


def _row_counts(tree: Node) -> tuple[int, int]:
    """Rows with padding, and real ones."""
    counts = stated_counts("batch_size", walk(tree))
    for path, node in walk(tree):
        if node.leaf_type is not None:
            counts[path] = node.leaf_type.count(node.value, path_name(path))
    name = type(tree.value).__name__
    if not counts:
        raise ValueError(
            f"the batch is a {name} without rows; a batch holds tensors, arrays or lists with an entry per row: add one"
        )
    rows = common_count(
        f"the {name}",
        counts,
        "the first dimension of every field is the batch, and a list has an entry per row: pad or trim them, or make a "
        "list that belongs to the whole batch a tuple",
        path_name,
    )
    return rows, real_within(stated_counts("actual_batch_size", walk(tree)), rows)


def _as_indices(indices: Any, rows: int) -> torch.Tensor:
    """int64 `(N,)` on the CPU; ValueError unless all are rows of the batch."""
    try:
        chosen = torch.as_tensor(np.asarray(indices) if isinstance(indices, (list, tuple, range)) else indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"indices are a {type(indices).__name__} that is no array of integers ({error}); rows are chosen by a "
            "one-dimensional list of integers: pass the positions of the rows"
        ) from error
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
