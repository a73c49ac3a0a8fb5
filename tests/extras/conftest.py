"""Tests with libraries that evenrank works beside and does not need; `make test-extras` installs them.

A module says which extra of pyproject.toml it needs: `pytestmark = pytest.mark.extra("ray")`. It imports the
library inside its tests, because they are collected, and skipped, where the library is missing too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Programs of ranks, which import the library at once.
collect_ignore = ["accelerated_rows.py", "balanced_trainer.py", "balanced_lightning.py"]


def answers_of_ranks(module: str, folder: Path, ranks: int = 2) -> list[Any]:
    """Run a program of tests/extras under torchrun; what each rank has written."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*torchrun, "-m", f"tests.extras.{module}", str(folder)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},  # Accelerate's own; else one process without a GPU
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("extra"):
            (name,) = mark.args
            if find_spec(name) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs {name}: make test-extras"))
