"""Files of events for `evenrank simulate`: a row is an event, and a user's length is the number of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commons.cli.lengths_file import Part, is_list, read_parts


def count_events(path: Path, column: str) -> np.ndarray:
    """How many rows, which are events, each user has.

    Args:
        path: a parquet, csv or jsonl file of events, or a folder of parquet files, over which a user's may be spread.
        column: of users, integers or text.

    Returns:
        int64 `(users,)`, at least one, in the order in which users first occur.

    Raises:
        ValueError: a type of file that is not read, no such column, or a row that names no user.
    """
    chunks = [chunk for part in read_parts(path, column, of_events=True) for chunk in _users(part, column).chunks]
    kinds = sorted({str(chunk.type) for chunk in chunks})
    if len(kinds) > 1:
        raise ValueError(
            f"column {column!r} of {path} holds {' in one file and '.join(kinds)} in another; all files of a folder "
            "have the same: convert it"
        )
    return pc.value_counts(pa.chunked_array(chunks)).field("counts").to_numpy(zero_copy_only=False).astype(np.int64)


def _users(part: Part, name: str) -> Any:
    """A column of users, checked."""
    column, what = part.columns[name], f"column {name!r} of {part.path}"
    if is_list(column.type):
        raise ValueError(
            f"{what} holds lists, which have lengths already; users are integers or text: evenrank counts them by "
            f"--column {shlex.quote(name)}"
        )
    if pa.types.is_dictionary(column.type):  # as pandas writes categories
        column = column.cast(column.type.value_type)
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if not (is_text or pa.types.is_integer(column.type)):
        raise ValueError(f"{what} holds {column.type}; users are integers or text: choose another, or convert it")
    lacks = pc.or_kleene(column.is_null(), pc.equal(column, "")) if is_text else column.is_null()
    if (row := pc.index(lacks, pa.scalar(True)).as_py()) >= 0:
        raise ValueError(
            f"{what} has no value in {part.place(row)}; every event has one of the users: leave such rows out"
        )
    return column
