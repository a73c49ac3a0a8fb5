"""From a batch to its micro-batches: pack rows under a token budget, on all ranks into the same number.

1 offer   each rank packs its own rows into as few micro-batches as it can        block_packing.py
2 agree   one gather: who needs how many, and has how many rows and loss terms    agreement.py
3 pack    each rank packs into the largest of these numbers                       block_packing.py
4 select  rows of one micro-batch at a time, as they are asked for                micro_batches.py

With joint=True there is one plan for the rows of all ranks: joint_packing.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from commons.dispatch.trim import Trim
from commons.distributed.channel.agree import ControlChannel, open_channel
from commons.distributed.errors import attempt
from commons.micro_batching.agreement import (
    Needs,
    all_can_make,
    exchange_needs,
    most_needed,
    require_blocks,
)
from commons.micro_batching.block_packing import BlockPacking
from commons.micro_batching.joint_packing import pack_jointly
from commons.micro_batching.micro_batches import MicroBatches
from commons.micro_batching.row_blocks import RowBlocks
from commons.micro_batching.row_columns import RowColumns
from commons.micro_batching.spec import MicroBatchSpec, require_spec
from commons.sequence_batch.rows import count_rows

B = TypeVar("B")

# Seconds after which a rank that does not take part is reported.
DEFAULT_TIMEOUT = 600.0


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
    as they have moved no rows, after one of three): each says how many micro-batches it needs, and all make the largest
    of these numbers. A rank that needs fewer deals its rows to as many. Where a rank has too few rows for that, all
    pack by "refined" before they give up.

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
        TypeError: `spec` is no MicroBatchSpec, or a batch that `select_rows` does not know.
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
    # In a joint plan a rank without rows has none, whatever the others do: it is told from the rows' own table.
    options["workloads given"] = joint is not True and workloads is not None
    options["groups given"] = joint is not True and groups is not None
    if isinstance(spec, MicroBatchSpec):
        options |= dataclasses.asdict(spec)
    given = {"lengths": lengths, "workloads": workloads, "loss_tokens": loss_tokens, "groups": groups}
    if joint is True:
        return pack_jointly(batch, spec, given, group, options, trim=trim, timeout=timeout)
    offer, error = attempt(lambda: _Offer.of(batch, spec, given, joint, trim))
    with open_channel(group, timeout, ControlChannel, moves_rows=False) as channel:
        needs = exchange_needs(channel, options, None if offer is None else offer.needs, error)
        assert offer is not None  # noqa: S101  a mistake has been raised
        number = most_needed(needs)
        if not all_can_make(number, needs) and spec.packing_algorithm != "refined":
            offer = offer.with_refined()
            needs = exchange_needs(channel, options, offer.needs, None)
            number = most_needed(needs)
        require_blocks(needs, number, channel.members)
        world_size = channel.world_size
    return offer.micro_batches(batch, number, world_size, sum(each.loss_tokens for each in needs))


@dataclass(frozen=True, eq=False)
class _Offer:
    """What a rank brings, checked and packed into as few micro-batches as it can."""

    packing: BlockPacking  # its rows, in blocks
    columns: RowColumns  # what there is to know of each row
    seconds: float  # time that packing has taken so far

    @classmethod
    def of(cls, batch: Any, spec: MicroBatchSpec, given: Mapping[str, Any], joint: Any, trim: Any) -> _Offer:
        require_spec(spec)
        if joint is not False:
            raise ValueError(f"joint is {joint!r}; it is True or False: choose one")
        if trim is not None:
            raise ValueError(
                "trim is given and joint is False; padded sequences are cut where rows change rank: set joint=True, or "
                "trim the batch with trim_batch"
            )
        columns = RowColumns.of(batch, count_rows(batch), **given)
        started = time.perf_counter()
        blocks = RowBlocks.of(spec, len(columns.lengths), columns.groups)
        packing = BlockPacking.of(spec, blocks, columns.lengths, columns.workloads)
        return cls(packing, columns, time.perf_counter() - started)

    def with_refined(self) -> _Offer:
        started = time.perf_counter()
        packing = self.packing.with_refined()
        return dataclasses.replace(self, packing=packing, seconds=self.seconds + time.perf_counter() - started)

    @property
    def needs(self) -> Needs:
        return Needs(
            rows=len(self.columns.lengths),
            blocks=len(self.packing.tokens),
            micro_batches=len(self.packing.fewest),
            loss_tokens=int(self.columns.loss_tokens.sum()),
        )

    def micro_batches(self, batch: B, number: int, world_size: int, all_loss_tokens: int) -> MicroBatches[B]:
        started = time.perf_counter()
        packed = self.packing.into(number)
        return MicroBatches.of(
            batch,
            self.packing.spec,
            self.packing.blocks,
            packed,
            self.columns,
            world_size=world_size,
            all_loss_tokens=all_loss_tokens,
            seconds=self.seconds + time.perf_counter() - started,
        )
