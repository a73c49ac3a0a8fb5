"""The loss whose averaged gradient is that of the global mean, however the samples lie on the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commons.distributed.process_group import resolve_process_group


def global_mean_loss(
    local_sum: torch.Tensor,
    local_count: int | torch.Tensor,
    pg_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The loss to call `backward` on: `W · local_sum ÷ global count` for `W` ranks.

    DistributedDataParallel and TorchRec's embeddings both divide gradients by `W`; with this loss the average over
    ranks is the gradient of the mean over all `global count` terms. A mean per rank would weigh the terms of
    a rank with few of them more, and so depend on which rank a sample is on.

    Args:
        local_sum: 0-dimensional floating-point tensor, the sum of this rank's loss terms.
        local_count: number (or total weight) of these terms, an int or a 0-dimensional tensor; may be zero.
        pg_group: the ranks that share the global batch; default as for the shuffler.

    Returns:
        0-dimensional tensor with the graph of `local_sum`. Zero, with its graph, if no rank has a term.

    Raises:
        ValueError: `local_sum` is no floating-point scalar, or `local_count` no scalar.
    """
    if local_sum.dim() != 0 or not local_sum.is_floating_point():
        raise ValueError(
            f"local_sum has shape {tuple(local_sum.shape)} and dtype {local_sum.dtype}; it must be a floating-point "
            "scalar: sum the loss terms of the rank"
        )
    count = _as_scalar(local_count, local_sum.device)
    group = resolve_process_group(pg_group)
    world_size = 1
    if group is not None:
        world_size = dist.get_world_size(group)
        dist.all_reduce(count, group=group)
    # where, not clamp: a division by zero must not happen even in the branch that is not taken (its gradient is NaN).
    safe = torch.where(count > 0, count, torch.ones_like(count)).to(torch.float64)
    scale = torch.where(count > 0, world_size / safe, torch.zeros_like(safe))
    return local_sum * scale.to(local_sum.dtype)


def _as_scalar(count: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new int64 or float64 scalar on `device`.

    A number on the host is written by a kernel's argument: a copy from the host would wait for the forward pass.
    """
    if isinstance(count, torch.Tensor):
        if count.dim() != 0:
            raise ValueError(
                f"local_count has shape {tuple(count.shape)}; it must be a scalar: count the rank's loss terms"
            )
        if count.device == device:
            return count.detach().to(torch.float64 if count.is_floating_point() else torch.int64, copy=True)
    number = count.item() if isinstance(count, torch.Tensor) else count
    return torch.full((), number, dtype=torch.float64 if isinstance(number, float) else torch.int64, device=device)
