"""The part that all preprocessors share: read raw files into an event store, then write the columnar files.

    source ─► EventStore (DuckDB, in the output folder), sorted by user, time ─► split ─► shards, row groups ─► manifest

An id is the position of the raw value among the sorted raw values. Memory contains the users' columns and a row group.
Until the end, the disk of the output also has the store (about 10 to 20 bytes per event, as much again for sorting) and
the files unpacked from an archive.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from commons.console import progress_bar
from commons.datasets.sequences.event_store import EventStore
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.metadata import (
    MANIFEST,
    TIMESTAMP,
    VOCABULARIES,
    SequenceFileMetadata,
    Shard,
)
from commons.splitmix import as_fraction, splitmix64
from commons.whole_folder import whole_folder

SPLITS = ("train", "test")
# Limits of a row group, which is decoded as a whole when one of its rows is read.
_INTERACTIONS_PER_GROUP, _MOST_USERS_PER_GROUP = 65_536, 4_096
# Size of a shard; of larger ones, if a split would have more than about this number.
_INTERACTIONS_PER_SHARD, _MOST_SHARDS = 4_000_000, 128
_EVENT_SCHEMA = pa.schema([("item", pa.int32()), ("action", pa.int16()), ("time", pa.int64())])
_SCRATCH = "_scratch"


@dataclass(frozen=True)
class SequenceSource:
    """The description of a data set whose events are in a store."""

    schema: SequenceSchema
    users: pa.Array  # distinct raw values of all users, sorted, including users without events
    items: pa.Array  # distinct raw values of all items, sorted
    action_vocabulary_size: int  # actions lie in `[0, action_vocabulary_size)`
    generated: bool  # whether the data are generated
    # The raw value of each user, which may be null, for each contextual feature except the user.
    context: Mapping[str, pa.Array] = field(default_factory=dict)
    # Distinct values of a contextual feature, sorted, a null last; by default the distinct values in `context`.
    vocabularies: Mapping[str, pa.Array] = field(default_factory=dict)
    sha256: str = ""  # hex digest of the archive
    options: Mapping[str, Any] = field(default_factory=dict)  # settings of the preprocessor, except the split's

    def vocabulary(self, name: str) -> pa.Array:
        """The distinct values of a contextual feature, sorted."""
        return self.vocabularies[name] if name in self.vocabularies else pc.unique(self.context[name]).sort()


def preprocess(
    dataset_name: str,
    read: Callable[[Path, EventStore], SequenceSource],
    source: str | Path,
    output: str | Path,
    *,
    test_fraction: float = 0.1,
    seed: int = 0,
    show_progress: bool = False,
) -> Path:
    """Write the columnar files of a data set; the folder appears when it is complete.

    A user is in the test split if a hash of `seed` and the raw user id is below `test_fraction`, so other users do not
    change the split. Events of equal time keep the order of the files.

    Args:
        dataset_name: name of the data set.
        read: fills the empty store with the source's events and returns the description of the data set. Raises
            FileNotFoundError for a missing source, ValueError for a damaged source, a source of another data set, or a
            malformed line.
        source: the archive as published, or its unpacked folder; or the user's own files.
        output: folder for `<name>.parquet`, created if missing.
        test_fraction: expected fraction of the users in the test split, in `[0, 1]`.
        seed: seed of the split.
        show_progress: show progress bars on stderr, if it is a terminal.

    Returns:
        The folder of the data set.

    Raises:
        FileNotFoundError: `source` does not exist.
        FileExistsError: the data set's folder exists and no preprocessor wrote it, or contains the source; `output` is
            itself a data set.
        BlockingIOError: another process is preprocessing to the same folder.
        OSError: no permission to write, or a full disk.
        ValueError: as `read`, a fraction outside `[0, 1]` or a negative seed.
    """
    target = Path(output) / f"{dataset_name}.parquet"
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(target)):
        raise FileExistsError(
            f"source is {source}, which is in {target}; the data set would replace this folder: give another output"
        )
    if (Path(output) / MANIFEST).is_file():  # readers would find the earlier data set there
        raise FileExistsError(
            f"output is {output}, a preprocessed data set; it is the folder in which {target.name} is written: give "
            f"{Path(output).parent}, or another folder"
        )
    if not 0 <= test_fraction <= 1:
        raise ValueError(f"test_fraction is {test_fraction}; it is a fraction of users: give a number between 0 and 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; seeds are not negative: give 0 or more")
    with whole_folder(
        target, may_replace=lambda old: (old / MANIFEST).is_file(), what="preprocessed data set"
    ) as folder:
        with EventStore(folder / _SCRATCH, show_progress=show_progress) as store:
            _Writer(folder, read(Path(source), store), store).write(test_fraction, seed)
        shutil.rmtree(folder / _SCRATCH)
    return target


def split_keys(values: pa.Array) -> np.ndarray:
    """A key for each raw value, uint64 `(num_values,)`: the integer itself, or 64 bits of a BLAKE2b digest."""
    if pa.types.is_integer(values.type):
        return values.to_numpy().astype(np.uint64)
    digests = (hashlib.blake2b(value.as_buffer(), digest_size=8).digest() for value in values)
    return np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64, len(values))


def split_hash(keys: np.ndarray, seed: int) -> np.ndarray:
    """A pseudo-random float64 in [0, 1) for each key and the seed."""
    return as_fraction(splitmix64(keys.astype(np.uint64) + np.random.SeedSequence(seed).generate_state(1, np.uint64)))


class _Events:
    """A stream of events, read in parts of any size."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest = pa.RecordBatch.from_pylist([], _EVENT_SCHEMA)

    def take(self, count: int) -> pa.Table:
        """The next `count` events."""
        parts = [self._rest.slice(0, count)]
        while (count := count - parts[-1].num_rows) > 0:
            self._rest = next(self._batches)
            parts.append(self._rest.slice(0, count))
        self._rest = self._rest.slice(parts[-1].num_rows)
        return pa.Table.from_batches(parts, _EVENT_SCHEMA).combine_chunks()


