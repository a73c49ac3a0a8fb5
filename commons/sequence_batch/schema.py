"""BatchSchema: everything about a batch but its rows.

Ranks compare schemas once before the first batch, and a rank whose data has ended builds its empty batches from the
schema that it learned. A schema travels as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar, overload

import torch

from commons.sequence_batch.branches import Constant, describe
from commons.sequence_batch.fields import (
    ROW_COUNT_FIELDS,
    Path,
    RowField,
    can_state_padding,
    declare_per_rank,
    make_batch,
    path_name,
    per_rank_names,
    require_dataclass,
)
from commons.sequence_batch.jagged import is_keyed_jagged
from commons.sequence_batch.open_batch import Node, Opened, counts_rows, open_batch, row_counts, text_of_plain, value_at
from commons.sequence_batch.plain_values import (
    decode_plain,
    differences,
    encode_plain,
    find_type,
    name_of,
    register_type,
)
from commons.sequence_batch.schema_fields import Branch, DenseField, Field, JaggedField, PlainField, empty_counts

T = TypeVar("T", bound=type)


@overload
def register_batch_type(batch_type: T, *, per_rank: Sequence[str] = ()) -> T: ...


@overload
def register_batch_type(*, per_rank: Sequence[str] = ()) -> Callable[[T], T]: ...


def register_batch_type(batch_type: T | None = None, *, per_rank: Sequence[str] = ()) -> T | Callable[[T], T]:
    """Make a batch dataclass known by name, for ranks that never see a batch of their own; usable as a decorator.

    A batch type states its padding in a field `actual_batch_size`. A `batch_size` below 0 states nothing and stays as
    it is when rows move.

    Args:
        batch_type: the class, of another library too; none where this is a decorator with arguments.
        per_rank: plain values that may differ between ranks and between batches, such as the time of the newest row;
            dotted names for what a branch holds beside rows ("info.source"; a dict of plain values alone is declared as
            a whole). The batch that a rank trains has the value of the batch that the rank brought to that step; the
            empty batch of a rank without data has the first rank's or, of a field whose value JSON cannot hold, its
            default. Subclasses inherit the declaration.

    Returns:
        The class, or the decorator.

    Raises:
        TypeError: `per_rank` is one string.
    """
    if isinstance(per_rank, str):
        raise TypeError(f"per_rank is the string {per_rank!r}; it is a sequence of names: write ({per_rank!r},)")
    if batch_type is None:
        return partial(register_batch_type, per_rank=tuple(per_rank))
    register_type(batch_type)
    declare_per_rank(batch_type, per_rank)
    return batch_type


_FIELDS: dict[str, Any] = {each.__name__: each for each in (JaggedField, DenseField, PlainField, Branch)}
_DENSE_FACTS = len(dataclasses.fields(DenseField))


@dataclass(frozen=True)
class BatchSchema:
    """Type name and contents of a batch, in the order of declaration, with the attributes beside its fields."""

    batch_type: str  # the class, as `find_type` finds it
    fields: tuple[Field, ...]  # what the batch holds; last the branches, each before those below it

    @cached_property
    def jagged(self) -> list[JaggedField]:
        """KeyedJaggedTensors and JaggedTensors."""
        return [field for field in self.fields if isinstance(field, JaggedField)]

    @cached_property
    def dense(self) -> list[DenseField]:
        """Tensors."""
        return [field for field in self.fields if isinstance(field, DenseField)]

    @cached_property
    def num_keys(self) -> int:
        """Keys of all jagged fields together."""
        return sum(len(field.keys) for field in self.jagged)

    @cached_property
    def host_fields(self) -> list[DenseField]:
        """Tensor fields whose values the host keeps, see `BaseBatch`: one integer per row."""
        paths = [(name,) for name in getattr(_find_batch_type(self.batch_type), "host_fields", ())]
        is_integer = {field.path: not (field.dtype.is_floating_point or field.dtype.is_complex) for field in self.dense}
        return [field for field in self.dense if field.path in paths and is_integer[field.path] and not field.trailing]

    @cached_property
    def states_padding(self) -> bool:
        """Whether batches of this type, or a part of them, can say which rows are padding."""
        parts = (field.states_padding for field in self.fields if isinstance(field, Branch))
        return can_state_padding(_find_batch_type(self.batch_type)) or any(parts)

    @classmethod
    def of(cls, batch: Any, opened: Opened | None = None, known: dict[Any, BatchSchema] | None = None) -> BatchSchema:
        """Describe a batch.

        Args:
            batch: the batch.
            opened: of `open_batch`, where the caller has it and has counted the rows.
            known: the schema of an earlier batch, by what it was made of; of a batch like that one, it is the result.

        Raises:
            TypeError: not a dataclass, a plain value that JSON cannot hold, or a branch that no other rank could make.
            ValueError: as `row_counts`; a name per rank of what holds rows.
        """
        if opened is None:
            require_dataclass(batch)
            opened = open_batch(batch)
            row_counts(batch, opened)
        leaves, plain, branches = opened
        own = per_rank_names(type(batch))
        facts = tuple(_facts_of_rows(path, value) for path, value in leaves.items())
        counts = [path for path in plain if path[-1] in ROW_COUNT_FIELDS and counts_rows(path, plain[path], branches)]
        plain = {path: value for path, value in plain.items() if path not in counts}
        key = None
        if known is not None and not branches and (text := text_of_plain(plain)) is not None:
            key = type(batch), own, facts, text
            if (like := known.get(key)) is not None:
                return like
        rows = [DenseField(*each) if len(each) == _DENSE_FACTS else JaggedField(*each) for each in facts]
        kept = [
            _describe_plain(path, value, type(batch), _is_own(path, own, branches)) for path, value in plain.items()
        ]
        if own:
            _require_plain(own, leaves, type(batch))
        schema = cls(
            name_of(type(batch)),
            (
                *rows,
                *kept,
                *(
                    Branch(path, json.dumps(describe(node.kind, node.value, path)), tuple(node.children))
                    for path, node in branches.items()
                    if node.kind is not None
                ),
            ),
        )
        if known is not None and key is not None:
            known.clear()  # batches of a run are alike
            known[key] = schema
        return schema

    @property
    def type_name(self) -> str:
        """The type's name with its module, for messages."""
        return self.batch_type.replace(":", ".")

    @property
    def class_name(self) -> str:
        """The type's name without its module, for messages."""
        return self.type_name.rpartition(".")[2]

    def rows_of(self, batch: Any) -> int:
        """Rows of a batch of this schema, padding included, by its first row field."""
        if not self.jagged:
            return value_at(batch, self.dense[0].path).shape[0]
        first = value_at(batch, self.jagged[0].path)
        return first.stride() if self.jagged[0].row_shape is None else first.lengths().numel()

    def row_tensors(self, batch: Any, leaves: Mapping[Path, Any] | None = None) -> list[torch.Tensor]:
        """Of every row field, the tensor or the values, jagged fields first; `leaves` are those of `open_batch`."""
        find = partial(value_at, batch) if leaves is None else leaves.__getitem__
        return [find(field.path).values() for field in self.jagged] + [find(field.path) for field in self.dense]

    def sizes(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Of every tensor of `row_tensors` its number of elements: of a jagged one, those that the lengths count."""
        keyed = len(self.jagged)
        jagged = [tensor.shape[0] for tensor in tensors[:keyed]]
        return (*jagged, *(tensor.numel() for tensor in tensors[keyed:]))

    def empty_batch(self, rows: int = 0) -> Any:
        """A host batch of `rows` padding rows, equal to the others' but for their rows, made without its constructor.

        Raises:
            KeyError: a class that is not imported on this rank.
        """
        batch_type = _find_batch_type(self.batch_type)
        branches = {field.path: field for field in self.fields if isinstance(field, Branch)}
        children: dict[Path, dict[Any, Any]] = {path: {} for path in ((), *branches)}
        for field in self.fields:
            if isinstance(field, Branch):
                continue
            *parent, name = field.path
            above = branches.get(tuple(parent))
            value = _empty(field, rows, batch_type)
            if isinstance(field, PlainField) and above is not None and above.described[0] == "tensordict":
                value = Constant(value)
            children[tuple(parent)][name] = value
        for path, branch in reversed(branches.items()):
            children[path[:-1]][path[-1]] = branch.made_of(children[path], rows)
        return make_batch(batch_type, empty_counts(batch_type, rows) | children[()])

    def to_json(self) -> list[Any]:
        """Something that json.dumps takes; `from_json` reads it back."""
        return [
            self.batch_type,
            [
                [type(each).__name__, *(encode_plain(getattr(each, name), each.path) for name in each.__match_args__)]
                for each in self.fields
            ],
        ]

    @classmethod
    def from_json(cls, data: list[Any]) -> BatchSchema:
        """The schema that `to_json` wrote."""
        return cls(data[0], tuple(_FIELDS[kind](*map(decode_plain, content)) for kind, *content in data[1]))

    def differences(self, other: BatchSchema) -> list[str]:
        """What differs between two schemas, one short text per field."""
        if self.batch_type != other.batch_type:
            return [f"batch type {self.type_name} and {other.type_name}"]
        pairs = differences(*({field.path: field for field in each.fields} for each in (self, other)))
        return [f"field {path_name(path)!r}: {_summary(mine)} and {_summary(its)}" for path, mine, its in pairs]

    def way_out(self, other: BatchSchema) -> str:
        """How plain values that differ between two schemas may do so; empty where none does."""
        pairs = differences(*({field.path: field for field in each.fields} for each in (self, other)))
        plain = [path_name(path) for path, *both in pairs if all(isinstance(each, PlainField) for each in both)]
        if self.batch_type != other.batch_type or not plain:
            return ""
        names = ", ".join(map(repr, plain)) + "," * (len(plain) == 1)
        return f", or declare what is each rank's own: register_batch_type({self.class_name}, per_rank=({names}))"


def _facts_of_rows(path: Path, value: RowField) -> tuple[Any, ...]:
    """What a DenseField or a JaggedField says of a value that holds rows, in the order of its fields."""
    if isinstance(value, torch.Tensor):
        return path, value.dtype, tuple(value.shape[1:])
    weights, values = value.weights_or_none(), value.values()
    keys = tuple(value.keys()) if is_keyed_jagged(value) else None
    return (
        path,
        (str(path[-1]),) if keys is None else keys,
        values.dtype,
        None if weights is None else weights.dtype,
        value.lengths().dtype,
        tuple(values.shape[1:]) if keys is None else None,
    )


def _is_own(path: Path, own: frozenset[str], branches: Mapping[Path, Node]) -> bool:
    """Whether a plain value is declared to be each rank's own, by the batch type or by that of a branch."""
    return path[0] in own if len(path) == 1 else branches[path[:-1]].children[path[-1]].per_rank


def _require_plain(own: frozenset[str], leaves: Mapping[Path, RowField], batch_type: type) -> None:
    """Raise ValueError if rows are declared to be each rank's own."""
    for path in leaves:
        if path_name(path) in own:
            raise ValueError(
                f"per_rank of {batch_type.__name__} names {path_name(path)!r}, which holds rows; rows move to other "
                "ranks: name plain values alone"
            )


def _describe_plain(path: Path, value: Any, batch_type: type, per_rank: bool) -> PlainField:
    try:
        return PlainField(path, json.dumps(encode_plain(value, path)), per_rank)
    except TypeError as error:
        if len(path) > 1 or _default(batch_type, path[0]) is dataclasses.MISSING:
            if not per_rank:
                raise
            raise TypeError(
                f"{error}; a value of each rank's own may be of any type where it is a field with a default, which "
                "ranks without data take: give it one"
            ) from error
        if per_rank:
            return PlainField(path, "", per_rank)
        raise TypeError(
            f"{error}; or declare that it is each rank's own: register_batch_type({batch_type.__name__}, "
            f"per_rank=({path[0]!r},))"
        ) from error


def _default(batch_type: type, name: str) -> Any:
    """The default of a field of a dataclass; MISSING where it has none."""
    item = batch_type.__dataclass_fields__.get(name)  # type: ignore[attr-defined]  # of a dataclass
    if item is None or item.default_factory is dataclasses.MISSING:
        return dataclasses.MISSING if item is None else item.default
    return item.default_factory()


def _empty(field: JaggedField | DenseField | PlainField, rows: int, batch_type: type) -> Any:
    """What an empty batch holds in the place of a field."""
    if not isinstance(field, PlainField):
        return field.empty(rows)
    return field.value() if field.json else _default(batch_type, field.path[0])


def _summary(field: Field | None) -> str:
    return "absent" if field is None else field.summary()


def _find_batch_type(name: str) -> type:
    """The class of that name: registered, or found in a module that this process has already imported."""
    found = find_type(name)
    if found is None or not dataclasses.is_dataclass(found):
        raise KeyError(
            f"batch type {name.replace(':', '.')!r} is unknown on this rank, which has no batch of its own; the class "
            "must be known by name on every rank: import its module, or decorate it with "
            "commons.sequence_batch.schema.register_batch_type"
        )
    return found
