"""`evenrank preprocess`: from a raw archive to the file that training reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from commons.cli.console import print_summary
from commons.datasets.movielens import preprocess_movielens
from commons.datasets.sequence_file import SequenceFile

_PREPROCESSORS: dict[str, Callable[..., Path]] = {"ml-1m": preprocess_movielens}


@dataclass
class Preprocess:
    """Turn a raw archive into the columnar file that training reads.

    For example:
      evenrank preprocess ml-1m --source ml-1m.zip --output data
      evenrank preprocess ml-1m --source unpacked/ml-1m --output data --test-fraction 0.2
    """

    dataset_name: tyro.conf.Positional[Literal["ml-1m"]]
    """The data set."""

    source: Path
    """The archive as published (ml-1m.zip), or its unpacked folder."""

    output: Path
    """Folder for the file, made if missing."""

    test_fraction: float = 0.1
    """Expected part of the users in the test split."""

    seed: int = 0
    """Seed of the split."""

    def run(self) -> None:
        """Preprocess, then print what was written."""
        path = _PREPROCESSORS[self.dataset_name](
            self.source, self.output, test_fraction=self.test_fraction, seed=self.seed
        )
        metadata = SequenceFile(path, self.dataset_name, []).metadata
        splits = ", ".join(f"{name} {num_users:,}" for name, num_users in metadata.splits.items())
        print_summary(
            f"{self.dataset_name}{' (generated)' if metadata.generated else ''}",
            {
                "users": f"{metadata.num_users:,} ({splits})",
                "ratings": f"{metadata.num_interactions:,}",
                "length": f"mean {metadata.mean_length:.1f}, min {metadata.min_length:,}, max {metadata.max_length:,}",
                "file": str(path),
            },
        )
