"""The columnar files of a data set: one row per user, parquet shards read by row groups as rows are asked for.

    <folder>/ml-1m.parquet/_manifest.json            counts, columns, splits, shards (see SequenceFileMetadata)
    <folder>/ml-1m.parquet/_vocabularies/zip.parquet the raw value of each id of a feature, column `value`
    <folder>/ml-1m.parquet/train-00000.parquet       users of one split

Preprocessors write them (see writer), SequenceDataset reads them; `pyarrow.parquet.read_table` reads the whole
folder. What a model has to know beforehand is in the manifest, so that opening a data set opens no shard.
"""

from __future__ import annotations

import os
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
    """Which columns of a data set play which part."""

    dataset_name: str  # the data set
    contextual_feature_names: tuple[str, ...]  # plain columns, one token per user
    item_feature_name: str  # list column of item ids
    action_feature_name: str | None  # list column of actions, one per item; None where batches are to have none
    # For each label, a function that can be pickled, from actions, int64 `(n,)`, to what is not 0 where they have it.
    tasks: tuple[Callable[[np.ndarray], np.ndarray], ...]
    # What a second counts in the list column "timestamp": 1,000 for milliseconds; None where that has no times.
    timestamps_per_second: int | None = 1
    user_feature_name: str = "user_id"  # plain column of user ids


class SequenceFile:
    """Rows of a data set, read lazily: opening reads the manifest, asking for rows reads their row groups.

    `path` is the folder `<dataset_name>.parquet`, or the folder that holds it. No other `columns` are read. The row
    groups used last stay decoded, up to `max_cached_bytes` in each process.

    Raises:
        FileNotFoundError: no such data set.
        ValueError: data that are damaged, of another data set or version, or lack a column.

    """

    def __init__(
        self, path: str | Path, dataset_name: str, columns: Sequence[str], *, max_cached_bytes: int = 256 << 20
    ) -> None:
        path = Path(path)
        self.path = path if (path / MANIFEST).is_file() else path / f"{dataset_name}.parquet"
        if not (self.path / MANIFEST).is_file():
            raise FileNotFoundError(
                f"{self.path} does not exist or has no {MANIFEST}; data are preprocessed once: run `evenrank "
                f"preprocess {dataset_name} --source … --output …` and give its output as dataset_path"
            )
        self._columns = list(columns)
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
        # For each row group of the whole data set: its shard, its number there, and the row it begins with.
        self._groups = [(shard, group) for shard, own in enumerate(shards) for group in range(len(own.row_groups))]
        self._group_starts = np.cumsum([0, *(rows for shard in shards for rows in shard.row_groups)])
        self._process = os.getpid()
        self._open: dict[int, pq.ParquetFile] = {}
        self._cache: OrderedDict[int, _RowGroup] = OrderedDict()
        self._cached_bytes = 0

    def split_rows(self, split: str) -> range:
        """Rows of one split; raises ValueError for one that the data do not have."""
        start, splits = 0, self.metadata.splits
        for name, num_rows in splits.items():
            if name == split:
                return range(start, start + num_rows)
            start += num_rows
        raise ValueError(f"split is {split!r}, {self.path} has {', '.join(splits)}: choose one of them")

    def select(self, rows: np.ndarray) -> RowSelection:
        """Rows to read columns of: int64 `(num_rows,)`, counted from the start of the data set."""
        numbers = np.searchsorted(self._group_starts, rows, side="right") - 1
        groups = {number: self._row_group(number) for number in np.unique(numbers).tolist()}
        local = rows - self._group_starts[numbers]
        return RowSelection([(groups[number], row) for number, row in zip(numbers.tolist(), local.tolist())])

    def list_lengths(self, column: str, rows: range) -> np.ndarray:
        """Lengths of a list column in consecutive rows: int64 `(len(rows),)`; reads that column alone, keeps nothing.

        Parquet holds no lengths of lists but in the levels of their values, so the values are decoded with them.
        """
        first = int(np.searchsorted(self._group_starts, rows.start, side="right")) - 1
        last = int(np.searchsorted(self._group_starts, rows.stop, side="left"))
        lengths = [np.empty(0, np.int64)]
        for number in range(first, last) if rows else ():
            offsets = self._read_table(number, [column])[column].combine_chunks().offsets.to_numpy()
            begin = int(self._group_starts[number])
            lengths.append(np.diff(offsets).astype(np.int64)[max(0, rows.start - begin) : rows.stop - begin])
        return np.concatenate(lengths)

    def _row_group(self, number: int) -> _RowGroup:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        group = self._cache[number] = self._read_group(number)
        self._cached_bytes += group.num_bytes
        while self._cached_bytes > self._max_cached_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return group

    def _read_table(self, number: int, columns: list[str]) -> pa.Table:
        """Columns of a row group, as many rows as the manifest says."""
        if self._process != os.getpid():  # a worker, forked after a shard was opened, opens it for itself
            self._process, self._open = os.getpid(), {}
        shard, index = self._groups[number]
        file, expected = self.metadata.shards[shard].file, self.metadata.shards[shard].row_groups[index]
        try:
            if shard not in self._open:
                self._open[shard] = pq.ParquetFile(self.path / file, memory_map=True, page_checksum_verification=True)
            table = self._open[shard].read_row_group(index, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{self.path / file} is damaged ({reason_of(error)}); preprocess the data again"
            ) from error
        if table.num_rows != expected:
            raise ValueError(
                f"{self.path / file} has {table.num_rows} rows in row group {index}, {MANIFEST} says {expected}; both "
                "come from one run: preprocess the data again"
            )
        return table

    def _read_group(self, number: int) -> _RowGroup:
        group = _RowGroup(self._read_table(number, self._columns))
        file = self.metadata.shards[self._groups[number][0]].file
        for name, values in (*group.plain.items(), *group.flat.items()):
            size = self.metadata.vocabulary_sizes.get(name)
            if size is not None and len(values) and not 0 <= values.min() <= values.max() < size:
                wrong = values.min() if values.min() < 0 else values.max()
                raise ValueError(
                    f"{self.path / file} has id {wrong} of {name!r}, whose vocabulary has {size}; ids lie below "
                    "that: preprocess the data again"
                )
        return group

    def __getstate__(self) -> dict[str, Any]:
        # An open file does not travel to another process; it is opened there again.
        return {**self.__dict__, "_open": {}, "_cache": OrderedDict(), "_cached_bytes": 0}


