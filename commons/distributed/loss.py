"""The loss whose averaged gradient is that of the global mean, however the samples lie on the ranks; and for a log."""

from __future__ import annotations

from functools import partial
from typing import Any, SupportsFloat

import numpy as np
import torch
import torch.distributed as dist
import torch.fx

from commons.distributed.channel.groups import numbers_device, serves
from commons.distributed.errors import raise_on_all
from commons.distributed.process_group import all_gather_single, resolve_process_group


def global_mean_loss(
    local_sum: torch.Tensor,
    local_count: SupportsFloat | torch.Tensor,
    pg_group: dist.ProcessGroup | None = None,
    *,
    global_count: SupportsFloat | None = None,
) -> torch.Tensor:
    """The loss to call `backward` on: `W · local_sum ÷ global count` for `W` ranks.

    DistributedDataParallel and TorchRec's embeddings both divide gradients by `W`; with this loss the average over
    ranks is the gradient of the mean over all `global count` terms. A mean per rank would weigh the terms of
    a rank with few of them more, and so depend on which rank a sample is on.

    A model may return it from its own `forward`: to symbolic tracers, such as that of TorchRec's pipelines, it is one
    node of the graph, and what it is given is checked when the model runs.

    Print `mean_over_ranks(loss)`, not the loss of one rank.

    A mistake that the all-reduce of counts can carry is raised on all ranks, whichever made it. On CUDA they do not
    read its result, so as not to wait for the device: there the rank itself raises, and the others get NaN.

    Args:
        local_sum: 0-dimensional floating-point tensor, the sum of this rank's loss terms.
        local_count: number (or total weight) of these terms: a number of Python or numpy or a 0-dimensional tensor, of
            any dtype but bool, not the same on all ranks perhaps. Counts are added up in float64. May be zero, not
            negative.
        pg_group: the ranks that share the global batch; default as for the shuffler.
        global_count: the counts of all ranks together, a number of the host, where it is known, such as
            `batch.global_loss_terms()`; the same on all ranks, or None on all: then the counts are added up by an
            all-reduce, for which the backward pass waits.

    Returns:
        0-dimensional tensor with the graph of `local_sum`; zero, with its graph, if no rank has a term. Its dtype is
        float64 where that of `local_sum` is, else float32: `W ÷ global count` has too few digits in bfloat16 and may be
        too small for float16, and so may be the mean; a sum in half precision is therefore widened first.

    Raises:
        ValueError: `local_sum` is no floating-point scalar; `local_count` no scalar; or a count on the host, negative
            or not finite.
        TypeError: `local_sum` is no tensor, `local_count` a bool or no number, `global_count` not a number of the host,
            or `pg_group` no process group.
    """
    group = _traceable(resolve_process_group(pg_group), local_sum, local_count, global_count)
    return _scale_to_global_mean(local_sum, local_count, group, global_count)


