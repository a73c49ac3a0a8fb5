"""Tests with libraries that evenrank works beside and does not need; `make test-extras` installs them.

A module says which extra of pyproject.toml it needs: `pytestmark = pytest.mark.extra("ray")`. It imports the
library inside its tests, because they are collected, and skipped, where the library is missing too.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs.programs import TWO_RANKS, run_program

# Programs of ranks, which import the library at once.
collect_ignore = ["accelerated_rows.py", "balanced_trainer.py", "balanced_lightning.py"]


def answers_of_ranks(module: str, folder: Path) -> list[Any]:
    """Run a program of tests/extras on two ranks; what each has written."""
    done = run_program(
        *TWO_RANKS,
        *("-m", f"tests.extras.{module}", folder),
        env={"ACCELERATE_USE_CPU": "true"},  # Accelerate's own; else one process without a GPU
        timeout=360,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("extra"):
            (name,) = mark.args
            if find_spec(name) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs {name}: make test-extras"))
