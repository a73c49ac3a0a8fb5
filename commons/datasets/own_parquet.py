"""Parquet files of a user's own: from an event log, or from a table of users with lists, to the columnar files.

    source ─► pass 1: vocabularies of users, items and context ─► pass 2: UserPartitions ─► write_sequences

A row is an event, or a user with lists of items, times and actions; a user may have several such rows. Ids are the
ranks of the raw values among the sorted ones, whatever those are. Events are kept as they are, equal ones too, sorted
by time; of a context that changes, a user has the value of the latest event.

Memory holds the different users, items and values of context, about as many rows at a time, and one partition.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dacite
import numpy as np

from commons.datasets.event_columns import ACTIONS, EventColumns
from commons.datasets.event_files import EventBatch, EventFiles
from commons.datasets.preprocessing import OpenedArchive, Preprocessor
from commons.datasets.sequence_file import HasAction, SequenceSchema
from commons.datasets.sequence_metadata import SequenceFileMetadata
from commons.datasets.sequence_writer import IdMap, SequenceSource, UserTable
from commons.datasets.user_partitions import UserPartitions, partitions_for
from commons.datasets.vocabulary import Vocabulary

DATASET_NAME = "parquet"


def preprocess_parquet(columns: EventColumns, source: str | Path, output: str | Path, **options: Any) -> Path:
    """Write the columnar files of an own data set; further arguments and errors as those of `Preprocessor`.

    Args:
        columns: which column plays which part.
        source: a parquet file, or a folder of them, however deep.
        output: folder for `parquet.parquet`, made if missing.
        options: `test_fraction`, `seed` and `show_progress`.

    Raises:
        FileNotFoundError: nothing at `source`, or no parquet file in it.
        ValueError: no parquet file, a column that is missing or of another type, a null among users, items, times or
            actions, lists of different lengths, or files without rows; an output within the source.

    """
    # Not Path.resolve(), which raises RuntimeError for a loop of links.
    target = Path(os.path.realpath(Path(output) / f"{DATASET_NAME}.parquet"))
    if Path(os.path.realpath(source)) in (target, *target.parents):
        raise ValueError(
            f"output {output} lies within source {source}, all of which is read: give an output outside of it"
        )
    return Preprocessor(partial(_open, columns))(source, output, **options)


def schema_of(columns: EventColumns, made_with: EventColumns, timestamps_per_second: int | None) -> SequenceSchema:
    """The schema of an own data set, as a model sees it.

    Args:
        columns: what is asked for.
        made_with: what the files were made with; an action's bit is its place there.
        timestamps_per_second: what a second counts in the files; None where there are no times.

    """
    actions = columns.actions or ()
    return SequenceSchema(
        dataset_name=DATASET_NAME,
        contextual_feature_names=columns.context or (),
        item_feature_name=str(columns.item),
        action_feature_name=ACTIONS if actions else None,
        tasks=tuple(HasAction(1 << (made_with.actions or ()).index(action)) for action in actions),
        timestamps_per_second=timestamps_per_second,
        user_feature_name=str(columns.user),
    )


def columns_of(metadata: SequenceFileMetadata) -> tuple[EventColumns, int | None]:
    """What the files of a data set were made with, and what a second counts in them.

    Raises:
        ValueError: a manifest that does not say so.

    """
    try:
        stated = dict(metadata.options["columns"])
        columns = dacite.from_dict(EventColumns, stated, dacite.Config(strict=True, cast=[tuple]))
        per_second = metadata.options["timestamps_per_second"]
        if not (columns.user and columns.item):
            raise ValueError("no column of users or of items")
        if not (per_second is None or (isinstance(per_second, int) and per_second > 0)):
            raise ValueError(f"timestamps_per_second is {per_second!r}")
    except (ValueError, KeyError, TypeError, dacite.DaciteError) as error:
        raise ValueError(
            f"options of the manifest are damaged ({' '.join(str(error).split())}); preprocess the data again"
        ) from error
    return columns, per_second


def _open(columns: EventColumns, source: str | Path, show_progress: bool) -> OpenedArchive:
    files = EventFiles(Path(source), columns)
    schema = dataclasses.replace(schema_of(columns, columns, files.timestamps_per_second), action_feature_name=ACTIONS)

    def read(folder: Path, on_bytes: Callable[[int], object]) -> SequenceSource:
        vocabularies = _Vocabularies.collect(files, columns, on_bytes)
        partitions = UserPartitions(folder, partitions_for(vocabularies.num_events))
        latest = _LatestContext(len(vocabularies.users), list(vocabularies.context))
        for batch in files.batches(on_bytes, rows=vocabularies.rows_at_once):
            users = vocabularies.users.ids(batch.users)
            items = vocabularies.items.ids(batch.items)
            owners = users if batch.lengths is None else np.repeat(users, batch.lengths)
            partitions.add(owners, items, batch.actions, batch.times)
            latest.update(
                users, batch, {name: own.ids(batch.context[name]) for name, own in vocabularies.context.items()}
            )
        context = {name: own.values for name, own in vocabularies.context.items()}
        return SequenceSource(
            interactions=partitions,
            users=UserTable(
                np.arange(len(vocabularies.users), dtype=np.int32),
                latest.ids,
                context,
                raw_ids=vocabularies.users.values,
                split_keys=vocabularies.users.split_keys(),
            ),
            items=IdMap(np.arange(len(vocabularies.items), dtype=np.int32)),
            raw_items=vocabularies.items.values,
            action_vocabulary_size=1 << len(columns.actions or ()),
            generated=False,
            sha256="",
            options={
                "columns": dataclasses.asdict(columns),
                "timestamps_per_second": files.timestamps_per_second,
            },
        )

    return OpenedArchive(schema, 2 * files.num_bytes, read)


@dataclass(frozen=True)
class _Vocabularies:
    """What the first pass finds."""

    users: Vocabulary
    items: Vocabulary
    context: Mapping[str, Vocabulary]
    num_events: int

    @classmethod
    def collect(cls, files: EventFiles, columns: EventColumns, on_bytes: Callable[[int], object]) -> _Vocabularies:
        """Read all files once."""
        users, items = (Vocabulary(f"column {name!r} of {files.source}") for name in (columns.user, columns.item))
        # The users are a context too if they are named as one; the writer has their column already.
        names = [name for name in columns.context or () if name != columns.user]
        context = {name: Vocabulary(f"column {name!r} of {files.source}") for name in names}
        num_events = 0
        for batch in files.batches(on_bytes, only_ids=True):
            users.add(batch.users)
            items.add(batch.items)
            num_events += len(batch.items)
            for name, own in context.items():
                own.add(batch.context[name])
        for own in (users, items, *context.values()):
            own.finish()
        for name, number in (("users", len(users)), ("items", len(items))):
            if not number:
                raise ValueError(f"{files.source} has no {name} in any row; a data set has some: give other files")
            if number >= 2**31:
                raise ValueError(f"{files.source} has {number:,} {name}; ids have 31 bits: keep fewer of them")
        return cls(users, items, context, num_events)

    @property
    def rows_at_once(self) -> int:
        """So many that looking them up takes as long as making the tables for it."""
        return max([1 << 16, *(len(own) for own in (self.users, self.items, *self.context.values()) if own.is_text)])


class _LatestContext:
    """The context of every user's latest event; of equal times, that of the later row."""

    def __init__(self, num_users: int, names: list[str]) -> None:
        self.ids = {name: np.zeros(num_users, np.int32) for name in names}
        self._times = np.full(num_users, np.iinfo(np.int64).min) if names else np.empty(0, np.int64)

    def update(self, users: np.ndarray, batch: EventBatch, ids: Mapping[str, np.ndarray]) -> None:
        """Take the rows of a batch: int32 `(num_rows,)` users, and the ids of their context."""
        if not self.ids:
            return
        times = batch.row_times()
        order = np.lexsort((times, users))  # stable
        last = order[np.append(users[order][1:] != users[order][:-1], True)] if len(order) else order
        last = last[times[last] >= self._times[users[last]]]
        self._times[users[last]] = times[last]
        for name, own in ids.items():
            self.ids[name][users[last]] = own[last]
