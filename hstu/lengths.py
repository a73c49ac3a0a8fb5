"""Lengths of a batch's rows as a cost formula takes them."""

from __future__ import annotations

import torch

from commons.datasets.hstu_batch import HSTUBatch


def workload_lengths(
    batch: HSTUBatch, *, action_interleaved: bool = True, contextual_mask: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Arguments of `AttentionTask.get_workloads`, on the batch's device; nothing is read back from it.

    Args:
        batch: the batch.
        action_interleaved: whether items and actions are tokens of their own.
        contextual_mask: whether contextual tokens see all of the history.

    Returns:
        int64 `(batch_size,)`: tokens that the model computes.
        int64 `(batch_size,)`: how many of them, at the end, belong to candidates.
        int64 `(batch_size,)`: how many of them, at the front, see all but the candidates; None without that mask.

    """
    seqlen, num_targets = batch.sequence_lengths(action_interleaved)
    return seqlen, num_targets, contextual_lengths(batch) if contextual_mask else None


def contextual_lengths(batch: HSTUBatch) -> torch.Tensor:
    """Contextual tokens per row: int64 `(batch_size,)`."""
    keys = batch.features.keys()
    lengths = batch.features.lengths().view(len(keys), batch.batch_size)
    contextual = [keys.index(name) for name in batch.contextual_feature_names]
    return lengths[contextual].sum(0, dtype=torch.int64)
