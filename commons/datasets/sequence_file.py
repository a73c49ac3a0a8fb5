"""The columnar file of a data set: one row per user, a parquet file read by row groups as rows are asked for.

Preprocessors write it, SequenceDataset reads it. Users of one split stand together, so that a reader of one split
touches no other row group. What a model has to know beforehand (vocabulary sizes, counts) is JSON in the footer.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_METADATA_KEY = b"evenrank"
_VOCABULARY_KEY = b"evenrank.vocabularies"
_FORMAT_VERSION = 1
_ROWS_PER_GROUP = 512


@dataclass(frozen=True)
class SequenceSchema:
    """Which columns of a file play which part.

    Attributes:
        dataset_name: the data set that the file must hold.
        contextual_feature_names: plain columns, one token per user.
        item_feature_name: list column of item ids.
        action_feature_name: list column of actions, one per item.
        tasks: for each label, a module-level function from actions, int64 `(n,)`, to labels, bool `(n,)`.

    """

    dataset_name: str
    contextual_feature_names: tuple[str, ...]
    item_feature_name: str
    action_feature_name: str
    tasks: tuple[Callable[[np.ndarray], np.ndarray], ...]


@dataclass(frozen=True)
class SequenceFileMetadata:
    """What the footer of a file says.

    Attributes:
        dataset_name: name of the data set, such as "ml-1m".
        generated: the data come from a generator and not from users.
        num_users: rows.
        num_interactions: items of all rows.
        min_length: items of the shortest row.
        max_length: items of the longest row.
        splits: rows of each split, in the order in which they stand in the file.
        vocabulary_sizes: for each feature, the number of ids: ids lie in `[0, size)`.
        options: settings of the preprocessor.
        format_version: of this layout.

    """

    dataset_name: str
    generated: bool
    num_users: int
    num_interactions: int
    min_length: int
    max_length: int
    splits: dict[str, int]
    vocabulary_sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    format_version: int = _FORMAT_VERSION

    @property
    def mean_length(self) -> float:
        """Items per row; 0.0 without rows."""
        return self.num_interactions / self.num_users if self.num_users else 0.0


def write_sequence_file(
    path: Path, table: pa.Table, metadata: SequenceFileMetadata, vocabularies: dict[str, list[Any]]
) -> None:
    """Write a file; a failure leaves what was at `path` before.

    Args:
        path: the file; its folder is made if missing.
        table: one row per user, the splits one after the other.
        metadata: for the footer.
        vocabularies: for each categorical feature, the raw value of each id.

    """
    table = table.replace_schema_metadata(
        {
            _METADATA_KEY: json.dumps(dataclasses.asdict(metadata)).encode(),
            _VOCABULARY_KEY: json.dumps(vocabularies).encode(),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, aside, row_group_size=_ROWS_PER_GROUP, write_page_checksum=True)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class SequenceFile:
    """Rows of a file, read lazily: opening reads the footer, asking for rows reads their row groups.

    Args:
        path: the file, or the folder that holds it under the name of the data set.
        dataset_name: the data set that is expected.
        columns: the columns that will be asked for; no other is read.
        max_cached_groups: row groups of 512 users kept in memory, the last used ones.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is damaged, of another data set or version, or lacks a column.

    """

    def __init__(
        self, path: str | Path, dataset_name: str, columns: Sequence[str], *, max_cached_groups: int = 256
    ) -> None:
        path = Path(path)
        self.path = path / f"{dataset_name}.parquet" if path.is_dir() else path
        self._columns = list(columns)
        self._max_cached_groups = max_cached_groups
        footer = self._read_footer(dataset_name)
        self.metadata = _metadata_of(footer, self.path, dataset_name)
        present = footer.schema.to_arrow_schema().names
        missing = [name for name in self._columns if name not in present]
        if missing:
            raise ValueError(f"{self.path} has columns {present}, but no {missing}: preprocess the data again")
        group_rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        self._group_starts = np.cumsum([0, *group_rows])  # (num_groups + 1,)
        self._process = os.getpid()
        self._file: pq.ParquetFile | None = None
        self._cache: OrderedDict[int, _RowGroup] = OrderedDict()

    def _read_footer(self, dataset_name: str) -> pq.FileMetaData:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path} does not exist; data are preprocessed once: run `evenrank preprocess {dataset_name} "
                "--source … --output …` and give its output as dataset_path"
            )
        try:
            return pq.read_metadata(self.path)
        except pa.ArrowInvalid as error:
            first_line = str(error).splitlines()[0]
            raise ValueError(f"{self.path} is no parquet file ({first_line}); preprocess the data again") from error

    def vocabularies(self) -> dict[str, list[Any]]:
        """For each categorical feature, the raw value of each id."""
        return json.loads(pq.read_metadata(self.path).metadata[_VOCABULARY_KEY])

    def split_rows(self, split: str) -> range:
        """Rows of one split.

        Raises:
            ValueError: a split that the file does not have.

        """
        start = 0
        for name, num_rows in self.metadata.splits.items():
            if name == split:
                return range(start, start + num_rows)
            start += num_rows
        raise ValueError(f"split is {split!r}, {self.path} has {', '.join(self.metadata.splits)}: choose one of them")

    def select(self, rows: np.ndarray) -> RowSelection:
        """Rows to read columns of: int64 `(num_rows,)`, counted from the start of the file."""
        groups = np.searchsorted(self._group_starts, rows, side="right") - 1
        return RowSelection(
            rows, [(self._row_group(group), np.flatnonzero(groups == group)) for group in np.unique(groups).tolist()]
        )

    def _row_group(self, index: int) -> _RowGroup:
        if self._process != os.getpid():  # a worker, forked after the file was opened, opens it for itself
            self._process, self._file = os.getpid(), None
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        try:
            if self._file is None:
                self._file = pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True)
            table = self._file.read_row_group(index, columns=self._columns, use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            first_line = str(error).splitlines()[0]
            raise ValueError(f"{self.path} is damaged ({first_line}); preprocess the data again") from error
        group = self._cache[index] = _RowGroup(int(self._group_starts[index]), table)
        if len(self._cache) > self._max_cached_groups:
            self._cache.popitem(last=False)
        return group

    def __getstate__(self) -> dict[str, Any]:
        # An open file does not travel to another process; it is opened there again.
        return {**self.__dict__, "_file": None, "_cache": OrderedDict()}


class _RowGroup:
    """The decoded columns of one row group as numpy arrays."""

    def __init__(self, start: int, table: pa.Table) -> None:
        self.start = start
        self.plain: dict[str, np.ndarray] = {}
        self.offsets: dict[str, np.ndarray] = {}
        self.flat: dict[str, np.ndarray] = {}
        for name in table.column_names:
            column = table[name].combine_chunks()
            if pa.types.is_list(column.type):
                self.offsets[name] = column.offsets.to_numpy().astype(np.int64)
                self.flat[name] = column.values.to_numpy()
            else:
                self.plain[name] = column.to_numpy()


class RowSelection:
    """Some rows of a file; columns come in the order in which the rows were asked for."""

    def __init__(self, rows: np.ndarray, groups: list[tuple[_RowGroup, np.ndarray]]) -> None:
        self._num_rows = len(rows)
        # For each row group: where its rows stand in the selection, and where in the group.
        self._groups = [(group, positions, rows[positions] - group.start) for group, positions in groups]

    def values(self, column: str) -> np.ndarray:
        """A plain column: int64 `(num_rows,)`."""
        result = np.empty(self._num_rows, np.int64)
        for group, positions, local in self._groups:
            result[positions] = group.plain[column][local]
        return result

    def lengths(self, column: str) -> np.ndarray:
        """Lengths of a list column: int64 `(num_rows,)`."""
        result = np.empty(self._num_rows, np.int64)
        for group, positions, local in self._groups:
            result[positions] = group.offsets[column][local + 1] - group.offsets[column][local]
        return result

    def tails(self, column: str, lengths: np.ndarray) -> np.ndarray:
        """The last entries of each row of a list column.

        Args:
            column: a list column.
            lengths: int64 `(num_rows,)`, entries to take from the end of each row, at most the row's length.

        Returns:
            int64 `(sum(lengths),)`, row after row.

        """
        starts = np.cumsum(lengths) - lengths
        result = np.empty(int(lengths.sum()), np.int64)
        for group, positions, local in self._groups:
            taken = lengths[positions]
            within = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)  # 0 … length − 1 in each row
            source = np.repeat(group.offsets[column][local + 1] - taken, taken) + within
            target = np.repeat(starts[positions], taken) + within
            result[target] = group.flat[column][source]
        return result


def _metadata_of(footer: pq.FileMetaData, path: Path, dataset_name: str) -> SequenceFileMetadata:
    raw = (footer.metadata or {}).get(_METADATA_KEY)
    if raw is None:
        raise ValueError(f"{path} was not written by `evenrank preprocess`; preprocess the data and give its output")
    fields = json.loads(raw)
    if fields.get("format_version") != _FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {fields.get('format_version')}, this version reads {_FORMAT_VERSION}: "
            "preprocess the data again"
        )
    metadata = SequenceFileMetadata(**fields)
    if metadata.dataset_name != dataset_name:
        raise ValueError(
            f"{path} holds {metadata.dataset_name!r}, dataset_name is {dataset_name!r}; they must agree: correct one"
        )
    return metadata
