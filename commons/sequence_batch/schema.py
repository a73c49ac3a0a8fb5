"""BatchSchema: everything about a batch but its rows.

Ranks compare schemas once before the first batch, and a rank whose data has ended builds its empty batches from the
schema that it learned. A schema travels as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from commons.sequence_batch.fields import (
    ROW_COUNT_FIELDS,
    batch_items,
    batch_rows,
    can_state_padding,
    make_batch,
    require_dataclass,
    row_count_values,
)
from commons.sequence_batch.plain_values import canonical_plain, decode_plain, differences, encode_plain, show_plain
from commons.sequence_batch.torchrec_types import empty_keyed_jagged, is_keyed_jagged
from commons.sequence_batch.type_names import find_type, name_of, register_type

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# Characters of a value in a message.
_SHOWN = 200


def register_batch_type(batch_type: type) -> type:
    """Make a batch dataclass known by name, for ranks that never see a batch of their own; usable as a decorator."""
    register_type(batch_type)
    return batch_type


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


@dataclass(frozen=True)
class JaggedField:
    """A KeyedJaggedTensor field: its keys and dtypes."""

    name: str
    keys: tuple[str, ...]
    values_dtype: torch.dtype
    weights_dtype: torch.dtype | None
    lengths_dtype: torch.dtype

    def empty(self, rows: int) -> KeyedJaggedTensor:
        """A KeyedJaggedTensor of `rows` empty rows."""
        return empty_keyed_jagged(self.keys, rows, self.values_dtype, self.weights_dtype, self.lengths_dtype)


@dataclass(frozen=True)
class DenseField:
    """A tensor field: its dtype and trailing dimensions."""

    name: str
    dtype: torch.dtype
    trailing: tuple[int, ...]

    def empty(self, rows: int) -> torch.Tensor:
        """Zeros of shape `(rows, *trailing)`."""
        return torch.zeros(rows, *self.trailing, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class PlainField:
    """A field that holds no rows: it must be the same on all ranks.

    Attributes:
        name: of the field.
        json: its value as `encode_plain` writes it, as JSON text.
    """

    name: str
    json: str

    def __eq__(self, other: object) -> bool:
        """Whether name and value are the same, types included; dicts are equal in any order of their items."""
        if not isinstance(other, PlainField):
            return NotImplemented
        return self.name == other.name and (self.json == other.json or self._canonical() == other._canonical())

    def __hash__(self) -> int:
        return hash(self.name)

    def value(self) -> Any:
        """The value, equal to what was described; KeyError for an enum or namedtuple that is not imported here."""
        return decode_plain(json.loads(self.json))

    def _canonical(self) -> str:
        return json.dumps(canonical_plain(json.loads(self.json)))  # as text: in Python, 1, 1.0 and True are equal


Field: TypeAlias = JaggedField | DenseField | PlainField


@dataclass(frozen=True)
class BatchSchema:
    """Type name and fields of a batch, in the order of declaration, with the attributes beside them.

    Attributes:
        batch_type: the class, as `find_type` finds it.
        fields: what the batch holds.
    """

    batch_type: str
    fields: tuple[Field, ...]

    @cached_property
    def jagged(self) -> list[JaggedField]:
        """KeyedJaggedTensor fields."""
        return [field for field in self.fields if isinstance(field, JaggedField)]

    @cached_property
    def dense(self) -> list[DenseField]:
        """Tensor fields."""
        return [field for field in self.fields if isinstance(field, DenseField)]

    @cached_property
    def num_keys(self) -> int:
        """Keys of all KeyedJaggedTensor fields together."""
        return sum(len(field.keys) for field in self.jagged)

    @cached_property
    def host_fields(self) -> list[DenseField]:
        """Tensor fields whose values the host keeps, see `BaseBatch`: one integer per row."""
        names = getattr(_find_batch_type(self.batch_type), "host_fields", ())
        is_integer = {field.name: not (field.dtype.is_floating_point or field.dtype.is_complex) for field in self.dense}
        return [field for field in self.dense if field.name in names and is_integer[field.name] and not field.trailing]

    @cached_property
    def states_padding(self) -> bool:
        """Whether batches of this type can say which rows are padding."""
        return can_state_padding(_find_batch_type(self.batch_type))

    @classmethod
    def of(cls, batch: Any, items: Mapping[str, Any] | None = None) -> BatchSchema:
        """Describe a batch.

        Args:
            batch: the batch.
            items: its `batch_items`, where the caller has them and has counted the rows.

        Raises:
            TypeError: not a dataclass, or a plain field that JSON cannot hold.
            ValueError: fields that disagree on the number of rows, or as `num_rows_of`.
        """
        if items is None:
            require_dataclass(batch)
            items = batch_items(batch)
            batch_rows(batch, items)
        fields = [_describe(name, value) for name, value in items.items() if name not in ROW_COUNT_FIELDS]
        return cls(name_of(type(batch)), tuple(fields))

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
        if self.jagged:
            return getattr(batch, self.jagged[0].name).stride()
        return getattr(batch, self.dense[0].name).shape[0]

    def row_tensors(self, batch: Any) -> list[torch.Tensor]:
        """Of every row field of a batch of this schema, the tensor or the values: KeyedJaggedTensors first."""
        jagged = [getattr(batch, field.name).values() for field in self.jagged]
        return jagged + [getattr(batch, field.name) for field in self.dense]

    def empty_batch(self, rows: int = 0) -> Any:
        """A host batch of `rows` padding rows, equal to the others' but for their rows.

        It is made without its constructor, as every batch whose rows move: what the others hold has been through it,
        and it may well refuse a batch without rows.

        Raises:
            KeyError: a class that is not imported on this rank.
        """
        batch_type = _find_batch_type(self.batch_type)
        items: dict[str, Any] = {
            field.name: field.value() if isinstance(field, PlainField) else field.empty(rows) for field in self.fields
        }
        return make_batch(batch_type, items | row_count_values(batch_type, rows, 0))

    def to_json(self) -> list[Any]:
        """Something that json.dumps takes; `from_json` reads it back."""
        return [self.batch_type, [_field_to_json(field) for field in self.fields]]

    @classmethod
    def from_json(cls, data: list[Any]) -> BatchSchema:
        """The schema that `to_json` wrote."""
        return cls(data[0], tuple(_field_from_json(field) for field in data[1]))

    def differences(self, other: BatchSchema) -> list[str]:
        """What differs between two schemas, one short text per field."""
        if self.batch_type != other.batch_type:
            return [f"batch type {self.type_name} and {other.type_name}"]
        mine = {field.name: field for field in self.fields}
        theirs = {field.name: field for field in other.fields}
        return [f"field {text}" for text in differences(mine, theirs, _summary)]


def _describe(name: str, value: Any) -> Field:
    if is_keyed_jagged(value):
        weights = value.weights_or_none()
        return JaggedField(
            name,
            tuple(value.keys()),
            value.values().dtype,
            None if weights is None else weights.dtype,
            value.lengths().dtype,
        )
    if isinstance(value, torch.Tensor):
        return DenseField(name, value.dtype, tuple(value.shape[1:]))
    return PlainField(name, json.dumps(encode_plain(value, (name,))))


def _summary(field: Field | None) -> str:
    if field is None:
        return "absent"
    if isinstance(field, PlainField):
        text = show_plain(json.loads(field.json))
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    if isinstance(field, DenseField):
        return f"tensor {_dtype_name(field.dtype)} {list(field.trailing)}"
    weights = "" if field.weights_dtype is None else f", weights {_dtype_name(field.weights_dtype)}"
    lengths = _dtype_name(field.lengths_dtype)
    return f"jagged {list(field.keys)} {_dtype_name(field.values_dtype)}{weights}, lengths {lengths}"


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _field_to_json(field: Field) -> list[Any]:
    if isinstance(field, JaggedField):
        dtypes = [_dtype_name(dtype) for dtype in (field.values_dtype, field.weights_dtype, field.lengths_dtype)]
        return ["jagged", field.name, list(field.keys), *dtypes]
    if isinstance(field, DenseField):
        return ["dense", field.name, _dtype_name(field.dtype), list(field.trailing)]
    return ["plain", field.name, field.json]


def _field_from_json(data: list[Any]) -> Field:
    kind, name, *rest = data
    if kind == "jagged":
        keys, values, weights, lengths = rest
        return JaggedField(name, tuple(keys), _dtype_of(values), _dtype_of(weights), _dtype_of(lengths))  # type: ignore[arg-type]
    if kind == "dense":
        return DenseField(name, _dtype_of(rest[0]), tuple(rest[1]))  # type: ignore[arg-type]
    return PlainField(name, rest[0])
