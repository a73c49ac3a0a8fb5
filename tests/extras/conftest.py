"""Tests with libraries that evenrank works beside and does not need; `make test-extras` installs them.

A module says which extra of pyproject.toml it needs: `pytestmark = pytest.mark.extra("ray")`. It imports the
library inside its tests, because they are collected, and skipped, where the library is missing too.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# Programs of ranks, which import the library at once.
collect_ignore = ["accelerated_rows.py", "balanced_trainer.py", "balanced_lightning.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("extra"):
            (name,) = mark.args
            if find_spec(name) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs {name}: make test-extras"))
