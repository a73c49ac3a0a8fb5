"""PLAN: where rows go that already lie on the ranks. A pure function of what was gathered, the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from commons.dispatch.dealing import require_enough
from commons.perf_model.partitioner import partition
from commons.perf_model.shuffle_plan import sum_by_rank

_REMEDY = "use fewer ranks or a larger batch"


@dataclass(frozen=True, eq=False)
class Moves:
    """Where every row goes.

    Attributes:
        home: int64 `(rows of all ranks,)`, ascending: the rank that each row is on.
        destination: int64 `(rows of all ranks,)`: the rank that computes it.
        workloads: int64 `(rows of all ranks,)`.
        num_ranks: number of ranks.
    """

    home: np.ndarray
    destination: np.ndarray
    workloads: np.ndarray
    num_ranks: int

    @cached_property
    def loads_before(self) -> np.ndarray:
        """int64 `(num_ranks,)`: summed workloads where the rows are."""
        return sum_by_rank(self.home, self.workloads, self.num_ranks)

    @cached_property
    def loads_after(self) -> np.ndarray:
        """int64 `(num_ranks,)`: summed workloads where the rows go."""
        return sum_by_rank(self.destination, self.workloads, self.num_ranks)

    @property
    def moves(self) -> np.ndarray:
        """Bool: which rows change rank."""
        return self.home != self.destination

    def first_row(self, rank: int) -> int:
        """Rows of the ranks before."""
        return int((self.home < rank).sum())

    def local_rows(self, home: int, destination: int) -> np.ndarray:
        """int64: rows of rank `home`, counted there, that `destination` computes; ascending."""
        return np.flatnonzero((self.home == home) & (self.destination == destination)) - self.first_row(home)


def plan_moves(
    workloads: np.ndarray,
    rows_per_rank: np.ndarray,
    *,
    equal_size: bool = True,
    group_ids: np.ndarray | None = None,
    slack: float = 0.0,
) -> Moves:
    """Decide which rows move, few of them and none without need.

    Args:
        workloads: int64 `(rows of all ranks,)`, rank by rank.
        rows_per_rank: int64 `(number of ranks,)`.
        equal_size: numbers of rows differ by at most one afterwards; with `group_ids`, numbers of groups do.
        group_ids: int64 `(rows of all ranks,)`: rows with one id come together, whatever rank they are on.
        slack: fraction of the best load that may be given up to keep rows where they are.

    Raises:
        ValueError: no rows, or fewer rows (or groups) than ranks.
    """
    num_ranks = len(rows_per_rank)
    home = np.repeat(np.arange(num_ranks), rows_per_rank)
    require_enough(num_ranks, len(home), "rows", False, _REMEDY)
    units, unit_of_row, unit_home = workloads, np.arange(len(home)), home
    if group_ids is not None:
        _, unit_of_row = np.unique(group_ids, return_inverse=True)
        num_units = int(unit_of_row.max()) + 1
        require_enough(num_ranks, num_units, "groups", False, _REMEDY)
        units = sum_by_rank(unit_of_row, workloads, num_units)
        unit_home = _heaviest_rank(unit_of_row, home, workloads, num_units, num_ranks)
    plan = partition(units, num_ranks, equal_size=equal_size, home=unit_home, slack=slack).assignment
    counts = np.bincount(plan, minlength=num_ranks)
    if equal_size and int(counts.max()) - int(counts.min()) > 1:
        # The planner leaves uneven sizes alone where no move lowers the largest load; here sizes were asked for.
        plan = _near_home(partition(units, num_ranks).assignment, unit_home, units, num_ranks)
    return Moves(home, _fill_empty(units, plan, num_ranks)[unit_of_row], workloads, num_ranks)


def as_int64_ids(group_ids: Any, num_rows: int) -> np.ndarray:
    """Ids as int64 `(num_rows,)`, equal where they were; strings become 63 bits of their BLAKE2b digest.

    Raises:
        ValueError: no integers or strings, or not one per row.
    """
    ids = np.asarray(group_ids)
    if ids.shape != (num_rows,) or (ids.dtype.kind not in "iuUSO" and num_rows):
        raise ValueError(
            f"group_ids have shape {ids.shape} and dtype {ids.dtype}, there are {num_rows} rows; an integer or a "
            "string per row is needed: match them"
        )
    if ids.dtype.kind in "iu":
        return ids.astype(np.int64)
    digests = [hashlib.blake2b(str(item).encode(), digest_size=8).digest() for item in ids.tolist()]
    return np.array([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=np.int64)


def _heaviest_rank(
    unit_of_row: np.ndarray, home: np.ndarray, workloads: np.ndarray, num_units: int, num_ranks: int
) -> np.ndarray:
    """int64 `(num_units,)`: the rank that holds most of each group's work, the first one of equals."""
    on_rank = sum_by_rank(unit_of_row * num_ranks + home, workloads + 1, num_units * num_ranks)
    return on_rank.reshape(num_units, num_ranks).argmax(axis=1)


def _near_home(part_of_unit: np.ndarray, home: np.ndarray, units: np.ndarray, num_ranks: int) -> np.ndarray:
    """Name the parts of a plan after ranks so that as much work as possible stays where it is."""
    kept = sum_by_rank(part_of_unit * num_ranks + home, units + 1, num_ranks * num_ranks)
    _, rank_of_part = linear_sum_assignment(kept.reshape(num_ranks, num_ranks), maximize=True)
    return rank_of_part[part_of_unit]


def _fill_empty(units: np.ndarray, part_of_unit: np.ndarray, num_parts: int) -> np.ndarray:
    """Give every empty part the lightest unit of a part that keeps another; no largest load grows by that."""
    counts = np.bincount(part_of_unit, minlength=num_parts)
    if counts.all():
        return part_of_unit
    filled = part_of_unit.copy()
    lightest_first = iter(np.argsort(units, kind="stable"))
    for part in np.flatnonzero(counts == 0):
        unit = next(unit for unit in lightest_first if counts[filled[unit]] > 1)
        counts[filled[unit]] -= 1
        counts[part] += 1
        filled[unit] = part
    return filled
