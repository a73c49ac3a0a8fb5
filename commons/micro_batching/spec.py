"""MicroBatchSpec: how a batch is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commons.checks import Count, require_field_types, take_python_scalars
from commons.micro_batching.allocation import get_allocate_fn

Order = Literal["heaviest_first", "light_ends"]


@dataclass(frozen=True)
class MicroBatchSpec:
    """How a batch is cut into micro-batches; the same on all ranks.

    Raises:
        ValueError: a value outside its range, or an unknown name.
    """

    n_mbs: Count = 1  # fewest micro-batches; n_mbs_divisor, max_tokens_per_mb or another rank may require more
    # Number of neighbouring rows that stay together, such as the answers to one prompt (GRPO) or a preference pair.
    granularity: Count = 1
    max_tokens_per_mb: Count | None = None  # most tokens of a micro-batch; None for no limit
    # The number of micro-batches is a multiple of it, as interleaved pipeline schedules require.
    n_mbs_divisor: Count = 1
    # Name of the allocator: "ffd" (first-fit decreasing), "kk" (Karmarkar-Karp) or "refined" (the fewest micro-batches,
    # evenly filled).
    packing_algorithm: str = "ffd"
    # Order of the micro-batches: "heaviest_first", so that memory peaks in the first one and all ranks go from heavy to
    # light together, or "light_ends", so that a pipeline fills and drains with light ones.
    order: Order = "heaviest_first"

    def __post_init__(self) -> None:
        take_python_scalars(self)
        get_allocate_fn(self.packing_algorithm)
        require_field_types(self)
