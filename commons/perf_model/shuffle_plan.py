"""PLAN: who sends which row to whom, and what that does to the loads.

Input: what the gather brought (rows, real rows, workloads and tokens of every rank). Output: a frozen ShufflePlan, the
same on every rank because it is a pure function of that input. It knows nothing of process groups.

Rows are at *places*: a place is rank · steps + step. Where one batch is planned, steps is 1 and a place is a rank;
where a window of batches is, every rank has a place for each of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from commons.perf_model.partitioner import partition, partition_grid
from commons.perf_model.partitioner.core import digest, place_of_rows, sum_at
from commons.perf_model.row_table import RowTable


@dataclass(frozen=True)
class GatheredRows:
    """What every rank knows of the global batch, or of a window of them, after the gather.

    Attributes:
        rows: int64 `(num_places,)`, batch_size of each batch, padding included; 0 where a rank has none.
        real_rows: int64 `(num_places,)`, rows that are no padding.
        workloads: int64 `(N,)`, of the real rows of all ranks, place by place.
        tokens: int64 `(N,)`, what the rows weigh in memory and on the wire.
        table: what else is known of each row, to be read where it is needed: the lengths of every key, and the fields
            that the host keeps, see `BaseBatch`; empty where nothing is exchanged.
        steps: batches of a rank that are planned together.
    """

    rows: np.ndarray
    real_rows: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    table: RowTable = field(default_factory=RowTable)
    steps: int = 1

    @property
    def num_places(self) -> int:
        """Ranks times steps."""
        return len(self.rows)

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""
        return self.num_places // self.steps

    @cached_property
    def home(self) -> np.ndarray:
        """int64 `(N,)`, the place that each real row is at."""
        return place_of_rows(self.real_rows)

    @cached_property
    def loads(self) -> np.ndarray:
        """int64 `(num_places,)`, summed workloads where the rows are."""
        return sum_at(self.home, self.workloads, self.num_places)

    def rank_of(self, place: np.ndarray) -> np.ndarray:
        """The ranks that places belong to."""
        return place if self.steps == 1 else place // self.steps

    @cached_property
    def local_row(self) -> np.ndarray:
        """int64 `(N,)`, the position of each real row in its batch."""
        first = np.cumsum(self.real_rows) - self.real_rows
        return np.arange(len(self.workloads), dtype=np.int64) - first[self.home]

    @cached_property
    def global_id(self) -> np.ndarray:
        """int64 `(N,)`, ascending: rows of the places before (padding included) plus the local row."""
        first = np.cumsum(self.rows) - self.rows
        return first[self.home] + self.local_row


@dataclass(frozen=True)
class ShufflePlan:
    """Where every real row of the global batch, or of a window of them, is trained.

    Attributes:
        gathered: the rows and where they are.
        destination: int64 `(N,)`, the place that trains each row; equal to `gathered.home` if nobody moves.
        planned: int64 `(N,)`, the destination that balancing alone asks for; differs from `destination` when a plan was
            made but not carried out (mode "observe", or a gain below the gate).
        lower_bound: no plan can have a smaller largest load; of a window, a smaller sum of them over its steps.
        gated: a better plan was found and its gain was below the gate.
        excess_tokens: how far the fullest place exceeds the token cap; 0 where the cap is kept or there is none.
        pads: whether results are padded to the rows that a rank brought; False for batches that cannot state padding.
    """

    gathered: GatheredRows
    destination: np.ndarray
    planned: np.ndarray
    lower_bound: int
    gated: bool = False
    excess_tokens: int = 0
    pads: bool = True

    @cached_property
    def moves(self) -> np.ndarray:
        """Bool `(N,)`, rows that change rank."""
        return self.gathered.rank_of(self.destination) != self.gathered.rank_of(self.gathered.home)

    @cached_property
    def changes(self) -> bool:
        """Whether any row changes its rank, or its step of a window."""
        return not np.array_equal(self.destination, self.gathered.home)

    @cached_property
    def num_moved(self) -> int:
        """Rows that change rank."""
        return int(self.moves.sum())

    @property
    def loads_before(self) -> np.ndarray:
        """int64 `(num_places,)`, summed workloads where the rows are now."""
        return self.gathered.loads

    @cached_property
    def loads_after(self) -> np.ndarray:
        """int64 `(num_places,)`, summed workloads where the rows go."""
        return self.loads_planned if self.destination is self.planned else self._loads_at(self.destination)

    @cached_property
    def loads_planned(self) -> np.ndarray:
        """int64 `(num_places,)`, summed workloads under the planned assignment, carried out or not."""
        return self._loads_at(self.planned)

    @cached_property
    def result_real_rows(self) -> np.ndarray:
        """int64 `(num_places,)`, real rows each place ends with."""
        return sum_at(self.destination, None, self.gathered.num_places)

    def result_batch_size(self, place: int) -> int:
        """Rows of the result with padding: at least one, and never fewer than there were."""
        if not self.pads:
            return int(self.result_real_rows[place])
        return max(1, int(self.gathered.rows[place]), int(self.result_real_rows[place]))

    def rows_for(self, place: int) -> np.ndarray:
        """Positions among the N real rows of those that are trained at `place`, in ascending global id."""
        return np.flatnonzero(self.destination == place)

    def digest(self) -> int:
        """63 bits over the plan and what it was made from; equal on ranks that agree."""
        gathered = self.gathered
        return digest((gathered.rows, gathered.real_rows, gathered.workloads, gathered.tokens, self.destination))

    def _loads_at(self, place: np.ndarray) -> np.ndarray:
        gathered = self.gathered
        return gathered.loads if place is gathered.home else sum_at(place, gathered.workloads, gathered.num_places)


def plan_shuffle(
    gathered: GatheredRows,
    *,
    method: str = "refined",
    equal_size: bool = True,
    slack: float = 0.0,
    ranks_per_node: int | None = None,
    max_tokens: int | None = None,
    min_gain: float = 0.0,
    min_gain_load: int = 0,
    carry_out: bool = True,
    pads: bool = True,
) -> ShufflePlan:
    """Plan the shuffle of one global batch, or of a window of them; never worse than leaving every row where it is.

    If no assignment lowers the largest load (of a window, the sum of the largest over its steps), or the gain is below
    the gate, nobody moves, even when counts are unequal. Only a token cap that the present assignment breaks, and a
    rank that may not be padded and has no row of its own, can move rows at the price of a larger load.

    The steps of a window come in an order that is drawn from its workloads: the same on every rank and whenever the
    same rows are planned again, and heavy steps are not always first.

    Args:
        gathered: the rows of all ranks.
        method: name of the partitioning algorithm.
        equal_size: ranks get row counts that differ by at most one.
        slack: fraction of the best load that may be given up to keep rows at home.
        ranks_per_node: ranks that share a node; rows leaving a node count more.
        max_tokens: cap on the tokens of a rank. Where none can keep it, the plan that exceeds it least is taken.
        min_gain: fraction of the largest load that must be gained, else nobody moves; 0 switches the gate off.
        min_gain_load: the same as a load of one step; the stricter of both counts.
        carry_out: False to plan without moving anything.
        pads: whether results may be padded.
    """
    if gathered.num_ranks == 1 or len(gathered.workloads) == 0:
        home, bound = gathered.home, int(gathered.workloads.sum())
        return ShufflePlan(gathered, home, home, bound, False, _excess_tokens(gathered, home, max_tokens), pads)
    constraints: dict[str, Any] = {"tokens": gathered.tokens, "max_tokens": max_tokens, "best_effort": True}
    planned, loads, bound = _assign(
        gathered, method=method, equal_size=equal_size, ranks_per_node=ranks_per_node, slack=slack, **constraints
    )
    if not pads and gathered.steps == 1 and not _has_rows_everywhere(gathered, planned):
        # Near home a rank may stay without rows; of equal counts none does, as long as there are enough.
        anew = partition(gathered.workloads, gathered.num_ranks, method=method, equal_size=True, **constraints)
        planned, loads, bound = np.asarray(anew.assignment, dtype=np.int64), anew.loads, anew.lower_bound
    before, after = (_time(each, gathered.steps) for each in (gathered.loads, loads))
    excess_before = _excess_tokens(gathered, gathered.home, max_tokens)
    excess_after = _excess_tokens(gathered, planned, max_tokens)
    relieves_memory = excess_after < excess_before
    fills = not (pads or _has_rows_everywhere(gathered, gathered.home)) and _has_rows_everywhere(gathered, planned)
    must_move = relieves_memory or fills
    if not must_move and (after >= before or excess_after > excess_before):
        planned = gathered.home
    gain = before - after
    too_small = gain > 0 and (gain / before < min_gain or gain < min_gain_load * gathered.steps)
    gated = not must_move and too_small
    moves = carry_out and not gated
    destination = planned if moves else gathered.home
    return ShufflePlan(
        gathered,
        destination,
        planned,
        bound,
        gated,
        _excess_tokens(gathered, destination, max_tokens),
        pads,
    )


def _assign(gathered: GatheredRows, **options: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """The place of each row, int64 `(N,)`, the loads of the places, and what no plan can go below."""
    if gathered.steps == 1:
        plan = partition(gathered.workloads, gathered.num_ranks, home=gathered.home, **options)
        return np.asarray(plan.assignment, dtype=np.int64), plan.loads, plan.lower_bound
    rank, step = np.divmod(gathered.home, gathered.steps)
    drawn_from = hashlib.blake2b(np.ascontiguousarray(gathered.workloads).tobytes(), digest_size=8)
    grid = partition_grid(
        gathered.workloads,
        gathered.num_ranks,
        gathered.steps,
        home=rank,
        home_step=step,
        seed=int.from_bytes(drawn_from.digest(), "big") >> 1,
        **options,
    )
    return grid.assignment * gathered.steps + grid.step, grid.loads.T, grid.lower_bound


def _has_rows_everywhere(gathered: GatheredRows, place: np.ndarray) -> bool:
    return bool(sum_at(place, None, gathered.num_places).all())


def _time(loads: np.ndarray, steps: int) -> int:
    """Sum over the steps of the largest load, where the places have these loads."""
    return int(loads.max()) if steps == 1 else int(loads.reshape(-1, steps).max(axis=0).sum())


def _excess_tokens(gathered: GatheredRows, place: np.ndarray, max_tokens: int | None) -> int:
    if max_tokens is None:
        return 0
    fullest = int(sum_at(place, gathered.tokens, gathered.num_places).max(initial=0))
    return max(0, fullest - max_tokens)
