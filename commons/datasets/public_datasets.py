"""The public data sets by name: their schemas, preprocessors and generators.

To add one: write its preprocessor (see preprocessing) and, if it is not freely available, its generator, and add it to
`PUBLIC_DATASETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from commons.datasets.generated_archive import GeneratedArchive
from commons.datasets.kuairand import VERSIONS, preprocess_kuairand
from commons.datasets.kuairand_generator import NUM_USERS as KUAIRAND_USERS
from commons.datasets.kuairand_generator import generate_kuairand
from commons.datasets.movielens import SCHEMA, SCHEMA_20M, preprocess_movielens, preprocess_movielens_20m
from commons.datasets.movielens_20m_generator import NUM_USERS as MOVIELENS_20M_USERS
from commons.datasets.movielens_20m_generator import generate_movielens_20m
from commons.datasets.movielens_generator import NUM_USERS as MOVIELENS_1M_USERS
from commons.datasets.movielens_generator import generate_movielens
from commons.datasets.sequence_file import SequenceSchema


@dataclass(frozen=True)
class PublicDataset:
    """What is known of a public data set.

    Attributes:
        schema: of its columnar files.
        archive_name: of the archive as published.
        num_users: in the published data.
        preprocess: from (source, output), with `test_fraction`, `seed` and `show_progress`, to the folder of the files.
        generate: writes an archive at (output), with `num_users`, `seed` and `show_progress`.

    """

    schema: SequenceSchema
    archive_name: str
    num_users: int
    preprocess: Callable[..., Path]
    generate: Callable[..., GeneratedArchive]


PUBLIC_DATASETS: dict[str, PublicDataset] = {
    "ml-1m": PublicDataset(SCHEMA, "ml-1m.zip", MOVIELENS_1M_USERS, preprocess_movielens, generate_movielens),
    "ml-20m": PublicDataset(
        SCHEMA_20M, "ml-20m.zip", MOVIELENS_20M_USERS, preprocess_movielens_20m, generate_movielens_20m
    ),
    **{
        name: PublicDataset(
            version.schema,
            f"{version.folder}.tar.gz",
            KUAIRAND_USERS[name],
            partial(preprocess_kuairand, version),
            partial(generate_kuairand, version),
        )
        for name, version in VERSIONS.items()
    },
}
