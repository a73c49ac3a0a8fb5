"""One rank's rows as blocks that stay together, packed into the fewest micro-batches or into any number from there on.

Every number from the fewest to that of the blocks can be made: halving a micro-batch keeps its budget. So ranks that
need different numbers can meet at the largest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commons.micro_batching.allocation import get_allocate_fn
from commons.micro_batching.fewest_groups import as_groups
from commons.micro_batching.first_fit import split_heaviest
from commons.micro_batching.row_blocks import RowBlocks
from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner import partition, refine

# What balances workloads under a cap on tokens, by packing algorithm.
_PLANNERS = {"kk": "karmarkar_karp", "refined": "refined"}
# Blocks above the budget that an error names.
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class BlockPacking:
    """Rows that stay together as blocks, packed into the fewest micro-batches that the algorithm finds."""

    spec: MicroBatchSpec  # how to pack
    blocks: RowBlocks  # which rows stay together
    tokens: np.ndarray  # int64 `(blocks,)`, tokens of each block
    workloads: np.ndarray | None  # int64 `(blocks,)`, what each block costs; None where that is its tokens
    fewest: list[list[int]]  # the blocks of each micro-batch

    @classmethod
    def of(
        cls, spec: MicroBatchSpec, blocks: RowBlocks, lengths: np.ndarray, workloads: np.ndarray | None
    ) -> BlockPacking:
        """Check what a rank brings, and pack it.

        Args:
            spec: how to pack.
            blocks: which rows stay together.
            lengths: int64 `(rows,)`, tokens of each row.
            workloads: int64 `(rows,)`, what each row costs, or None.

        Raises:
            ValueError: no rows, a block above the budget, fewer blocks than micro-batches, workloads for an algorithm
                that does not balance, or no packing.
        """
        if len(lengths) == 0:
            raise ValueError("the batch has no rows; every micro-batch has at least one: leave out empty batches")
        tokens = tokens_of(spec, blocks, lengths, workloads is not None)
        _require_blocks(spec, blocks)
        costs = None if workloads is None else blocks.sums(workloads)
        return cls(spec, blocks, tokens, costs, _allocate(spec, tokens, spec.n_mbs))

    def with_refined(self) -> BlockPacking:
        """The same blocks packed by "refined", which never takes more micro-batches."""
        spec = replace(self.spec, packing_algorithm="refined")
        return replace(self, spec=spec, fewest=_allocate(spec, self.tokens, spec.n_mbs))

    def into(self, num_micro_batches: int) -> list[list[int]]:
        """The blocks of each of so many micro-batches, in the order that the spec asks for.

        Args:
            num_micro_batches: a multiple of the divisor, from the number of `fewest` to that of the blocks.
        """
        groups = self.fewest if len(self.fewest) == num_micro_batches else self._of_number(num_micro_batches)
        if self.workloads is not None:
            groups = self._balance(self.workloads, groups)
        return in_order(groups, self.tokens if self.workloads is None else self.workloads, self.spec.order)

    def _of_number(self, num_micro_batches: int) -> list[list[int]]:
        """Groups by the algorithm; halves of the fewest where it finds nothing for this very number."""
        try:
            groups = _allocate(self.spec, self.tokens, num_micro_batches)
        except ValueError:
            groups = []
        if len(groups) == num_micro_batches:
            return groups
        order = _descending(self.tokens)
        parts = _group_of(self.fewest, len(self.tokens))[order]
        return as_groups(self.tokens, order, split_heaviest(self.tokens[order], parts, num_micro_batches))

    def _balance(self, workloads: np.ndarray, groups: list[list[int]]) -> list[list[int]]:
        """As many groups of even workloads, under the budget of tokens that `groups` keep."""
        number, budget = len(groups), budget_of(self.spec, self.tokens)
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
            return plan.groups()
        # The planner did not get under the budget. The packing is, and swaps balance it from there.
        parts = refine(workloads, _group_of(groups, len(workloads)), number, tokens=self.tokens, max_tokens=budget)
        order = _descending(workloads)
        return as_groups(workloads, order, parts[order])


def tokens_of(spec: MicroBatchSpec, blocks: RowBlocks, lengths: np.ndarray, has_workloads: bool) -> np.ndarray:
    """Check what a rank brings to be packed by itself or with the rows of others.

    Args:
        spec: how to pack.
        blocks: which rows stay together.
        lengths: int64 `(rows,)`, tokens of each row.
        has_workloads: whether rows cost something else than their tokens.

    Returns:
        int64 `(blocks,)`, the tokens of each block.

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
    """Most tokens of a micro-batch; all there are where the spec sets no limit."""
    return spec.max_tokens_per_mb or max(1, int(tokens.sum()))


def in_order(groups: list[list[int]], loads: np.ndarray, order: str) -> list[list[int]]:
    """The groups in the order of a MicroBatchSpec.

    Args:
        groups: indices of each group.
        loads: int64 `(n,)`, what each index weighs.
        order: "heaviest_first", or "light_ends": the loads rise to the middle and fall again.
    """
    sums = [int(loads[group].sum()) for group in groups]
    ranked = sorted(range(len(groups)), key=lambda each: (-sums[each], groups[each][0]))
    if order == "light_ends":
        ranked = [*ranked[::2][::-1], *ranked[1::2]]
    return [groups[each] for each in ranked]


def _group_of(groups: list[list[int]], number: int) -> np.ndarray:
    """int64 `(number,)`, the group of each block."""
    parts = np.empty(number, np.int64)
    for group, blocks in enumerate(groups):
        parts[blocks] = group
    return parts


def _descending(weights: np.ndarray) -> np.ndarray:
    return np.argsort(-weights, kind="stable")


def _allocate(spec: MicroBatchSpec, tokens: np.ndarray, min_groups: int) -> list[list[int]]:
    allocate = get_allocate_fn(spec.packing_algorithm)
    return allocate(tokens, budget_of(spec, tokens), min_groups, spec.n_mbs_divisor)


def _require_blocks(spec: MicroBatchSpec, blocks: RowBlocks) -> None:
    for name, number in (("n_mbs", spec.n_mbs), ("n_mbs_divisor", spec.n_mbs_divisor)):
        if number > len(blocks):
            raise ValueError(
                f"{name} is {number}, the batch has {blocks}; no micro-batch is empty: lower {name} or bring more rows"
            )


def _require_room(spec: MicroBatchSpec, blocks: RowBlocks, tokens: np.ndarray) -> None:
    budget, alone = budget_of(spec, tokens), len(blocks) == len(blocks.of_row)
    too_long = np.flatnonzero(tokens > budget)
    if len(too_long) == 0:
        return
    named = [
        f"{blocks.name(block)} has {tokens[block]} tokens"
        if len(blocks.rows_of(block)) == 1
        else f"{blocks.name(block)} have {tokens[block]} tokens together"
        for block in too_long[:_SHOWN].tolist()
    ]
    more = f" and {len(too_long) - _SHOWN} more do too" if len(too_long) > _SHOWN else ""
    raise ValueError(
        f"{', '.join(named)}{more}, max_tokens_per_mb is {budget}; {'rows' if alone else 'blocks'} are never "
        "split: raise max_tokens_per_mb, or truncate or drop such rows"
    )
