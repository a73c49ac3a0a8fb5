"""The tensor-parallel and data-parallel groups: megatron-core's parallel_state, with checked sizes."""

from __future__ import annotations

import torch.distributed as dist

from sid_gr.megatron_core import parallel_state


def initialize_model_parallel(tensor_parallel_size: int = 1) -> None:
    """Make megatron-core's groups: ranks `[k·t, (k + 1)·t)` share a decoder, ranks with equal rank % t share the data.

    A collective call on all ranks. Afterwards shufflers, losses and data loaders use the data-parallel group.

    Args:
        tensor_parallel_size: t, number of ranks that share one decoder.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: t does not divide the number of ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; parallel groups are made of its ranks: call init_process_group first"
        )
    world_size = dist.get_world_size()
    if tensor_parallel_size < 1 or world_size % tensor_parallel_size:
        raise ValueError(
            f"tensor_model_parallel_size is {tensor_parallel_size}, there are {world_size} ranks; all decoders have "
            "the same number of ranks: choose a divisor of the number of ranks, or start another number"
        )
    # Let new groups connect at their first collective: if ranks are bound to a device, as in the trainer, torch would
    # make an NCCL communicator for each of megatron-core's two dozen groups at once, and the decoder uses two of them.
    world = dist.distributed_c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
    finally:
        world.bound_device_id = bound


def groups_of_decoder() -> list[dist.ProcessGroup]:
    """The groups in which a decoder's ranks wait for one another; `initialize_model_parallel` has made them."""
    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),  # of the loss's number of terms
    ]


def tensor_parallel_size() -> int:
    """Number of ranks that share this rank's decoder.

    Raises:
        RuntimeError: the groups have not been made.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "megatron-core's parallel_state is not initialised; its layers need their group: call "
            "sid_gr.parallel.initialize_model_parallel first"
        )
    return parallel_state.get_tensor_model_parallel_world_size()
