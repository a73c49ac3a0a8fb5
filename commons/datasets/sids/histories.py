"""Item-id histories of one split, oldest item first: from a file of `evenrank preprocess`, or from any parquet file.

A user's own parquet file has a list column of item ids and, optionally, a column `split` with "train" and "test".
Without `split`, every user is in both splits: "test" ends with the user's last item, "train" with the item before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from commons.console import reason_of
from commons.datasets.sequences.file import SequenceFile, SequenceSchema
from commons.datasets.sequences.source_files import require_no_table

DEFAULT_HISTORY_COLUMN = "item_id"
SPLIT_COLUMN = "split"
_SPLITS = ("train", "test")
_OR_MAKE = "or make histories of any events with `evenrank preprocess parquet`"
_USERS_PER_CHUNK = 2**16
_ITEMS_PER_CHUNK = 2**21
_PARTS_OF_LENGTHS = 64  # of the users of a chunk


class Histories(Protocol):
    """Users with their items, oldest first."""

    source: str  # file and split, for messages
    num_items: int | None  # if ids are places among so many items; None if they are the raw items

    def __len__(self) -> int:
        """Number of users."""

    def lengths(self, users: np.ndarray) -> np.ndarray:
        """Number of items of each user, int64 `(n,)`; `users` is int64 `(n,)`, counted from 0."""

    def tails(self, users: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The last `lengths` items of each user, user after user, int64 `(sum(lengths),)`."""

    def items_digest(self) -> str:
        """Digest of the raw items of all ids; "" if the ids are the raw items."""

    def row_order(self) -> dict[str, Any]:
        """See UserDataset."""

    def row_contents(self) -> dict[str, Any]:
        """See UserDataset."""


def history_chunks(histories: Histories) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Chunks of users: their numbers, their numbers of items, and their items, user after user, all int64.

    A chunk has about two million items, and at least one user.
    """
    for first in range(0, len(histories), _USERS_PER_CHUNK):
        users = np.arange(first, min(first + _USERS_PER_CHUNK, len(histories)))
        # In parts: a file's row groups are in memory until the lengths of all their users are known.
        lengths = np.concatenate([histories.lengths(part) for part in np.array_split(users, _PARTS_OF_LENGTHS)])
        chunk = np.cumsum(lengths) // _ITEMS_PER_CHUNK
        cuts = np.flatnonzero(np.diff(chunk)) + 1
        for own_users, own_lengths in zip(np.split(users, cuts), np.split(lengths, cuts)):
            yield own_users, own_lengths, histories.tails(own_users, own_lengths)


class PreprocessedHistories:
    """Histories of one split of a file of `evenrank preprocess`, read lazily; errors as for SequenceFile."""

    def __init__(self, path: str | Path, schema: SequenceSchema, split: str) -> None:
        self._column, self._user_feature_name = schema.item_feature_name, schema.user_feature_name
        self._file = SequenceFile(path, schema.dataset_name, [self._column])
        self._rows = self._file.split_rows(split)
        self.num_items: int | None = self._file.metadata.vocabulary_sizes[self._column]
        self.source = f"split {split!r} of {self._file.path}"

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self, users: np.ndarray) -> np.ndarray:
        return self._file.select(users + self._rows.start).lengths(self._column)

    def tails(self, users: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return self._file.select(users + self._rows.start).tails(self._column, lengths)

    def items_digest(self) -> str:
        return self._file.metadata.vocabulary_digests.get(self._column, "")

    def row_order(self) -> dict[str, Any]:
        return self._file.metadata.row_order(self._user_feature_name)

    def row_contents(self) -> dict[str, Any]:
        return self._file.metadata.row_contents()


class ParquetHistories:
    """Histories of a user's own parquet file, in memory; `column` has lists of item ids, oldest first.

    Raises:
        FileNotFoundError: no file.
        IsADirectoryError: a folder.
        ValueError: no parquet file, one of a Delta, Iceberg or Hudi table, or a column that is missing, of another
            type, with nulls or with unknown splits.
    """

    num_items: int | None = None

    def __init__(self, path: str | Path, column: str, split: str) -> None:
        self.source = f"split {split!r} of {path}"
        table = _read(Path(path), column)
        items = table[column].combine_chunks()
        offsets = items.offsets.to_numpy().astype(np.int64)
        self._items = items.values.to_numpy()
        self._starts, self._ends = offsets[:-1], offsets[1:]
        if SPLIT_COLUMN in table.column_names:
            users = np.flatnonzero(table[SPLIT_COLUMN].to_numpy() == split)
        else:
            left_out = 1 if split == "train" else 0
            self._ends = self._ends - left_out
            users = np.flatnonzero(self._ends > self._starts) if left_out else np.arange(len(self._ends))
        self._starts, self._ends = self._starts[users], self._ends[users]

    def __len__(self) -> int:
        return len(self._ends)

    def lengths(self, users: np.ndarray) -> np.ndarray:
        return self._ends[users] - self._starts[users]

    def tails(self, users: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self._items[np.repeat(self._ends[users] - lengths, lengths) + within].astype(np.int64)

    def items_digest(self) -> str:
        return ""

    def row_order(self) -> dict[str, Any]:
        return {}

    def row_contents(self) -> dict[str, Any]:
        checksum = zlib.crc32(np.ascontiguousarray(self._items).data, zlib.crc32(self._ends.data))
        return {"num_users": len(self), "num_interactions": len(self._items), "checksum": checksum}


def _read(path: Path, column: str) -> pa.Table:
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder; your own item-id histories are one parquet file with a row per user: give the file, "
            f"{_OR_MAKE}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; it must be a file of item-id histories: correct the path")
    require_no_table([path])
    try:
        names = pq.read_schema(path).names
        wanted = [name for name in (column, SPLIT_COLUMN) if name in names]
        table = pq.read_table(path, columns=wanted, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no parquet file, or damaged ({reason_of(error)}): write it again") from None
    if column not in names:
        raise ValueError(
            f"{path} has columns {names}, but no {column!r}: name the column of item-id histories, {_OR_MAKE}"
        )
    kind = table.schema.field(column).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
        raise ValueError(
            f"column {column!r} of {path} is of type {kind}; a history is a list of integers: convert it, {_OR_MAKE}"
        )
    items = table[column].combine_chunks()
    if items.null_count or items.values.null_count:
        raise ValueError(f"column {column!r} of {path} has nulls; a user without items has an empty list: replace them")
    if SPLIT_COLUMN in names:
        kind = table[SPLIT_COLUMN].type
        splits = [f"values of type {kind}"] if pa.types.is_nested(kind) else table[SPLIT_COLUMN].unique().to_pylist()
        if not set(splits) <= set(_SPLITS):
            raise ValueError(f"column 'split' of {path} has {splits}; it must have 'train' and 'test': rename them")
    return table
