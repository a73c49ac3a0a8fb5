"""The SID-GR shuffler: the workload of a row is the decoder's forward FLOPs for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import register_batch_shuffler
from commons.distributed.options import ShufflerOptions, reject_options_as
from commons.perf_model.calibration import CalibratedTask
from commons.perf_model.task_estimator import SelfAttentionTask, vocabulary_head_flops


@register_batch_shuffler("sid_gr")
class SIDGRBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    """Balances the forward FLOPs of a semantic-ID decoder or, with `options.calibration`, its measured time.

    The tokens of a row are BOS and the codes of its history and its candidates, without the last code; attention is
    causal. The heads score one codebook for every code of a candidate; they count if the batch has `codebook_sizes`.
    A user with an empty history still has a workload.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of attention heads, over all tensor-parallel ranks.
        head_dim: width of a head.
        num_layers: number of layers.
        ffn_hidden_size: width of the feed-forward block; None for 4 · hidden_size.
        options: settings; None for the defaults, which balance.
        pg_group: ranks that share a global batch; None for the default group, see `BaseTaskBalancedBatchShuffler`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_layers: int = 1,
        *,
        ffn_hidden_size: int | None = None,
        options: ShufflerOptions | None = None,
        pg_group: dist.ProcessGroup | None = None,
    ) -> None:
        reject_options_as(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            ffn_hidden_size=ffn_hidden_size,
        )
        self.task = SelfAttentionTask(hidden_size, num_heads, head_dim, num_layers, ffn_hidden_size=ffn_hidden_size)
        super().__init__(options, pg_group)
        self.cost = self.calibrated(self.task)

    def get_workloads(self, batch: GPTSIDBatch) -> torch.Tensor:
        """Forward FLOPs of every row or, with a calibration, its time: int64 `(batch_size,)`."""
        if isinstance(self.cost, CalibratedTask):
            return self.cost.get_workloads(batch.sequence_lengths())
        return decoder_flops(self.task, batch)


def decoder_flops(task: SelfAttentionTask, batch: GPTSIDBatch) -> torch.Tensor:
    """Forward FLOPs of the layers and the heads for every row, int64 `(batch_size,)`.

    Args:
        task: the cost model of the layers.
        batch: a batch on the host or a device; nothing is copied from the device.
    """
    layers = task.get_workloads(batch.sequence_lengths())
    # One head scores each code of a candidate, so the heads score all codes of all codebooks once per candidate.
    candidates = batch.code_lengths(batch.candidate_feature_name) // batch.num_hierarchies
    return layers + vocabulary_head_flops(
        candidates, hidden_size=task.hidden_size, vocab_size=sum(batch.codebook_sizes or ())
    )
