"""JOINT PLAN: the rows of all ranks to ranks and micro-batches at once; a pure function, the same on every rank.

Where ranks synchronise at every micro-batch (FSDP, expert parallelism), a step takes the sum over the micro-batches of
the costliest one of any rank. So all rows are packed under the budget into as few bins as the number of ranks divides,
and bins of like cost become the i-th micro-batches of all ranks. Three ways to do so are compared:

as they lie   every rank's own packing, where each can make as many micro-batches by itself: no row moves
grid          the planner's, which balances first and may not get under the budget
sorted        the bins of a packing, sorted by cost and cut; only where the grid is not close to its bound
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from commons.micro_batching.block_packing import BlockPacking, RowBlocks, budget_of, in_order_of, tokens_of
from commons.micro_batching.fewest_groups import in_order
from commons.micro_batching.first_fit import l2_bound
from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.grid import partition_grid

# Fraction of the least cost that is given up so that fewer tokens move, as redistribute_balanced does.
_SLACK = 0.01


@dataclass(frozen=True, eq=False)
class JointPlan:
    """Which rank computes each row, and in which of its micro-batches."""

    rank: np.ndarray  # int64 `(rows of all ranks,)`
    micro_batch: np.ndarray  # int64 `(rows of all ranks,)`
    costs: np.ndarray  # int64 `(ranks, micro-batches)`
    blocks: RowBlocks  # which of the rows of all ranks stay together


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
        spec: how to pack; its numbers of micro-batches are those of a rank.
        lengths: int64 `(rows of all ranks,)`, rank by rank: tokens, whole blocks of each rank.
        workloads: int64 `(rows of all ranks,)`, what each row costs; None where that is its tokens.
        rows_per_rank: int64 `(ranks,)`.
        own_packing: int64 `(rows of all ranks,)`: the micro-batch of each row where every rank packs for itself, all
            into the same number; None where they cannot.
        groups: int64 `(rows of all ranks,)`: rows of equal numbers stay together, from whichever ranks they come.

    Returns:
        The plan. Every rank has a row in every micro-batch, none is above the budget, and blocks stay whole. With
        `own_packing`, if no group spans ranks, it has no more micro-batches, and if as many, no larger sum of the
        costliest ones.

    Raises:
        ValueError: no rows, too few for the ranks and micro-batches, a group above the budget, or no packing.
    """
    num_ranks, blocks = len(rows_per_rank), RowBlocks.of(spec, len(lengths), groups)
    _require_enough(spec, blocks, num_ranks)
    try:
        tokens = tokens_of(spec, blocks, lengths, workloads is not None)
    except ValueError as error:  # ranks have checked their own rows, but a group of several may be above the budget
        raise ValueError(f"{error} (rows are counted over the ranks)") from error
    costs = tokens if workloads is None else blocks.sums(workloads)
    home, spans_ranks = _homes(blocks, lengths, rows_per_rank)
    if spans_ranks:
        own_packing = None
    cells = _Cells(spec, tokens, costs, home, num_ranks)
    number = fewest = cells.fewest()
    gap, places = cells.grid(fewest)
    if not places or gap > 2 * _SLACK:  # what is given up for fewer moves counts in the gap, too
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
        places.insert(0, own_packing[blocks.first_rows] * num_ranks + cells.home)  # of equal ones the first is taken
    micro_batch, rank = np.divmod(cells.best(places, number), num_ranks)
    micro_batch = in_order_of(spec, micro_batch, costs)
    loads = sum_by_rank(rank * number + micro_batch, costs, num_ranks * number).reshape(num_ranks, number)
    return JointPlan(rank[blocks.of_row], micro_batch[blocks.of_row], loads, blocks)


