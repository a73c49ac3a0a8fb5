"""The functions of verl's seqlen_balancing; see `commons.integrations.verl`."""

from commons.integrations.verl import (
    get_group_balanced_partitions,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
)

__all__ = ["get_group_balanced_partitions", "get_seqlen_balanced_partitions", "rearrange_micro_batches"]