def mean_over_ranks(value: SupportsFloat | torch.Tensor, pg_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The mean of a number over ranks: of the losses that `global_mean_loss` returns, the loss of the global batch.

    A rank's own loss is `W · local_sum ÷ global count`, and says little by itself: a rank with few terms has a small
    one. Their mean is what one process would have over the global batch. For a log; it has no gradient.

    All ranks of the group call this together, also those that print nothing.

    Args:
        value: 0-dimensional tensor of any dtype but bool and complex, or a number; of this rank.
        pg_group: the ranks; default as for `global_mean_loss`.

    Returns:
        float64 scalar tensor, the same on all ranks, on the device of `value`, or CUDA where the group has no other;
        the host waits when it reads the number.

    Raises:
        ValueError: `value` is no scalar.
        TypeError: `value` is a bool or no number, or `pg_group` no process group; on all ranks as `global_mean_loss`.

    Examples:
        >>> f"loss {mean_over_ranks(torch.tensor(0.5)):.4f}"  # without process groups, of one rank
        'loss 0.5000'
    """
    return _mean_over_ranks(value, _traceable(resolve_process_group(pg_group), value))


def _traceable(group: dist.ProcessGroup | None, *values: Any) -> dist.ProcessGroup | str | None:
    """A group, by name if a symbolic tracer looks: it would keep the group in the user's model, for no copy to hold."""
    if group is not None and any(isinstance(value, torch.fx.Proxy) for value in values):
        return group.group_name
    return group


def _resolved(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group


@torch.fx.wrap
def _mean_over_ranks(value: SupportsFloat | torch.Tensor, group: dist.ProcessGroup | str | None) -> torch.Tensor:
    """What `mean_over_ranks` returns; symbolic tracers do not look inside."""
    group = _resolved(group)
    error = _number_error("value", value, "for each rank", ("take its mean or sum", "pass float(...)"))
    device = value.device if isinstance(value, torch.Tensor) else torch.device("cpu")
    if group is not None and device.type == "cpu":
        device = numbers_device(group)
    total = _sum_over_ranks(value, device, error, group)
    return total if group is None else total / dist.get_world_size(group)


@torch.fx.wrap
def _scale_to_global_mean(
    local_sum: torch.Tensor,
    local_count: SupportsFloat | torch.Tensor,
    group: dist.ProcessGroup | str | None,
    global_count: SupportsFloat | None,
) -> torch.Tensor:
    """What `global_mean_loss` returns; symbolic tracers do not look inside."""
    group = _resolved(group)
    world_size = 1 if group is None else dist.get_world_size(group)
    error = _sum_error(local_sum) or _count_error("local_count", local_count)
    if global_count is not None:
        error = error or _count_error("global_count", global_count)
        if error is not None:
            raise error
        terms = float(global_count)
        return _widened(local_sum) * (0.0 if terms <= 0 else world_size / terms)
    device = local_sum.device if isinstance(local_sum, torch.Tensor) else _device_of_tensors(group)
    count = _sum_over_ranks(local_count, device, error, group)
    # where, not clamp: a division by zero must not happen even in the branch that is not taken (its gradient is NaN).
    nothing = count <= 0
    scale = torch.where(
        nothing, torch.zeros_like(count), world_size / torch.where(nothing, torch.ones_like(count), count)
    )
    widened = _widened(local_sum)
    return widened * scale.to(widened.dtype)


def _widened(local_sum: torch.Tensor) -> torch.Tensor:
    return local_sum if local_sum.dtype == torch.float64 else local_sum.float()


def _sum_over_ranks(
    number: SupportsFloat | torch.Tensor,
    device: torch.device,
    error: Exception | None,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The sum of a number of every rank, a new float64 scalar on `device`; without a group, the number.

    A rank with an error, whose number may be none, takes part with NaN, so that nothing but this number is sent while
    all is well.

    Raises:
        Exception: this rank's error, or on the host, where reading the sum costs nothing, that of any rank.
    """
    if group is None and error is not None:
        raise error
    total = _as_float64(float("nan") if error is not None else number, device)
    if group is None:
        return total
    dist.all_reduce(total, group=group)
    if device.type == "cpu" and not torch.compiler.is_compiling() and bool(total.isnan()):
        raise_on_all(error, dist.get_process_group_ranks(group), partial(_gather, group=group))
    elif error is not None:
        raise error
    return total


def _gather(values: np.ndarray, group: dist.ProcessGroup) -> np.ndarray:
    """`values` of all ranks, int64 `(world_size, n)`."""
    gathered = torch.empty(dist.get_world_size(group) * len(values), dtype=torch.int64)
    all_gather_single(gathered, torch.from_numpy(values), group=group)
    return gathered.numpy().reshape(-1, len(values))


def _device_of_tensors(group: dist.ProcessGroup | None) -> torch.device:
    """Where the other ranks have their loss, as far as a rank can say that has none."""
    on_cuda = group is not None and serves(group, "cuda") and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _sum_error(local_sum: Any) -> Exception | None:
    """What is wrong with a sum of loss terms, if anything."""
    if not isinstance(local_sum, torch.Tensor):
        return TypeError(
            f"local_sum is a {type(local_sum).__name__}; it must be a tensor with the model's graph, on a rank without "
            "loss terms too: sum its terms, of which there may be none"
        )
    if local_sum.dim() != 0 or not local_sum.is_floating_point():
        return ValueError(
            f"local_sum has shape {tuple(local_sum.shape)} and dtype {local_sum.dtype}; it must be a floating-point "
            "scalar: sum the loss terms of the rank"
        )
    return None


def _count_error(name: str, count: Any) -> Exception | None:
    """What is wrong with a count of loss terms, if anything; what lies on a device is not read."""
    error = _number_error(
        name, count, "of loss terms", ("count the rank's loss terms", "sum their mask, or pass int(...)")
    )
    if error is not None:
        return error
    on_device = isinstance(count, torch.Tensor) and count.device.type != "cpu"
    if on_device and name == "global_count":
        return TypeError(
            f"global_count is a tensor on {count.device}; it must be a number of the host, or it would have to be "
            "waited for: leave it out, and local_count is added up over the ranks"
        )
    if on_device or torch.compiler.is_compiling():
        return None
    if not 0 <= float(count) < float("inf"):
        return ValueError(f"{name} is {float(count)}; it must be finite and at least 0: count the loss terms")
    return None


def _number_error(name: str, value: Any, what: str, remedies: tuple[str, str]) -> Exception | None:
    """ValueError for what is no scalar, TypeError for what is no number, None for what is one.

    Args:
        name: of the value.
        value: anything.
        what: which number it must be.
        remedies: for what is no scalar, and no number.
    """
    shape = tuple(getattr(value, "shape", ()))
    if shape:
        return ValueError(f"{name} has shape {shape}; it must be a scalar: {remedies[0]}")
    kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    if kind.startswith(("bool", "complex")) or not isinstance(value, SupportsFloat):
        return TypeError(f"{name} is of type {kind}; it must be a number {what}: {remedies[1]}")
    return None


def _as_float64(count: SupportsFloat | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new float64 scalar on `device`: one dtype on all ranks, whatever they count in, and exact up to 2^53.

    A number on the host is written by a kernel's argument: a copy from the host would wait for the forward pass.
    """
    if isinstance(count, torch.Tensor) and count.device == device:
        return count.detach().to(torch.float64, copy=True)
    return torch.full((), float(count), dtype=torch.float64, device=device)