class _RowGroup:
    """The decoded columns of one row group as numpy arrays; split names are left out."""

    def __init__(self, table: pa.Table) -> None:
        self.plain: dict[str, np.ndarray] = {}
        self.offsets: dict[str, list[int]] = {}
        self.flat: dict[str, np.ndarray] = {}
        for name in table.column_names:
            column = table[name].combine_chunks()
            if pa.types.is_list(column.type):
                # A list is faster than an array where rows are looked up one by one.
                self.offsets[name] = column.offsets.to_numpy().tolist()
                self.flat[name] = column.values.to_numpy()
            else:
                self.plain[name] = column.to_numpy(zero_copy_only=False)
        self.num_bytes = sum(values.nbytes for values in (*self.plain.values(), *self.flat.values()))
        self.num_bytes += 40 * sum(map(len, self.offsets.values()))


class RowSelection:
    """Some rows of a data set; columns come in the order in which the rows were asked for."""

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
        """The last entries of each row of a list column, row after row: int64 `(sum(lengths),)`.

        `lengths` is int64 `(num_rows,)`, how many of each, at most the row's length.
        """
        result = np.empty(int(lengths.sum()), np.int64)
        start = 0
        for (group, row), length in zip(self._rows, lengths.tolist()):
            end = group.offsets[column][row + 1]
            result[start : start + length] = group.flat[column][end - length : end]
            start += length
        return result
