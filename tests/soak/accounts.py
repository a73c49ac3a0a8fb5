"""Every row accounted for: what all ranks bring to a step is what they train in it, row by row and bit by bit."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch.fields import path_name
from commons.sequence_batch.open_batch import real_rows, row_fields

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mix(numbers: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), elementwise on uint64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements' bits as uint64, in the tensor's shape."""
    size = tensor.element_size()
    # A copy whatever the strides: view() of another dtype wants a dense last dimension.
    return tensor.clone().contiguous().view(_SIGNED[size]).numpy().view(_UNSIGNED[size]).astype(np.uint64)


def _places(count: int, *names: object) -> np.ndarray:
    """A random number for each of `count` places of what is called so."""
    start = np.uint64(zlib.crc32(repr(names).encode())) << np.uint64(32)
    return _mix(start + np.arange(1, count + 1, dtype=np.uint64))


def _of_segments(values: torch.Tensor, lengths: np.ndarray, *names: object) -> np.ndarray:
    """uint64 of every segment: of its elements in their order, and of how many they are."""
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    longest = int(lengths.max(initial=0))
    hashed = _mix(_bits(values) + _places(longest, *names, values.dtype)[within])
    sums = np.concatenate([[np.uint64(0)], np.cumsum(hashed, dtype=np.uint64)])
    return sums[ends] - sums[ends - lengths] + lengths.astype(np.uint64) * _places(1, "length", *names)


def row_digests(batch: Any) -> np.ndarray:
    """A 64-bit digest of each real row: uint64 `(real rows,)`, of every field's name, dtype, bits and weights."""
    real = real_rows(batch)
    total = np.zeros(real, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for path, value in row_fields(batch):
            name = path_name(path)
            if isinstance(value, KeyedJaggedTensor):
                keys, lengths = value.keys(), value.lengths().numpy().astype(np.int64)
                parts = [("values", value.values()), ("weights", value.weights_or_none())]
                for part, elements in parts:
                    if elements is None:
                        continue
                    rows = len(lengths) // len(keys)
                    starts = np.concatenate([[0], np.cumsum(lengths)])[::rows] if rows else [0] * (len(keys) + 1)
                    for index, key in enumerate(keys):
                        own = lengths[index * rows : (index + 1) * rows]
                        segments = elements[int(starts[index]) : int(starts[index + 1])]
                        total += _mix(_of_segments(segments, own, name, key, part)[:real])
            else:
                bits = _bits(value[:real]).reshape(real, math.prod(value.shape[1:]))
                total += _mix(bits + _places(bits.shape[1], name, value.dtype)).sum(axis=1, dtype=np.uint64)
        return _mix(total)


class Steps:
    """Sums over the rows of each step, on one rank: how many, and their digests modulo 2^64."""

    def __init__(self, sums: Sequence[tuple[int, int]] = ()) -> None:
        self.sums: list[tuple[int, int]] = list(sums)

    def add(self, batch: Any) -> None:
        """One more step."""
        digests = row_digests(batch)
        self.sums.append((len(digests), int(digests.sum(dtype=np.uint64))))

    def noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, each one a step when it is read."""
        for batch in batches:
            self.add(batch)
            yield batch

    def over_ranks(self, num_steps: int, group_by: int = 1) -> np.ndarray:
        """uint64 `(steps, 2)`, the sums over all ranks, `group_by` neighbouring steps together; a collective call."""
        own = np.zeros((num_steps, 2), dtype=np.uint64)
        own[: len(self.sums)] = np.array(self.sums[:num_steps], dtype=np.uint64).reshape(-1, 2)
        grouped = np.add.reduceat(own, np.arange(0, num_steps, group_by)) if num_steps else own
        total = torch.from_numpy(grouped.view(np.int64).copy())
        dist.all_reduce(total)
        return total.numpy().view(np.uint64)


def most_steps(steps: Steps) -> int:
    """The number of steps of the rank that has most; a collective call."""
    most = torch.tensor([len(steps.sums)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def require_equal(brought: np.ndarray, trained: np.ndarray, what: str) -> int:
    """How many rows the sums are of; AssertionError on every rank if a row was lost, doubled or changed."""
    if brought.shape != trained.shape:
        raise AssertionError(f"{what}: {len(brought)} steps were brought and {len(trained)} trained")
    wrong = np.flatnonzero((brought != trained).any(axis=1))
    if len(wrong):
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(brought)} steps differ, the first is {first}: {brought[first][0]} rows were "
            f"brought and {trained[first][0]} trained, with digests {brought[first][1]:x} and {trained[first][1]:x}"
        )
    return int(brought[:, 0].sum())
