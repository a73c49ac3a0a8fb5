"""Packing of one rank's rows, in blocks that stay together, into the fewest micro-batches or any larger number.

Every number from the fewest to the number of blocks is possible, because halving a micro-batch keeps its budget. So
ranks that need different numbers of micro-batches can all make the largest of these numbers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from commons.micro_batching.allocation import get_allocate_fn
from commons.micro_batching.fewest_groups import group_of_each, in_order
from commons.micro_batching.first_fit import l2_bound, split_heaviest
from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.loads import numbered, sum_by_rank
from commons.perf_model.partitioner import partition, refine

# The planner's method that balances workloads under a cap on tokens, by packing algorithm.
_PLANNERS = {"kk": "karmarkar_karp", "refined": "refined"}
# Most blocks above the budget that an error lists.
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """The rows of a batch in blocks; a block is packed as if it were one row."""

    of_row: np.ndarray  # int64 `(rows,)`, the block of each row; blocks are numbered in the order of their first rows

    @classmethod
    def of(cls, spec: MicroBatchSpec, num_rows: int, groups: np.ndarray | None = None) -> RowBlocks:
        """Blocks of `granularity` neighbouring rows or, with `groups` `(rows,)`, of rows with equal group numbers.

        Raises:
            ValueError: the number of rows is no multiple of `granularity`, or both kinds of blocks are requested.
        """
        if groups is not None:
            if spec.granularity != 1:
                raise ValueError(
                    f"groups are given and granularity is {spec.granularity}; both set which rows stay together: leave "
                    "granularity at 1"
                )
            return cls(numbered(groups))
        if num_rows % spec.granularity:
            raise ValueError(
                f"the batch has {num_rows} rows, granularity is {spec.granularity}; every block has granularity rows: "
                "pass a multiple of granularity, or correct it"
            )
        return cls(np.arange(num_rows) // spec.granularity)

    def __len__(self) -> int:
        return int(self.of_row.max()) + 1 if len(self.of_row) else 0

    def __str__(self) -> str:
        """The text in messages: "6 rows in 3 blocks", or "6 rows" if each block is one row."""
        return f"{len(self.of_row)} rows" + ("" if len(self) == len(self.of_row) else f" in {len(self)} blocks")

    @property
    def first_rows(self) -> np.ndarray:
        """int64 `(blocks,)`, the first row of each block."""
        return np.unique(self.of_row, return_index=True)[1]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum values of rows, int64 `(rows,)`, over each block: int64 `(blocks,)`."""
        return sum_by_rank(self.of_row, values, len(self))

    def select(self, rows: np.ndarray) -> RowBlocks:
        """The blocks of a selection of rows, which must consist of whole blocks."""
        return RowBlocks(numbered(self.of_row[rows]))


@dataclass(frozen=True, eq=False)
class BlockPacking:
    """Blocks of rows, packed into the fewest micro-batches that the algorithm finds."""

    spec: MicroBatchSpec  # how to pack
    blocks: RowBlocks  # which rows stay together
    tokens: np.ndarray  # int64 `(blocks,)`, tokens of each block
    workloads: np.ndarray | None  # int64 `(blocks,)`, cost of each block; None if the cost is its tokens
    fewest: np.ndarray  # int64 `(blocks,)`, the micro-batch of each block

    @classmethod
    def of(
        cls, spec: MicroBatchSpec, blocks: RowBlocks, lengths: np.ndarray, workloads: np.ndarray | None
    ) -> BlockPacking:
        """Check and pack a rank's rows, of tokens int64 `(rows,)` and workloads int64 `(rows,)` or None.

        Raises:
            ValueError: no rows, a block above the budget, fewer blocks than micro-batches, workloads for an algorithm
                that does not balance, or no packing.
        """
        if len(lengths) == 0:
            raise ValueError(
                "the batch has no rows; every micro-batch has at least one: take rows of other ranks with joint=True, "
                "or leave such batches out on all ranks"
            )
        tokens = tokens_of(spec, blocks, lengths, workloads is not None)
        require_blocks(spec, blocks, f"the batch has {blocks}")
        costs = None if workloads is None else blocks.sums(workloads)
        try:
            fewest = _allocate(spec, tokens, spec.n_mbs)
        except ValueError as error:  # it names the allocator's arguments
            raise no_packing(spec, tokens, f"the batch has {blocks}") from error
        return cls(spec, blocks, tokens, costs, fewest)

    @property
    def num_fewest(self) -> int:
        """Number of micro-batches in `fewest`."""
        return int(self.fewest.max()) + 1

    def into(self, number: int) -> np.ndarray:
        """Pack into `number` micro-batches: int64 `(blocks,)`, the micro-batch of each block, in the spec's order.

        `number` is a multiple of the divisor, and at least `num_fewest`.
        """
        parts = self.fewest if self.num_fewest == number else self._of_number(number)
        if self.workloads is not None:
            parts = self._balance(self.workloads, parts, number)
        return in_order_of(self.spec, parts, self.tokens if self.workloads is None else self.workloads)

    def _of_number(self, number: int) -> np.ndarray:
        """Groups by the algorithm; if it fails for this number, the fewest groups with some of them halved."""
        with contextlib.suppress(ValueError):
            parts = _allocate(self.spec, self.tokens, number)
            if int(parts.max()) + 1 == number:
                return parts
        return split_heaviest(self.tokens, self.fewest, number)

    def _balance(self, workloads: np.ndarray, parts: np.ndarray, number: int) -> np.ndarray:
        """The same number of groups with even workloads, within the token budget, which `parts` keep."""
        budget = budget_of(self.spec, self.tokens)
        plan = partition(
            workloads,
            number,
            method=_PLANNERS[self.spec.packing_algorithm],
            equal_size=False,
            tokens=self.tokens,
            max_tokens=budget,
            best_effort=True,
        )
        counts = np.bincount(plan.assignment, minlength=number)
        if int(counts.min()) > 0 and int(sum_by_rank(plan.assignment, self.tokens, number).max()) <= budget:
            return plan.assignment
        # The planner's groups exceed the budget. `parts` keep it, and swaps balance them.
        return refine(workloads, parts, number, tokens=self.tokens, max_tokens=budget)


