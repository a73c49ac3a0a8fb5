"""From a batch to its micro-batches: rows are packed under a token budget, into the same number on all ranks.

1 offer   each rank packs its own rows into the fewest micro-batches              block_packing.py
2 agree   one gather of each rank's micro-batches, rows and loss terms
3 pack    each rank packs into the largest number of micro-batches of any rank    block_packing.py
4 select  rows of one micro-batch at a time, when they are used                   micro_batches.py

With joint=True the third step is one plan for the rows of all ranks:

3 gather  each row's tokens, workload, loss terms, group and own packing          dispatch/own_rows.py
  plan    assign rows to ranks and micro-batches, equally on every rank           joint_plan.py
  move    one exchange of the rows that change rank                               dispatch/redistribute.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist

from commons.checks import as_boolean, kind_of
from commons.dispatch.exchange import DEFAULT_TIMEOUT, DispatchChannel
from commons.dispatch.own_rows import OwnRows, gather_rows
from commons.dispatch.redistribute import Routes, carry_out
from commons.dispatch.trim import Trim, as_trims
from commons.distributed.channel.agree import CALL_NUMBERS, ControlChannel
from commons.distributed.errors import capture_error, listed
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
    """Cut a batch into micro-batches under a token budget; all ranks make the same number, and none is empty.

    Collective over the group. All ranks make the largest number of micro-batches that any rank needs. They agree on it
    with one gather of six integers over their own gloo group; until the group has first moved rows, a gather of three
    integers precedes it. If a rank has too few rows for this number, all ranks try "refined" before an error is raised.

    With `joint`, for ranks that synchronise at every micro-batch (FSDP, expert parallelism), one plan covers the rows
    of all ranks: the fewest micro-batches per rank, and the i-th micro-batches of all ranks have similar costs. Rows
    that change rank move in one exchange. If each rank's own packing is as good to 1 %, no row moves. A rank may have
    any number of rows, also none; padding rows that a batch states are left out. `MicroBatches.send_home` sends results
    back to the ranks that their rows are from.

    Args:
        batch: TensorDict, dict of tensors, dataclass such as BaseBatch, nested or plain tensor, or any nesting of these
            whose fields have an entry per row. With `joint`, None on a rank without rows, like the arguments per row.
        spec: how to cut the batch; its numbers are per rank.
        lengths: tokens of each row: list, array or tensor `(rows,)`. Tensors on a device are copied to the host.
        group: the ranks; None for megatron-core's data-parallel group if there is one, else all ranks, as for the
            shuffler. Without torch.distributed there is one rank.
        workloads: cost of each row, `(rows,)`, to balance under the budget on tokens; needs the algorithm "kk" or
            "refined". None if the cost is the tokens.
        loss_tokens: terms of the loss in each row, `(rows,)`, such as from `count_loss_tokens`; None for the number of
            label values of a BaseBatch with labels, else for `lengths`.
        groups: integers or strings `(rows,)`: rows with equal values, such as the answers to one prompt or a preference
            pair, stay in one micro-batch; with `joint` also rows of several ranks. Rows keep their order, so those of a
            group are neighbours there only if they were. An alternative to `MicroBatchSpec.granularity`, which keeps
            neighbours together.
        joint: whether to plan the rows of all ranks together; equal on all ranks.
        trim: with `joint`, the fields that are padded sequences. Their widths may differ between ranks; a rank's result
            is as wide as its longest row, filled with the fields' own padding value (`Trim.fill`).
        timeout: seconds after which a rank that has not called this is reported missing.

    Raises:
        ValueError: an empty batch (with `joint`, no rows on any rank), fields with different numbers of rows, rows
            above the budget (the error names them), a number of rows that is no multiple of granularity, both `groups`
            and a granularity, too few rows for the number of micro-batches, workloads with "ffd", batches of different
            types with `joint`, or ranks whose specs or arguments differ. Raised on every rank.
        TypeError: `spec` is no MicroBatchSpec, or the batch is of an unsupported type.
        RankMissingError: a rank did not call this in time.

    Examples:
        >>> import torch
        >>> batch = {"ids": torch.arange(4)}
        >>> spec = MicroBatchSpec(max_tokens_per_mb=8, packing_algorithm="refined")
        >>> micro_batches = pack_micro_batches(batch, spec, [2, 6, 5, 3])
        >>> [each["ids"].tolist() for each in micro_batches], micro_batches.num_tokens
        ([[0, 1], [2, 3]], [8, 8])
    """
    joint = bool(joint) if isinstance(joint, np.bool_) else joint
    options: dict[str, Any] = {"joint": joint, "spec": type(spec).__name__, "trim": repr(trim)}
    # Not compared with `joint`, where a rank without rows passes None; the gather of the rows compares the others.
    given = {"lengths": lengths, "workloads": workloads, "loss_tokens": loss_tokens, "groups": groups}
    for name in ("workloads", "loss_tokens", "groups"):
        options[f"{name} given"] = joint is not True and given[name] is not None
    if isinstance(spec, MicroBatchSpec):
        options |= dataclasses.asdict(spec)
    if joint is True:
        return _pack_jointly(batch, spec, given, group, options, trim, timeout)
    offer, error = capture_error(lambda: _Offer.alone(batch, spec, given, joint, trim))
    with closing(ControlChannel(group, timeout, moves_rows=False)) as channel:
        needs = _agree(channel, None if batch is None else options, offer, error)  # without a batch nothing is given
        assert offer is not None  # noqa: S101  a mistake has been raised
        if not _all_can_make(needs) and spec.packing_algorithm != "refined":
            refined = dataclasses.replace(spec, packing_algorithm="refined")
            offer = _Offer.of(refined, offer.columns, may_fail=False, seconds=offer.seconds)
            needs = _agree(channel, options, offer, None)
        _require_blocks(needs, channel.members)
    assert offer.packing is not None  # noqa: S101  without `joint`, packing has succeeded or raised
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
    made, error = capture_error(lambda: _Offer.joint(batch, spec, given, trim))
    with closing(DispatchChannel(group, timeout)) as channel:
        needs = _agree(channel, options, None if made is None else made[0], error)
        assert made is not None  # noqa: S101  a mistake has been raised
        offer, own = made
        rows_per_rank = np.array([each.rows for each in needs])
        alone = all(each.micro_batches for each in needs) and _all_can_make(needs)
        own_packing = None
        if alone and offer.packing is not None:
            own_packing = offer.packing.into(_most_needed(needs))[offer.blocks.of_row]
        own = dataclasses.replace(own, columns={**own.columns, "micro_batch": own_packing})
        gathered = gather_rows(channel, own, rows_per_rank)
        columns = RowColumns.of(gathered.columns)
        started = time.perf_counter()
        plan = plan_jointly(
            spec,
            columns.lengths,
            columns.workloads,
            rows_per_rank,
            gathered.columns["micro_batch"] if alone else None,
            groups=columns.groups,
        )
        seconds = offer.seconds + time.perf_counter() - started
        costs = columns.lengths if columns.workloads is None else columns.workloads
        bound = -(-int(costs.sum()) // len(needs))
        shuffle = ShufflePlan.of(GatheredRows(rows_per_rank, rows_per_rank, costs, columns.lengths), plan.rank, bound)
        routes = Routes(shuffle, channel.rank, group, timeout)
        moved = carry_out(channel, _CALL, own, routes, gathered)
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
    """The numbers that one rank contributes to the agreement."""

    rows: int  # rows of its batch
    blocks: int  # blocks of its rows: the most micro-batches that it can make
    micro_batches: int  # fewest micro-batches of its own rows; 0 if they cannot be packed without other ranks' rows
    loss_tokens: int  # terms of the loss in its batch


@dataclass(frozen=True, eq=False)
class _Offer:
    """A rank's own rows, checked and packed into the fewest micro-batches."""

    columns: RowColumns  # the numbers per row
    blocks: RowBlocks  # the rows in blocks that stay together
    packing: BlockPacking | None  # None with `joint` if the blocks cannot be packed without other ranks' rows
    seconds: float  # time that packing has taken so far

    @classmethod
    def alone(cls, batch: Any, spec: MicroBatchSpec, given: Mapping[str, Any], joint: Any, trim: Any) -> _Offer:
        _require_spec(spec)
        as_boolean(joint, "joint")
        if trim is not None:
            raise ValueError(
                "trim is given and joint is False; trimming is part of the exchange of rows: set joint=True, or trim "
                "the batch with trim_batch"
            )
        no_rows = batch is None  # an error with the remedy, as for a batch of 0 rows
        columns = dict.fromkeys(given) if no_rows else RowColumns.checked(batch, Rows.of(batch).count, **given)
        return cls.of(spec, RowColumns.of(columns), may_fail=False)

    @classmethod
    def joint(
        cls, batch: Any, spec: MicroBatchSpec, given: Mapping[str, Any], trim: Trim | Sequence[Trim] | None
    ) -> tuple[_Offer, OwnRows]:
        _require_spec(spec)
        trims = as_trims(trim, one_sided=True)
        own = OwnRows.of(batch, given, lambda rows: RowColumns.checked(batch, rows.count, **given), trims)
        return cls.of(spec, RowColumns.of(own.columns), may_fail=True), own

    @classmethod
    def of(cls, spec: MicroBatchSpec, columns: RowColumns, *, may_fail: bool, seconds: float = 0.0) -> _Offer:
        """Pack the rows; `packing` is None if that fails and `may_fail`, as where other ranks may take some rows."""
        started = time.perf_counter()
        blocks, packing = RowBlocks.of(spec, len(columns.lengths), columns.groups), None
        if may_fail:
            tokens_of(spec, blocks, columns.lengths, columns.workloads is not None)  # raises what no rank can solve
        with contextlib.suppress(ValueError) if may_fail else contextlib.nullcontext():
            packing = BlockPacking.of(spec, blocks, columns.lengths, columns.workloads)
        return cls(columns, blocks, packing, seconds + time.perf_counter() - started)

    @property
    def needs(self) -> _Needs:
        return _Needs(
            rows=len(self.columns.lengths),
            blocks=len(self.blocks),
            micro_batches=0 if self.packing is None else self.packing.num_fewest,
            loss_tokens=int(self.columns.loss_tokens.sum()),
        )


