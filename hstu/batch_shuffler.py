"""The HSTU shuffler: the workload of a row is the model's forward FLOPs for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commons.checks import as_boolean, require_names
from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import register_batch_shuffler
from commons.distributed.options import ShufflerOptions, reject_options_as
from commons.perf_model.task_estimator import HSTUAttentionTask


@register_batch_shuffler("hstu")
class HSTUBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    """Balances the forward FLOPs of an HSTU model or, with `options.calibration`, its measured time.

    The length of a row is the number of tokens that the model computes for it: its contextual features, its history and
    its candidates; history and candidates count twice if actions are interleaved. So a user with an empty history but
    contextual features still has a workload.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of attention heads.
        head_dim: width of a head.
        num_layers: number of layers.
        causal: whether attention is causal.
        action_interleaved: whether the model interleaves items with actions; no effect on batches without actions.
        contextual_mask: whether contextual tokens attend to the whole history.
        target_group_size: number of consecutive candidate tokens that may attend to one another.
        value_dim: width of a head of u and v, as for HSTUAttentionTask; None for head_dim.
        concat_ux: whether the input of the output projection is [u, x, y], as in generative-recommenders, or only y.
        max_attn_len: the largest distance at which a token attends to another token; None for no window.
        token_feature_names: keys whose values are tokens of the model, for `options.max_tokens_per_rank` and the stats;
            None for all keys of the batch.
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
        causal: bool = True,
        action_interleaved: bool = True,
        contextual_mask: bool = False,
        target_group_size: int = 1,
        value_dim: int | None = None,
        concat_ux: bool = False,
        max_attn_len: int | None = None,
        token_feature_names: Sequence[str] | None = None,
        options: ShufflerOptions | None = None,
        pg_group: dist.ProcessGroup | None = None,
    ) -> None:
        dimensions: dict[str, Any] = {
            **{"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim, "num_layers": num_layers},
            **{"causal": causal, "target_group_size": target_group_size},
            **{"value_dim": value_dim, "concat_ux": concat_ux, "max_attn_len": max_attn_len},
        }
        masks = {"action_interleaved": action_interleaved, "contextual_mask": contextual_mask}
        reject_options_as(**dimensions, **masks, token_feature_names=token_feature_names)
        if token_feature_names is not None:
            token_feature_names = require_names("token_feature_names", token_feature_names)
        self.task = HSTUAttentionTask(**dimensions)
        self.action_interleaved = as_boolean(action_interleaved, "action_interleaved")
        self.contextual_mask = as_boolean(contextual_mask, "contextual_mask")
        self.token_feature_names = token_feature_names
        super().__init__(options, pg_group)
        self.cost = self.calibrated(self.task)

    def get_workloads(self, batch: HSTUBatch) -> torch.Tensor:
        """Forward FLOPs of every row or, with a calibration, its time: int64 `(batch_size,)`."""
        seqlen, num_targets = batch.token_counts(self.action_interleaved)
        return self.cost.get_workloads(
            seqlen, num_targets, batch.contextual_lengths() if self.contextual_mask else None
        )
