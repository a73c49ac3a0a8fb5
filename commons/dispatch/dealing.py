"""PLAN: which rows go to which chunk or rank. Pure functions of workloads; the planner does the work.

Input: a workload per row. Output: one ascending array of rows per part, every row once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.perf_model.partitioner import as_int64_workloads, partition
from commons.perf_model.shuffle_plan import sum_by_rank

PAD_REMEDY = "use fewer parts or a larger batch, or pad=True, which fills up with rows that are flagged as padding"


@dataclass(frozen=True)
class Deal:
    """Rows dealt to parts.

    Attributes:
        rows: for each part an int64 array of its rows, ascending.
        loads: int64 `(num_parts,)`, the workload of each part.
        num_rows: rows of the dealt batch, its padding included; padding is not dealt.
    """

    rows: list[np.ndarray]
    loads: np.ndarray
    num_rows: int

    @property
    def imbalance(self) -> float:
        """Largest load divided by the mean, minus 1; 0.0 if there is no load."""
        total = int(self.loads.sum())
        return int(self.loads.max()) * len(self.loads) / total - 1.0 if total else 0.0

    @property
    def padded_size(self) -> int:
        """Rows of every part once all are padded to one size: the largest, or a share of the batch with its padding."""
        return max(max(map(len, self.rows)), -(-self.num_rows // len(self.rows)))


def deal_balanced(
    workloads: Any,
    num_parts: int,
    *,
    num_rows: int,
    real_rows: int,
    equal_size: bool = True,
    group_ids: Any = None,
    may_be_empty: bool = False,
) -> Deal:
    """Deal rows so that the largest load is small.

    Args:
        workloads: non-negative integers `(num_rows,)`; those of padding are ignored.
        num_parts: number of parts, at least 1.
        num_rows: rows of the batch, padding included.
        real_rows: how many of them, from the first on, are no padding; at least 1.
        equal_size: numbers of rows differ by at most one; with `group_ids`, numbers of groups do.
        group_ids: integers or strings `(num_rows,)`: rows of equal id go to one part. None: every row for itself.
        may_be_empty: whether there may be fewer rows (or groups) than parts.

    Raises:
        ValueError: an argument of the wrong length or outside its range, no rows, or more parts than rows (or groups).
    """
    weights = as_int64_workloads(workloads, num_rows=num_rows)[:real_rows]
    require_enough(num_parts, real_rows, "rows", may_be_empty)
    if group_ids is None:
        units, unit_of_row = weights, np.arange(real_rows)
    else:
        unit_of_row = _as_groups(group_ids, num_rows, real_rows)
        units = sum_by_rank(unit_of_row, weights, int(unit_of_row.max()) + 1)
        require_enough(num_parts, len(units), "groups", may_be_empty)
    part_of_row = partition(units, num_parts, equal_size=equal_size).assignment[unit_of_row]
    rows = [np.flatnonzero(part_of_row == part) for part in range(num_parts)]
    return Deal(rows, sum_by_rank(part_of_row, weights, num_parts), num_rows)


def deal_in_turn(num_parts: int, *, num_rows: int, real_rows: int) -> Deal:
    """Deal row i to part `i mod num_parts`, as a sampler does that gives each rank every W-th row."""
    rows = [np.arange(part, real_rows, num_parts) for part in range(num_parts)]
    return Deal(rows, np.array([len(each) for each in rows]), num_rows)


def require_enough(num_parts: int, num_units: int, what: str, may_be_empty: bool, remedy: str = PAD_REMEDY) -> None:
    """Raise ValueError for no rows, and for fewer of them than parts unless parts may be empty.

    Args:
        num_parts: number of parts.
        num_units: number of rows, or groups of rows.
        what: "rows" or "groups".
        may_be_empty: whether there may be fewer of them than parts.
        remedy: what to do about that.
    """
    if num_units == 0:
        raise ValueError("the batch has 0 rows that are no padding; at least one is needed: skip empty batches")
    if num_units < num_parts and not may_be_empty:
        raise ValueError(
            f"the number of {what} is {num_units}, that of parts (chunks or ranks) is {num_parts}; every part needs "
            f"one: {remedy}"
        )


def _as_groups(group_ids: Any, num_rows: int, real_rows: int) -> np.ndarray:
    """int64 `(real_rows,)`: groups numbered by first appearance."""
    ids = np.asarray(group_ids)
    if ids.shape != (num_rows,) or ids.dtype.kind not in "iuUSO":
        raise ValueError(
            f"group_ids have shape {ids.shape} and dtype {ids.dtype}, there are {num_rows} rows; an integer or a "
            "string per row is needed: match them"
        )
    _, first, inverse = np.unique(ids[:real_rows], return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]
