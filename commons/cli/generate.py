"""`evenrank generate`: an archive in the raw format of a public data set, where that cannot be downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from commons.console import print_summary
from commons.datasets.public_datasets import PUBLIC_DATASETS


@dataclass
class Generate:
    """Write a generated archive in the raw format of a public data set.

    Lengths follow the published statistics; users, items and feedback are drawn at random.

    For example:
      evenrank generate ml-1m --output ml-1m.zip
      evenrank generate ml-20m --output small/ml-20m --num-users 500 --seed 7
      evenrank generate kuairand-pure --output KuaiRand-Pure.tar.gz
    """

    dataset_name: tyro.conf.Positional[Literal["ml-1m", "ml-20m", "kuairand-pure", "kuairand-1k", "kuairand-27k"]]
    """The data set."""

    output: Path
    """A path that ends in .zip or .tar.gz becomes such a file, any other a folder."""

    num_users: int | None = None
    """Users; the published number if not given. KuaiRand-27K then takes 25 GB on disk; ml-1m 33 kB of memory a user."""

    seed: int = 0
    """The same seed gives the same archive."""

    def run(self) -> None:
        """Generate, then print what was written."""
        dataset = PUBLIC_DATASETS[self.dataset_name]
        num_users = dataset.num_users if self.num_users is None else self.num_users
        archive = dataset.generate(self.output, num_users=num_users, seed=self.seed, show_progress=True)
        print_summary(
            f"{self.dataset_name} (generated)",
            {
                "users": f"{archive.num_users:,}",
                "interactions": f"{archive.num_interactions:,}",
                "length": f"mean {archive.mean_length:.1f}, max {archive.max_length:,}",
                "file": str(archive.path),
            },
        )
