"""ROWS as they cross the ranks: columns of numbers, each as narrow as the batch allows, read where they are asked for.

A rank packs its rows (`core.encode_rows`), every rank gets the words of all of them, and takes out what it needs:
workloads and tokens of all rows, and the lengths of those few that it sends, keeps or receives.

The rows of one batch are a block of bytes, empty without rows: a code of one byte for every column, then the columns.
A code is the width of the column's numbers, 1, 2, 4 or 8 bytes, unsigned but for the last, plus 16 where all rows have
the same number, which is written once; zeros fill the last word of eight bytes. Bytes are in the order of the machine.

The native core (partitioner/native/row_table.hpp) packs and reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from commons.perf_model.partitioner import core

# The columns: workload and tokens, the lengths of every key, and what else the host keeps of a row.
_LENGTHS_FROM = 2


def _nothing(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.int64)


@dataclass(frozen=True)
class RowTable:
    """The packed rows of all ranks; `N` rows at `num_places` places, of which a rank has as many as any other.

    Attributes:
        words: int64 `(num_ranks, n)`, what each rank has sent: the blocks of its places, then anything.
        first: int64 `(num_places,)`, where the block of each place begins among its rank's words.
        real_rows: int64 `(num_places,)`.
        num_keys: keys whose lengths the rows have.
        num_kept: further columns.

    Raises, where it is read:
        ValueError: words that are no such blocks.
    """

    words: np.ndarray = field(default_factory=lambda: _nothing(0, 0))
    first: np.ndarray = field(default_factory=lambda: _nothing(0))
    real_rows: np.ndarray = field(default_factory=lambda: _nothing(0))
    num_keys: int = 0
    num_kept: int = 0

    @classmethod
    def of(cls, lengths: np.ndarray, real_rows: np.ndarray, kept: np.ndarray | None = None) -> RowTable:
        """Pack rows that are known, with workloads and tokens of zero.

        Args:
            lengths: int64 `(N, num_keys)`.
            real_rows: int64 `(num_places,)`.
            kept: int64 `(N, num_kept)`; None for no such columns.
        """
        kept = _nothing(len(lengths), 0) if kept is None else kept
        blocks, end = [], np.cumsum(real_rows).tolist()
        for begin, stop in zip([0, *end], end):
            own = lengths[begin:stop].T
            rows, sums = stop - begin, [int(own.sum())]
            block = core.encode_rows(_nothing(rows), [own], sums, list(kept[begin:stop].T), [], rows, rows)
            if block is None:
                raise ValueError("lengths are negative, or their sum is above 2^63: correct them")
            blocks.append(block)
        words = _nothing(len(blocks), max(map(len, blocks), default=0))
        for row, block in zip(words, blocks):
            row[: len(block)] = block
        real = np.asarray(real_rows, dtype=np.int64)
        return cls(words, np.zeros_like(real), real, lengths.shape[1], kept.shape[1])

    def workloads_and_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 `(N,)` each, of all rows."""
        workloads, tokens = core.read_columns(self, [0, 1])
        return workloads, tokens

    def lengths_of_keys(self, keys: Sequence[int]) -> np.ndarray:
        """int64 `(len(keys), N)`, the lengths of some keys of all rows."""
        return core.read_columns(self, [_LENGTHS_FROM + key for key in keys])

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """int64 `(len(rows), num_keys)`, the lengths of some rows, which are in ascending order."""
        return core.read_rows(self, rows, _LENGTHS_FROM, self.num_keys)

    def kept(self, rows: np.ndarray) -> np.ndarray:
        """int64 `(len(rows), num_kept)`, the further columns of some rows, which are in ascending order."""
        return core.read_rows(self, rows, _LENGTHS_FROM + self.num_keys, self.num_kept)

    @property
    def num_columns(self) -> int:
        """Numbers of a row."""
        return _LENGTHS_FROM + self.num_keys + self.num_kept