def plan_unplaced(spec: MicroBatchSpec, lengths: np.ndarray, workloads: np.ndarray, num_ranks: int) -> JointPlan:
    """`plan_jointly` for rows that lie on no rank yet."""
    rows_per_rank = np.full(num_ranks, len(lengths) // num_ranks) + (np.arange(num_ranks) < len(lengths) % num_ranks)
    return plan_jointly(spec, lengths, workloads, rows_per_rank)


def _homes(blocks: RowBlocks, lengths: np.ndarray, rows_per_rank: np.ndarray) -> tuple[np.ndarray, bool]:
    """int64 `(blocks,)`, the rank with most of the tokens of each, the first of several; whether any spans ranks."""
    num_ranks = len(rows_per_rank)
    home = np.repeat(np.arange(num_ranks), rows_per_rank)
    at = blocks.of_row * num_ranks + home
    rows = np.bincount(at, minlength=len(blocks) * num_ranks).reshape(-1, num_ranks)
    held = sum_by_rank(at, lengths, rows.size).reshape(-1, num_ranks)
    return np.where(rows > 0, held, -1).argmax(axis=1), bool((np.count_nonzero(rows, axis=1) > 1).any())


@dataclass(frozen=True, eq=False)
class _Cells:
    """Blocks of rows, and the ways in which they can be placed; a place is micro-batch · ranks + rank."""

    spec: MicroBatchSpec  # how to pack
    tokens: np.ndarray  # int64 `(blocks,)`
    costs: np.ndarray  # int64 `(blocks,)`
    home: np.ndarray  # int64 `(blocks,)`, the rank that each block lies on
    num_ranks: int  # ranks

    def sorted_and_cut(self, bins: np.ndarray) -> np.ndarray:
        """Places of the blocks of bins, as many of like cost to a micro-batch as there are ranks."""
        return self._near_home(in_order(bins, self.costs), (int(bins.max()) + 1) // self.num_ranks)

    def fewest(self) -> int:
        """Micro-batches of a rank: no plan has fewer."""
        spec, needed = self.spec, -(-_fewest_bins(self.spec, self.tokens) // self.num_ranks)
        return -(-max(spec.n_mbs, needed) // spec.n_mbs_divisor) * spec.n_mbs_divisor

    def grid(self, number: int) -> tuple[float, list[np.ndarray]]:
        """Their gap to the planner's bound, and its places; none if it leaves one empty or above the budget."""
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
        """Of the places of the blocks the cheapest, or nearly, that move the fewest tokens."""
        sums = [self._sum_of_largest(place, number) for place in places]
        near = [place for place, cost in zip(places, sums) if cost <= min(sums) * (1 + _SLACK)]
        return min(near, key=self._moved)

    def _near_home(self, place: np.ndarray, number: int) -> np.ndarray:
        """The same bins, those of each micro-batch dealt to the ranks so that as many tokens as possible stay."""
        num_ranks = self.num_ranks
        at_home = sum_by_rank(place * num_ranks + self.home, self.tokens + 1, number * num_ranks**2)
        rank_of = np.empty((number, num_ranks), np.int64)
        for index, kept in enumerate(at_home.reshape(number, num_ranks, num_ranks)):
            rank_of[index] = linear_sum_assignment(kept, maximize=True)[1]
        micro_batch = place // num_ranks
        return micro_batch * num_ranks + rank_of.ravel()[place]

    def _sum_of_largest(self, place: np.ndarray, number: int) -> int:
        loads = sum_by_rank(place, self.costs, number * self.num_ranks)
        return int(loads.reshape(number, self.num_ranks).max(axis=1).sum())

    def _moved(self, place: np.ndarray) -> int:
        return int(self.tokens[place % self.num_ranks != self.home].sum())


def _pack(
    spec: MicroBatchSpec,
    blocks: RowBlocks,
    lengths: np.ndarray,
    workloads: np.ndarray | None,
    num_ranks: int,
    may_fail: bool,
) -> BlockPacking | None:
    """All rows in the fewest bins that the number of ranks divides; None if no packing is found and that is allowed."""
    whole = replace(spec, n_mbs=spec.n_mbs * num_ranks, n_mbs_divisor=spec.n_mbs_divisor * num_ranks)
    try:
        return BlockPacking.of(whole, blocks, lengths, workloads)
    except ValueError as error:
        if may_fail:
            return None
        raise _no_packing(spec, blocks, lengths, num_ranks) from error


def _fewest_bins(spec: MicroBatchSpec, tokens: np.ndarray) -> int:
    return l2_bound(np.sort(tokens)[::-1], budget_of(spec, tokens))


def _require_enough(spec: MicroBatchSpec, blocks: RowBlocks, num_ranks: int) -> None:
    if len(blocks) == 0:
        raise ValueError("no rank has a row; every micro-batch has at least one: leave out empty batches")
    for name, number in (("n_mbs", spec.n_mbs), ("n_mbs_divisor", spec.n_mbs_divisor)):
        if number * num_ranks > len(blocks):
            raise ValueError(
                f"{name} is {number}, {_rows_of(num_ranks, blocks)}; no "
                f"micro-batch of a rank is empty: {f'lower {name}' if number > 1 else 'use fewer ranks'} or bring more "
                "rows"
            )


def _no_packing(spec: MicroBatchSpec, blocks: RowBlocks, lengths: np.ndarray, num_ranks: int) -> ValueError:
    divisor = spec.n_mbs_divisor * num_ranks
    fewest = max(_fewest_bins(spec, blocks.sums(lengths)), spec.n_mbs * num_ranks)
    return ValueError(
        f"{_rows_of(num_ranks, blocks)}, which need {fewest} or more "
        f"micro-batches of at most {spec.max_tokens_per_mb} tokens, in number a multiple of {divisor} (ranks · "
        "n_mbs_divisor), none of them empty: raise max_tokens_per_mb, lower n_mbs_divisor or bring more rows"
    )


def _rows_of(num_ranks: int, rows: RowBlocks) -> str:
    return f"the one rank has {rows}" if num_ranks == 1 else f"the {num_ranks} ranks have {rows} together"
