"""The manifest of a preprocessed data set: what a reader has to know before it opens a shard."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dacite

FORMAT_VERSION = 2
# Readers of a folder of parquet files pass over names that begin with an underscore.
MANIFEST = "_manifest.json"
VOCABULARIES = "_vocabularies"
# Column of the items' times, in a unit that the schema tells; also the key of the times in a batch, in seconds.
TIMESTAMP = "timestamp"


@dataclass(frozen=True)
class Shard:
    """One parquet file."""

    file: str  # its name
    row_groups: list[int]  # rows of each of its row groups
    num_interactions: int  # items of all rows

    def __post_init__(self) -> None:
        if self.file in ("", "..") or Path(self.file).name != self.file or "\x00" in self.file:
            raise ValueError(f"shard {self.file!r} is no name of a file in the folder of the manifest")


@dataclass(frozen=True)
class SequenceFileMetadata:
    """What the manifest of a data set says."""

    dataset_name: str  # name of the data set, such as "ml-1m"
    generated: bool  # the data come from a generator and not from users
    num_users: int  # rows
    num_interactions: int  # items of all rows
    min_length: int  # items of the shortest row
    max_length: int  # items of the longest row
    splits: dict[str, int]  # rows of each split, in the order in which their shards are listed
    vocabulary_sizes: dict[str, int]  # for each feature, the number of ids: ids lie in `[0, size)`
    columns: dict[str, str] = field(default_factory=dict)  # type of each column, by its name
    # How many rows have how many items: the key "20" counts rows of 20 up to the next key's items.
    length_histogram: dict[str, int] = field(default_factory=dict)
    # Checksum of the archive as `sha256sum` prints it; of a folder, that of the lines which it prints for the files
    # read.
    source_sha256: str = ""
    shards: list[Shard] = field(default_factory=list)  # the parquet files, rows of one after the rows of the other
    options: dict[str, Any] = field(default_factory=dict)  # settings of the preprocessor
    format_version: int = FORMAT_VERSION  # of this layout

    @property
    def mean_length(self) -> float:
        """Items per row; 0.0 without rows."""
        return self.num_interactions / self.num_users if self.num_users else 0.0

    def save(self, folder: Path) -> None:
        """Write the manifest into a folder."""
        (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def load_metadata(folder: Path, dataset_name: str) -> SequenceFileMetadata:
    """Read the manifest of a data set; ValueError for a damaged one, or one of another version or data set."""
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
            f"{folder} holds {metadata.dataset_name!r}, dataset_name is {dataset_name!r}; they must agree: correct one"
        )
    return metadata


def _require_consistent(metadata: SequenceFileMetadata) -> None:
    """Raise ValueError unless counts fit together."""
    row_groups = [rows for shard in metadata.shards for rows in shard.row_groups]
    if min([0, *row_groups, *metadata.splits.values(), *metadata.vocabulary_sizes.values()]) < 0:
        raise ValueError("a count is negative")
    rows = {"shards": sum(row_groups), "splits": sum(metadata.splits.values()), "num_users": metadata.num_users}
    if len(set(rows.values())) > 1:
        raise ValueError(f"rows differ: {', '.join(f'{name} {number}' for name, number in rows.items())}")
