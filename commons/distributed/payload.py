"""PAYLOAD: all fields of a batch as one jagged whole of 4-byte words, so that one collective carries them.

Every values, weights or dense tensor is a *part*; a part has one or more *segments* per row: one per key of a
KeyedJaggedTensor, one for a dense field. Within a part, segments lie key by key and row by row, as in a
KeyedJaggedTensor. Parts with larger elements come first, so that each part starts at a multiple of its element size and
can be viewed in its own dtype. Jagged elements of 1 or 2 bytes are widened to a word each for the journey; dense ones
are padded to whole words per row: at most 3 bytes of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch.schema import BatchSchema

WORD_BYTES = 4
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class Part:
    """One tensor of a batch within the payload.

    Attributes:
        field: name of the batch's field.
        weights: whether this is the weights tensor of a KeyedJaggedTensor.
        dtype: element type.
        first_key: column of the part's first key in the table of lengths; -1 for a dense field.
        num_segments: keys of a KeyedJaggedTensor, 1 for a dense field.
        elements_per_row: elements of a dense field per row; 0 for a KeyedJaggedTensor.
    """

    field: str
    weights: bool
    dtype: torch.dtype
    first_key: int
    num_segments: int
    elements_per_row: int

    @property
    def is_dense(self) -> bool:
        """Whether rows of this part have a fixed size."""
        return self.first_key < 0

    @property
    def is_narrow(self) -> bool:
        """Whether elements are smaller than a word."""
        return self.dtype.itemsize < WORD_BYTES

    @property
    def words(self) -> int:
        """Words of an element; of a dense field, of a row."""
        if self.is_dense:
            return -(-self.elements_per_row * self.dtype.itemsize // WORD_BYTES)
        return max(1, self.dtype.itemsize // WORD_BYTES)

    def tensor_of(self, batch: Any) -> torch.Tensor:
        """The part's tensor in a batch."""
        value = getattr(batch, self.field)
        if isinstance(value, KeyedJaggedTensor):
            return value.weights() if self.weights else value.values()
        return value

    def write(self, source: torch.Tensor, words: torch.Tensor) -> None:
        """Copy the part's tensor in a batch into int32 `words`, its section of the payload, rows in batch order."""
        if not self.is_narrow:
            words.view(self.dtype).copy_(source.reshape(-1))
            return
        narrow = _INTEGER_OF_SIZE[self.dtype.itemsize]
        flat = source.resolve_neg().contiguous().view(narrow).flatten()
        if not self.is_dense:
            words.copy_(flat)
        elif flat.numel():
            rows = len(source)
            words.view(narrow).view(rows, -1)[:, : self.elements_per_row].copy_(flat.view(rows, -1))

    def read(self, words: torch.Tensor, rows: int) -> torch.Tensor:
        """Copy the part of `rows` rows out of its section, into storage of its own; dense ones `(rows, elements)`."""
        if not self.is_narrow:
            result = words.clone().view(self.dtype)
            return result.view(rows, self.elements_per_row) if self.is_dense else result
        narrow = _INTEGER_OF_SIZE[self.dtype.itemsize]
        if not self.is_dense:
            return words.to(narrow).view(self.dtype)
        padded = words.view(narrow).view(rows, words.view(narrow).numel() // rows)[:, : self.elements_per_row]
        return padded.clone(memory_format=torch.contiguous_format).view(self.dtype)


@dataclass(frozen=True)
class PayloadLayout:
    """The parts of a batch, largest elements first."""

    schema: BatchSchema
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, schema: BatchSchema) -> PayloadLayout:
        """Lay out the parts of a schema.

        Raises:
            ValueError: an element size that is no multiple of a word nor 1 or 2 bytes.
        """
        parts: list[Part] = []
        first_key = 0
        for jagged in schema.jagged:
            for weights, dtype in ((False, jagged.values_dtype), (True, jagged.weights_dtype)):
                if dtype is not None:
                    parts.append(Part(jagged.name, weights, dtype, first_key, len(jagged.keys), 0))
            first_key += len(jagged.keys)
        for dense in schema.dense:
            parts.append(Part(dense.name, False, dense.dtype, -1, 1, int(np.prod(dense.trailing, dtype=np.int64))))
        for part in parts:
            if part.dtype.itemsize % WORD_BYTES and part.dtype.itemsize not in _INTEGER_OF_SIZE:
                raise ValueError(f"field {part.field!r} has dtype {part.dtype}; it cannot travel: convert it")
        return cls(schema, tuple(sorted(parts, key=lambda part: -part.dtype.itemsize)))

    @cached_property
    def num_segments(self) -> int:
        """Segments of a row."""
        return sum(part.num_segments for part in self.parts)

    @cached_property
    def table(self) -> np.ndarray:
        """int64 `(num_parts, 3)`: of every part its `first_key`, `num_segments` and `words`."""
        return np.array([[part.first_key, part.num_segments, part.words] for part in self.parts], dtype=np.int64)
