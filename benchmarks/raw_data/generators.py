"""The writers of raw archives by the name of the data set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.raw_data.archive import GeneratedArchive
from benchmarks.raw_data.kuairand import NUM_USERS as KUAIRAND_USERS
from benchmarks.raw_data.kuairand import generate_kuairand
from benchmarks.raw_data.movielens_1m import generate_movielens
from benchmarks.raw_data.movielens_20m import NUM_USERS as MOVIELENS_20M_USERS
from benchmarks.raw_data.movielens_20m import generate_movielens_20m
from commons.datasets.generated_ratings import NUM_USERS as MOVIELENS_1M_USERS
from commons.datasets.kuairand import VERSIONS

# Each writes an archive at (output), with `num_users`, `seed` and `show_progress`; and the published number of users.
GENERATORS: dict[str, tuple[Callable[..., GeneratedArchive], int]] = {
    "ml-1m": (generate_movielens, MOVIELENS_1M_USERS),
    "ml-20m": (generate_movielens_20m, MOVIELENS_20M_USERS),
    **{name: (partial(generate_kuairand, version), KUAIRAND_USERS[name]) for name, version in VERSIONS.items()},
}
