"""The HSTU shuffler: a row costs what the model computes for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import register_batch_shuffler
from commons.distributed.options import ShufflerOptions, reject_options_as, require_names
from commons.perf_model.task_estimator import HSTUAttentionTask


@register_batch_shuffler("hstu")
class HSTUBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    """Balances the forward operations of an HSTU model or, with `options.calibration`, its measured time.

    The length of a row is the number of tokens that the model computes for it: the contextual features it has, its
    history and its candidates, the latter two doubled when actions are interleaved. A user with an empty history
    therefore still costs something.

    Args:
        hidden_size: width of the residual stream.
        num_heads: attention heads.
        head_dim: width of a head.
        num_layers: layers.
        causal: whether attention is causal.
        action_interleaved: whether the model interleaves items with actions; without effect on batches without actions.
        contextual_mask: whether contextual tokens see all of the history.
        target_group_size: candidates' tokens that may see one another.
        value_dim: width of a head of u and v, as for HSTUAttentionTask; head_dim if not given.
        concat_ux: whether the output projection reads [u, x, y], as in generative-recommenders, not y alone.
        max_attn_len: the largest distance at which a token sees another one; no window if not given.
        token_feature_names: keys whose values are tokens of the model, for `options.max_tokens_per_rank` and the stats;
            all keys of the batch if not given.
        options: settings; the defaults balance.
        pg_group: ranks that share a global batch.
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
        self.action_interleaved = action_interleaved
        self.contextual_mask = contextual_mask
        self.token_feature_names = token_feature_names
        super().__init__(options, pg_group)
        self.cost = self.calibrated(self.task)

    def get_workloads(self, batch: HSTUBatch) -> torch.Tensor:
        """Forward operations of every row or, with a calibration, its time: int64 `(batch_size,)`."""
        seqlen, num_targets = batch.token_counts(self.action_interleaved)
        return self.cost.get_workloads(
            seqlen, num_targets, batch.contextual_lengths() if self.contextual_mask else None
        )
