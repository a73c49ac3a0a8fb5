"""The columnar files of a data set: one row per user, in parquet shards whose row groups are read on demand.

    <folder>/ml-1m.parquet/_manifest.json            counts, columns, splits, shards (see SequenceFileMetadata)
    <folder>/ml-1m.parquet/_vocabularies/zip.parquet the raw value of each id of a feature, column `value`
    <folder>/ml-1m.parquet/train-00000.parquet       users of one split

Preprocessors write them (see writer), SequenceDataset reads them; `pyarrow.parquet.read_table` reads the whole
folder. The manifest has all that building a model needs, so opening a data set opens no shard.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from commons.console import reason_of
from commons.datasets.sequences.metadata import MANIFEST, SequenceFileMetadata, load_metadata

__all__ = ["RowSelection", "SequenceFile", "SequenceFileMetadata", "SequenceSchema"]


@dataclass(frozen=True)
class SequenceSchema:
    """The columns of a data set by their meaning, and its tasks."""

    dataset_name: str  # name of the data set
    contextual_feature_names: tuple[str, ...]  # plain columns, one token per user
    item_feature_name: str  # list column of item ids
    action_feature_name: str | None  # list column of actions, one per item; None for batches without actions
    # For each label, a picklable function from actions, int64 `(n,)`, to values that are not 0 for a positive label.
    tasks: tuple[Callable[[np.ndarray], np.ndarray], ...]
    # Units per second of the list column "timestamp": 1,000 for milliseconds; None if the data have no times.
    timestamps_per_second: int | None = 1
    user_feature_name: str = "user_id"  # plain column of user ids
    # Of your own files: the kind of action of each bit of an action id, and of each label.
    action_names: tuple[str, ...] = ()
    task_names: tuple[str, ...] = ()


class SequenceFile:
    """Reads rows of a data set lazily: the constructor reads the manifest, `select` reads the row groups of its rows.

    `path` is the folder `<dataset_name>.parquet`, or its parent folder. Only `columns` are read. The most recently used
    row groups are cached decoded, up to `max_cached_bytes` in each process.

    Raises:
        FileNotFoundError: no such data set.
        ValueError: the data are damaged, of another data set or version, or lack a column.
    """

    def __init__(
        self, path: str | Path, dataset_name: str, columns: Sequence[str], *, max_cached_bytes: int = 256 << 20
    ) -> None:
        path = Path(path)
        self.path = path if (path / MANIFEST).is_file() else path / f"{dataset_name}.parquet"
        if not (self.path / MANIFEST).is_file():
            raise FileNotFoundError(
                f"{self.path} does not exist or has no {MANIFEST}; data must be preprocessed: run `evenrank "
                f"preprocess {dataset_name} --source … --output FOLDER` and give FOLDER"
            )
        self._columns = list(columns)
        self._manifest_digest = self._digest_of_manifest()
        self._max_cached_bytes = max_cached_bytes
        self.metadata = load_metadata(self.path, dataset_name)
        present = self.metadata.columns
        missing = [name for name in self._columns if name not in present]
        if missing:
            raise ValueError(
                f"{self.path} has columns {list(present)}, but no {missing}: correct the names, or preprocess the data "
                "again"
            )
        shards = self.metadata.shards
        # For each row group of the data set: its shard, its number within the shard, and its first row.
        self._groups = [(shard, group) for shard, own in enumerate(shards) for group in range(len(own.row_groups))]
        self._group_starts = np.cumsum([0, *(rows for shard in shards for rows in shard.row_groups)])
        self._process = os.getpid()
        self._open: dict[int, pq.ParquetFile] = {}
        self._cache: OrderedDict[int, _RowGroup] = OrderedDict()
        self._cached_bytes = 0

    def split_rows(self, split: str) -> range:
        """Rows of one split; ValueError for an unknown split."""
        start, splits = 0, self.metadata.splits
        for name, num_rows in splits.items():
            if name == split:
                return range(start, start + num_rows)
            start += num_rows
        raise ValueError(f"split is {split!r}, {self.path} has {', '.join(splits)}: choose one of them")

    def select(self, rows: np.ndarray) -> RowSelection:
        """Select rows, int64 `(num_rows,)`, counted from the start of the data set, to read columns of them."""
        numbers = np.searchsorted(self._group_starts, rows, side="right") - 1
        groups = {number: self._row_group(number) for number in np.unique(numbers).tolist()}
        local = rows - self._group_starts[numbers]
        return RowSelection([(groups[number], row) for number, row in zip(numbers.tolist(), local.tolist())])

    def list_lengths(self, column: str, rows: range) -> np.ndarray:
        """Lengths of a list column in consecutive rows, int64 `(len(rows),)`; reads only this column, caches nothing.

        Parquet stores lengths of lists only in the levels of their values, so the values are decoded too.
        """
        first = int(np.searchsorted(self._group_starts, rows.start, side="right")) - 1
        last = int(np.searchsorted(self._group_starts, rows.stop, side="left"))
        lengths = [np.empty(0, np.int64)]
        for number in range(first, last) if rows else ():
            offsets = self._read_table(number, [column])[column].combine_chunks().offsets.to_numpy()
            begin = int(self._group_starts[number])
            lengths.append(np.diff(offsets).astype(np.int64)[max(0, rows.start - begin) : rows.stop - begin])
        return np.concatenate(lengths)

    def _read_table(self, number: int, columns: list[str]) -> pa.Table:
        """Columns of a row group; ValueError unless it has the number of rows in the manifest."""
        if self._process != os.getpid():  # a worker that was forked after a shard was opened must open it again
            self._process, self._open = os.getpid(), {}
        shard, index = self._groups[number]
        file, expected = self.metadata.shards[shard].file, self.metadata.shards[shard].row_groups[index]
        try:
            if shard not in self._open:
                opened = pq.ParquetFile(self.path / file, memory_map=True, page_checksum_verification=True)
                self._require_not_replaced()
                self._open[shard] = opened
            table = self._open[shard].read_row_group(index, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            self._require_not_replaced()
            raise ValueError(
                f"{self.path / file} is damaged ({reason_of(error)}); preprocess the data again"
            ) from error
        if table.num_rows != expected:
            raise ValueError(
                f"{self.path / file} has {table.num_rows} rows in row group {index}, {MANIFEST} has {expected}; both "
                "must come from one run: preprocess the data again"
            )
        return table

    def _require_not_replaced(self) -> None:
        """Raise ValueError if the folder has another data set now: its rows would be read with this one's manifest."""
        if self._digest_of_manifest() != self._manifest_digest:
            raise ValueError(
                f"{self.path} was replaced while it was read; ids of two data sets stand for other values: preprocess "
                "to a folder that no run reads, and start this run again"
            )

    def _digest_of_manifest(self) -> int | None:
        try:
            return zlib.crc32((self.path / MANIFEST).read_bytes())
        except FileNotFoundError:
            return None

    def _row_group(self, number: int) -> _RowGroup:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        group = _RowGroup(self._read_table(number, self._columns))
        file = self.metadata.shards[self._groups[number][0]].file
        for name, values in (*group.plain.items(), *group.flat.items()):
            size = self.metadata.vocabulary_sizes.get(name)
            if size is not None and len(values) and not 0 <= values.min() <= values.max() < size:
                wrong = values.min() if values.min() < 0 else values.max()
                raise ValueError(
                    f"{self.path / file} has id {wrong} of {name!r}, whose vocabulary has {size}; ids must be lower: "
                    "preprocess the data again"
                )
        self._cache[number] = group
        self._cached_bytes += group.num_bytes
        while self._cached_bytes > self._max_cached_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return group

    def __getstate__(self) -> dict[str, Any]:
        # Open files cannot be pickled; another process opens them again.
        return {**self.__dict__, "_open": {}, "_cache": OrderedDict(), "_cached_bytes": 0}


