"""Operations of an HSTU model: one formula for the shuffler, the log line, the calibration and the simulator."""

from __future__ import annotations

from commons.datasets.hstu_batch import HSTUBatch
from commons.perf_model.task_estimator import HSTUAttentionTask, training_flops
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


def batch_training_flops(task: HSTUAttentionTask, batch: HSTUBatch) -> int:
    """Forward and backward operations of the layers on a host batch; embeddings and head are small and left out."""
    return training_flops(int(task.get_workloads(*batch.sequence_lengths()).sum()))
