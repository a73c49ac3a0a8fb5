"""Megatron-Core: a scheduler that balances packed sequences, in place of "dp_balanced", which packs them in order.

evenrank.integrations.megatron.balance_packed_sequences()  # before the training; the config needs no change
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commons.micro_batching import MicroBatchSpec
from commons.micro_batching.joint_plan import plan_unplaced
from commons.perf_model.task_estimator import SelfAttentionTask

_REPLACED = "dp_balanced"


def balance_packed_sequences() -> None:
    """Put evenrank's scheduler into Megatron-Core's `scheduler_map`, as "dp_balanced".

    Raises:
        ValueError: this release of Megatron-Core has no such scheduler.
    """
    from megatron.core import __version__
    from megatron.core.datasets import data_schedule

    schedulers = getattr(data_schedule, "scheduler_map", {})
    if _REPLACED not in schedulers:
        raise ValueError(
            f"megatron-core {__version__} has no packing scheduler {_REPLACED!r} in "
            "megatron.core.datasets.data_schedule.scheduler_map; there is nothing to replace: install a release that "
            "has sequence_packing_scheduler"
        )
    schedulers[_REPLACED] = balanced_scheduler(schedulers[_REPLACED])


def balanced_scheduler(base: type) -> type:
    """A subclass of a scheduler: it exchanges and builds batches as `base` does, but assigns sequences by workload."""

    class BalancedScheduler(base):
        """Packs sequences into the fewest micro-batches, of even work on all ranks."""

        _task: SelfAttentionTask | None = None

        def run(self, *args: Any, **kwargs: Any) -> Any:
            """Run the base's method, after reading the cost of a sequence from the model's config."""
            self._task = task_of(kwargs["config"] if "config" in kwargs else args[-1])
            return super().run(*args, **kwargs)

        def get_groups_and_subsamples(self, sample_id_seqlens: list[tuple[int, int]]) -> list[list[list[int]]]:
            """Ids of the sequences of each micro-batch and rank, equal on the ranks of a context-parallel group.

            Raises:
                ValueError: a sequence that fills more than a micro-batch, too few sequences for a sequence per rank and
                    micro-batch, or more than `thd_max_packed_sequences` in a micro-batch.
            """
            cp_size, lengths = self.cp_size, np.array([length for _, length in sample_id_seqlens], np.int64)
            spec = MicroBatchSpec(
                max_tokens_per_mb=self.max_seqlen_per_dp_cp_rank * cp_size,
                n_mbs_divisor=self.microbatch_group_size_per_vp_stage or 1,
                packing_algorithm="refined",
            )
            costs = lengths**2 if self._task is None else np.asarray(self._task.get_workloads(lengths))
            plan = plan_unplaced(spec, lengths, costs, self.dp_size)
            num_micro_batches, num_ranks = plan.costs.shape[1], self.dp_size * cp_size
            dealt: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(num_micro_batches)]
            for (number, _), rank, index in zip(sample_id_seqlens, plan.rank.tolist(), plan.micro_batch.tolist()):
                for each in range(rank * cp_size, (rank + 1) * cp_size):
                    dealt[index][each].append(number)
            _require_few(dealt, getattr(self, "max_num_seqs", None))
            return dealt

    return BalancedScheduler


def _require_few(dealt: list[list[list[int]]], max_num_seqs: int | None) -> None:
    """Raise ValueError if a micro-batch has more sequences than `max_num_seqs`, a limit of newer releases."""
    most = max(len(ids) for micro_batch in dealt for ids in micro_batch)
    if max_num_seqs is not None and most > max_num_seqs:
        raise ValueError(
            f"a micro-batch has {most} sequences, thd_max_packed_sequences allows {max_num_seqs}; only tokens are "
            "limited in packing, not sequences: raise thd_max_packed_sequences or lower max_seqlen_per_dp_cp_rank"
        )


def task_of(config: Any) -> SelfAttentionTask:
    """The cost model of a sequence, from a TransformerConfig.

    With multi-latent attention the pairs are exact, and projections count as if they had no latent dimension.
    """
    head_dim = config.kv_channels or config.hidden_size // config.num_attention_heads
    if getattr(config, "multi_latent_attention", False):  # queries and values have different widths
        head_dim = (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim) // 2
    experts = getattr(config, "num_moe_experts", None) or 1
    width = getattr(config, "moe_ffn_hidden_size", None) if experts > 1 else None
    return SelfAttentionTask(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=head_dim,
        num_layers=config.num_layers,
        ffn_hidden_size=width or config.ffn_hidden_size,
        num_query_groups=config.num_query_groups,
        gated_ffn=bool(config.gated_linear_unit),
        num_experts=experts,
        num_active_experts=config.moe_router_topk if experts > 1 else 1,
    )
