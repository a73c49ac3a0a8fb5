"""From interactions dealt out by user to the columnar files of a data set.

    UserPartitions ─► one partition at a time ─► split ─► shards, row groups ─► manifest

Ids are the ranks of the raw values among the sorted ones. Memory holds one partition at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from commons.datasets.sequence_file import SequenceSchema
from commons.datasets.sequence_metadata import (
    MANIFEST,
    TIMESTAMP,
    VOCABULARIES,
    SequenceFileMetadata,
    Shard,
    histogram_keys,
    histogram_of,
)
from commons.datasets.user_partitions import UserHistories, UserPartitions

SPLITS = ("train", "test")
# Of a row group, which is decoded as a whole when one of its rows is read.
_INTERACTIONS_PER_GROUP, _MOST_USERS_PER_GROUP = 65_536, 4_096
# Above it, a table by raw value takes more memory than it saves time.
_LARGEST_TABLE = 100_000_000
_V1_KEY = b"evenrank"


class IdMap:
    """Raw integers to ids and back: the id of a value is its rank.

    Args:
        values: int32 `(num_ids,)`, ascending, each once.

    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self._table: np.ndarray | None = None
        if len(values) and values[0] >= 0 and values[-1] < _LARGEST_TABLE:
            self._table = np.full(int(values[-1]) + 2, -1, np.int32)
            self._table[values] = np.arange(len(values), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.values)

    def ids(self, raw: np.ndarray) -> np.ndarray:
        """int32 `(n,)`: the id of each raw value, which is not negative; -1 where it has none."""
        if self._table is not None:
            return self._table[np.minimum(raw, len(self._table) - 1)]
        places = np.searchsorted(self.values, raw)
        known = places < len(self.values)
        known[known] = self.values[places[known]] == raw[known]
        return np.where(known, places, -1).astype(np.int32)


class SeenIds:
    """The set of raw ids in a stream of them, below a bound: one byte per possible id."""

    def __init__(self) -> None:
        self._seen = np.zeros(1 << 16, bool)

    def add(self, raw: np.ndarray) -> None:
        """Add int32 `(n,)`, none negative."""
        if not len(raw):
            return
        needed = int(raw.max()) + 1
        if needed > len(self._seen):
            grown = np.zeros(max(needed, 2 * len(self._seen)), bool)
            grown[: len(self._seen)] = self._seen
            self._seen = grown
        self._seen[raw] = True

    def values(self) -> np.ndarray:
        """The ids, ascending: int32 `(num_ids,)`."""
        return np.flatnonzero(self._seen).astype(np.int32)


@dataclass(frozen=True)
class UserTable:
    """All users of a data set, those without interactions included.

    Attributes:
        user_ids: int32 `(num_users,)`, ascending.
        columns: for each contextual feature other than the user id, the ids of its values, int32 `(num_users,)`.
        vocabularies: for each of these, the raw value of each id.
        raw_ids: the raw value of each user, where `user_ids` are not these.
        split_keys: integers `(num_users,)` by which users are split, where `user_ids` are not these.

    """

    user_ids: np.ndarray
    columns: Mapping[str, np.ndarray]
    vocabularies: Mapping[str, Sequence[Any] | pa.Array]
    raw_ids: pa.Array | None = None
    split_keys: np.ndarray | None = None


