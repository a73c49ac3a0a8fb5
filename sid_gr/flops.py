"""Operations of a semantic-ID decoder: one formula for the shuffler, the log line and the cost model."""

from __future__ import annotations

from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.perf_model.task_estimator import SelfAttentionTask, training_flops
from sid_gr.batch_shuffler import decoder_flops
from sid_gr.model.config import SIDGRConfig


def sid_task(config: SIDGRConfig) -> SelfAttentionTask:
    """The operations of the layers, as a task."""
    return SelfAttentionTask(
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.num_layers,
        ffn_hidden_size=config.ffn_width,
    )


def batch_training_flops(task: SelfAttentionTask, batch: GPTSIDBatch) -> int:
    """Forward and backward operations of layers and heads on a host batch; lookups are small and left out."""
    return training_flops(int(decoder_flops(task, batch).sum()))
