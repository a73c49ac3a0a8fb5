"""Micro-batches: rows packed under a token budget, evenly, and into the same number on all ranks.

allocation.py                 the allocators "ffd", "kk" and "refined", and groups of padded rows
fewest_groups.py              the search: the planner's plans, first fit, repacking, from the fewest groups on
  first_fit.py, repacking.py  packing under the capacity, and the fewest groups there can be
  leveling.py                 the least spread
metrics.py                    what a packing is worth
spec.py, packing.py           MicroBatchSpec and pack_micro_batches: from a batch to its micro-batches
  block_packing.py            one rank's rows
  joint_plan.py               with joint=True: one plan for the rows of all ranks
  micro_batches.py            the result
packed_rows.py                the rows of a micro-batch as one row without padding
"""

from commons.micro_batching.allocation import (
    ffd_allocate,
    get_allocate_fn,
    kk_allocate,
    padded_allocate,
    refined_allocate,
)
from commons.micro_batching.metrics import packing_metrics
from commons.micro_batching.micro_batches import MicroBatches
from commons.micro_batching.packed_rows import PackedRows, count_loss_tokens, pack_rows
from commons.micro_batching.packing import pack_micro_batches
from commons.micro_batching.spec import MicroBatchSpec

__all__ = [
    "MicroBatchSpec",
    "MicroBatches",
    "PackedRows",
    "count_loss_tokens",
    "ffd_allocate",
    "get_allocate_fn",
    "kk_allocate",
    "pack_micro_batches",
    "pack_rows",
    "packing_metrics",
    "padded_allocate",
    "refined_allocate",
]
