"""Interactions on disk, dealt out by user, so that each part fits into memory and holds all of its users' rows.

First every batch of interactions is added; then each partition is read on its own, users in order, oldest row first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

# Rows of a partition that is read at once: about 40 bytes each while it is sorted.
_ROWS_PER_PARTITION = 4_000_000
_MOST_PARTITIONS = 128
_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 ÷ golden ratio: Knuth's multiplicative hash
_COLUMNS = ("user_id", "item_id", "action", "timestamp")


def partitions_for(num_rows: float) -> int:
    """A power of two, so many that a partition of an average data set of `num_rows` can be sorted in memory."""
    wanted = 1
    while wanted < min(num_rows / _ROWS_PER_PARTITION, _MOST_PARTITIONS):
        wanted *= 2
    return wanted


@dataclass(frozen=True)
class UserHistories:
    """Interactions of some users, user after user, oldest first.

    Attributes:
        user_ids: int32 `(num_users,)`, ascending; users with at least one interaction.
        lengths: int64 `(num_users,)`.
        item_ids: int32 `(sum(lengths),)`.
        actions: int16 `(sum(lengths),)`.
        timestamps: int64 `(sum(lengths),)`.

    """

    user_ids: np.ndarray
    lengths: np.ndarray
    item_ids: np.ndarray
    actions: np.ndarray
    timestamps: np.ndarray


class UserPartitions:
    """Interactions by partition of their users.

    Args:
        folder: for the temporary files, made if missing.
        num_partitions: a power of two.

    """

    def __init__(self, folder: Path, num_partitions: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.num_partitions = num_partitions
        self.num_rows = 0
        self._paths = [folder / f"{index:03d}.arrow" for index in range(num_partitions)]
        self._schema = pa.schema(list(zip(_COLUMNS, (pa.int32(), pa.int32(), pa.int16(), pa.int64()))))
        self._writers = [pa.ipc.new_stream(str(path), self._schema) for path in self._paths]

    def partition_of(self, user_ids: np.ndarray) -> np.ndarray:
        """The partition of each user: uint8 `(n,)` for int32 `(n,)`."""
        shift = 32 - (self.num_partitions.bit_length() - 1)
        if shift == 32:
            return np.zeros(len(user_ids), np.uint8)
        return ((user_ids.astype(np.uint32) * _GOLDEN) >> np.uint32(shift)).astype(np.uint8)

    def add(self, user_ids: np.ndarray, item_ids: np.ndarray, actions: np.ndarray, timestamps: np.ndarray) -> None:
        """Add interactions, int32, int32, integers within int16 and int64, each `(n,)`."""
        self.num_rows += len(user_ids)
        columns = [user_ids, item_ids, actions.astype(np.int16, copy=False), timestamps]
        if self.num_partitions == 1:
            bounds = np.array([0, len(user_ids)])
        else:
            partition = self.partition_of(user_ids)
            order = np.argsort(partition, kind="stable")  # of 8-bit numbers: a counting sort
            columns = [column[order] for column in columns]
            bounds = np.searchsorted(partition[order], np.arange(self.num_partitions + 1))
        batch = pa.record_batch([pa.array(column) for column in columns], schema=self._schema)
        for writer, start, end in zip(self._writers, bounds[:-1].tolist(), bounds[1:].tolist()):
            if end > start:
                writer.write_batch(batch.slice(start, end - start))

    def close(self) -> None:
        """End adding; idempotent."""
        for writer in self._writers:
            writer.close()
        self._writers = []

    def remove(self) -> None:
        """Remove the temporary files and their folder."""
        self.close()
        for path in self._paths:
            path.unlink()
        self._folder.rmdir()

    def read(self, index: int) -> UserHistories:
        """The users of a partition. Rows of one user and time keep the order in which they were added."""
        with pa.OSFile(str(self._paths[index])) as file:
            table = pa.ipc.open_stream(file).read_all()
        users, items, actions, timestamps = (table[name].to_numpy() for name in _COLUMNS)
        del table
        order = _by_user_and_time(users, timestamps)
        users = users[order]
        starts = np.flatnonzero(np.diff(users, prepend=-1))
        return UserHistories(
            users[starts],
            np.diff(starts, append=len(users)),
            items[order],
            actions[order],
            timestamps[order],
        )


def _by_user_and_time(users: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
    """Stable order by user, then time."""
    if len(users) == 0:
        return np.empty(0, np.int64)
    first = timestamps.min()
    if int(timestamps.max()) - int(first) >= 2**32:
        return np.lexsort((timestamps, users))
    # User ids have 31 bits: one sort of one number is several times faster than two.
    return np.argsort((users.astype(np.int64) << 32) | (timestamps - first), kind="stable")
