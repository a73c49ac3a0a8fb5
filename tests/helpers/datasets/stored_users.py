"""What preprocessing has stored, by user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from commons.datasets.sequences.file import SequenceFile
from commons.datasets.sequences.metadata import MANIFEST, VOCABULARIES


def vocabularies_of(path: Path, name: str) -> dict[str, list[Any]]:
    """By feature with ids, the raw value of each."""
    files = (SequenceFile(path, name, []).path / VOCABULARIES).glob("*.parquet")
    return {file.stem: pq.read_table(file)["value"].to_pylist() for file in files}


def copy_of_another_split(path: str | Path, copy: Path) -> Path:
    """A copy of a data set whose manifest states another seed of the split."""
    return _copy(path, copy, "options", {"seed": 7})


def copy_of_another_day(path: str | Path, copy: Path) -> Path:
    """A copy of a data set whose manifest states another number of events, of the same users and items."""
    return _copy(path, copy, "num_interactions", 7)


def _copy(path: str | Path, copy: Path, name: str, value: Any) -> Path:
    shutil.copytree(path, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest[name] = manifest[name] | value if isinstance(value, dict) else value
    (copy / MANIFEST).write_text(json.dumps(manifest))
    return copy


def users_of(path: Path, name: str, user: str = "user_id") -> dict[Any, dict[str, Any]]:
    """Rows of a data set by raw user id: the other columns, ids as the raw values that they stand for."""
    vocabularies = vocabularies_of(path, name)
    users = {}
    for row in pq.read_table(path).to_pylist():
        for column, raw in vocabularies.items():
            ids = row[column]
            row[column] = [raw[each] for each in ids] if isinstance(ids, list) else raw[ids]
        users[row.pop(user)] = row
    return users
