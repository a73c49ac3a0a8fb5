"""slime: the function that assigns a rollout's samples to ranks and micro-batches, with the same signature.

import slime.utils.dp_schedule
slime.utils.dp_schedule.build_dp_schedule = evenrank.integrations.slime.build_dp_schedule
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commons.micro_batching import MicroBatchSpec
from commons.micro_batching.joint_plan import plan_unplaced, scaled_down
from commons.perf_model.partitioner import as_int64_workloads, partition_grid

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
    sample_is_multimodal: list[bool] | None = None,
) -> Schedule:
    """Assign samples to ranks and micro-batches: few micro-batches under the cap, the i-th of even work on all ranks.

    Work is slime's `calculate_fwd_flops` with `args.balance_data`, else tokens. As in slime, a sample longer than the
    cap has its own micro-batch.

    Args:
        args: `use_dynamic_batch_size`, `max_tokens_per_gpu`, `micro_batch_size` and `balance_data` are read, and
            `packing_safety_margin` if there is one.
        train_parallel_config: "dp_size", "cp_size", "vpp_size" and "microbatch_group_size_per_vp_stage".
        total_lengths: tokens of each sample.
        global_batch_size: rollouts of a training step; as in slime, the last rollouts that fill no step are left out.
        rollout_indices: the rollout of each sample; the samples of a rollout are trained in one step.
        sample_is_multimodal: which samples have images; slime can be set to pack these apart.

    Returns:
        Four lists: the samples of each rank; the micro-batches of each rank, as positions in its samples; the number of
        micro-batches of each step; the number of rollouts of each step.

    Raises:
        ValueError: too few rollouts, too few samples for the ranks and micro-batches, or micro-batches of a fixed size
            that the samples do not fill; settings without counterpart here: `global_batch_tokens`, or
            `multimodal_aware_packing` if a sample has images.
    """
    _require_known(args, sample_is_multimodal)
    lengths = as_int64_workloads(total_lengths, "total_lengths")
    ranks = train_parallel_config["dp_size"]
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(ranks)]
    numbers, sizes = [], []
    for samples in _steps(rollout_indices, global_batch_size):
        costs = _workloads(args, lengths[samples])
        plan = _plan_dynamic if args.use_dynamic_batch_size else _plan_fixed
        rank_of, micro_batch_of, number = plan(args, train_parallel_config, lengths[samples], costs)
        numbers.append(number)
        sizes.append(global_batch_size)
        for rank, places in enumerate(partitions):
            for index in range(number):
                here = samples[(rank_of == rank) & (micro_batch_of == index)].tolist()
                micro_batches[rank].append(list(range(len(places), len(places) + len(here))))
                places.extend(here)
    return partitions, micro_batches, numbers, sizes


def _require_known(args: Any, sample_is_multimodal: list[bool] | None) -> None:
    """Raise ValueError for settings by which slime would choose other steps or micro-batches."""
    if getattr(args, "global_batch_tokens", None) is not None:
        raise ValueError(
            f"global_batch_tokens is {args.global_batch_tokens}; evenrank makes steps of global_batch_size rollouts: "
            "leave it out, or keep slime's function"
        )
    packing = getattr(args, "multimodal_aware_packing", "off")
    if args.use_dynamic_batch_size and packing != "off" and any(sample_is_multimodal or ()):
        raise ValueError(
            f"multimodal_aware_packing is {packing!r}; evenrank packs samples with and without "
            "images together: set it to 'off', or keep slime's function"
        )


def _steps(rollout_indices: list[int], global_batch_size: int) -> list[np.ndarray]:
    """The samples of each step, int64; the samples of a rollout are adjacent."""
    rollouts: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        rollouts.setdefault(rollout, []).append(sample)
    if len(rollouts) < global_batch_size:
        raise ValueError(
            f"there are {len(rollouts)} rollouts, global_batch_size is {global_batch_size}; a step has "
            "global_batch_size rollouts: pass more rollouts or lower global_batch_size"
        )
    samples = list(rollouts.values())
    starts = range(0, len(samples) - global_batch_size + 1, global_batch_size)
    return [np.array([each for some in samples[at : at + global_batch_size] for each in some]) for at in starts]


def _workloads(args: Any, lengths: np.ndarray) -> np.ndarray:
    if not args.balance_data:
        return lengths
    from slime.utils.flops_utils import calculate_fwd_flops

    return np.array([int(calculate_fwd_flops([length], args)) for length in lengths.tolist()], np.int64)


def _divisor(config: dict[str, Any]) -> int:
    vpp = config.get("vpp_size") or 1
    return config["microbatch_group_size_per_vp_stage"] if vpp > 1 else 1


def _plan_dynamic(
    args: Any, config: dict[str, Any], lengths: np.ndarray, costs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    ranks, margin = config["dp_size"], getattr(args, "packing_safety_margin", 1.0)
    cap = max(1, int(args.max_tokens_per_gpu * config["cp_size"] * margin))
    spec = MicroBatchSpec(max_tokens_per_mb=cap, n_mbs_divisor=_divisor(config), packing_algorithm="refined")
    # A sample above the cap counts as the cap, so that it fills a micro-batch.
    plan = plan_unplaced(spec, lengths.clip(max=cap), costs, ranks)
    return plan.rank, plan.micro_batch, plan.costs.shape[1]


def _plan_fixed(
    args: Any, config: dict[str, Any], lengths: np.ndarray, costs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    size, ranks, divisor = args.micro_batch_size, config["dp_size"], _divisor(config)
    if len(lengths) % (size * ranks * divisor):
        raise ValueError(
            f"a step has {len(lengths)} samples; their number must be a multiple of {size * ranks * divisor} "
            f"({ranks} ranks, micro-batches of {size}, a multiple of {divisor} of them): correct micro_batch_size or "
            "global_batch_size"
        )
    number = len(lengths) // (size * ranks)
    grid = partition_grid(scaled_down(costs), ranks, number)
    return grid.assignment, grid.step, number
