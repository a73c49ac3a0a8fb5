"""`evenrank generate`: an archive in the raw format of a public data set, where that cannot be downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from commons.cli.console import print_summary
from commons.datasets.movielens_generator import GeneratedArchive, generate_movielens

_GENERATORS: dict[str, Callable[..., GeneratedArchive]] = {"ml-1m": generate_movielens}


@dataclass
class Generate:
    """Write a generated archive in the raw format of a public data set.

    Lengths follow the published statistics; users, items and ratings are drawn at random.

    For example:
      evenrank generate ml-1m --output ml-1m.zip
      evenrank generate ml-1m --output small/ml-1m --num-users 500 --seed 7
    """

    dataset_name: tyro.conf.Positional[Literal["ml-1m"]]
    """The data set."""

    output: Path
    """A path that ends in .zip becomes a zip file, any other a folder."""

    num_users: int = 6040
    """Users; the default is the published number."""

    seed: int = 0
    """The same seed gives the same archive."""

    def run(self) -> None:
        """Generate, then print what was written."""
        archive = _GENERATORS[self.dataset_name](
            self.output, num_users=self.num_users, seed=self.seed, show_progress=True
        )
        print_summary(
            f"{self.dataset_name} (generated)",
            {
                "users": f"{archive.num_users:,}",
                "ratings": f"{archive.num_ratings:,}",
                "length": f"mean {archive.mean_length:.1f}, max {archive.max_length:,}",
                "file": str(archive.path),
            },
        )