class _Writer:
    """Writes the files to an empty folder; `source` must list every user and item of the store's events."""

    def __init__(self, folder: Path, source: SequenceSource, store: EventStore) -> None:
        self._folder, self._source, self._store = folder, source, store
        self._lengths = store.lengths(source.users)
        self._shards: list[Shard] = []
        schema = source.schema
        self._action_column = str(schema.action_feature_name)
        action_type = pa.int8() if source.action_vocabulary_size <= 127 else pa.int16()
        # For each list column, the store's column and the type of the entries.
        self._lists = {
            schema.item_feature_name: ("item", pa.int32()),
            self._action_column: ("action", action_type),
            TIMESTAMP: ("time", pa.int64()),
        }
        self._plain = {schema.user_feature_name: pa.array(np.arange(len(self._lengths), dtype=np.int32))}
        for name, values in source.context.items():
            self._plain[name] = pc.index_in(values, value_set=source.vocabulary(name)).cast(pa.int32())
        fields = [(name, pa.int32()) for name in self._plain]
        fields += [(name, pa.list_(pa.field("element", kind))) for name, (_, kind) in self._lists.items()]
        self._schema = pa.schema([*fields, ("split", pa.string())])

    def write(self, test_fraction: float, seed: int) -> None:
        """Write one shard after the other, with users in the order of the events, then vocabularies and manifest."""
        users, lengths = self._source.users, self._lengths
        split = (split_hash(split_keys(users), seed) < test_fraction).astype(np.int8)  # index in SPLITS
        order = np.argsort(split, kind="stable")
        places = np.empty(len(order), np.int32)
        places[order] = np.arange(len(order))
        per_shard = max(_INTERACTIONS_PER_SHARD, int(lengths.sum()) // _MOST_SHARDS)
        with progress_bar("write", int(lengths.sum()), "row", show=self._store.show_progress) as progress:
            events = _Events(self._store.histories(users, places, self._source.items))
            for index, name in enumerate(SPLITS):
                users_of_split = np.flatnonzero(split == index)
                shards = _cut(lengths[users_of_split], per_shard)
                for part, own in enumerate(np.split(users_of_split, np.cumsum(shards)[:-1]) if shards else ()):
                    self._write_shard(name, part, own, events)
                    progress.update(int(lengths[own].sum()))
        self.finish({"test_fraction": test_fraction, "seed": seed, **self._source.options}, int(split.sum()))

    def _write_shard(self, split: str, part: int, users: np.ndarray, events: _Events) -> None:
        file, lengths = f"{split}-{part:05d}.parquet", self._lengths[users]
        groups = _cut(lengths, _INTERACTIONS_PER_GROUP, _MOST_USERS_PER_GROUP)
        with pq.ParquetWriter(
            self._folder / file,
            self._schema,
            write_page_checksum=True,
            use_dictionary=["split", f"{self._action_column}.list.element"],
        ) as writer:
            for own in np.split(users, np.cumsum(groups)[:-1]):
                writer.write_table(self._row_group(split, own, events), row_group_size=len(own))
        self._shards.append(Shard(file, groups, int(lengths.sum())))

    def _row_group(self, split: str, users: np.ndarray, events: _Events) -> pa.Table:
        offsets = pa.array(np.concatenate([[0], np.cumsum(self._lengths[users])]).astype(np.int32))
        flat = events.take(int(self._lengths[users].sum()))
        columns: list[pa.Array] = [values.take(pa.array(users)) for values in self._plain.values()]
        for name, (column, kind) in self._lists.items():
            entries = flat[column].cast(kind).combine_chunks()
            columns.append(pa.ListArray.from_arrays(offsets, entries, type=self._schema.field(name).type))
        return pa.table([*columns, pa.repeat(split, len(users))], schema=self._schema)

    def finish(self, options: dict[str, Any], num_test: int) -> None:
        """Write vocabularies and manifest."""
        source, schema, lengths = self._source, self._source.schema, self._lengths
        vocabularies = {
            schema.user_feature_name: source.users,
            **{name: source.vocabulary(name) for name in source.context},
            schema.item_feature_name: source.items,
        }
        (self._folder / VOCABULARIES).mkdir()
        for name, values in vocabularies.items():
            pq.write_table(pa.table({"value": values}), self._folder / VOCABULARIES / f"{name}.parquet")
        sizes = {name: len(values) for name, values in vocabularies.items()}
        SequenceFileMetadata(
            dataset_name=schema.dataset_name,
            generated=source.generated,
            num_users=len(lengths),
            num_interactions=int(lengths.sum()),
            min_length=int(lengths.min()) if len(lengths) else 0,
            max_length=int(lengths.max(initial=0)),
            splits={"train": len(lengths) - num_test, "test": num_test},
            vocabulary_sizes={**sizes, self._action_column: source.action_vocabulary_size},
            vocabulary_digests={name: _digest(values) for name, values in vocabularies.items()},
            columns={entry.name: str(entry.type) for entry in self._schema},
            length_histogram=_length_histogram(lengths),
            source_sha256=source.sha256,
            shards=self._shards,
            options=options,
        ).save(self._folder)


def _digest(values: pa.Array) -> str:
    if values.null_count:  # DuckDB leaves any number in the place of the null, which is the last value
        values = pa.concat_arrays([values.drop_null(), pa.nulls(values.null_count, values.type)])
    serialized = pa.record_batch([values], ["value"]).serialize()
    return hashlib.blake2b(serialized, digest_size=8).hexdigest()


def _length_histogram(lengths: np.ndarray) -> dict[str, int]:
    """Number of rows by the binary digits of their length; the key is the smallest length with these digits."""
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=1)
    return {str(1 << digits >> 1): int(count) for digits, count in enumerate(counts)}


def _cut(lengths: np.ndarray, interactions: int, users: int = sys.maxsize) -> list[int]:
    """Number of rows of each shard or row group: users in order, until it has its limit of interactions or users."""
    ends = np.cumsum(lengths)
    parts, start, done = [], 0, 0
    while start < len(lengths):
        end = int(np.searchsorted(ends, done + interactions, side="right"))
        end = min(max(end, start + 1), start + users, len(lengths))
        parts.append(end - start)
        start, done = end, int(ends[end - 1])
    return parts
