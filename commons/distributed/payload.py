"""PAYLOAD: all fields of a batch as one jagged whole of 4-byte words, so that one collective carries them.

Every values, weights or dense tensor is a *part*; a part has one or more *segments* per row: one per key of a
KeyedJaggedTensor, one for a dense field. Within a part, segments lie key by key and row by row, as in a
KeyedJaggedTensor. Parts with larger elements come first, so that each part starts at a multiple of its element size and
can be viewed in its own dtype. Elements of 1 or 2 bytes are padded to whole words per row and key: at most 3 bytes of
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch.schema import BatchSchema

WORD_BYTES = 4


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
        """Whether elements are smaller than a word, so that rows are padded."""
        return self.dtype.itemsize < WORD_BYTES

    def elements(self, lengths: np.ndarray) -> np.ndarray:
        """int64 `(rows, num_segments)` elements of each segment, given lengths `(rows, num_keys)`."""
        if self.is_dense:
            return np.full((len(lengths), 1), self.elements_per_row, dtype=np.int64)
        return lengths[:, self.first_key : self.first_key + self.num_segments]

    def words(self, lengths: np.ndarray) -> np.ndarray:
        """int64 `(rows, num_segments)` words of each segment."""
        return -(-self.elements(lengths) * self.dtype.itemsize // WORD_BYTES)

    def tensor_of(self, batch: Any) -> torch.Tensor:
        """The part's tensor in a batch."""
        value = getattr(batch, self.field)
        if isinstance(value, KeyedJaggedTensor):
            return value.weights() if self.weights else value.values()
        return value


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
            if part.dtype.itemsize % WORD_BYTES and part.dtype.itemsize not in (1, 2):
                raise ValueError(f"field {part.field!r} has dtype {part.dtype}; it cannot travel: convert it")
        return cls(schema, tuple(sorted(parts, key=lambda part: -part.dtype.itemsize)))

    @property
    def num_segments(self) -> int:
        """Segments of a row."""
        return sum(part.num_segments for part in self.parts)

    def words(self, lengths: np.ndarray) -> np.ndarray:
        """int64 `(rows, num_segments)` words per row and segment, given lengths `(rows, num_keys)`."""
        return np.concatenate([part.words(lengths) for part in self.parts], axis=1)


def segment_shifts(part: Part, lengths: np.ndarray) -> np.ndarray | None:
    """How far each segment of a narrow jagged part is moved by the padding of those before it.

    Args:
        part: the part.
        lengths: int64 `(rows, num_keys)`.

    Returns:
        int64 `(num_segments * rows,)` elements, or None for parts that are not padded.
    """
    if part.is_dense or not part.is_narrow:
        return None
    elements = part.elements(lengths).T.ravel()
    padded = part.words(lengths).T.ravel() * (WORD_BYTES // part.dtype.itemsize)
    return (np.cumsum(padded) - padded) - (np.cumsum(elements) - elements)


def write_part(part: Part, source: torch.Tensor, words: torch.Tensor, positions: torch.Tensor | None) -> None:
    """Copy a part's tensor into its words of the payload.

    Args:
        part: the part.
        source: its tensor in the batch.
        words: int32, the part's section of the payload, rows in batch order.
        positions: for a narrow jagged part, int64 positions of its elements within the padded section.
    """
    if not part.is_narrow:
        words.view(part.dtype).copy_(source.reshape(-1))
        return
    narrow = torch.uint8 if part.dtype.itemsize == 1 else torch.int16
    flat = source.contiguous().view(narrow).flatten()
    if positions is not None:
        words.view(narrow).index_copy_(0, positions, flat)
    elif flat.numel():
        rows = source.shape[0]
        words.view(narrow).view(rows, -1)[:, : part.elements_per_row].copy_(flat.view(rows, -1))


def read_part(part: Part, words: torch.Tensor, rows: int, positions: torch.Tensor | None) -> torch.Tensor:
    """Copy a part out of its words of the payload, into storage of its own.

    Args:
        part: the part.
        words: int32, the part's section of the payload.
        rows: rows of the section.
        positions: for a narrow jagged part, int64 positions of its elements within the padded section.

    Returns:
        The part's tensor; a dense one is `(rows, elements_per_row)`.
    """
    if not part.is_narrow:
        result = words.clone().view(part.dtype)
        return result.view(rows, part.elements_per_row) if part.is_dense else result
    narrow = torch.uint8 if part.dtype.itemsize == 1 else torch.int16
    padded = words.view(narrow)
    if positions is not None:
        return padded.index_select(0, positions).view(part.dtype)
    padded = padded.view(rows, padded.numel() // rows)[:, : part.elements_per_row]
    return padded.clone(memory_format=torch.contiguous_format).view(part.dtype)


def element_positions(shifts: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """int64 `(total,)` positions of a narrow part's elements within its padded section.

    Args:
        shifts: int64 `(num_segments,)` from `segment_shifts`.
        lengths: int64 `(num_segments,)` elements per segment.
        total: their sum, known on the host, so that the device is not asked.
    """
    shift = torch.repeat_interleave(shifts, lengths, output_size=total)
    return torch.arange(total, device=shifts.device) + shift
