"""Data that several files train on."""

from __future__ import annotations

import pytest

from benchmarks.raw_data.movielens import generate_movielens
from commons.datasets.public.movielens import preprocess_movielens


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of MovieLens-1M as generated, of 70 users, 59 of which are for training."""
    folder = tmp_path_factory.mktemp("data")
    archive = generate_movielens(folder / "ml-1m", num_users=70, seed=3)
    return str(preprocess_movielens(archive.path, folder / "out", test_fraction=0.1, seed=0))
