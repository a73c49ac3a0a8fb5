"""PAYLOAD: the layout of all fields of a batch in one buffer of 4-byte words, so that one collective carries them.

Every values, weights or dense tensor is a *part*; a part has one or more *segments* per row: one per key of a jagged
field, one for a dense field. Within a part, segments are ordered by key and then by row, as in a KeyedJaggedTensor. A
segment consists of *entries*: one in a dense part, as many as the length in a jagged part. An entry is a number or, in
a dense field or JaggedTensor of more dimensions, several. Parts with larger elements come first, so that each part
starts at a multiple of its element size and can be viewed in its own dtype. Entries of elements of 1 or 2 bytes are
padded to whole words, by at most 3 bytes each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from commons.sequence_batch.fields import Path
from commons.sequence_batch.open_batch import value_at
from commons.sequence_batch.schema import BatchSchema

WORD_BYTES = 4
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class Part:
    """One tensor of a batch within the payload."""

    path: Path  # of the batch's field
    weights: bool  # whether this is the weights tensor of a jagged field
    dtype: torch.dtype  # element type
    first_key: int  # column of the part's first key in the table of lengths; -1 for a dense field
    num_segments: int  # keys of a jagged field, 1 for a dense field
    entry_shape: tuple[int, ...]  # shape of one entry: of a row in a dense field, of one value in a jagged field

    @cached_property
    def is_dense(self) -> bool:
        """Whether rows of this part have a fixed size."""
        return self.first_key < 0

    @cached_property
    def elements(self) -> int:
        """Elements of an entry."""
        return math.prod(self.entry_shape)

    @cached_property
    def is_narrow(self) -> bool:
        """Whether elements are smaller than a word."""
        return self.dtype.itemsize < WORD_BYTES

    @property
    def words(self) -> int:
        """Words of an entry."""
        return -(-self.elements * self.dtype.itemsize // WORD_BYTES)

    def tensor_of(self, batch: Any) -> torch.Tensor:
        """The part's tensor in a batch."""
        value = value_at(batch, self.path)
        if self.is_dense:
            return value
        return value.weights() if self.weights else value.values()

    def words_of(self, source: torch.Tensor) -> torch.Tensor:
        """The part's tensor in a batch as int32 words, rows in batch order; shares its memory if that is possible."""
        plain = source.resolve_conj().resolve_neg().contiguous()
        if not self.is_narrow:
            # Not view(-1): a tensor of a single element is contiguous with any stride.
            return plain.as_strided((plain.numel(),), (1,)).view(torch.int32)
        entries, narrow = len(source), _INTEGER_OF_SIZE[self.dtype.itemsize]
        words = torch.empty(entries * self.words, dtype=torch.int32, device=source.device)
        if plain.numel():
            words.view(narrow).view(entries, -1)[:, : self.elements].copy_(plain.view(narrow).view(entries, -1))
        return words

    def read(self, words: torch.Tensor, entries: int) -> torch.Tensor:
        """The part's tensor `(entries, *entry_shape)` from its words; may share their storage."""
        if not self.is_narrow:
            result = words.view(self.dtype)
            return result.view(entries, *self.entry_shape) if self.entry_shape else result
        narrow = _INTEGER_OF_SIZE[self.dtype.itemsize]
        padded = words.view(narrow).view(entries, self.words * WORD_BYTES // self.dtype.itemsize)[:, : self.elements]
        own = padded.clone(memory_format=torch.contiguous_format)
        return own.view(self.dtype).view(entries, *self.entry_shape)


@dataclass(frozen=True)
class PayloadLayout:
    """The parts of a batch, largest elements first."""

    schema: BatchSchema
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, schema: BatchSchema) -> PayloadLayout:
        """Lay out the parts of a schema."""
        parts: list[Part] = []
        first_key = 0
        for jagged in schema.jagged:
            num_keys = len(jagged.keys)
            parts.append(Part(jagged.path, False, jagged.values_dtype, first_key, num_keys, jagged.row_shape or ()))
            if jagged.weights_dtype is not None:
                parts.append(Part(jagged.path, True, jagged.weights_dtype, first_key, num_keys, ()))
            first_key += num_keys
        for dense in schema.dense:
            parts.append(Part(dense.path, False, dense.dtype, -1, 1, dense.trailing))
        return cls(schema, tuple(sorted(parts, key=lambda part: -part.dtype.itemsize)))

    @cached_property
    def num_segments(self) -> int:
        """Segments of a row."""
        return sum(part.num_segments for part in self.parts)

    @cached_property
    def lookups(self) -> list[tuple[int, int]]:
        """Index of every part whose entries are embedding lookups, and the words of an entry."""
        paths = {field.path for field in self.schema.jagged if field.is_lookup}
        parts = enumerate(self.parts)
        return [(number, part.words) for number, part in parts if part.path in paths and not part.weights]

    @cached_property
    def table(self) -> np.ndarray:
        """int64 `(num_parts, 3)`: of every part its `first_key`, `num_segments` and `words`."""
        return np.array([[part.first_key, part.num_segments, part.words] for part in self.parts], dtype=np.int64)
