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
            """Ids of the sequences of each micro-batch and rank, equal on the ranks of a context-parallel group."""
            dealt = deal_sequences(
                sample_id_seqlens,
                dp_size=self.dp_size,
                cp_size=self.cp_size,
                max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
                divisor=self.microbatch_group_size_per_vp_stage or 1,
                task=self._task,
            )
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
    """The cost model of a sequence, from a TransformerConfig."""
    return SelfAttentionTask(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.kv_channels or config.hidden_size // config.num_attention_heads,
        num_layers=config.num_layers,
        ffn_hidden_size=config.ffn_hidden_size,
        num_query_groups=config.num_query_groups,
        gated_ffn=bool(config.gated_linear_unit),
    )


def deal_sequences(
    sample_id_seqlens: list[tuple[int, int]],
    *,
    dp_size: int,
    cp_size: int,
    max_tokens: int,
    divisor: int = 1,
    task: SelfAttentionTask | None = None,
) -> list[list[list[int]]]:
    """Assign sequences to the fewest micro-batches that keep `max_tokens`, and evenly to the ranks of each.

    Args:
        sample_id_seqlens: id and tokens of each sequence.
        dp_size: number of data-parallel ranks.
        cp_size: context-parallel ranks of each data-parallel rank; they compute the same sequences.
        max_tokens: most tokens of a micro-batch of a data-parallel rank.
        divisor: the number of micro-batches is a multiple of it.
        task: cost model of a sequence; None for the square of its tokens.

    Returns:
        Ids of the sequences of each micro-batch and rank; there are `dp_size · cp_size` ranks, and `cp_size` neighbours
        have the same sequences.

    Raises:
        ValueError: a sequence above `max_tokens`, or too few sequences for a sequence per rank and micro-batch.
    """
    lengths = np.array([length for _, length in sample_id_seqlens], np.int64)
    spec = MicroBatchSpec(max_tokens_per_mb=max_tokens, n_mbs_divisor=divisor, packing_algorithm="refined")
    costs = lengths**2 if task is None else np.asarray(task.get_workloads(lengths))
    plan = plan_unplaced(spec, lengths, costs, dp_size)
    dealt: list[list[list[int]]] = [[[] for _ in range(dp_size * cp_size)] for _ in range(plan.costs.shape[1])]
    for (number, _), rank, index in zip(sample_id_seqlens, plan.rank.tolist(), plan.micro_batch.tolist()):
        for each in range(rank * cp_size, (rank + 1) * cp_size):
            dealt[index][each].append(number)
    return dealt