@dataclass(frozen=True)
class SequenceSource:
    """What a preprocessor has read of an archive.

    Attributes:
        interactions: by user; with raw user and item ids.
        users: all of them; every user of the interactions is among them.
        items: all items; every item of the interactions is among them.
        action_vocabulary_size: actions lie in `[0, action_vocabulary_size)`.
        generated: the archive says that it was generated.
        sha256: of the archive.
        raw_items: the raw value of each item, where `items` are not these.
        options: of the preprocessor, besides the split's.

    """

    interactions: UserPartitions
    users: UserTable
    items: IdMap
    action_vocabulary_size: int
    generated: bool
    sha256: str
    raw_items: pa.Array | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def write_sequences(
    folder: Path,
    schema: SequenceSchema,
    source: SequenceSource,
    *,
    test_fraction: float,
    seed: int,
    on_rows: Callable[[int], object] = lambda rows: None,
) -> SequenceFileMetadata:
    """Write the shards, the vocabularies and the manifest of a data set into an empty folder.

    Args:
        folder: where to.
        schema: of the data set.
        source: what to write.
        test_fraction: expected part of the users in the test split.
        seed: of the split.
        on_rows: called with the number of interactions written.

    Raises:
        ValueError: an interaction whose user is not among the users.

    """
    writer = _Writer(folder, schema, source)
    users = source.users
    is_test = split_hash(users.user_ids if users.split_keys is None else users.split_keys, seed) < test_fraction
    partition = source.interactions.partition_of(source.users.user_ids)
    for index in range(source.interactions.num_partitions):
        writer.write_partition(source.interactions.read(index), np.flatnonzero(partition == index), is_test, index)
        on_rows(writer.rows_of_last)
    return writer.finish({"test_fraction": test_fraction, "seed": seed, **source.options}, is_test)


