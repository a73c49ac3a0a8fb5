"""verl: the functions of its seqlen_balancing module, with the same signatures.

import verl.utils.seqlen_balancing
verl.utils.seqlen_balancing.rearrange_micro_batches = evenrank.integrations.verl.rearrange_micro_batches
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commons.dispatch.planning import as_int64_ids
from commons.micro_batching import MicroBatchSpec, pack_micro_batches
from commons.micro_batching.block_packing import BlockPacking, RowBlocks
from commons.micro_batching.fewest_groups import groups_of
from commons.perf_model.partitioner import as_int64_workloads, partition


def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Indices in `k_partitions` partitions of nearly equal sums.

    Args:
        seqlen_list: weight of each item, integers `(n,)`.
        k_partitions: number of partitions.
        equal_size: whether the sizes differ by one at most; `n` need not be a multiple of `k_partitions`.

    Returns:
        Ascending indices of each partition, none empty.

    Raises:
        ValueError: fewer items than partitions.
    """
    weights = as_int64_workloads(seqlen_list, "seqlen_list")
    _require_enough(len(weights), "items", k_partitions)
    return partition(weights, k_partitions, equal_size=equal_size).groups()


def get_group_balanced_partitions(seqlen_list: Any, uid_list: Any, k_partitions: int) -> list[list[int]]:
    """Samples in partitions of even work; the samples of a uid, adjacent or not, stay together as a group.

    If all groups have one size, the partitions have equal numbers of groups (± 1); else any numbers.

    Args:
        seqlen_list: tokens of each sample, integers `(n,)`; their cost is verl's `calculate_workload`.
        uid_list: uid of each sample, integers or strings `(n,)`.
        k_partitions: number of partitions.

    Raises:
        ValueError: fewer groups than partitions, or not one uid per sample.
    """
    costs = _workloads(torch.as_tensor(seqlen_list, device="cpu"))
    groups = as_int64_ids(uid_list, len(costs))
    _, sizes = torch.from_numpy(groups).unique(return_counts=True)
    _require_enough(len(sizes), "groups of samples", k_partitions)
    equal_size = bool((sizes == sizes[0]).all())
    return partition(costs, k_partitions, equal_size=equal_size, groups=groups).groups()


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """The fewest micro-batches of at most `max_token_len` tokens, of even work.

    Args:
        batch: TensorDict with a nested "input_ids", or with an "attention_mask" `(rows, width)`.
        max_token_len: most tokens of a micro-batch; unlike in verl, it may be less than the padded width.
        dp_group: ranks that make the same number of micro-batches, if `same_micro_num_in_dp`; None for this rank only.
        num_batches_divided_by: the number of micro-batches is a multiple of it.
        same_micro_num_in_dp: whether the ranks of `dp_group` make the same number.
        min_num_micro_batch: fewest micro-batches.
        use_dynamic_bsz_balance: whether light micro-batches are at both ends; else the heaviest comes first.
        force_group_size: number of neighbouring rows that stay together.

    Returns:
        The micro-batches, and the rows of each.

    Raises:
        ValueError: a row or block above `max_token_len` (the error names it), or too few rows; on all ranks of
            `dp_group`.
        RankMissingError: a rank did not call this in time.
    """
    from verl.utils import tensordict_utils

    ids = batch["input_ids"]
    lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths = lengths.cpu().long()
    workloads = _workloads(lengths)
    spec = MicroBatchSpec(
        n_mbs=min_num_micro_batch or 1,
        granularity=force_group_size,
        max_tokens_per_mb=max_token_len,
        n_mbs_divisor=num_batches_divided_by or 1,
        packing_algorithm="refined",
        order="light_ends" if use_dynamic_bsz_balance else "heaviest_first",
    )
    if dist.is_initialized() and same_micro_num_in_dp and dp_group is not None:
        rows = torch.arange(len(lengths), device="cpu")
        groups = pack_micro_batches(rows, spec, lengths, dp_group, workloads=workloads).groups
    else:
        blocks = RowBlocks.of(spec, len(lengths))
        packing = BlockPacking.of(spec, blocks, lengths.numpy(), workloads.numpy())
        groups = groups_of(packing.into(packing.num_fewest)[blocks.of_row])
    return [tensordict_utils.index_select_tensor_dict(batch, rows) for rows in groups], groups


def _workloads(lengths: torch.Tensor) -> torch.Tensor:
    from verl.utils.seqlen_balancing import calculate_workload

    return calculate_workload(lengths.long())


def _require_enough(number: int, what: str, k_partitions: int) -> None:
    if number < k_partitions:
        raise ValueError(
            f"there are {number} {what}, k_partitions is {k_partitions}; no partition is empty: lower k_partitions or "
            "pass more"
        )
