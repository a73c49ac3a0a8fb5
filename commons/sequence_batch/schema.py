"""BatchSchema: the description of a batch without its rows.

Ranks compare schemas once, before the first batch, and a rank whose data has ended makes its empty batches from the
agreed schema. Messages contain a schema, as JSON, and the tensors of its leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias, TypeVar, overload

import torch

from commons.checks import require_names
from commons.sequence_batch.branches import BranchField, Constant
from commons.sequence_batch.fields import (
    Path,
    batch_items,
    can_state_padding,
    declare_per_rank,
    path_name,
    per_rank_names,
    row_count_items,
)
from commons.sequence_batch.jagged_fields import JaggedField
from commons.sequence_batch.open_batch import (
    Tree,
    batch_device,
    holds_scalars,
    open_batch,
    replace_rows,
    row_counts,
    row_fields,
    value_at,
)
from commons.sequence_batch.plain_values import (
    PlainField,
    decode_plain,
    differences,
    encode_plain,
    register_type,
)
from commons.sequence_batch.row_fields import DenseField, RowField
from commons.sequence_batch.row_leaves import KINDS, describe_leaf, is_moved

T = TypeVar("T", bound=type)


@overload
def register_batch_type(batch_type: T, *, per_rank: Sequence[str] = ()) -> T: ...


@overload
def register_batch_type(*, per_rank: Sequence[str] = ()) -> Callable[[T], T]: ...


def register_batch_type(batch_type: T | None = None, *, per_rank: Sequence[str] = ()) -> T | Callable[[T], T]:
    """Register a batch dataclass by name, for ranks that never load a batch; usable as a decorator.

    A batch type states its padding in a field `actual_batch_size`. A `batch_size` below 0 states nothing and is not
    changed when rows move.

    Args:
        batch_type: the class, which may come from another library; None for a decorator with arguments.
        per_rank: names of plain values that may differ between ranks and between batches, such as the time of the
            newest row; dotted names for plain values below a branch ("info.source"), but the name of the dict for a
            dict with only plain values. The batch that a rank trains in a step has the value of the batch that the rank
            loaded for the step. The empty batch of a rank without data has the first rank's value, or the field's
            default if JSON cannot hold the value. Subclasses inherit the declaration.

    Returns:
        The class, or the decorator.

    Raises:
        TypeError: `per_rank` is one string.
    """
    per_rank = require_names("per_rank", per_rank)
    if batch_type is None:
        return partial(register_batch_type, per_rank=per_rank)
    register_type(batch_type)
    declare_per_rank(batch_type, per_rank)
    return batch_type


Field: TypeAlias = RowField | PlainField | BranchField

_FIELDS: dict[str, Any] = {each.__name__: each for each in (*KINDS, PlainField, BranchField)}


@dataclass(frozen=True)
class BatchSchema:
    """The fields of a batch in the order of `Tree`: leaves, plain values, then branches, parents first."""

    fields: tuple[Field, ...]

    @cached_property
    def rows(self) -> list[RowField]:
        """Fields with an entry per row."""
        return [each for each in self.fields if isinstance(each, RowField)]

    @cached_property
    def jagged(self) -> list[JaggedField]:
        """KeyedJaggedTensors and JaggedTensors."""
        return [each for each in self.fields if isinstance(each, JaggedField)]

    @cached_property
    def dense(self) -> list[DenseField]:
        """Tensors."""
        return [each for each in self.fields if isinstance(each, DenseField)]

    @cached_property
    def branches(self) -> list[BranchField]:
        """Branches, parents first: the first is the batch itself, unless it is a leaf."""
        return [each for each in self.fields if isinstance(each, BranchField)]

    @cached_property
    def num_keys(self) -> int:
        """Number of keys of all jagged fields."""
        return sum(len(each.keys) for each in self.jagged)

    @cached_property
    def batch_type(self) -> type:
        """The class of a batch that is a dataclass; KeyError if it is not imported here."""
        return self.branches[0].batch_type

    @cached_property
    def host_fields(self) -> list[DenseField]:
        """Tensor fields with a host copy, one integer per row; see `BaseBatch`."""
        paths = [(name,) for name in self.branches[0].described[2:]]
        is_integer = {each.path: not (each.dtype.is_floating_point or each.dtype.is_complex) for each in self.dense}
        return [each for each in self.dense if each.path in paths and is_integer[each.path] and not each.trailing]

    @cached_property
    def states_padding(self) -> bool:
        """Whether batches of this type, or a part of them, can state padding."""
        return any(each.kind == "dataclass" and can_state_padding(each.batch_type) for each in self.branches)

    @classmethod
    def of(cls, batch: Any, tree: Tree[Any] | None = None, known: dict[Any, BatchSchema] | None = None) -> BatchSchema:
        """Describe a batch of a shuffler.

        Args:
            batch: the batch.
            tree: the batch's `open_batch`, after `row_counts`; None to compute both here.
            known: a cache with the schema of the last batch, which is returned for a batch that differs only in its
                rows; None for no cache.

        Raises:
            TypeError: as for `of_tree`, or a batch that is not a dataclass.
            ValueError: as for `row_counts`, or a `per_rank` name of a field with rows.
        """
        if tree is None:
            tree = open_batch(batch)
            row_counts(batch, tree)
        if known is None or len(tree.branches) > 1 or not all(map(holds_scalars, (plain := tree.metadata).values())):
            return cls.of_tree(tree)
        # repr, because 1, 1.0 and True are equal in Python.
        rows, values = tuple(tree.fields.values()), repr(list(plain.values()))
        own = per_rank_names(type(batch))  # type: ignore[arg-type]  # types are hashable
        key = type(batch), own, rows, tuple(plain), values
        schema = known.get(key)  # once: the thread for windows uses the same cache
        if schema is None:
            schema = cls.of_tree(tree)
            known.clear()  # one entry is enough: batches of a run are alike
            known[key] = schema
        return schema

    @classmethod
    def of_tree(cls, tree: Tree[Any]) -> BatchSchema:
        """Describe a batch of any kind.

        Raises:
            TypeError: a plain value that JSON cannot hold, or a branch that another rank could not rebuild.
            ValueError: a `per_rank` name of a field with rows.
        """
        own, root = tree.own_paths, tree.branches.get(())
        batch_type = type(root.value) if root is not None and root.kind == "dataclass" else None
        if batch_type is not None:
            _require_plain(batch_type, tree)
        return cls(
            (
                *tree.fields.values(),
                *(_describe_plain(path, value, batch_type, path in own) for path, value in tree.metadata.items()),
                *(BranchField.of(path, kind, value, keys) for path, (value, kind, keys) in tree.branches.items()),
            )
        )

    @property
    def type_name(self) -> str:
        """The type's name for messages, with the module for a dataclass."""
        if not self.branches:
            return self.fields[0].summary()
        kind, *content = self.branches[0].described
        return content[0].replace(":", ".") if kind == "dataclass" else self.branches[0].summary()

    @property
    def class_name(self) -> str:
        """The type's name for messages, without its module."""
        return self.type_name.rpartition(".")[2]

    def rows_of(self, batch: Any) -> int:
        """Number of rows of a batch of this schema, including padding, from its first row field."""
        if not self.jagged:
            return value_at(batch, self.dense[0].path).shape[0]
        first = value_at(batch, self.jagged[0].path)
        return first.stride() if self.jagged[0].row_shape is None else first.lengths().numel()

    def row_tensors(self, batch: Any, leaves: Mapping[Path, Any] | None = None) -> list[torch.Tensor]:
        """The tensor or the values of every row field, jagged fields first; `leaves`: of the batch's `open_batch`."""
        find = partial(value_at, batch) if leaves is None else leaves.__getitem__
        return [find(each.path).values() for each in self.jagged] + [find(each.path) for each in self.dense]

    def sizes(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The sizes of the tensors of `row_tensors`: entries, as lengths count them, of a jagged one, else elements."""
        keyed = len(self.jagged)
        jagged = [tensor.shape[0] for tensor in tensors[:keyed]]
        return (*jagged, *(tensor.numel() for tensor in tensors[keyed:]))

    def require_same_fields(self, batch: Any) -> None:
        """Raise ValueError if a copy of a batch of this schema has row fields of another form, or other ones.

        Further ones are not looked for below branches.
        """
        then = {each.path: each for each in self.rows}
        now = {}
        for path in dict.fromkeys((*then, *((name,) for name in batch_items(batch)))):
            with contextlib.suppress(AttributeError, LookupError, TypeError):  # the copy has no such field
                if is_moved(value := value_at(batch, path)):
                    now[path] = describe_leaf(path, value)
        if changed := differences(then, now):
            path, before, after = changed[0]
            raise ValueError(
                f"field {path_name(path)!r} is {_summary(after)}, and was {_summary(before)} when the shuffle was "
                "started; rows move in the form that they had then: change or add fields in the loader or in the "
                "model, not in the batch's to()"
            )

    def empty_batch(self, rows: int = 0) -> Any:
        """A host batch of this schema with `rows` padding rows, made without its constructor.

        Raises:
            KeyError: a class that is not imported on this rank.
        """
        values = {
            (*branch.path, name): count
            for branch in self.branches
            if branch.kind == "dataclass"
            for name, count in row_count_items(branch.batch_type, rows, 0).items()  # not a plain batch_size below 0
        }
        host = torch.device("cpu")  # not torch's default device, which a script may have set
        return self.made_of(values | {each.path: each.empty(rows, host) for each in self.rows}, lambda _: (rows, None))

    def padded(self, batch: Any) -> Any:
        """A copy, with one row of padding, of a batch of this schema without rows; on the same device."""
        device, padding = batch_device(batch), self.empty_batch(1)
        if device.type != "cpu":
            padding = padding.to(device, non_blocking=True)
        return replace_rows(batch, dict(row_fields(padding)), 1, 0)

    def made_of(self, values: Mapping[Path, Any], size_of: Callable[[Path], tuple[int, torch.device | None]]) -> Any:
        """Make a batch of this schema without its constructor; KeyError for a class that is not imported here.

        Args:
            values: the leaves and the fields that count rows, by path.
            size_of: returns the rows and the device of a TensorDict by its path; results for other paths are ignored.
        """
        plain = {each.path: each for each in self.fields if isinstance(each, PlainField)}
        made = {**values}
        for path, each in plain.items():
            made[path] = each.value() if each.json else _default(self.batch_type, path[0])
        for branch in reversed(self.branches):
            path = branch.path
            children = {key: made[(*path, key)] for key in branch.keys}
            if branch.kind == "tensordict":
                children = {key: Constant(each) if (*path, key) in plain else each for key, each in children.items()}
            made[path] = branch.made_of(children, *size_of(path))
        return made[()]

    @cached_property
    def text(self) -> str:
        """The schema as JSON text; `from_text` reads it back."""
        return json.dumps(
            [
                [type(each).__name__, *(encode_plain(getattr(each, name), each.path) for name in each.__match_args__)]
                for each in self.fields
            ],
            separators=(",", ":"),
        )

    @classmethod
    @lru_cache(maxsize=16)  # messages of one exchange have one schema
    def from_text(cls, text: str) -> BatchSchema:
        """The schema of a `text`."""
        return cls(tuple(_FIELDS[kind](*map(decode_plain, content)) for kind, *content in json.loads(text)))

    def differences(self, other: BatchSchema) -> list[str]:
        """The differences between two schemas, one short text per field."""
        if self.type_name != other.type_name:
            return [f"batch type {self.type_name} and {other.type_name}"]
        return [
            f"field {path_name(path)!r}: {_summary(mine)} and {_summary(its)}" for path, mine, its in self._pairs(other)
        ]

    def way_out(self, other: BatchSchema) -> str:
        """The remedy for plain values that differ between two schemas, for messages; empty if none differ."""
        plain = [
            path_name(path) for path, *both in self._pairs(other) if all(isinstance(each, PlainField) for each in both)
        ]
        is_dataclass = bool(self.branches) and self.branches[0].kind == "dataclass"
        if self.type_name != other.type_name or not plain or not is_dataclass:
            return ""
        names = ", ".join(map(repr, plain)) + "," * (len(plain) == 1)
        return (
            ", or make values of single rows a tensor, and let others differ between ranks: "
            f"register_batch_type({self.class_name}, per_rank=({names}))"
        )

    def _pairs(self, other: BatchSchema) -> list[tuple[Path, Field | None, Field | None]]:
        return differences(*({each.path: each for each in schema.fields} for schema in (self, other)))


def _require_plain(batch_type: type, tree: Tree[Any]) -> None:
    """Raise ValueError if `per_rank` names a field with rows."""
    own = per_rank_names(batch_type)
    for path in tree.leaves if own else ():
        if path_name(path) in own:
            raise ValueError(
                f"per_rank of {batch_type.__name__} names {path_name(path)!r}, which holds rows; rows move to other "
                "ranks: name only plain values"
            )


def _describe_plain(path: Path, value: Any, batch_type: type | None, per_rank: bool) -> PlainField:
    try:
        return PlainField(path, json.dumps(encode_plain(value, path)), per_rank)
    except TypeError as error:
        if batch_type is None or len(path) > 1 or _default(batch_type, path[0]) is dataclasses.MISSING:
            if not per_rank:
                raise
            raise TypeError(
                f"{error}; a per_rank value of another type must be a field with a default, which ranks without data "
                "use: give it one"
            ) from error
        if per_rank:
            return PlainField(path, "", per_rank)
        raise TypeError(
            f"{error}; or let it differ between ranks: register_batch_type({batch_type.__name__}, "
            f"per_rank=({path[0]!r},))"
        ) from error


def _default(batch_type: type, name: str) -> Any:
    """The default of a field of a dataclass; MISSING if it has none."""
    item = batch_type.__dataclass_fields__.get(name)  # type: ignore[attr-defined]  # of a dataclass
    if item is None or item.default_factory is dataclasses.MISSING:
        return dataclasses.MISSING if item is None else item.default
    return item.default_factory()


def _summary(field: Field | None) -> str:
    return "absent" if field is None else field.summary()