class _RowGroup:
    """The decoded columns of one row group as numpy arrays."""

    def __init__(self, table: pa.Table) -> None:
        self.plain: dict[str, np.ndarray] = {}
        self.offsets: dict[str, list[int]] = {}
        self.flat: dict[str, np.ndarray] = {}
        for name in table.column_names:
            column = table[name].combine_chunks()
            if pa.types.is_list(column.type):
                # A list is faster than an array for single lookups.
                self.offsets[name] = column.offsets.to_numpy().tolist()
                self.flat[name] = column.values.to_numpy()
            else:
                self.plain[name] = column.to_numpy(zero_copy_only=False)
        self.num_bytes = sum(values.nbytes for values in (*self.plain.values(), *self.flat.values()))
        self.num_bytes += 40 * sum(map(len, self.offsets.values()))


class RowSelection:
    """Selected rows of a data set; columns have the order of the selection."""

    def __init__(self, rows: list[tuple[_RowGroup, int]]) -> None:
        self._rows = rows

    def values(self, column: str) -> np.ndarray:
        """A plain column: int64 `(num_rows,)`."""
        return np.array([group.plain[column][row] for group, row in self._rows], np.int64)

    def lengths(self, column: str) -> np.ndarray:
        """Lengths of a list column: int64 `(num_rows,)`."""
        return np.array(
            [group.offsets[column][row + 1] - group.offsets[column][row] for group, row in self._rows], np.int64
        )

    def tails(self, column: str, lengths: np.ndarray) -> np.ndarray:
        """The last `lengths` entries of each row of a list column, row after row, int64 `(sum(lengths),)`.

        `lengths` is int64 `(num_rows,)`, each at most the row's length.
        """
        result = np.empty(int(lengths.sum()), np.int64)
        start = 0
        for (group, row), length in zip(self._rows, lengths.tolist()):
            end = group.offsets[column][row + 1]
            result[start : start + length] = group.flat[column][end - length : end]
            start += length
        return result
