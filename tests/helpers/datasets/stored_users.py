"""What preprocessing has stored, by user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from commons.datasets.sequences.file import SequenceFile


def users_of(path: Path, name: str, user: str = "user_id") -> dict[Any, dict[str, Any]]:
    """Rows of a data set by raw user id: the other columns, ids as the raw values that they stand for."""
    vocabularies = SequenceFile(path, name, []).vocabularies()
    users = {}
    for row in pq.read_table(path).to_pylist():
        for column, raw in vocabularies.items():
            ids = row[column]
            row[column] = [raw[each] for each in ids] if isinstance(ids, list) else raw[ids]
        users[row.pop(user)] = row
    return users
