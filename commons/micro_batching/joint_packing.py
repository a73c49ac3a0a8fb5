"""From the batches of all ranks to one plan of their micro-batches, and the rows to where they are computed.

1 offer   each rank packs its own rows, if it can by itself                       block_packing.py
2 agree   one gather: who can make how many, and has how many rows                agreement.py
3 gather  tokens, workloads, loss terms, group of every row, its own packing      dispatch/own_rows.py
4 plan    rows to ranks and micro-batches, the same on every rank                 joint_plan.py
5 move    rows that change rank, in one exchange                                  dispatch/redistribute.py
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.dispatch.channel import DispatchChannel
from commons.dispatch.own_rows import OwnRows, gather_rows
from commons.dispatch.redistribute import Routes, carry_out, one_sided
from commons.dispatch.trim import Trim
from commons.distributed.channel.agree import open_channel
from commons.distributed.errors import attempt
from commons.micro_batching.agreement import CALL, Needs, all_can_make, exchange_needs, most_needed
from commons.micro_batching.block_packing import BlockPacking, tokens_of
from commons.micro_batching.joint_plan import JointPlan, plan_jointly
from commons.micro_batching.micro_batches import MicroBatches
from commons.micro_batching.row_blocks import RowBlocks
from commons.micro_batching.row_columns import RowColumns
from commons.micro_batching.spec import MicroBatchSpec, require_spec
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan
from commons.sequence_batch.rows import Rows


def pack_jointly(
    batch: Any,
    spec: MicroBatchSpec,
    given: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    options: dict[str, Any],
    *,
    trim: Trim | Sequence[Trim] | None,
    timeout: float,
) -> MicroBatches[Any]:
    """`pack_micro_batches` with joint=True.

    Args:
        batch: this rank's rows; None for none.
        spec: how to cut them.
        given: what is known of each row, by the names of RowColumns.
        group: the ranks.
        options: what all ranks must pass alike, as JSON holds it.
        trim: how padded sequences are cut.
        timeout: seconds after which a rank that does not take part is reported.

    Raises:
        ValueError, TypeError, KeyError, RankMissingError: as `pack_micro_batches` and `redistribute_balanced`.
    """
    offer, error = attempt(lambda: _JointOffer.of(batch, spec, given, trim))
    with open_channel(group, timeout, DispatchChannel) as channel:
        needs = exchange_needs(channel, options, None if offer is None else offer.needs, error)
        assert offer is not None  # noqa: S101  a mistake has been raised
        number, rows_per_rank = most_needed(needs), np.array([each.rows for each in needs])
        alone = all(each.micro_batches for each in needs) and all_can_make(number, needs)
        own = offer.with_own_packing(number if alone else None)
        gathered, widening, differentiable = gather_rows(channel, own, rows_per_rank, len(offer.trims))
        rows = {name: _present(column) for name, column in gathered.items()}
        started = time.perf_counter()
        plan = plan_jointly(
            spec,
            rows["lengths"],
            gathered["workloads"],
            rows_per_rank,
            rows["micro_batch"] if alone else None,
            groups=gathered["groups"],
        )
        seconds = offer.seconds + time.perf_counter() - started
        columns = RowColumns(rows["lengths"], gathered["workloads"], rows["loss_tokens"], gathered["groups"])
        routes = Routes(_as_shuffle(columns, plan, rows_per_rank), channel.rank, group, timeout)
        moved = carry_out(channel, CALL, own, routes, offer.trims, widening, differentiable)
    here = moved.indices.numpy()
    blocks = plan.blocks.select(here)
    micro_batch = plan.micro_batch[here][blocks.first_rows]
    return MicroBatches.of(
        moved.batch,
        spec,
        blocks,
        [np.flatnonzero(micro_batch == index).tolist() for index in range(plan.costs.shape[1])],
        columns.select(here),
        world_size=len(rows_per_rank),
        all_loss_tokens=int(columns.loss_tokens.sum()),
        seconds=seconds,
        costs_of_ranks=plan.costs,
        redistributed=moved,
    )


@dataclass(frozen=True, eq=False)
class _JointOffer:
    """What a rank brings, checked."""

    own: OwnRows  # its real rows, with the columns of RowColumns
    trims: tuple[Trim, ...]  # how padded sequences are cut
    blocks: RowBlocks  # which of its rows stay together
    packing: BlockPacking | None  # these by themselves; None where that is not possible
    seconds: float  # time that packing has taken

    @classmethod
    def of(
        cls, batch: Any, spec: MicroBatchSpec, given: Mapping[str, Any], trim: Trim | Sequence[Trim] | None
    ) -> _JointOffer:
        require_spec(spec)
        trims = one_sided(trim)
        if batch is None:
            _require_none(given)
            own = OwnRows.of(None, dict.fromkeys(given), trims)
        else:
            rows = Rows.of(batch)
            columns = RowColumns.of(batch, rows.count, **given)
            own = OwnRows.of(rows, vars(columns), trims)
        started = time.perf_counter()
        tokens, costs = _present(own.columns["lengths"]), own.columns["workloads"]
        blocks = RowBlocks.of(spec, len(tokens), own.columns["groups"])
        tokens_of(spec, blocks, tokens, costs is not None)
        try:
            packing = BlockPacking.of(spec, blocks, tokens, costs) if len(blocks) else None
        except ValueError:
            packing = None  # the rows of others may make it possible
        return cls(own, trims, blocks, packing, time.perf_counter() - started)

    @property
    def needs(self) -> Needs:
        return Needs(
            rows=self.own.count,
            blocks=len(self.blocks),
            micro_batches=0 if self.packing is None else len(self.packing.fewest),
            loss_tokens=int(_present(self.own.columns["loss_tokens"]).sum()),
        )

    def with_own_packing(self, number: int | None) -> OwnRows:
        """The rows with another column, `micro_batch`: where they are if each rank packs into so many by itself."""
        column = None
        if number is not None and self.packing is not None:
            of_blocks = np.empty(len(self.blocks), dtype=np.int64)
            for index, group in enumerate(self.packing.into(number)):
                of_blocks[group] = index
            column = of_blocks[self.blocks.of_row]
        return replace(self.own, columns={**self.own.columns, "micro_batch": column})


def _as_shuffle(columns: RowColumns, plan: JointPlan, rows_per_rank: np.ndarray) -> ShufflePlan:
    """The plan as rows that change rank."""
    costs = columns.lengths if columns.workloads is None else columns.workloads
    gathered = GatheredRows(rows_per_rank, rows_per_rank, costs, columns.lengths)
    return ShufflePlan.of(gathered, plan.rank, -(-int(costs.sum()) // len(rows_per_rank)))


def _present(column: np.ndarray | None) -> np.ndarray:
    """The column of rows; where nobody has any, an empty one."""
    return np.empty(0, dtype=np.int64) if column is None else column


def _require_none(given: Mapping[str, Any]) -> None:
    for name, values in given.items():
        if values is not None and len(values):
            raise ValueError(
                f"batch is None and there are {len(values)} {name}; a rank without rows has none: pass the batch, or "
                "None for all"
            )