def split_hash(user_ids: np.ndarray, seed: int) -> np.ndarray:
    """A float64 in [0, 1) per user: SplitMix64 (Steele, Lea, Flood 2014) of the user id, in the stream of `seed`."""
    with np.errstate(over="ignore"):
        state = user_ids.astype(np.uint64) + np.random.SeedSequence(seed).generate_state(1, np.uint64)
        state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def is_preprocessed(path: Path) -> bool:
    """Whether a path is what a preprocessor wrote, in this or an earlier version."""
    if path.is_dir():
        return (path / MANIFEST).is_file()
    try:
        return _V1_KEY in (pq.read_metadata(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


class _Writer:
    """Shards of a data set, one for each partition and split that has users."""

    def __init__(self, folder: Path, schema: SequenceSchema, source: SequenceSource) -> None:
        self._folder, self._schema, self._source = folder, schema, source
        self._action_column = str(schema.action_feature_name)
        self._shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        self._histogram = np.zeros(33, np.int64)
        self._shortest, self._longest = np.iinfo(np.int64).max, 0
        self.rows_of_last = 0
        action_type = pa.int8() if source.action_vocabulary_size <= 127 else pa.int16()
        self._list_types = {
            schema.item_feature_name: pa.int32(),
            self._action_column: action_type,
            TIMESTAMP: pa.int64(),
        }
        fields = [(schema.user_feature_name, pa.int32()), *((name, pa.int32()) for name in source.users.columns)]
        fields += [(name, pa.list_(pa.field("element", kind))) for name, kind in self._list_types.items()]
        self._arrow_schema = pa.schema([*fields, ("split", pa.string())])

    def write_partition(self, histories: UserHistories, users: np.ndarray, is_test: np.ndarray, index: int) -> None:
        """Write the shards of a partition; `users` are the places of its users in the user table."""
        all_users = self._source.users.user_ids
        places = np.searchsorted(all_users[users], histories.user_ids)
        known = places < len(users)
        known[known] = all_users[users[places[known]]] == histories.user_ids[known]
        if not known.all():
            raise ValueError(
                f"user {histories.user_ids[~known][0]} has interactions but is not among the {len(all_users):,} users "
                "of the archive; all its files come from one data set: download it again"
            )
        lengths = np.zeros(len(users), np.int64)  # users without interactions stay at 0
        lengths[places] = histories.lengths
        self.rows_of_last = int(lengths.sum())
        flat = {
            self._schema.item_feature_name: self._source.items.ids(histories.item_ids),
            self._action_column: histories.actions,
            TIMESTAMP: histories.timestamps,
        }
        if len(lengths):
            self._histogram += histogram_of(lengths)
            self._shortest = min(self._shortest, int(lengths.min()))
            self._longest = max(self._longest, int(lengths.max()))
        for split in SPLITS:
            own = is_test[users] == (split == "test")
            if own.any():
                self._write_shard(f"{split}-{index:05d}.parquet", split, users[own], lengths[own], flat, own, lengths)

    def _write_shard(
        self,
        file: str,
        split: str,
        users: np.ndarray,
        lengths: np.ndarray,
        flat: Mapping[str, np.ndarray],
        own: np.ndarray,
        all_lengths: np.ndarray,
    ) -> None:
        keep = None if own.all() else np.repeat(own, all_lengths)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns: list[pa.Array] = [pa.array(users.astype(np.int32))]
        columns += [pa.array(values[users]) for values in self._source.users.columns.values()]
        for name, kind in self._list_types.items():
            values = flat[name] if keep is None else flat[name][keep]
            entries = pa.array(values, type=kind)
            columns.append(pa.ListArray.from_arrays(offsets, entries, type=self._arrow_schema.field(name).type))
        columns.append(pa.DictionaryArray.from_arrays(np.zeros(len(users), np.int8), [split]).dictionary_decode())
        table = pa.table(columns, schema=self._arrow_schema)
        groups = _row_groups(lengths)
        with pq.ParquetWriter(
            self._folder / file,
            self._arrow_schema,
            write_page_checksum=True,
            use_dictionary=["split", f"{self._action_column}.list.element"],
        ) as writer:
            start = 0
            for rows in groups:
                writer.write_table(table.slice(start, rows), row_group_size=rows)
                start += rows
        self._shards[split].append(Shard(file, groups, int(lengths.sum())))

    def finish(self, options: dict[str, Any], is_test: np.ndarray) -> SequenceFileMetadata:
        """Write vocabularies and manifest."""
        source, schema = self._source, self._schema
        vocabularies: dict[str, Any] = {
            schema.user_feature_name: source.users.user_ids if source.users.raw_ids is None else source.users.raw_ids,
            **source.users.vocabularies,
            schema.item_feature_name: source.items.values if source.raw_items is None else source.raw_items,
        }
        (self._folder / VOCABULARIES).mkdir()
        for name, values in vocabularies.items():
            column = values if isinstance(values, pa.Array) else pa.array(values)
            pq.write_table(pa.table({"value": column}), self._folder / VOCABULARIES / f"{name}.parquet")
        shards = [shard for split in SPLITS for shard in self._shards[split]]
        num_users, num_test = len(is_test), int(is_test.sum())
        sizes = {name: len(values) for name, values in vocabularies.items()}
        metadata = SequenceFileMetadata(
            dataset_name=schema.dataset_name,
            generated=source.generated,
            num_users=num_users,
            num_interactions=source.interactions.num_rows,
            min_length=int(self._shortest) if num_users else 0,
            max_length=int(self._longest),
            splits={"train": num_users - num_test, "test": num_test},
            vocabulary_sizes={**sizes, self._action_column: source.action_vocabulary_size},
            columns={entry.name: str(entry.type) for entry in self._arrow_schema},
            length_histogram=histogram_keys(self._histogram),
            source_sha256=source.sha256,
            shards=shards,
            options=options,
        )
        metadata.save(self._folder)
        return metadata


def _row_groups(lengths: np.ndarray) -> list[int]:
    """Rows of each row group: users one after the other, until a group has its interactions."""
    ends = np.cumsum(lengths)
    groups, start, done = [], 0, 0
    while start < len(lengths):
        end = int(np.searchsorted(ends, done + _INTERACTIONS_PER_GROUP, side="right"))
        end = min(max(end, start + 1), start + _MOST_USERS_PER_GROUP, len(lengths))
        groups.append(end - start)
        start, done = end, int(ends[end - 1])
    return groups


def ids_of_values(values: list[Any] | pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """Ids of raw values, int32 `(n,)`, and the raw value of each id, sorted."""
    encoded = pa.chunked_array([values] if isinstance(values, list) else values.chunks).combine_chunks()
    encoded = encoded.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    ids = np.empty(len(order), np.int32)
    ids[order] = np.arange(len(order), dtype=np.int32)
    return ids[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order)).to_pylist()