def _agree(
    channel: ControlChannel, options: dict[str, Any] | None, offer: _Offer | None, error: Exception | None
) -> list[_Needs]:
    """The needs of every rank. Raises any rank's error on all ranks, and ValueError if options differ."""
    if error is not None and channel.world_size == 1:
        raise error
    own = _Needs(0, 0, 0, 0) if offer is None else offer.needs
    return [_Needs(*row) for row in channel.agree(_CALL, options, error, own, room=CALL_NUMBERS).tolist()]


def _most_needed(needs: list[_Needs]) -> int:
    return max(each.micro_batches for each in needs)


def _all_can_make(needs: list[_Needs]) -> bool:
    """Whether every rank has enough blocks for the largest number of micro-batches that any rank needs."""
    return _most_needed(needs) <= min(each.blocks for each in needs)


def _require_blocks(needs: list[_Needs], members: Sequence[int]) -> None:
    """Raise ValueError, on all ranks, if a rank has too few rows; `members` are the global numbers of the ranks."""
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
        f"{listed(short)}; all ranks make the same number and none is empty: spread the rows evenly over the "
        "ranks (commons.dispatch.redistribute_balanced), raise max_tokens_per_mb or lower n_mbs and n_mbs_divisor"
    )


def _require_spec(spec: Any) -> None:
    if not isinstance(spec, MicroBatchSpec):
        raise TypeError(f"spec is {kind_of(spec)}; it must be a MicroBatchSpec: make one")
