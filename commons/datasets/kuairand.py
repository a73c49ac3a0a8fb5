"""KuaiRand-Pure, KuaiRand-1K and KuaiRand-27K (Gao et al., CIKM 2022): from the raw archives to the columnar files.

One row per user of `user_features_*.csv`, with or without interactions: the user's features, `video_id` (list of ids),
`action_weights` (list), `timestamp` (list, milliseconds), oldest first, and `split`. The interactions are those of the
standard logs; the 0.4 % that were exposed at random have a log of their own, which is not read. The items are the
videos of the interactions.

An action weight is the sum of the weights of the feedback that a user gave, 0 to 255: `FEEDBACK_WEIGHTS`. The tasks are
these eight in order: the first is a click.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from commons.datasets.csv_member import CsvColumn, CsvLayout, read_csv_member
from commons.datasets.preprocessing import OpenedArchive, Preprocessor
from commons.datasets.raw_archive import GENERATED_MARK, RawArchive, open_archive
from commons.datasets.sequence_file import HasAction, SequenceSchema
from commons.datasets.sequence_writer import IdMap, SeenIds, SequenceSource, UserTable, ids_of_values
from commons.datasets.user_partitions import UserPartitions, partitions_for

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
_CONTEXTUAL = (
    "user_id",
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)
_LARGEST_ID = 99_999_999
_ID_RULE = f"a number of 0 to {_LARGEST_ID:,}"
_LARGEST_MS = 10**14
_LOG = CsvLayout(
    "a KuaiRand log",
    (
        CsvColumn("user_id", "int32", 0, _LARGEST_ID, _ID_RULE),
        CsvColumn("video_id", "int32", 0, _LARGEST_ID, _ID_RULE),
        CsvColumn("time_ms", "int64", 0, _LARGEST_MS, "a number of milliseconds since 1970"),
        *(CsvColumn(name, "int32", 0, 1, "0 or 1") for name in FEEDBACK_WEIGHTS),
    ),
    may_be_empty=True,  # one of a few users may be
)
_USERS = CsvLayout("KuaiRand's user features", (_LOG.columns[0], *(CsvColumn(name, "text") for name in USER_FEATURES)))
_BYTES_PER_ROW = 70


@dataclass(frozen=True)
class KuaiRandVersion:
    """One of the three data sets.

    Attributes:
        name: of the data set.
        folder: of the archive.
        suffix: of its file names.
        log_parts: files that each period's log comes in.

    """

    name: str
    folder: str
    suffix: str
    log_parts: int = 1

    @property
    def log_names(self) -> list[str]:
        """The standard logs, in the order of time."""
        parts = [f"_part{part}" for part in range(1, self.log_parts + 1)] if self.log_parts > 1 else [""]
        return [
            f"log_standard_{period}_{self.suffix}{part}.csv"
            for period in ("4_08_to_4_21", "4_22_to_5_08")
            for part in parts
        ]

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
            tasks=tuple(HasAction(weight) for weight in FEEDBACK_WEIGHTS.values()),
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
    return Preprocessor(partial(_open, version))(source, output, **options)


def _open(version: KuaiRandVersion, source: str | Path, show_progress: bool) -> OpenedArchive:
    name = f"{version.folder}.tar.gz"
    archive = open_archive(
        source,
        [f"{version.folder}/data", "data"],
        f"the source is {name} as published, or its unpacked folder: correct the path",
        show_progress=show_progress,
    )
    archive.require(
        [*version.log_names, version.user_file], version.folder, f"give the path of {name} or of its unpacked folder"
    )

    num_bytes = sum(archive.sizes[log] for log in version.log_names)

    def read(folder: Path, on_bytes: Callable[[int], object]) -> SequenceSource:
        users = _read_users(archive, version)
        partitions = UserPartitions(folder, partitions_for(num_bytes / _BYTES_PER_ROW))
        known, videos = IdMap(users.user_ids), SeenIds()
        for log, stream in archive.streams(version.log_names):
            for line, columns in read_csv_member(f"{archive.path}: {log}", stream, _LOG, on_bytes):
                _check_users(archive, log, line, columns["user_id"], known, version)
                weights = np.zeros(len(columns["user_id"]), np.int16)
                for feedback, weight in FEEDBACK_WEIGHTS.items():
                    weights += columns[feedback].astype(np.int16) * np.int16(weight)
                videos.add(columns["video_id"])
                partitions.add(columns["user_id"], columns["video_id"], weights, columns["time_ms"])
        if not partitions.num_rows:
            raise ValueError(f"{archive.path} has no interactions in {', '.join(version.log_names)}: download it again")
        return SequenceSource(
            interactions=partitions,
            users=users,
            items=IdMap(videos.values()),
            action_vocabulary_size=2 * max(FEEDBACK_WEIGHTS.values()),
            generated=archive.readme().startswith(GENERATED_MARK.encode()),
            sha256=archive.checksum([*version.log_names, version.user_file]),
        )

    return OpenedArchive(version.schema, num_bytes, read)


def _read_users(archive: RawArchive, version: KuaiRandVersion) -> UserTable:
    where = f"{archive.path}: {version.user_file}"
    stream = io.BytesIO(archive.read(version.user_file))
    columns: dict[str, list[Any]] = {name: [] for name in ("user_id", *USER_FEATURES)}
    for _, batch in read_csv_member(where, stream, _USERS, lambda count: None):
        for name, values in columns.items():
            values.extend(batch[name])
    user_ids = np.array(columns.pop("user_id"), dtype=np.int32)
    first = np.unique(user_ids, return_index=True)[1]
    if len(first) < len(user_ids):
        again = np.setdiff1d(np.arange(len(user_ids)), first)[0]
        raise ValueError(
            f"{where} line {again + 2} has user_id {user_ids[again]} again; every user has one line: remove the line"
        )
    order = np.argsort(user_ids)
    # A missing value is a value of its own, the empty text.
    encoded = {name: ids_of_values(values) for name, values in columns.items()}
    return UserTable(
        user_ids[order],
        {name: ids[order] for name, (ids, _) in encoded.items()},
        {name: values for name, (_, values) in encoded.items()},
    )


def _check_users(
    archive: RawArchive, log: str, line: int, user_ids: np.ndarray, known: IdMap, version: KuaiRandVersion
) -> None:
    unknown = known.ids(user_ids) < 0
    if unknown.any():
        index = int(unknown.argmax())
        raise ValueError(
            f"{archive.path}: {log} line {line + index} has user_id {user_ids[index]}, which {version.user_file} does "
            "not list; both files come from one archive: download it again"
        )
