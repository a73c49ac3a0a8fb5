"""Operations of an HSTU model: one formula for the shuffler, the log line, the calibration and the simulator."""

from __future__ import annotations

from commons.datasets.hstu_batch import HSTUBatch
from commons.perf_model.task_estimator import HSTUAttentionTask, training_flops
from hstu.lengths import workload_lengths
from hstu.model import HSTUConfig


def hstu_task(config: HSTUConfig) -> HSTUAttentionTask:
    """The operations of a stack of layers, as a task."""
    return HSTUAttentionTask(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.kv_channels,
        num_layers=config.num_layers,
        causal=config.is_causal,
        target_group_size=config.target_group_size,
    )


def batch_training_flops(task: HSTUAttentionTask, batch: HSTUBatch, *, contextual_mask: bool = False) -> int:
    """Forward and backward operations of the layers on a host batch.

    Embeddings, projections of them, the head and the scores of retrieval are left out.

    Args:
        task: the layers.
        batch: the batch.
        contextual_mask: whether contextual tokens see all of the history.

    """
    return training_flops(int(task.get_workloads(*workload_lengths(batch, contextual_mask=contextual_mask)).sum()))


def count_tokens(batch: HSTUBatch) -> int:
    """Tokens that the model computes for a host batch; what comes with a row besides them does not count."""
    return int(batch.sequence_lengths()[0].sum())
