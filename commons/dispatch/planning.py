"""PLAN: decides which rows go to which chunk or rank: pure functions of workloads, based on the planner."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from commons.checks import as_boolean
from commons.perf_model.loads import fill_empty, numbered, sum_by_rank
from commons.perf_model.partitioner import Partition, as_int64_workloads, partition
from commons.perf_model.partitioner.inputs import as_array
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan
from commons.sequence_batch.rows import Rows

B = TypeVar("B")

_PAD_REMEDY = "use fewer parts or a larger batch, or pad=True, which adds rows that are marked as padding"
_REMEDY = "use fewer ranks or a larger batch"


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of a batch by part."""

    indices: list[torch.Tensor]  # for each part int64 `(its rows,)`, ascending, then -1 for padding
    plan: Partition  # of the real rows
    num_rows: int  # rows of the batch, including padding

    @classmethod
    def of(cls, plan: Partition, rows: Rows[Any], pad: bool) -> Split:
        """The split of a batch by a plan.

        With `pad` all parts have one size: the largest part's, at least the batch's rows with padding ÷ parts.
        """
        parts = plan.groups()
        size = max(*map(len, parts), -(-rows.count // len(parts))) if pad else 0
        padded = [torch.tensor(part + [-1] * (size - len(part)), dtype=torch.int64, device="cpu") for part in parts]
        return cls(padded, plan, rows.count)

    def take(self, rows: Rows[B], part: int) -> Rows[B]:
        """The rows of one part."""
        indices = self.indices[part]
        taken = rows.select(indices[indices >= 0])
        return taken.pad(len(indices)) if taken.count < len(indices) else taken


def split_rows(
    rows: Rows[Any], workloads: Any, num_parts: int, *, equal_size: bool = True, groups: Any = None, pad: bool = False
) -> Split:
    """Plan a split of the real rows with a small largest load; arguments as for `split_balanced`.

    Fewer rows (or groups) than parts are a ValueError without `pad`.
    """
    weights, pad = as_int64_workloads(workloads, num_rows=rows.count)[: rows.real], as_boolean(pad, "pad")
    require_enough(num_parts, rows.real, "rows", pad)
    numbers = None
    if groups is not None:
        numbers = as_int64_ids(groups, rows.count)[: rows.real]
        require_enough(num_parts, len(np.unique(numbers)), "groups", pad)
    return Split.of(partition(weights, num_parts, equal_size=equal_size, groups=numbers), rows, pad)


def split_in_turn(rows: Rows[Any], num_parts: int, pad: bool) -> Split:
    """Assign row i to part `i mod num_parts`, like torch's DistributedSampler; every row has workload 1."""
    assignment, fair = np.arange(rows.real) % num_parts, -(-rows.real // num_parts)
    return Split.of(Partition(assignment, np.bincount(assignment, minlength=num_parts), fair), rows, pad)


def plan_redistribution(
    workloads: np.ndarray,
    rows_per_rank: np.ndarray,
    *,
    equal_size: bool = True,
    groups: np.ndarray | None = None,
    slack: float = 0.0,
) -> ShufflePlan:
    """Plan which rows move to other ranks: few rows, and none without need.

    Unlike the shuffler's plans, this plan gives every rank a row, and equal sizes with `equal_size`, even if the
    largest load does not fall. The plan is equal on every rank and uses no token counts. `workloads` and `groups` are
    for the rows of all ranks, rank by rank; `equal_size`, `groups` and `slack` are as for `redistribute_balanced`.

    Raises:
        ValueError: no rows, fewer rows (or groups) than ranks, or groups of different sizes with `equal_size`.
    """
    gathered = GatheredRows(rows_per_rank, rows_per_rank, workloads, np.zeros_like(workloads))
    num_ranks, home = gathered.num_ranks, gathered.home
    require_enough(num_ranks, len(home), "rows", False, _REMEDY)
    units, unit_of_row, tokens = workloads, np.arange(len(home)), None
    if groups is not None:
        unit_of_row = numbered(groups)
        num_units = int(unit_of_row.max()) + 1
        require_enough(num_ranks, num_units, "groups", False, _REMEDY)
        # tokens=workloads, so that a group's home is the rank with most of its work
        units, tokens = sum_by_rank(unit_of_row, workloads, num_units), workloads
    plan = partition(workloads, num_ranks, equal_size=equal_size, home=home, tokens=tokens, slack=slack, groups=groups)
    rank_of_unit = plan.assignment[np.unique(unit_of_row, return_index=True)[1]]
    counts = np.bincount(rank_of_unit, minlength=num_ranks)
    if equal_size and int(counts.max()) - int(counts.min()) > 1:
        # The planner keeps unequal sizes if no move lowers the largest load. Plan equal parts, and assign them to ranks
        # so that as much work as possible stays at home.
        part_of_unit = partition(units, num_ranks).assignment
        rank_of_unit = ranks_near_home(part_of_unit[unit_of_row], home, workloads, num_ranks)[part_of_unit]
    destination = fill_empty(rank_of_unit, units, num_ranks)[unit_of_row]
    return ShufflePlan.of(gathered, destination, plan.lower_bound)


def ranks_near_home(
    place: np.ndarray, home: np.ndarray, weights: np.ndarray, num_ranks: int, steps: int = 1
) -> np.ndarray:
    """int64 `(steps · num_ranks,)`: the rank of each place, so that as much weight as possible stays at home.

    Row i, of weight `weights[i]`, is on the rank `home[i]` and goes to `place[i]`, int64 `(rows,)`. Each rank gets one
    of the `num_ranks` places of a step.
    """
    kept = sum_by_rank(place * num_ranks + home, weights + 1, steps * num_ranks**2).reshape(-1, num_ranks, num_ranks)
    return np.concatenate([linear_sum_assignment(of_step, maximize=True)[1] for of_step in kept])


def require_enough(num_parts: int, num_units: int, what: str, may_be_empty: bool, remedy: str = _PAD_REMEDY) -> None:
    """Raise ValueError for no rows, and for fewer units ("rows" or "groups") than parts unless parts may be empty."""
    if num_units == 0:
        raise ValueError("the batch has 0 real rows; at least one is needed: skip empty batches")
    if num_units < num_parts and not may_be_empty:
        raise ValueError(
            f"there are {num_units} {what} for {num_parts} parts (chunks or ranks); every part needs at least one: "
            f"{remedy}"
        )


def as_int64_ids(groups: Any, num_rows: int) -> np.ndarray:
    """Convert ids to int64 `(num_rows,)`; strings become 63 bits of their BLAKE2b digest.

    Raises:
        ValueError: neither integers nor strings, None, NaN or a masked value for a row, or not one per row.
    """
    ids = as_array(groups, "groups")
    if ids.shape != (num_rows,) or (ids.dtype.kind not in "iuUSO" and num_rows):
        raise ValueError(
            f"groups have shape {ids.shape} and dtype {ids.dtype}, there are {num_rows} rows; an integer or a "
            "string per row is needed: match them"
        )
    if ids.dtype.kind in "iu":
        return ids.astype(np.int64)
    items = ids.tolist() if isinstance(groups, np.ndarray) else list(groups)  # numpy turns NaN beside texts into "nan"
    missing = next((index for index, item in enumerate(items) if _is_missing(item)), None)
    if missing is not None:
        raise ValueError(
            f"groups[{missing}] is {items[missing]}; rows without a group would stay together: give each its own id"
        )
    return np.array([_as_id(item) for item in items], dtype=np.int64)


def _as_id(item: Any) -> int:
    """An integer unchanged, because other ranks may have it in an integer dtype; the digest of a string."""
    if isinstance(item, (int, np.integer)) and -(2**63) <= item < 2**63:
        return int(item)
    return int.from_bytes(hashlib.blake2b(str(item).encode(), digest_size=8).digest(), "big") >> 1


def _is_missing(item: Any) -> bool:
    """Whether an id is None, NaN or pandas' NA."""
    return item is None or (isinstance(item, (float, np.floating)) and item != item) or str(item) == "<NA>"
