"""The page of what evenrank works with names the versions that the suite runs with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_requirements import pins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "works_with.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## In the test suite")[1].split("\n## ")[0]
# The package of a row, and its version.
NAMED = dict(
    re.findall(r"^\|[^|]*?(?:\(`)?([\w-]+)(?:`\))? \| (\d[\w.]*(?:, oldest [\w.]+)?) \|", SECTION, re.MULTILINE)
)


def test_every_row_with_a_version_is_looked_at():
    rows = [line for line in SECTION.splitlines() if re.match(r"\|[^|]+\| \d", line)]
    assert len(NAMED) == len(rows) >= 10


@pytest.mark.parametrize("name", NAMED)
def test_versions_are_those_that_are_pinned(name):
    newest, _, oldest = NAMED[name].partition(", oldest ")
    pinned = {**pins("extras.txt", "3.12"), **pins("dev.txt", "3.12"), **pins("cpu.txt", "3.12")}
    assert pinned[name.lower()] == newest
    if oldest:
        assert pins("oldest.txt", "3.12")[name.lower()] == oldest
