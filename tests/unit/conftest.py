"""Command lines that are run, their printed text, JSON and one-line errors; and a generated data set."""

import json
from unittest import mock

import pytest

from benchmarks.raw_data.movielens import generate_movielens
from commons.cli.main import main
from commons.datasets.public.movielens import preprocess_movielens
from commons.datasets.sequences import writer as sequence_writer


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with nothing in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def told(capsys):
    """What a command prints."""

    def run(*arguments, status=0):
        assert main([*arguments]) == status, capsys.readouterr().err
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.fixture
def asked(told):
    """What a command says in JSON."""
    return lambda *arguments: json.loads(told(*arguments, "--json"))


@pytest.fixture
def mistake(capsys):
    """The one line that says why a command is refused."""

    def run(*arguments):
        assert main([*arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("evenrank: ") and printed.err.count("\n") == 1
        return printed.err

    return run


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    """Folder with the shards of 150 generated users in row groups of at most 16, with several shards of each split."""
    folder = tmp_path_factory.mktemp("generated")
    generate_movielens(folder / "ml-1m.zip", num_users=150, seed=2)
    with (
        mock.patch.object(sequence_writer, "_MOST_USERS_PER_GROUP", 16),
        mock.patch.object(sequence_writer, "_INTERACTIONS_PER_SHARD", 4_000),
    ):
        path = preprocess_movielens(folder / "ml-1m.zip", folder, test_fraction=0.2)
    assert all(len(list(path.glob(f"{split}-*.parquet"))) > 1 for split in ("train", "test"))
    return folder
