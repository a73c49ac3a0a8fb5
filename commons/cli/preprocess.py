"""`evenrank preprocess`: from a raw archive to the columnar files that training reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from commons.cli.console import print_summary
from commons.datasets.public_datasets import PUBLIC_DATASETS
from commons.datasets.sequence_file import SequenceFile


@dataclass
class Preprocess:
    """Turn a raw archive into the columnar files that training reads.

    The data set becomes the folder <output>/<name>.parquet, which appears when it is complete.

    For example:
      evenrank preprocess ml-1m --source ml-1m.zip --output data
      evenrank preprocess ml-20m --source unpacked/ml-20m --output data --test-fraction 0.2
      evenrank preprocess kuairand-27k --source KuaiRand-27K.tar.gz --output data
    """

    dataset_name: tyro.conf.Positional[Literal["ml-1m", "ml-20m", "kuairand-pure", "kuairand-1k", "kuairand-27k"]]
    """The data set."""

    source: Path
    """The archive as published (ml-1m.zip, KuaiRand-1K.tar.gz), or its unpacked folder."""

    output: Path
    """Folder for the data set, made if missing."""

    test_fraction: float = 0.1
    """Expected part of the users in the test split."""

    seed: int = 0
    """Seed of the split."""

    def run(self) -> None:
        """Preprocess, then print what was written."""
        start = time.monotonic()
        path = PUBLIC_DATASETS[self.dataset_name].preprocess(
            self.source, self.output, test_fraction=self.test_fraction, seed=self.seed, show_progress=True
        )
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
