"""How often each item occurs in the training data: the baseline that a model has to beat."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.process_group import resolve_process_group


def count_items(
    batches: Iterable[HSTUBatch],
    num_items: int,
    *,
    device: torch.device,
    pg_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Occurrences of every item in the histories of all ranks: a collective call.

    Args:
        batches: host batches of this rank; read to the end.
        num_items: ids lie in `[0, num_items)`.
        device: where ranks exchange tensors.
        pg_group: the ranks; the shuffler's default if not given.

    Returns:
        int64 `(num_items,)` on the host, the same on every rank.

    """
    counts = torch.zeros(num_items, dtype=torch.int64)
    for batch in batches:
        items = batch.features[batch.item_feature_name].values()
        counts += torch.bincount(items.long(), minlength=num_items)
    group = resolve_process_group(pg_group)
    if group is not None:
        shared = counts.to(device)
        dist.all_reduce(shared, group=group)
        counts = shared.cpu()
    return counts
