"""Micro-batches: rows packed evenly under a token budget, into the same number of micro-batches on all ranks.

allocation.py                 the allocators "ffd", "kk" and "refined", and groups of padded rows
fewest_groups.py              the search for the fewest groups: the planner, first fit, repacking
  first_fit.py, repacking.py  packing under the capacity, and a lower bound of the number of groups
  leveling.py                 narrows the spread of the loads
metrics.py                    measures of a packing
spec.py, packing.py           MicroBatchSpec and pack_micro_batches: from a batch to its micro-batches
  block_packing.py            packs the rows of one rank
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
