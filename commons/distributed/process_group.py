"""The process group whose ranks share a global batch: one rule for the shuffler, the loss and every pipeline."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

# torch 2.13 renames all_gather_into_tensor and warns of the old name; 2.11 has only the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def resolve_process_group(
    pg_group: dist.ProcessGroup | None = None, *, with_context_parallel: bool = False
) -> dist.ProcessGroup | None:
    """The data-parallel group: the one given, else megatron-core's, else WORLD.

    Args:
        pg_group: a process group, or None for the default.
        with_context_parallel: whether megatron-core's group includes context-parallel peers.

    Returns:
        The group, or None if torch.distributed is not initialised: a single process is a group of one.

    Raises:
        ValueError: this process is no member of `pg_group`.
        TypeError: `pg_group` is no process group.
    """
    if pg_group is not None:
        require_process_group(pg_group)
        if dist.get_rank(pg_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the given process group; every rank passes a group that it belongs "
                "to: pass the result of new_group on its members only"
            )
        return pg_group
    if not (dist.is_available() and dist.is_initialized()):
        return None
    parallel_state = _parallel_state()
    if parallel_state is None:
        return dist.group.WORLD
    return parallel_state.get_data_parallel_group(with_context_parallel=with_context_parallel)


def model_parallel_group() -> dist.ProcessGroup | None:
    """This rank's tensor-, context- and pipeline-parallel peers in megatron-core; None without it, and without peers.

    All ranks with both context and pipeline parallelism, for whose peers megatron-core has no group.
    """
    parallel_state = _parallel_state()
    if parallel_state is None:
        return None
    group = parallel_state.get_model_parallel_group()
    if parallel_state.get_context_parallel_world_size() > 1:
        has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
        group = dist.group.WORLD if has_stages else parallel_state.get_tensor_and_context_parallel_group()
    return group if dist.get_world_size(group) > 1 else None


def _parallel_state() -> Any:
    """megatron-core's parallel_state, if it is initialised."""
    # Looked up, not imported: a program that uses megatron-core has imported it.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    return parallel_state if parallel_state is not None and parallel_state.model_parallel_is_initialized() else None


def require_process_group(pg_group: Any) -> None:
    """Raise TypeError unless this is a process group, or `new_group`'s result on ranks outside of the group."""
    if not isinstance(pg_group, dist.ProcessGroup) and pg_group != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"the group is of type {type(pg_group).__name__}; it must be a process group: pass the result of "
            "new_group, or of get_group of a DeviceMesh"
        )


def describe_group(group: dist.ProcessGroup | None) -> str:
    """The members of a group by global rank, for messages."""
    if group is None:
        return "a single process"
    members = dist.get_process_group_ranks(group)
    return f"ranks {members}" if len(members) <= 16 else f"{len(members)} ranks from {members[0]} to {members[-1]}"


def serves(group: dist.ProcessGroup, kind: str) -> bool:
    """Whether the group has a backend for tensors on a type of device, "cpu" or "cuda"."""
    return any(device.type == kind for device in group._device_types)
