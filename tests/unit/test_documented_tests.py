"""Tests that the documentation names as evidence are there."""

from __future__ import annotations

import re

from tests.helpers.documented import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_named_files_and_promises_are_there():
    promises = (ROOT / "tests/test_promises.py").read_text(encoding="utf-8")
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / path).is_file(), f"{page.name} names {path}"
        for name in re.findall(r"`(?:\w+/)*(test_\w+\.py)`", text):
            assert name in there, f"{page.name} names {name}"
        for number in re.findall(r"`(test_\d\d)…`", text):
            assert f"def {number}_" in promises, f"{page.name} names {number}"
