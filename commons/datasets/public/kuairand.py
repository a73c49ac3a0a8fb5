"""KuaiRand-Pure, KuaiRand-1K and KuaiRand-27K (Gao et al., CIKM 2022): from the raw archives to the columnar files.

One row per user of `user_features_*.csv`, with or without interactions: the user's features, `video_id` (list of ids),
`action_weights` (list), `timestamp` (list, milliseconds), oldest first, and `split`. The interactions are those of the
standard logs; the 0.4 % that were exposed at random have a log of their own, which is not read. The items are the
videos of the interactions.

An action weight is the sum of the weights of the feedback that a user gave, 0 to 255: `FEEDBACK_WEIGHTS`. The tasks are
these eight in order: the first is a click.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from commons.datasets.public.raw_files import RawKind, open_raw_files
from commons.datasets.public.raw_tables import ID, Column, Listed, RawTables, TextLayout
from commons.datasets.sequences.event_store import EventStore
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.preprocessing import Preprocessor
from commons.datasets.sequences.writer import SequenceSource

FEEDBACK_WEIGHTS = {
    "is_click": 1,
    "is_like": 2,
    "is_follow": 4,
    "is_comment": 8,
    "is_forward": 16,
    "is_hate": 32,
    "long_view": 64,
    "is_profile_enter": 128,
}
# Columns of user_features_*.csv with few values; the others are counts, which the ranges sum up.
USER_FEATURES = (
    *("user_active_degree", "is_lowactive_period", "is_live_streamer", "is_video_author"),
    *("follow_user_num_range", "fans_user_num_range", "friend_user_num_range", "register_days_range"),
    *(f"onehot_feat{index}" for index in range(18)),
)
# What a model gets unless it asks for others: each is one token in front of the history.
_CONTEXTUAL = ("user_id", "user_active_degree", *USER_FEATURES[4:8])
_USER = Column("user_id", *ID)
_LOG = TextLayout(
    "a KuaiRand log",
    (
        *(_USER, Column("video_id", *ID)),
        Column("time_ms", "BIGINT", r"\d{1,14}", "a number of milliseconds since 1970"),
        *(Column(name, "SMALLINT", "0|1", "0 or 1") for name in FEEDBACK_WEIGHTS),
    ),
    may_be_empty=True,  # one of a few users may be
)
_USERS = TextLayout("KuaiRand's user features", (_USER, *map(Column, USER_FEATURES)))
_ACTION = " + ".join(f"{weight} * {name}" for name, weight in FEEDBACK_WEIGHTS.items())
_EVENT = {"user": "user_id", "item": "video_id", "action": f"({_ACTION})::SMALLINT", "time": "time_ms"}


@dataclass(frozen=True)
class KuaiRandVersion:
    """One of the three data sets."""

    name: str  # of the data set
    folder: str  # of the archive
    suffix: str  # of its file names
    log_parts: int = 1  # files that each period's log comes in

    @property
    def log_names(self) -> tuple[str, ...]:
        """The standard logs, in the order of time."""
        parts = [f"_part{part}" for part in range(1, self.log_parts + 1)] if self.log_parts > 1 else [""]
        return tuple(
            f"log_standard_{period}_{self.suffix}{part}.csv"
            for period in ("4_08_to_4_21", "4_22_to_5_08")
            for part in parts
        )

    @property
    def user_file(self) -> str:
        """The users and their features."""
        return f"user_features_{self.suffix}.csv"

    @property
    def schema(self) -> SequenceSchema:
        """Of the data set."""
        return SequenceSchema(
            dataset_name=self.name,
            contextual_feature_names=_CONTEXTUAL,
            item_feature_name="video_id",
            action_feature_name="action_weights",
            tasks=tuple(partial(np.bitwise_and, weight) for weight in FEEDBACK_WEIGHTS.values()),
            timestamps_per_second=1_000,
        )


VERSIONS = {
    version.name: version
    for version in (
        KuaiRandVersion("kuairand-pure", "KuaiRand-Pure", "pure"),
        KuaiRandVersion("kuairand-1k", "KuaiRand-1K", "1k"),
        KuaiRandVersion("kuairand-27k", "KuaiRand-27K", "27k", log_parts=2),
    )
}


def preprocess_kuairand(version: KuaiRandVersion, source: str | Path, output: str | Path, **options: Any) -> Path:
    """Write the columnar files of a KuaiRand data set; arguments and errors as those of `Preprocessor`."""
    return Preprocessor(version.name, partial(_read, version))(source, output, **options)


def _read(version: KuaiRandVersion, source: Path, store: EventStore) -> SequenceSource:
    names = (*version.log_names, version.user_file)
    kind = RawKind(version.folder, f"{version.folder}.tar.gz", f"{version.folder}/data", names)
    files = open_raw_files(kind, source, store.folder, show_progress=store.show_progress)
    tables = RawTables(files, store)
    users = tables.listing(version.user_file, _USERS)
    listed = {"user": Listed(users["user_id"], "user_id", version.user_file)}
    tables.add_events(version.log_names, _LOG, _EVENT, listed)
    if not store.num_rows:
        raise ValueError(f"{files.source} has no interactions in {', '.join(version.log_names)}: download it again")
    return SequenceSource(
        schema=version.schema,
        users=users["user_id"].combine_chunks(),
        context={name: users[name].combine_chunks() for name in USER_FEATURES},
        items=store.values("item"),
        action_vocabulary_size=2 * max(FEEDBACK_WEIGHTS.values()),
        generated=files.is_generated,
        sha256=files.sha256,
    )
