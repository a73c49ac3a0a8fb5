"""What a schema says of each thing that a batch holds: its path, and everything but the rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from commons.sequence_batch.branches import build, find_class
from commons.sequence_batch.fields import ROW_COUNT_FIELDS, Path, can_state_padding, row_count_names
from commons.sequence_batch.jagged import new_jagged, new_keyed_jagged
from commons.sequence_batch.plain_values import canonical_plain, decode_plain, show_plain

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

# Characters of a value in a message.
_SHOWN = 200


@dataclass(frozen=True)
class JaggedField:
    """A KeyedJaggedTensor, or a JaggedTensor as one with a single key: keys, dtypes, the shape of an element."""

    path: Path
    keys: tuple[str, ...]  # of a JaggedTensor, the last part of its path
    values_dtype: torch.dtype
    weights_dtype: torch.dtype | None
    lengths_dtype: torch.dtype
    row_shape: tuple[int, ...] | None = None  # of a JaggedTensor, whose values are `(sum of lengths, *row_shape)`

    @property
    def is_label(self) -> bool:
        """Whether its values are no tokens."""
        return self.path[0] == "labels"

    @property
    def is_lookup(self) -> bool:
        """Whether its values are embedding lookups: those of KeyedJaggedTensors but the labels."""
        return self.row_shape is None and not self.is_label

    def made_of(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        lengths: torch.Tensor,
        stride: int,
        length_per_key: list[int],
    ) -> KeyedJaggedTensor | JaggedTensor:
        """The jagged tensor of `stride` rows, with lengths `(keys · stride,)` whose sums are `length_per_key`."""
        if self.row_shape is not None:
            return new_jagged(values, weights, lengths)
        return new_keyed_jagged(self.keys, values, weights, lengths, stride, length_per_key)

    def empty(self, rows: int) -> KeyedJaggedTensor | JaggedTensor:
        """A jagged tensor of `rows` empty rows."""
        weights = None if self.weights_dtype is None else torch.empty(0, dtype=self.weights_dtype)
        lengths = torch.zeros(len(self.keys) * rows, dtype=self.lengths_dtype)
        values = torch.empty(0, *(self.row_shape or ()), dtype=self.values_dtype)
        return self.made_of(values, weights, lengths, rows, [0] * len(self.keys))

    def summary(self) -> str:
        """What messages show of it."""
        weights = "" if self.weights_dtype is None else f", weights {_short(self.weights_dtype)}"
        what = list(self.keys) if self.row_shape is None else f"elements {list(self.row_shape)}"
        return f"jagged {what} {_short(self.values_dtype)}{weights}, lengths {_short(self.lengths_dtype)}"


@dataclass(frozen=True)
class DenseField:
    """A tensor `(rows, *trailing)`."""

    path: Path
    dtype: torch.dtype
    trailing: tuple[int, ...]

    def empty(self, rows: int) -> torch.Tensor:
        """Zeros in `rows` rows."""
        return torch.zeros(rows, *self.trailing, dtype=self.dtype)

    def summary(self) -> str:
        """What messages show of it."""
        return f"tensor {_short(self.dtype)} {list(self.trailing)}"


@dataclass(frozen=True, eq=False)
class PlainField:
    """A value that holds no rows: it must be the same on all ranks, or is declared to be each rank's own."""

    path: Path
    json: str  # the value as `encode_plain` writes it, as JSON text; empty for one per rank that JSON cannot hold
    per_rank: bool = False  # see `register_batch_type`

    def __eq__(self, other: object) -> bool:
        """Whether path and value are the same, types included; dicts are equal in any order of their items."""
        if not isinstance(other, PlainField):
            return NotImplemented
        if self.path != other.path or self.per_rank != other.per_rank:
            return False
        return self.per_rank or self.json == other.json or self._canonical() == other._canonical()

    def __hash__(self) -> int:
        return hash(self.path)

    def value(self) -> Any:
        """The value, equal to what was described; KeyError for an enum or namedtuple that is not imported here."""
        return decode_plain(json.loads(self.json))

    def _canonical(self) -> str:
        return json.dumps(canonical_plain(json.loads(self.json)))  # as text: in Python, 1, 1.0 and True are equal

    def summary(self) -> str:
        """What messages show of it."""
        text = show_plain(json.loads(self.json)) if self.json else "a value"
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return f"{text} of this rank" if self.per_rank else text


@dataclass(frozen=True)
class Branch:
    """What leads to fields: a dict, list, tuple, namedtuple, dataclass, TensorDict or KeyedTensor."""

    path: Path
    json: str  # as `branches.describe` writes it, as JSON text
    # Its children as the batch holds them; ranks may fill their dicts in other orders, and the first rank's counts.
    keys: tuple[Any, ...] = field(default=(), compare=False)

    @property
    def described(self) -> list[Any]:
        """Its kind, and what `build` needs beside."""
        return json.loads(self.json)

    @property
    def states_padding(self) -> bool:
        """Whether it is a dataclass that can say which rows are padding."""
        kind, *content = self.described
        return kind == "dataclass" and can_state_padding(find_class(content[0]))

    def made_of(self, children: dict[Any, Any], rows: int) -> Any:
        """The branch around children of `rows` padding rows, in the order of `keys`."""
        kind, *content = self.described
        children = {key: children[key] for key in self.keys if key in children} | children
        if kind == "dataclass":
            children = empty_counts(find_class(content[0]), rows) | children
        return build(self.described, children, rows)

    def summary(self) -> str:
        """What messages show of it."""
        kind, *content = self.described
        if kind == "keyed":
            return f"KeyedTensor {content[0]} of widths {content[1]}"
        return kind if kind in ("tensordict", "defaultdict") else content[0].rpartition(":")[2]


Field: TypeAlias = JaggedField | DenseField | PlainField | Branch


def empty_counts(batch_type: type, rows: int) -> dict[str, int]:
    """The fields that count rows, of `rows` padding rows."""
    names = row_count_names(batch_type)
    return {name: count for name, count in zip(ROW_COUNT_FIELDS, (rows, 0)) if name in names}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
