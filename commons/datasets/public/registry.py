"""The public data sets by name.

To add one: write its preprocessor (see preprocessing) and add it to `PUBLIC_DATASETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from commons.datasets.public.kuairand import VERSIONS, preprocess_kuairand
from commons.datasets.public.movielens import SCHEMA, SCHEMA_20M, preprocess_movielens, preprocess_movielens_20m
from commons.datasets.sequences.file import SequenceSchema


class PublicDataset(NamedTuple):
    """What is known of a public data set."""

    schema: SequenceSchema  # of its columnar files
    # From (source, output), with `test_fraction`, `seed` and `show_progress`, to the folder of the files.
    preprocess: Callable[..., Path]


PUBLIC_DATASETS: dict[str, PublicDataset] = {
    "ml-1m": PublicDataset(SCHEMA, preprocess_movielens),
    "ml-20m": PublicDataset(SCHEMA_20M, preprocess_movielens_20m),
    **{
        name: PublicDataset(version.schema, partial(preprocess_kuairand, version)) for name, version in VERSIONS.items()
    },
}
