"""ROWS as they cross the ranks: columns of numbers, each as narrow as the batch allows, read where they are asked for.

A rank packs its rows (`encode_rows`), every rank gets the words of all of them, and takes out what it needs: workloads
and tokens of all rows, and the lengths of those few that it sends, keeps or receives.

The rows of one batch are a block of bytes, empty without rows: a code of one byte for every column, then the columns.
A code is the width of the column's numbers, 1, 2, 4 or 8 bytes, unsigned but for the last, plus 16 where all rows have
the same number, which is written once; zeros fill the last word of eight bytes. Bytes are in the order of the machine.

The native core (native/row_table.hpp) does the same, bit for bit, and keeps the interpreter lock unless there are many
rows: numpy lets go of it in each of many steps, and a thread that launches kernels waits to get it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commons.perf_model.partitioner.native_core import native_core

_SAME_FOR_ALL = 16
_DTYPES: dict[int, np.dtype[Any]] = {each.itemsize: each for each in map(np.dtype, ("u1", "u2", "u4", "i8"))}
_WORD = 8
_PLAIN = (np.dtype(np.int64), np.dtype(np.int32))
# The columns: workload and tokens, the lengths of every key, and what else the host keeps of a row.
_LENGTHS_FROM = 2


def encode_rows(
    workloads: np.ndarray,
    lengths: Sequence[np.ndarray],
    sums: Sequence[int],
    kept: Sequence[np.ndarray],
    counted: Sequence[int],
    rows: int,
    real_rows: int,
) -> np.ndarray | None:
    """What a rank sends of its rows, if the native core is there and finds nothing wrong.

    Args:
        workloads: int64 `(rows,)`, not negative.
        lengths: by field, int32 or int64 `(keys, rows)`; not negative, 0 for padding.
        sums: by field, what its lengths add up to.
        kept: more columns, int32 or int64 `(rows,)`.
        counted: keys whose lengths add up to the tokens of a row; none for one token per row.
        rows: of the batch, padding included.
        real_rows: those that are no padding.

    Returns:
        int64 `(words,)`, the block of the rows; None where it takes numpy to tell.
    """
    core = native_core()
    arrays = (workloads, *lengths, *kept)
    if core is None or workloads.dtype != np.int64 or any(each.dtype not in _PLAIN for each in arrays):
        return None
    return core.module.encode_rows(workloads, list(lengths), list(sums), list(kept), list(counted), rows, real_rows)


def encode_columns(
    workloads: np.ndarray, lengths: np.ndarray, kept: Sequence[np.ndarray], counted: Sequence[int]
) -> np.ndarray:
    """The block of rows in numpy, whatever they are.

    Args:
        workloads: int64 `(rows,)`.
        lengths: int64 `(keys, rows)`.
        kept: more columns, integers `(rows,)`.
        counted: keys whose lengths add up to the tokens of a row; none for one token per row.

    Returns:
        int64 `(words,)`.
    """
    if not len(workloads):
        return np.zeros(0, dtype=np.int64)
    tokens = lengths[list(counted)].sum(axis=0) if len(counted) else np.ones(len(workloads), dtype=np.int64)
    columns = np.concatenate([workloads[None], tokens[None], lengths, *(each[None] for each in kept)], dtype=np.int64)
    least, most = columns.min(axis=1), columns.max(axis=1)
    fits = [least < 0, most < 2**8, most < 2**16, most < 2**32]
    widths, same = np.select(fits, [8, 1, 2, 4], 8), least == most
    parts = [(widths + _SAME_FOR_ALL * same).astype(np.uint8).tobytes()]
    for column, width, is_same in zip(columns, widths.tolist(), same.tolist()):
        parts.append(column[: 1 if is_same else None].astype(_DTYPES[width]).tobytes())
    block = b"".join(parts)
    return np.frombuffer(bytearray(block.ljust(-(-len(block) // _WORD) * _WORD, b"\0")), dtype=np.int64)


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
            blocks.append(encode_columns(_nothing(stop - begin), own, list(kept[begin:stop].T), []))
        words = _nothing(len(blocks), max(map(len, blocks), default=0))
        for row, block in zip(words, blocks):
            row[: len(block)] = block
        real = np.asarray(real_rows, dtype=np.int64)
        return cls(words, np.zeros_like(real), real, lengths.shape[1], kept.shape[1])

    def workloads_and_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 `(N,)` each, of all rows."""
        workloads, tokens = self._columns([0, 1])
        return workloads, tokens

    def lengths_of_keys(self, keys: Sequence[int]) -> np.ndarray:
        """int64 `(len(keys), N)`, the lengths of some keys of all rows."""
        return self._columns([_LENGTHS_FROM + key for key in keys])

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """int64 `(len(rows), num_keys)`, the lengths of some rows, which are in ascending order."""
        return self._rows(rows, _LENGTHS_FROM, self.num_keys)

    def kept(self, rows: np.ndarray) -> np.ndarray:
        """int64 `(len(rows), num_kept)`, the further columns of some rows, which are in ascending order."""
        return self._rows(rows, _LENGTHS_FROM + self.num_keys, self.num_kept)

    @property
    def num_columns(self) -> int:
        """Numbers of a row."""
        return _LENGTHS_FROM + self.num_keys + self.num_kept

    def _columns(self, columns: list[int]) -> np.ndarray:
        core = native_core()
        if core is None:
            return self.reference_columns(columns)
        return core.module.read_columns(self.words, self.first, self.real_rows, self.num_columns, columns)

    def _rows(self, rows: np.ndarray, first_column: int, count: int) -> np.ndarray:
        core = native_core()
        if core is None:
            return self.reference_rows(rows, first_column, count)
        return core.module.read_rows(
            self.words, self.first, self.real_rows, self.num_columns, rows, first_column, count
        )

    def reference_columns(self, columns: Sequence[int]) -> np.ndarray:
        """Some columns of all rows, in numpy."""
        counts = self.real_rows.tolist()
        blocks = [self._read(place, max(columns, default=-1) + 1) for place, count in enumerate(counts) if count]
        read = [np.stack([block[column] for column in columns]) for block in blocks if len(columns)]
        return np.concatenate([_nothing(len(columns), 0), *read], axis=1)

    def reference_rows(self, rows: np.ndarray, first_column: int, count: int) -> np.ndarray:
        """Neighbouring columns of some rows, in numpy."""
        end = np.cumsum(self.real_rows)
        places = np.searchsorted(end, rows, side="right")
        read = [_nothing(0, count)]
        for place in np.unique(places).tolist():
            local = rows[places == place] - (end[place] - self.real_rows[place])
            columns = self._read(place, first_column + count)[first_column:]
            read.append(np.stack([_nothing(len(local)), *(column[local] for column in columns)], axis=1)[:, 1:])
        return np.concatenate(read)

    def _read(self, place: int, count: int) -> list[np.ndarray]:
        """int64 `(rows,)`, the first columns of a place that has rows."""
        own = self.words[place // (len(self.first) // len(self.words))]
        rows, first = int(self.real_rows[place]), int(self.first[place])
        block = own[first if first >= 0 else len(own) :].view(np.uint8)
        columns, at = [], self.num_columns
        for code in block[:count].tolist():
            width, is_same = code & ~_SAME_FOR_ALL, bool(code & _SAME_FOR_ALL)
            stop = at + width * (1 if is_same else rows)
            if width not in _DTYPES or stop > len(block):
                break
            numbers = np.frombuffer(block[at:stop].tobytes(), dtype=_DTYPES[width]).astype(np.int64)
            columns.append(np.repeat(numbers, rows) if is_same else numbers)
            at = stop
        if len(columns) < count:
            raise ValueError("a gathered table: a size or column is out of its range")
        return columns
