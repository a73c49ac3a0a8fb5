"""Columns that are no lengths, though they hold integers: identifiers and times."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

# Numbers identify rows, or date them, if so many of so many differ and half of them are above _LARGE, ...
_DISTINCT, _LARGE, _FEWEST_ROWS = 0.9, 100_000, 32
# ... or if so many rows have each of as many consecutive numbers once.
_NUMBERED_ROWS = 1_000


def require_other_name(path: Path, column: str) -> None:
    """Raise ValueError for a column that is called like an identifier."""
    if column.lower().endswith("id"):
        raise ValueError(
            f"column {column!r} of {path} ends in 'id', as identifiers do, which are no lengths: count the events of "
            f"each by --group-by {shlex.quote(column)}, name the column of lengths by --column, or save the numbers "
            "alone by numpy.save if they are lengths"
        )


def require_no_identifiers(path: Path, column: str, values: np.ndarray) -> None:
    """Raise ValueError where nearly all values of a column differ and are large, or where they number the rows."""
    distinct = len(np.unique(values)) if len(values) >= _FEWEST_ROWS else 0
    if distinct < _DISTINCT * len(values):
        return
    least, middle, most = int(values.min()), int(np.median(values)), int(values.max())
    if middle > _LARGE:
        rule = f"half of them above {_LARGE:,}"
    elif len(values) >= _NUMBERED_ROWS and most - least + 1 == distinct == len(values):
        rule = f"each of {least:,} to {most:,} once"
    else:
        return
    raise ValueError(
        f"column {column!r} of {path} has a value of its own in {distinct:,} of {len(values):,} rows, {rule}; such "
        "numbers identify or date rows and are no lengths: name another column by --column, count each user's events "
        "by --group-by user_id, or save the numbers alone by numpy.save if they are lengths"
    )
