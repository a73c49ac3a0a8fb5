"""From a batch to its micro-batches: pack rows under a token budget, on all ranks into the same number.

1 offer   each rank packs its own rows, if it can by itself                       block_packing.py
2 agree   one gather: who needs how many, and has how many rows and loss terms
3 pack    each rank packs into the largest of these numbers                       block_packing.py
4 select  rows of one micro-batch at a time, when they are used                   micro_batches.py

With joint=True the third step is one plan for the rows of all ranks:

3 gather  tokens, workloads, loss terms, group of every row, its own packing      dispatch/own_rows.py
  plan    rows to ranks and micro-batches, the same on every rank                 joint_plan.py
  move    rows that change rank, in one exchange                                  dispatch/redistribute.py
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist

from commons.dispatch.exchange import DEFAULT_TIMEOUT, DispatchChannel
from commons.dispatch.own_rows import OwnRows, gather_rows
from commons.dispatch.redistribute import Routes, carry_out
from commons.dispatch.trim import Trim, as_trims
from commons.distributed.channel.agree import CALL_NUMBERS, ControlChannel, open_channel
from commons.distributed.errors import attempt
from commons.micro_batching.block_packing import BlockPacking, RowBlocks, tokens_of
from commons.micro_batching.joint_plan import plan_jointly
from commons.micro_batching.micro_batches import MicroBatches, RowColumns
from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan
from commons.sequence_batch.rows import Rows

B = TypeVar("B")

_CALL = "pack_micro_batches"


def pack_micro_batches(
    batch: B,
    spec: MicroBatchSpec,
    lengths: Any,
    group: dist.ProcessGroup | None = None,
    *,
    workloads: Any = None,
    loss_tokens: Any = None,
    groups: Any = None,
    joint: bool = False,
    trim: Trim | Sequence[Trim] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> MicroBatches[B]:
    """Cut a batch into micro-batches that keep a token budget; all ranks make the same number, and none is empty.

    Called by all ranks of the group. They agree by one gather of six integers over a gloo group of their own (as long
    as they have moved no rows, after one of three): the number of micro-batches is the largest that any rank needs. A
    rank that needs fewer deals its rows to as many. Where a rank has too few rows for that, all pack by "refined"
    before they give up.

    With `joint`, for ranks that synchronise at every micro-batch (FSDP, expert parallelism), there is one plan for the
    rows of all ranks: as few micro-batches as these take together, and the i-th ones of all ranks of even cost. Rows
    change rank for it, in one exchange; those that stay do not travel. If each rank's own packing is as good to 1 %,
    none moves. A rank may bring any number of rows, none included; padding that a batch states is left out. Results go
    home with `MicroBatches.send_home`.

    Args:
        batch: TensorDict, dict of tensors, dataclass such as BaseBatch, nested or plain tensor; any nesting of these
            whose fields have an entry per row. With `joint`, None on a rank without rows, as its other columns.
        spec: how to cut it; its numbers are those of one rank.
        lengths: tokens of each row: list, array or tensor `(rows,)`. Tensors on a device are copied to the host.
        group: the ranks; default as for the shuffler: megatron-core's data-parallel group, else all. Without
            torch.distributed there is one rank.
        workloads: what each row costs, `(rows,)`, if not its tokens: then the budget is on tokens, and the workloads
            are balanced. For the algorithms "kk" and "refined".
        loss_tokens: terms of the loss in each row, `(rows,)`, such as `count_loss_tokens` gives; by default the label
            values of a BaseBatch that has labels, else `lengths`.
        groups: integers or strings `(rows,)`: rows of equal ones, such as the answers to one prompt or a preference
            pair, stay in one micro-batch; with `joint` on one rank too, from whichever ranks they come. In place of
            `MicroBatchSpec.granularity`, which keeps neighbours together.
        joint: plan the rows of all ranks together; the same on all of them.
        trim: with `joint`, which fields are padded sequences: they may differ in width between ranks, and become as
            wide as the longest row that a rank ends with, filled with the padding that they have already (`Trim.fill`).
        timeout: seconds after which a rank that does not take part is reported.

    Raises:
        ValueError: an empty batch (with `joint`, no rows on any rank), fields with different numbers of rows, rows
            above the budget, which are named, rows that granularity does not divide, `groups` beside a granularity,
            too few rows for the number of micro-batches, workloads with "ffd", batches of different kinds that are
            planned together, or ranks whose specs or arguments differ. On every rank, whichever has the mistake.
        TypeError: `spec` is no MicroBatchSpec, or a batch that `Rows` does not know.
        RankMissingError: a rank did not take part in time.

    Examples:
        >>> import torch
        >>> batch = {"ids": torch.arange(4)}
        >>> spec = MicroBatchSpec(max_tokens_per_mb=8, packing_algorithm="refined")
        >>> micro_batches = pack_micro_batches(batch, spec, [2, 6, 5, 3])
        >>> [each["ids"].tolist() for each in micro_batches], micro_batches.num_tokens
        ([[0, 1], [2, 3]], [8, 8])
    """
    options: dict[str, Any] = {"joint": joint, "spec": type(spec).__name__, "trim": repr(trim)}
    # In a joint plan a rank without rows has none; the table of all rows shows what the others give.
    options["workloads given"] = joint is not True and workloads is not None
    options["groups given"] = joint is not True and groups is not None
    if isinstance(spec, MicroBatchSpec):
        options |= dataclasses.asdict(spec)
    given = {"lengths": lengths, "workloads": workloads, "loss_tokens": loss_tokens, "groups": groups}
    if joint is True:
        return _pack_jointly(batch, spec, given, group, options, trim, timeout)
    offer, error = attempt(lambda: _Offer.alone(batch, spec, given, joint, trim))
    with open_channel(group, timeout, ControlChannel, moves_rows=False) as channel:
        needs = _agree(channel, options, offer, error)
        assert offer is not None  # noqa: S101  a mistake has been raised
        if not _all_can_make(needs) and spec.packing_algorithm != "refined":
            offer = offer.with_refined()
            needs = _agree(channel, options, offer, None)
        _require_blocks(needs, channel.members)
    assert offer.packing is not None  # noqa: S101  a rank packs by itself, or raises
    started = time.perf_counter()
    packed = offer.packing.into(_most_needed(needs))
    return MicroBatches.of(
        batch,
        offer.packing.spec,
        offer.blocks,
        packed,
        offer.columns,
        world_size=len(needs),
        all_loss_tokens=sum(each.loss_tokens for each in needs),
        seconds=offer.seconds + time.perf_counter() - started,
    )


def _pack_jointly(
    batch: Any,
    spec: MicroBatchSpec,
    given: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    options: dict[str, Any],
    trim: Trim | Sequence[Trim] | None,
    timeout: float,
) -> MicroBatches[Any]:
    made, error = attempt(lambda: _Offer.joint(batch, spec, given, trim))
    with open_channel(group, timeout, DispatchChannel) as channel:
        needs = _agree(channel, options, None if made is None else made[0], error)
        assert made is not None  # noqa: S101  a mistake has been raised
        offer, own, trims = made
        rows_per_rank = np.array([each.rows for each in needs])
        alone = all(each.micro_batches for each in needs) and _all_can_make(needs)
        own_packing = offer.micro_batch_of_rows(_most_needed(needs)) if alone else None
        own = dataclasses.replace(own, columns={**own.columns, "micro_batch": own_packing})
        gathered, padding, differentiable = gather_rows(channel, own, rows_per_rank)
        columns = RowColumns.of_gathered(gathered)
        started = time.perf_counter()
        plan = plan_jointly(
            spec,
            columns.lengths,
            columns.workloads,
            rows_per_rank,
            gathered["micro_batch"] if alone else None,
            groups=columns.groups,
        )
        seconds = offer.seconds + time.perf_counter() - started
        costs = columns.lengths if columns.workloads is None else columns.workloads
        bound = -(-int(costs.sum()) // len(needs))
        shuffle = ShufflePlan.of(GatheredRows(rows_per_rank, rows_per_rank, costs, columns.lengths), plan.rank, bound)
        routes = Routes(shuffle, channel.rank, group, timeout)
        moved = carry_out(channel, _CALL, own, routes, trims, padding, differentiable)
    here = moved.indices.numpy()
    blocks = plan.blocks.select(here)
    return MicroBatches.of(
        moved.batch,
        spec,
        blocks,
        plan.micro_batch[here][blocks.first_rows],
        columns.select(here),
        world_size=len(needs),
        all_loss_tokens=int(columns.loss_tokens.sum()),
        seconds=seconds,
        costs_of_ranks=plan.costs,
        redistributed=moved,
    )


class _Needs(NamedTuple):
    """What one rank brings and needs."""

    rows: int  # rows of its batch
    blocks: int  # how many there are to be dealt, each of `granularity` rows; at most as many micro-batches
    micro_batches: int  # fewest micro-batches that its packing takes; 0 where only other ranks' rows make one possible
    loss_tokens: int  # terms of the loss in its batch


@dataclass(frozen=True, eq=False)
class _Offer:
    """What a rank brings, checked and packed into as few micro-batches as it can."""

    columns: RowColumns  # what there is to know of each row
    blocks: RowBlocks  # which of its rows stay together
    packing: BlockPacking | None  # these by themselves; None where a joint plan may make it possible
    seconds: float  # time that packing has taken so far

    @classmethod
    def alone(cls, batch: Any, spec: MicroBatchSpec, given: Mapping[str, Any], joint: Any, trim: Any) -> _Offer:
        _require_spec(spec)
        if joint is not False:
            raise ValueError(f"joint is {joint!r}; it is True or False: choose one")
        if trim is not None:
            raise ValueError(
                "trim is given and joint is False; padded sequences are cut where rows change rank: set joint=True, or "
                "trim the batch with trim_batch"
            )
        columns = RowColumns.of(batch, Rows.of(batch).count, **given)
        started = time.perf_counter()
        blocks = RowBlocks.of(spec, len(columns.lengths), columns.groups)
        packing = BlockPacking.of(spec, blocks, columns.lengths, columns.workloads)
        return cls(columns, blocks, packing, time.perf_counter() - started)

    @classmethod
    def joint(
        cls, batch: Any, spec: MicroBatchSpec, given: Mapping[str, Any], trim: Trim | Sequence[Trim] | None
    ) -> tuple[_Offer, OwnRows, tuple[Trim, ...]]:
        _require_spec(spec)
        trims = as_trims(trim, one_sided=True)
        own = OwnRows.of(batch, given, lambda rows: vars(RowColumns.of(batch, rows.count, **given)), trims)
        columns = RowColumns.of_gathered(own.columns)
        started = time.perf_counter()
        blocks = RowBlocks.of(spec, len(columns.lengths), columns.groups)
        tokens_of(spec, blocks, columns.lengths, columns.workloads is not None)
        try:
            packing = BlockPacking.of(spec, blocks, columns.lengths, columns.workloads) if len(blocks) else None
        except ValueError:
            packing = None  # the rows of others may make it possible
        return cls(columns, blocks, packing, time.perf_counter() - started), own, trims

    def with_refined(self) -> _Offer:
        started = time.perf_counter()
        packing = None if self.packing is None else self.packing.with_refined()
        return dataclasses.replace(self, packing=packing, seconds=self.seconds + time.perf_counter() - started)

    def micro_batch_of_rows(self, number: int) -> np.ndarray | None:
        """int64 `(rows,)`: where each row is if this rank packs into so many micro-batches by itself."""
        return None if self.packing is None else self.packing.into(number)[self.blocks.of_row]

    @property
    def needs(self) -> _Needs:
        return _Needs(
            rows=len(self.columns.lengths),
            blocks=len(self.blocks),
            micro_batches=0 if self.packing is None else self.packing.num_fewest,
            loss_tokens=int(self.columns.loss_tokens.sum()),
        )


def _agree(
    channel: ControlChannel, options: dict[str, Any], offer: _Offer | None, error: Exception | None
) -> list[_Needs]:
    """The needs of every rank; raises on all what went wrong on any, ValueError for different options."""
    if error is not None and channel.world_size == 1:
        raise error
    own = _Needs(0, 0, 0, 0) if offer is None else offer.needs
    return [_Needs(*row) for row in channel.agree(_CALL, options, error, own, room=CALL_NUMBERS).tolist()]


def _most_needed(needs: list[_Needs]) -> int:
    return max(each.micro_batches for each in needs)


def _all_can_make(needs: list[_Needs]) -> bool:
    """Whether every rank has a block for each of as many micro-batches as any needs."""
    return _most_needed(needs) <= min(each.blocks for each in needs)


def _require_blocks(needs: list[_Needs], members: Sequence[int]) -> None:
    """Raise ValueError, the same on all ranks, if one has too few rows; `members` are their global numbers."""
    if _all_can_make(needs):
        return
    number = _most_needed(needs)
    largest = [each.micro_batches for each in needs].index(number)
    short = [
        f"rank {rank} has {each.rows} rows" + ("" if each.blocks == each.rows else f" in {each.blocks} blocks")
        for rank, each in zip(members, needs)
        if each.blocks < number
    ]
    raise ValueError(
        f"rank {members[largest]} needs {number} micro-batches for its {needs[largest].rows} rows, "
        f"{', '.join(short)}; all ranks make as many micro-batches and none is empty: spread the rows evenly over the "
        "ranks (commons.dispatch.redistribute_balanced), raise max_tokens_per_mb or lower n_mbs and n_mbs_divisor"
    )


def _require_spec(spec: Any) -> None:
    if not isinstance(spec, MicroBatchSpec):
        raise TypeError(f"spec is a {type(spec).__name__}; it must be a MicroBatchSpec: make one")
