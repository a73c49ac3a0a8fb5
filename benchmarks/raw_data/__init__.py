"""Generated archives in the raw formats of the public data sets, for tests and benchmarks.

Lengths follow the published statistics; nothing of the published data is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.raw_data.archive import GeneratedArchive
from benchmarks.raw_data.kuairand import generate_kuairand
from benchmarks.raw_data.movielens import generate_movielens, generate_movielens_20m
from commons.datasets.public.kuairand import VERSIONS

# By data set: each writes an archive at (output), with `num_users`, `seed` and `show_progress`.
GENERATORS: dict[str, Callable[..., GeneratedArchive]] = {
    "ml-1m": generate_movielens,
    "ml-20m": generate_movielens_20m,
    **{name: partial(generate_kuairand, version) for name, version in VERSIONS.items()},
}
