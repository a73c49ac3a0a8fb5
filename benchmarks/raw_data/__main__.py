"""Write a generated archive in the raw format of a public data set.

Lengths follow the published statistics; users, items and feedback are drawn at random.

Examples:
    python -m benchmarks.raw_data ml-1m --output ml-1m.zip
    python -m benchmarks.raw_data ml-20m --output small/ml-20m --num-users 500 --seed 7
    python -m benchmarks.raw_data kuairand-pure --output KuaiRand-Pure.tar.gz
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.raw_data import GENERATORS
from benchmarks.shared.command_line import from_command_line


def main(
    dataset_name: tyro.conf.Positional[Literal["ml-1m", "ml-20m", "kuairand-pure", "kuairand-1k", "kuairand-27k"]],
    output: Path,
    num_users: int | None = None,
    seed: int = 0,
) -> None:
    """Write the archive, and say what it holds.

    Args:
        dataset_name: the data set.
        output: a path that ends in .zip or .tar.gz becomes such a file, any other a folder.
        num_users: users; the published number if not given. KuaiRand-27K then takes 25 GB on disk.
        seed: the same seed gives the same archive.
    """
    options: dict[str, Any] = {} if num_users is None else {"num_users": num_users}
    archive = GENERATORS[dataset_name](output, seed=seed, show_progress=True, **options)
    print(f"{archive.path}: {archive.num_users:,} users, {archive.num_interactions:,} interactions")


if __name__ == "__main__":
    from_command_line(main, __doc__)
