"""The public data sets by name: their schemas and preprocessors.

To add one: write its preprocessor (see preprocessing) and add it to `PUBLIC_DATASETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from commons.datasets.public.kuairand import VERSIONS, preprocess_kuairand
from commons.datasets.public.movielens import SCHEMA, SCHEMA_20M, preprocess_movielens, preprocess_movielens_20m
from commons.datasets.sequences.file import SequenceSchema


@dataclass(frozen=True)
class PublicDataset:
    """What is known of a public data set."""

    schema: SequenceSchema  # of its columnar files
    archive_name: str  # of the archive as published
    # From (source, output), with `test_fraction`, `seed` and `show_progress`, to the folder of the files.
    preprocess: Callable[..., Path]


PUBLIC_DATASETS: dict[str, PublicDataset] = {
    "ml-1m": PublicDataset(SCHEMA, "ml-1m.zip", preprocess_movielens),
    "ml-20m": PublicDataset(SCHEMA_20M, "ml-20m.zip", preprocess_movielens_20m),
    **{
        name: PublicDataset(version.schema, f"{version.folder}.tar.gz", partial(preprocess_kuairand, version))
        for name, version in VERSIONS.items()
    },
}
