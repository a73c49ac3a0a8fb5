"""`evenrank preprocess`: turns a raw archive into the columnar files that training reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from commons.console import print_summary
from commons.datasets.public.registry import PUBLIC_DATASETS
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.file import SequenceFile
from commons.datasets.sequences.own_parquet import DATASET_NAME, preprocess_parquet

# The names that the parser accepts; type checkers cannot read a Literal that is made at run time.
if TYPE_CHECKING:
    DatasetName = str
else:
    DatasetName = Literal[(*PUBLIC_DATASETS, DATASET_NAME)]


@dataclass
class Preprocess:
    """Turn a raw archive, or your own parquet files, into the columnar files that training reads.

    The data set is written to the folder <output>/<name>.parquet, which appears only when it is complete.

    For example:
      evenrank preprocess ml-1m --source ml-1m.zip --output data
      evenrank preprocess ml-20m --source unpacked/ml-20m --output data --test-fraction 0.2
      evenrank preprocess kuairand-27k --source KuaiRand-27K.tar.gz --output data
      evenrank preprocess parquet --source events --output data --columns.user uid --columns.item iid --columns.time ts

    An archive may expand to 100 times its size, or to 64 MiB if that is more. If you trust an archive that expands
    more, unpack it and pass the folder. A line may have at most 1 MiB, and a file of users or movies 256 MiB.
    """

    # The data set; parquet for your own files, with one row per event, or one row per user with lists.
    dataset_name: tyro.conf.Positional[DatasetName]
    # The archive as published (ml-1m.zip) or its unpacked folder; for parquet, a file or a folder of files.
    source: Path
    output: Path  # folder for the data set, created if missing
    test_fraction: float = 0.1  # expected fraction of users in the test split
    seed: int = 0  # seed of the split
    # For your own files: the columns of users, items, times, …
    columns: EventColumns = field(default_factory=EventColumns)
    # A training config whose [dataset.columns] names the columns; give it instead of --columns.
    config: Path | None = None

    def run(self) -> None:
        """Preprocess, then print a summary."""
        options = {"test_fraction": self.test_fraction, "seed": self.seed, "show_progress": True}
        preprocess, start = self._preprocessor(), time.monotonic()
        path = preprocess(self.source, self.output, **options)
        seconds = time.monotonic() - start
        metadata = SequenceFile(path, self.dataset_name, []).metadata
        splits = ", ".join(f"{name} {num_users:,}" for name, num_users in metadata.splits.items())
        print_summary(
            f"{self.dataset_name}{' (generated)' if metadata.generated else ''}",
            {
                "users": f"{metadata.num_users:,} ({splits})",
                "interactions": f"{metadata.num_interactions:,}",
                "length": f"mean {metadata.mean_length:.1f}, min {metadata.min_length:,}, max {metadata.max_length:,}",
                "shards": f"{len(metadata.shards)}",
                "time": f"{seconds:.1f} s, {metadata.num_interactions / seconds:,.0f} interactions/s",
                "folder": str(path),
            },
        )

    def _preprocessor(self) -> Callable[..., Path]:
        if self.dataset_name == DATASET_NAME:
            return partial(preprocess_parquet, self._columns())
        if self.columns.is_given or self.config is not None:
            raise ValueError(
                f"columns or a config are given for {self.dataset_name}, whose columns are known; they are for your "
                "own files: remove them, or preprocess 'parquet'"
            )
        return PUBLIC_DATASETS[self.dataset_name].preprocess

    def _columns(self) -> EventColumns:
        if self.config is None:
            return self.columns
        if self.columns.is_given:
            raise ValueError(
                f"columns are given by flags and by config {self.config}; one of them is enough: remove the other"
            )
        # Imported here, because reading a config imports torch, and flags do not need it.
        from commons.trainer.config.args import DatasetArgs
        from commons.trainer.config.load import load_config_file

        return load_config_file(DatasetArgs, self.config, section="dataset").columns
