"""The manifest of a preprocessed data set: what a reader needs before it opens a shard."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dacite

FORMAT_VERSION = 3
# Readers of a folder of parquet files skip names that begin with an underscore.
MANIFEST = "_manifest.json"
VOCABULARIES = "_vocabularies"
# Column of the items' times, in the schema's unit; also the key of the times in a batch, in seconds.
TIMESTAMP = "timestamp"


@dataclass(frozen=True)
class Shard:
    """One parquet file."""

    file: str  # file name
    row_groups: list[int]  # number of rows of each row group
    num_interactions: int  # number of items of all rows

    def __post_init__(self) -> None:
        if self.file in ("", "..") or Path(self.file).name != self.file or "\x00" in self.file:
            raise ValueError(f"shard {self.file!r} is not a file name in the folder of the manifest")


@dataclass(frozen=True)
class SequenceFileMetadata:
    """The manifest of a data set."""

    dataset_name: str  # name of the data set, such as "ml-1m"
    generated: bool  # whether the data are generated
    num_users: int  # number of rows
    num_interactions: int  # number of items of all rows
    min_length: int  # items of the shortest row
    max_length: int  # items of the longest row
    splits: dict[str, int]  # number of rows of each split, in the order of their shards
    vocabulary_sizes: dict[str, int]  # for each feature, the number of ids: ids lie in `[0, size)`
    columns: dict[str, str] = field(default_factory=dict)  # type of each column, by its name
    # For each feature with raw values, a digest of them in the order of their ids: equal ids of equal values.
    vocabulary_digests: dict[str, str] = field(default_factory=dict)
    # Number of rows by number of items: the key "20" counts rows with at least 20 items and fewer than the next key.
    length_histogram: dict[str, int] = field(default_factory=dict)
    # SHA-256 of the archive in hex; for a folder, of the lines that `sha256sum` prints for its files.
    source_sha256: str = ""
    shards: list[Shard] = field(default_factory=list)  # the parquet files, in the order of their rows
    options: dict[str, Any] = field(default_factory=dict)  # settings of the preprocessor
    format_version: int = FORMAT_VERSION  # version of the files' format

    @property
    def mean_length(self) -> float:
        """Items per row; 0.0 without rows."""
        return self.num_interactions / self.num_users if self.num_users else 0.0

    def row_order(self, user_feature_name: str) -> dict[str, Any]:
        """What determines the user of every row of a split, JSON-ready."""
        return {
            "users": self.vocabulary_digests.get(user_feature_name),
            "test_fraction": self.options.get("test_fraction"),
            "split_seed": self.options.get("seed"),
        }

    def row_contents(self) -> dict[str, Any]:
        """How much the rows contain, JSON-ready: another export of the same users and items has another number."""
        return {"num_users": self.num_users, "num_interactions": self.num_interactions}

    def save(self, folder: Path) -> None:
        """Write the manifest into a folder."""
        (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def load_metadata(folder: Path, dataset_name: str) -> SequenceFileMetadata:
    """Read the manifest of a data set; ValueError if it is damaged, or of another version or data set."""
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_bytes())
        version = fields["format_version"]
        if version == FORMAT_VERSION:
            metadata = dacite.from_dict(SequenceFileMetadata, fields, dacite.Config(strict=True))
            _require_consistent(metadata)
    except (ValueError, KeyError, TypeError, RecursionError, dacite.DaciteError) as error:
        raise ValueError(f"{path} is damaged ({' '.join(str(error).split())}); preprocess the data again") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version!r}, this version reads {FORMAT_VERSION}: preprocess the data again"
        )
    if metadata.dataset_name != dataset_name:
        raise ValueError(
            f"{folder} contains {metadata.dataset_name!r}, dataset_name is {dataset_name!r}; they must agree: correct "
            "one of them"
        )
    return metadata


def _require_consistent(metadata: SequenceFileMetadata) -> None:
    """Raise ValueError unless all counts are consistent."""
    row_groups = [rows for shard in metadata.shards for rows in shard.row_groups]
    if min([0, *row_groups, *metadata.splits.values(), *metadata.vocabulary_sizes.values()]) < 0:
        raise ValueError("a count is negative")
    rows = {"shards": sum(row_groups), "splits": sum(metadata.splits.values()), "num_users": metadata.num_users}
    if len(set(rows.values())) > 1:
        raise ValueError(f"rows differ: {', '.join(f'{name} {number}' for name, number in rows.items())}")
