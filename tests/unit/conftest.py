"""Run command lines: their printed text, their JSON, and their one-line errors."""

import json

import pytest

from commons.cli.main import main


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
