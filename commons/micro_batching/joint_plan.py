"""JOINT PLAN: assigns the rows of all ranks to ranks and micro-batches; a pure function, equal on every rank.

If ranks synchronise at every micro-batch (FSDP, expert parallelism), the time of a step is the sum, over the
micro-batches, of the largest cost of any rank. So all rows are packed under the budget into the fewest bins whose
number is a multiple of the number of ranks, and bins of similar cost become the i-th micro-batches of all ranks. Three
plans are compared:

own packing   each rank's packing of its own rows, if all ranks can make the same number of micro-batches: no row moves
grid          the planner's grid, which balances first and may exceed the budget
sorted        the bins of a packing, sorted by cost and cut; only if the grid is not close to its bound
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commons.dispatch.planning import ranks_near_home
from commons.micro_batching.block_packing import (
    BlockPacking,
    RowBlocks,
    budget_of,
    fewest_bins,
    in_order_of,
    no_packing,
    require_blocks,
    tokens_of,
)
from commons.micro_batching.fewest_groups import in_order
from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.grid import partition_grid
from commons.perf_model.partitioner.inputs import MOST_LOAD

# Fraction of the least cost that is given up so that fewer tokens move, as in redistribute_balanced.
_SLACK = 0.01


@dataclass(frozen=True, eq=False)
class JointPlan:
    """The rank that computes each row, and the rank's micro-batch that contains the row."""

    rank: np.ndarray  # int64 `(rows of all ranks,)`
    micro_batch: np.ndarray  # int64 `(rows of all ranks,)`
    costs: np.ndarray  # int64 `(ranks, micro-batches)`
    blocks: RowBlocks  # the rows of all ranks, in blocks that stay together