def tokens_of(spec: MicroBatchSpec, blocks: RowBlocks, lengths: np.ndarray, has_workloads: bool) -> np.ndarray:
    """int64 `(blocks,)`, the tokens of each block.

    Raises:
        ValueError: a block above the budget, or workloads for an algorithm that does not balance.
    """
    if has_workloads and spec.packing_algorithm not in _PLANNERS:
        raise ValueError(
            f"workloads are given and packing_algorithm is {spec.packing_algorithm!r}; only "
            f"{' and '.join(map(repr, _PLANNERS))} balance them: choose one of these, or leave out the workloads"
        )
    tokens = blocks.sums(lengths)
    _require_room(spec, blocks, tokens)
    return tokens


def budget_of(spec: MicroBatchSpec, tokens: np.ndarray) -> int:
    """Most tokens of a micro-batch; the sum of all tokens if the spec sets no limit."""
    return spec.max_tokens_per_mb or max(1, int(tokens.sum()))


def in_order_of(spec: MicroBatchSpec, parts: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Micro-batches int64 `(blocks,)` numbered by `MicroBatchSpec.order`, where block i weighs `loads[i]`."""
    ranked = in_order(parts, loads)
    if spec.order == "heaviest_first":
        return ranked
    number = int(ranked.max()) + 1
    light_ends = np.concatenate([np.arange(0, number, 2)[::-1], np.arange(1, number, 2)])
    return np.argsort(light_ends)[ranked]


def _allocate(spec: MicroBatchSpec, tokens: np.ndarray, min_groups: int) -> np.ndarray:
    allocate = get_allocate_fn(spec.packing_algorithm)
    groups = allocate(tokens, budget_of(spec, tokens), min_groups, spec.n_mbs_divisor)
    return group_of_each(groups, len(tokens))


def require_blocks(spec: MicroBatchSpec, blocks: RowBlocks, found: str, num_ranks: int = 1) -> None:
    """Raise ValueError if some micro-batch of the ranks would be empty; `found` says in the error what there is."""
    for name, number in (("n_mbs", spec.n_mbs), ("n_mbs_divisor", spec.n_mbs_divisor)):
        if number * num_ranks > len(blocks):
            remedy = f"lower {name}" if number > 1 else "use fewer ranks"
            raise ValueError(f"{name} is {number}, {found}; no micro-batch is empty: {remedy} or pass more rows")


def fewest_bins(spec: MicroBatchSpec, tokens: np.ndarray) -> int:
    """A lower bound of the number of micro-batches, over all ranks, that keep the budget."""
    return l2_bound(np.sort(tokens)[::-1], budget_of(spec, tokens))


def no_packing(spec: MicroBatchSpec, tokens: np.ndarray, found: str, num_ranks: int = 1) -> ValueError:
    """The error if the blocks fit no allowed number of micro-batches of the ranks; `found` as for `require_blocks`."""
    needed, least, of_ranks = fewest_bins(spec, tokens), spec.n_mbs * num_ranks, "ranks · " if num_ranks > 1 else ""
    limit = "" if spec.max_tokens_per_mb is None else f" of at most {spec.max_tokens_per_mb} tokens"
    return ValueError(
        f"{found}, which need {max(needed, least)} or more micro-batches{limit}, in number a multiple of "
        f"{spec.n_mbs_divisor * num_ranks} ({of_ranks}n_mbs_divisor), none of them empty: "
        f"{'lower n_mbs' if least > needed else 'raise max_tokens_per_mb'}, lower n_mbs_divisor or pass more rows"
    )


def _require_room(spec: MicroBatchSpec, blocks: RowBlocks, tokens: np.ndarray) -> None:
    budget = budget_of(spec, tokens)
    too_long = np.flatnonzero(tokens > budget)
    if len(too_long) == 0:
        return
    what, first_rows = ("row" if len(blocks) == len(blocks.of_row) else "the block of row"), blocks.first_rows
    named = [f"{what} {first_rows[block]} has {tokens[block]} tokens" for block in too_long[:_SHOWN].tolist()]
    more = f" and {len(too_long) - _SHOWN} more do too" if len(too_long) > _SHOWN else ""
    raise ValueError(
        f"{', '.join(named)}{more}, max_tokens_per_mb is {budget}; rows and blocks are never split: raise "
        "max_tokens_per_mb, or truncate or drop such rows"
    )
