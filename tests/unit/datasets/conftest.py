"""Generated users in several shards, for the tests of data sets and loaders."""

from unittest import mock

import pytest

from benchmarks.raw_data.movielens import generate_movielens
from commons.datasets.public.movielens import preprocess_movielens
from commons.datasets.sequences import writer as sequence_writer


@pytest.fixture(scope="package")
def generated(tmp_path_factory):
    """Folder with the shards of 150 generated users in row groups of at most 16: four shards of each split."""
    folder = tmp_path_factory.mktemp("generated")
    generate_movielens(folder / "ml-1m.zip", num_users=150, seed=2)
    with (
        mock.patch.object(sequence_writer, "_MOST_USERS_PER_GROUP", 16),
        mock.patch.object(sequence_writer, "_INTERACTIONS_PER_SHARD", 12_000),
    ):
        path = preprocess_movielens(folder / "ml-1m.zip", folder, test_fraction=0.2)
    assert len(list(path.glob("*.parquet"))) == 8
    return folder