def plan_jointly(
    spec: MicroBatchSpec,
    lengths: np.ndarray,
    workloads: np.ndarray | None,
    rows_per_rank: np.ndarray,
    own_packing: np.ndarray | None = None,
    *,
    groups: np.ndarray | None = None,
) -> JointPlan:
    """Pack the rows of all ranks into as few micro-batches per rank as the budget allows, of even cost by index.

    Args:
        spec: how to pack; its numbers of micro-batches are per rank.
        lengths: int64 `(rows of all ranks,)`, rank by rank: tokens of each row; each rank has whole blocks.
        workloads: int64 `(rows of all ranks,)`, cost of each row; None if the cost is its tokens.
        rows_per_rank: int64 `(ranks,)`.
        own_packing: int64 `(rows of all ranks,)`: the micro-batch of each row if every rank packs its own rows into
            the same number of micro-batches; None if a rank cannot.
        groups: int64 `(rows of all ranks,)`: rows with equal group numbers stay together, also rows of several ranks.

    Returns:
        The plan. Every micro-batch of every rank has a row and keeps the budget, and blocks stay whole. If no group
        spans ranks, the plan has no more micro-batches than `own_packing` and, with the same number, no larger sum of
        largest costs.

    Raises:
        ValueError: no rows, too few for the ranks and micro-batches, a group above the budget, or no packing.
    """
    num_ranks, blocks = len(rows_per_rank), RowBlocks.of(spec, len(lengths), groups)
    if len(blocks) == 0:
        raise ValueError("no rank has a row; every micro-batch has at least one: leave out empty batches")
    require_blocks(spec, blocks, _rows_of(num_ranks, blocks), num_ranks)
    try:
        tokens = tokens_of(spec, blocks, lengths, workloads is not None)
    except ValueError as error:  # ranks have checked their own rows, but a group that spans ranks may exceed the budget
        raise ValueError(f"{error} (rows are counted over the ranks)") from error
    costs = tokens if workloads is None else blocks.sums(workloads)
    home, spans_ranks = _homes(blocks, lengths, rows_per_rank)
    if spans_ranks:
        own_packing = None
    cells = _Cells(spec, tokens, costs, home, num_ranks)
    number = fewest = cells.fewest()
    gap, places = cells.grid(fewest)
    if not places or gap > 2 * _SLACK:  # the slack is part of the gap
        may_fail = bool(places) or own_packing is not None
        packing = _pack(spec, blocks, lengths, workloads, num_ranks, may_fail)
        numbers = [fewest] if places else []
        numbers += [] if packing is None else [packing.num_fewest // num_ranks]
        numbers += [] if own_packing is None else [int(own_packing.max()) + 1]
        number = min(numbers)
        if number != fewest:
            places = cells.grid(number)[1]
        if packing is not None and packing.num_fewest == number * num_ranks:
            places.append(cells.sorted_and_cut(packing.into(number * num_ranks)))
    if own_packing is not None and int(own_packing.max()) + 1 == number:
        places.insert(0, own_packing[blocks.first_rows] * num_ranks + cells.home)  # first, so that it wins a tie
    micro_batch, rank = np.divmod(cells.best(places, number), num_ranks)
    micro_batch = in_order_of(spec, micro_batch, costs)
    loads = sum_by_rank(rank * number + micro_batch, costs, num_ranks * number).reshape(num_ranks, number)
    return JointPlan(rank[blocks.of_row], micro_batch[blocks.of_row], loads, blocks)


def plan_unplaced(spec: MicroBatchSpec, lengths: np.ndarray, workloads: np.ndarray, num_ranks: int) -> JointPlan:
    """`plan_jointly` for rows that are on no rank yet; the sum of workloads may be any."""
    rows_per_rank = np.full(num_ranks, len(lengths) // num_ranks) + (np.arange(num_ranks) < len(lengths) % num_ranks)
    return plan_jointly(spec, lengths, scaled_down(workloads), rows_per_rank)


def scaled_down(workloads: np.ndarray) -> np.ndarray:
    """Workloads, halved until their sum is one that the planner takes."""
    return workloads >> max(0, sum(workloads.tolist()).bit_length() - MOST_LOAD.bit_length())


def _homes(blocks: RowBlocks, lengths: np.ndarray, rows_per_rank: np.ndarray) -> tuple[np.ndarray, bool]:
    """int64 `(blocks,)`, the rank with most tokens of each block (ties: the first); whether any block spans ranks."""
    num_ranks = len(rows_per_rank)
    home = np.repeat(np.arange(num_ranks), rows_per_rank)
    at = blocks.of_row * num_ranks + home
    rows = np.bincount(at, minlength=len(blocks) * num_ranks).reshape(-1, num_ranks)
    held = sum_by_rank(at, lengths, rows.size).reshape(-1, num_ranks)
    return np.where(rows > 0, held, -1).argmax(axis=1), bool((np.count_nonzero(rows, axis=1) > 1).any())


@dataclass(frozen=True, eq=False)
class _Cells:
    """Blocks of rows, and plans that assign them to places; a place is micro-batch · ranks + rank."""

    spec: MicroBatchSpec  # how to pack
    tokens: np.ndarray  # int64 `(blocks,)`
    costs: np.ndarray  # int64 `(blocks,)`
    home: np.ndarray  # int64 `(blocks,)`, the rank that has each block before the exchange
    num_ranks: int  # number of ranks

    def sorted_and_cut(self, bins: np.ndarray) -> np.ndarray:
        """Places of the blocks of `bins`, sorted by cost: each micro-batch gets the next `num_ranks` bins."""
        return self._near_home(in_order(bins, self.costs), (int(bins.max()) + 1) // self.num_ranks)

    def fewest(self) -> int:
        """A lower bound of the number of micro-batches of a rank."""
        spec, needed = self.spec, -(-fewest_bins(self.spec, self.tokens) // self.num_ranks)
        return -(-max(spec.n_mbs, needed) // spec.n_mbs_divisor) * spec.n_mbs_divisor

    def grid(self, number: int) -> tuple[float, list[np.ndarray]]:
        """The grid's gap to the planner's bound, and a list of its places; empty if a place is empty or over budget."""
        if number * self.num_ranks > len(self.tokens):
            return 0.0, []
        grid = partition_grid(
            self.costs,
            self.num_ranks,
            number,
            equal_size=False,
            tokens=self.tokens,
            max_tokens=self.spec.max_tokens_per_mb,
            home=self.home,
            slack=_SLACK,
            best_effort=True,
        )
        place = grid.step * self.num_ranks + grid.assignment
        num_places = number * self.num_ranks
        fullest = int(sum_by_rank(place, self.tokens, num_places).max())
        if np.bincount(place, minlength=num_places).min() == 0 or fullest > budget_of(self.spec, self.tokens):
            return grid.optimality_gap, []
        return grid.optimality_gap, [self._near_home(place, number)]

    def best(self, places: list[np.ndarray], number: int) -> np.ndarray:
        """Of the plans within the slack of the cheapest, the one that moves the fewest tokens."""
        loads = [sum_by_rank(place, self.costs, number * self.num_ranks) for place in places]
        sums = [int(each.reshape(number, self.num_ranks).max(axis=1).sum()) for each in loads]
        near = [place for place, cost in zip(places, sums) if cost <= min(sums) * (1 + _SLACK)]
        return min(near, key=lambda place: int(self.tokens[place % self.num_ranks != self.home].sum()))

    def _near_home(self, place: np.ndarray, number: int) -> np.ndarray:
        """The same bins; the bins of each micro-batch are assigned to ranks so that the most tokens stay."""
        rank = ranks_near_home(place, self.home, self.tokens, self.num_ranks, number)[place]
        return place // self.num_ranks * self.num_ranks + rank


def _pack(
    spec: MicroBatchSpec,
    blocks: RowBlocks,
    lengths: np.ndarray,
    workloads: np.ndarray | None,
    num_ranks: int,
    may_fail: bool,
) -> BlockPacking | None:
    """Pack all rows into the fewest bins, a multiple of `num_ranks`; on failure, None if `may_fail`, else raise."""
    whole = replace(spec, n_mbs=spec.n_mbs * num_ranks, n_mbs_divisor=spec.n_mbs_divisor * num_ranks)
    try:
        return BlockPacking.of(whole, blocks, lengths, workloads)
    except ValueError as error:
        if may_fail:
            return None
        raise no_packing(spec, blocks.sums(lengths), _rows_of(num_ranks, blocks), num_ranks) from error


def _rows_of(num_ranks: int, rows: RowBlocks) -> str:
    return f"the one rank has {rows}" if num_ranks == 1 else f"the {num_ranks} ranks have {rows} together"
