"""From a batch to its micro-batches: pack rows under a token budget, on all ranks into the same number.

1 offer   each rank packs its own rows into as few micro-batches as it can        block_packing.py
2 agree   one gather: who needs how many, and has how many rows and loss terms    agreement.py
3 pack    each rank packs into the largest of these numbers                       block_packing.py
4 select  rows of one micro-batch at a time, as they are asked for                micro_batches.py
"""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.control import ControlChannel, open_channel
from commons.distributed.errors import attempt
from commons.micro_batching.agreement import (
    Needs,
    all_can_make,
    exchange_needs,
    most_needed,
    require_blocks,
)
from commons.micro_batching.block_packing import BlockPacking
from commons.micro_batching.metrics import packing_metrics
from commons.micro_batching.micro_batches import MicroBatches
from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.partitioner import as_int64_workloads
from commons.sequence_batch.rows import count_rows
from commons.sequence_batch.torchrec_types import is_keyed_jagged

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
    timeout: float = DEFAULT_TIMEOUT,
) -> MicroBatches[B]:
    """Cut a batch into micro-batches that keep a token budget; all ranks make the same number, and none is empty.

    Called by all ranks of the group. They agree by one gather of six integers over a gloo group of their own: each says
    how many micro-batches it needs, and all make the largest of these numbers. A rank that needs fewer deals its rows
    to as many. Where a rank has too few rows for that, all pack by "refined" before they give up.

    Args:
        batch: TensorDict, dict of tensors, dataclass such as BaseBatch, nested or plain tensor; any nesting of these
            whose fields have an entry per row.
        spec: how to cut it.
        lengths: tokens of each row: list, array or tensor `(rows,)`. Tensors on a device are copied to the host.
        group: the ranks; default as for the shuffler: megatron-core's data-parallel group, else all. Without
            torch.distributed there is one rank.
        workloads: what each row costs, `(rows,)`, if not its tokens: then the budget is on tokens, and the workloads
            are balanced. For the algorithms "kk" and "refined".
        loss_tokens: terms of the loss in each row, `(rows,)`, such as `count_loss_tokens` gives; by default the label
            values of a BaseBatch that has labels, else `lengths`.
        timeout: seconds after which a rank that does not take part is reported.

    Raises:
        ValueError: an empty batch, fields with different numbers of rows, rows above the budget, which are named, rows
            that granularity does not divide, too few rows for the number of micro-batches, workloads with "ffd", or
            ranks whose specs or arguments differ. On every rank, whichever has the mistake.
        TypeError: `spec` is no MicroBatchSpec, or a batch that `select_rows` does not know.
        RankMissingError: a rank did not take part in time.

    >>> batch = {"ids": torch.arange(4)}
    >>> spec = MicroBatchSpec(max_tokens_per_mb=8, packing_algorithm="refined")
    >>> micro_batches = pack_micro_batches(batch, spec, [2, 6, 5, 3])
    >>> [each["ids"].tolist() for each in micro_batches], micro_batches.num_tokens
    ([[0, 1], [2, 3]], [8, 8])

    """
    offer, error = attempt(lambda: _Offer.of(batch, spec, lengths, workloads, loss_tokens))
    options: dict[str, Any] = {"spec": type(spec).__name__, "workloads given": workloads is not None}
    if isinstance(spec, MicroBatchSpec):
        options |= dataclasses.asdict(spec)
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
    """What a rank brings, checked and packed into as few micro-batches as it can.

    Attributes:
        packing: its rows, in blocks.
        lengths: int64 `(rows,)`, tokens of each row.
        loss_tokens: int64 `(rows,)`, terms of the loss in each row.
        seconds: time that packing has taken so far.
    """

    packing: BlockPacking
    lengths: np.ndarray
    loss_tokens: np.ndarray
    seconds: float

    @classmethod
    def of(cls, batch: Any, spec: MicroBatchSpec, lengths: Any, workloads: Any, loss_tokens: Any) -> _Offer:
        if not isinstance(spec, MicroBatchSpec):
            raise TypeError(f"spec is a {type(spec).__name__}; it must be a MicroBatchSpec: make one")
        rows = count_rows(batch)
        tokens = _per_row(lengths, "lengths", rows)
        costs = None if workloads is None else _per_row(workloads, "workloads", rows)
        terms = _label_values(batch) if loss_tokens is None else _per_row(loss_tokens, "loss_tokens", rows)
        started = time.perf_counter()
        packing = BlockPacking.of(spec, tokens, costs)
        return cls(packing, tokens, tokens if terms is None else terms, time.perf_counter() - started)

    def with_refined(self) -> _Offer:
        started = time.perf_counter()
        packing = self.packing.with_refined()
        return dataclasses.replace(self, packing=packing, seconds=self.seconds + time.perf_counter() - started)

    @property
    def needs(self) -> Needs:
        return Needs(
            rows=len(self.lengths),
            blocks=len(self.packing.tokens),
            micro_batches=len(self.packing.fewest),
            loss_tokens=int(self.loss_tokens.sum()),
        )

    def micro_batches(self, batch: B, number: int, world_size: int, all_loss_tokens: int) -> MicroBatches[B]:
        packing, size = self.packing, self.packing.spec.granularity
        started = time.perf_counter()
        blocks = packing.into(number)
        seconds = self.seconds + time.perf_counter() - started
        groups = [[block * size + place for block in group for place in range(size)] for group in blocks]
        num_tokens = [int(self.lengths[rows].sum()) for rows in groups]
        terms = [int(self.loss_tokens[rows].sum()) for rows in groups]
        return MicroBatches(
            batch=batch,
            groups=groups,
            lengths=[torch.from_numpy(self.lengths[rows]) for rows in groups],
            num_tokens=num_tokens,
            workloads=None if packing.workloads is None else [int(packing.workloads[each].sum()) for each in blocks],
            loss_tokens=terms,
            loss_weights=[world_size * each / all_loss_tokens if all_loss_tokens else 0.0 for each in terms],
            loss_scale=world_size / all_loss_tokens if all_loss_tokens else 0.0,
            metrics=packing_metrics(
                packing.tokens, blocks, packing.spec.max_tokens_per_mb or max(1, *num_tokens), seconds
            ),
        )


def _per_row(values: Any, name: str, rows: int) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    return as_int64_workloads(values, name, rows)


def _label_values(batch: Any) -> np.ndarray | None:
    """Label values of each row of a BaseBatch, int64 `(rows,)`; None for other batches and without labels."""
    if not _is_base_batch(batch) or batch.labels is None:
        return None
    if is_keyed_jagged(batch.labels):
        return batch.labels.lengths().view(-1, batch.batch_size).sum(0).to("cpu", torch.int64).numpy()
    values = np.full(batch.batch_size, batch.labels[:1].numel(), np.int64)
    values[batch.actual_batch_size :] = 0
    return values


def _is_base_batch(batch: Any) -> bool:
    # Looked up rather than imported: the class needs TorchRec, and whoever has one has imported it.
    batches = sys.modules.get("commons.sequence_batch.batch")
    return isinstance(batch, getattr(batches, "BaseBatch", ()))
