"""Parquet files of a user's own: from an event log, or from a table of users with lists, to the columnar files.

A row is an event, or a user with lists of items, times and actions; a user may have several such rows. Ids are the
ranks of the raw values among the sorted ones, whatever those are. Events are kept as they are, equal ones too, sorted
by time; of a context that changes, a user has the value of the latest event.

Memory holds the different users, items and values of context, and a batch.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

import dacite
import numpy as np

from commons.datasets.sequences.event_columns import ACTIONS, EventColumns
from commons.datasets.sequences.event_files import EventFiles
from commons.datasets.sequences.event_store import EventStore, plain_array
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.metadata import SequenceFileMetadata
from commons.datasets.sequences.preprocessing import Preprocessor
from commons.datasets.sequences.writer import SequenceSource

DATASET_NAME = "parquet"


def preprocess_parquet(columns: EventColumns, source: str | Path, output: str | Path, **options: Any) -> Path:
    """Write the columnar files of an own data set; further arguments and errors as those of `Preprocessor`.

    Args:
        columns: which column plays which part.
        source: a parquet file, or a folder of them, however deep.
        output: folder for `parquet.parquet`, made if missing.
        options: `test_fraction`, `seed` and `show_progress`.

    Raises:
        ValueError: no parquet file, a column that is missing or of another type, a null among users, items, times or
            actions, lists of different lengths, or files without rows; an output within the source.

    """
    # Not Path.resolve(), which raises RuntimeError for a loop of links.
    target = Path(os.path.realpath(Path(output) / f"{DATASET_NAME}.parquet"))
    if Path(os.path.realpath(source)) in (target, *target.parents):
        raise ValueError(
            f"output {output} lies within source {source}, all of which is read: give an output outside of it"
        )
    return Preprocessor(DATASET_NAME, partial(_read, columns))(source, output, **options)


def schema_of(columns: EventColumns, made_with: EventColumns, timestamps_per_second: int | None) -> SequenceSchema:
    """The schema of an own data set, as a model sees it.

    `columns` are those given, `made_with` what the files were made with: an action's bit is its place there.
    """
    actions = columns.actions or ()
    return SequenceSchema(
        dataset_name=DATASET_NAME,
        contextual_feature_names=columns.context or (),
        item_feature_name=str(columns.item),
        action_feature_name=ACTIONS if actions else None,
        tasks=tuple(partial(np.bitwise_and, 1 << (made_with.actions or ()).index(action)) for action in actions),
        timestamps_per_second=timestamps_per_second,
        user_feature_name=str(columns.user),
    )


def columns_of(metadata: SequenceFileMetadata) -> tuple[EventColumns, int | None]:
    """What the files of a data set were made with, and what a second counts in them; ValueError where damaged."""
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


def _read(columns: EventColumns, source: Path, store: EventStore) -> SequenceSource:
    files = EventFiles(source, columns)
    files.add_to(store)
    users, items = (store.values(part).drop_null() for part in ("user", "item"))
    for name, found in (("users", users), ("items", items)):
        if not len(found):
            raise ValueError(f"{source} has no {name} in any row; a data set has some: give other files")
        if len(found) >= 2**31:
            raise ValueError(f"{source} has {len(found):,} {name}; ids have 31 bits: keep fewer of them")
    latest = store.latest(list(files.context.values())) if files.context else {}
    schema = schema_of(columns, columns, files.timestamps_per_second)
    return SequenceSource(
        schema=dataclasses.replace(schema, action_feature_name=ACTIONS),
        users=users,
        context={name: plain_array(latest[key]) for name, key in files.context.items()},
        vocabularies={name: store.values(key) for name, key in files.context.items()},
        items=items,
        action_vocabulary_size=1 << len(columns.actions or ()),
        generated=False,
        options={"columns": dataclasses.asdict(columns), "timestamps_per_second": files.timestamps_per_second},
    )
