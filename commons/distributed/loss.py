"""The loss whose averaged gradient is that of the global mean, however the samples lie on the ranks."""

from __future__ import annotations

from typing import SupportsFloat

import torch
import torch.distributed as dist
import torch.fx

from commons.distributed.process_group import resolve_process_group


def global_mean_loss(
    local_sum: torch.Tensor,
    local_count: SupportsFloat | torch.Tensor,
    pg_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The loss to call `backward` on: `W · local_sum ÷ global count` for `W` ranks.

    DistributedDataParallel and TorchRec's embeddings both divide gradients by `W`; with this loss the average over
    ranks is the gradient of the mean over all `global count` terms. A mean per rank would weigh the terms of
    a rank with few of them more, and so depend on which rank a sample is on.

    A model may return it from its own `forward`: to symbolic tracers, such as that of TorchRec's pipelines, it is one
    node of the graph, and what it is given is checked when the model runs.

    Args:
        local_sum: 0-dimensional floating-point tensor, the sum of this rank's loss terms.
        local_count: number (or total weight) of these terms: a number of Python or numpy or a 0-dimensional tensor, of
            any dtype but bool, not the same on all ranks perhaps. Counts are added up in float64. May be zero.
        pg_group: the ranks that share the global batch; default as for the shuffler.

    Returns:
        0-dimensional tensor with the graph of `local_sum`; zero, with its graph, if no rank has a term. Its dtype is
        float64 where that of `local_sum` is, else float32: `W ÷ global count` has too few digits in bfloat16 and may be
        too small for float16, and so may be the mean; a sum in half precision is therefore widened first.

    Raises:
        ValueError: `local_sum` is no floating-point scalar, or `local_count` no scalar.
        TypeError: `local_count` is a bool or no number, or `pg_group` no process group.
    """
    group = resolve_process_group(pg_group)
    if group is not None and (isinstance(local_sum, torch.fx.Proxy) or isinstance(local_count, torch.fx.Proxy)):
        # By name: the tracer would keep the group as an attribute of the user's model, which could not be copied then.
        return _scale_to_global_mean(local_sum, local_count, group.group_name)
    return _scale_to_global_mean(local_sum, local_count, group)


@torch.fx.wrap
def _scale_to_global_mean(
    local_sum: torch.Tensor, local_count: SupportsFloat | torch.Tensor, group: dist.ProcessGroup | str | None
) -> torch.Tensor:
    """What `global_mean_loss` returns; symbolic tracers do not look inside."""
    if local_sum.dim() != 0 or not local_sum.is_floating_point():
        raise ValueError(
            f"local_sum has shape {tuple(local_sum.shape)} and dtype {local_sum.dtype}; it must be a floating-point "
            "scalar: sum the loss terms of the rank"
        )
    count = _as_float64(local_count, local_sum.device)
    world_size = 1
    if group is not None:
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        world_size = dist.get_world_size(group)
        dist.all_reduce(count, group=group)
    # where, not clamp: a division by zero must not happen even in the branch that is not taken (its gradient is NaN).
    nothing = count <= 0
    scale = torch.where(
        nothing, torch.zeros_like(count), world_size / torch.where(nothing, torch.ones_like(count), count)
    )
    dtype = torch.float64 if local_sum.dtype == torch.float64 else torch.float32
    return local_sum.to(dtype) * scale.to(dtype)


def _as_float64(count: SupportsFloat | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new float64 scalar on `device`: one dtype on all ranks, whatever they count in, and exact up to 2^53.

    A number on the host is written by a kernel's argument: a copy from the host would wait for the forward pass.
    """
    shape = tuple(getattr(count, "shape", ()))
    if shape:
        raise ValueError(f"local_count has shape {shape}; it must be a scalar: count the rank's loss terms")
    kind = str(getattr(count, "dtype", type(count).__name__)).removeprefix("torch.")
    if kind.startswith(("bool", "complex")) or not isinstance(count, SupportsFloat):
        raise TypeError(
            f"local_count is of type {kind}; it must be a number of loss terms: sum their mask, or pass int(...)"
        )
    if isinstance(count, torch.Tensor) and count.device == device:
        return count.detach().to(torch.float64, copy=True)
    return torch.full((), float(count), dtype=torch.float64, device=device)
