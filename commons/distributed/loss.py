"""A loss whose averaged gradient is that of the global mean, wherever the samples are; and its value for a log."""

from __future__ import annotations

from functools import partial
from typing import Any, SupportsFloat

import numpy as np
import torch
import torch.distributed as dist
import torch.fx

from commons.checks import kind_of
from commons.distributed.channel.groups import numbers_device
from commons.distributed.errors import raise_on_all
from commons.distributed.process_group import all_gather_single, resolve_process_group, serves


def global_mean_loss(
    local_sum: torch.Tensor,
    local_count: SupportsFloat | torch.Tensor,
    pg_group: dist.ProcessGroup | None = None,
    *,
    global_count: SupportsFloat | None = None,
) -> torch.Tensor:
    """The loss to call `backward` on: `W · local_sum ÷ global count` for `W` ranks.

    DistributedDataParallel and TorchRec's embeddings divide gradients by `W`; with this loss, the average over ranks is
    the gradient of the mean over all `global count` terms. With a mean per rank, the terms of a rank with few terms
    would weigh more, and the gradient would depend on which rank a sample is on.

    A model may return this loss from its own `forward`: for symbolic tracers, such as that of TorchRec's pipelines, it
    is one node of the graph, and the arguments are checked when the model runs.

    Print `mean_over_ranks(loss)`, not the loss of one rank.

    Without `global_count`, an all-reduce adds up the counts, and a mistake of one rank is raised on all ranks. On CUDA
    only that rank raises, and the others get NaN, because reading the result would wait for the device.

    Args:
        local_sum: 0-dimensional floating-point tensor, the sum of this rank's loss terms.
        local_count: number (or total weight) of these terms: a Python or numpy number or a 0-dimensional tensor, of any
            dtype except bool; dtypes may differ between ranks. Counts are added up in float64. May be zero, not
            negative.
        pg_group: the ranks that share the terms of the global batch; default as for the shuffler, and with
            megatron-core their context-parallel peers, which have different terms of the same rows.
        global_count: the sum of all ranks' counts, a number on the host, if it is known, such as
            `batch.global_loss_terms()`; equal on all ranks. None, on all ranks: an all-reduce adds up the counts, and
            the backward pass waits for it.

    Returns:
        0-dimensional tensor with the graph of `local_sum`; zero, with its graph, if no rank has a term. float64 if
        `local_sum` is, else float32: `W ÷ global count` has too few digits in bfloat16, and it and the mean may be too
        small for float16; so a half-precision sum is converted first.

    Raises:
        ValueError: `local_sum` is not a floating-point scalar, `local_count` is not a scalar, or a count on the host is
            negative or not finite.
        TypeError: `local_sum` is not a tensor, `local_count` is a bool or not a number, `global_count` is not a number
            on the host, or `pg_group` is not a process group.
    """
    group = _traceable(pg_group, local_sum, local_count, global_count)
    return _scale_to_global_mean(local_sum, local_count, group, global_count)


def mean_over_ranks(value: SupportsFloat | torch.Tensor, pg_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The mean of a number over ranks, for a log; the mean of `global_mean_loss` is the loss of the global batch.

    A rank's own loss is `W · local_sum ÷ global count`, which is small on a rank with few terms. The mean over ranks is
    the loss that one process would compute for the global batch. It has no gradient.

    All ranks of the group call this together, including ranks that do not print it.

    Args:
        value: this rank's number, or a 0-dimensional tensor of any dtype except bool and complex.
        pg_group: the ranks; default as for `global_mean_loss`.

    Returns:
        float64 scalar tensor, equal on all ranks, on the device of `value`, or on CUDA if the group supports only that;
        reading it on the host waits for the device.

    Raises:
        ValueError: `value` is not a scalar.
        TypeError: `value` is a bool or not a number, or `pg_group` is not a process group; on all ranks as for
            `global_mean_loss`.

    Examples:
        >>> f"loss {mean_over_ranks(torch.tensor(0.5)):.4f}"  # a single process
        'loss 0.5000'
    """
    return _mean_over_ranks(value, _traceable(pg_group, value))


def _traceable(pg_group: dist.ProcessGroup | None, *values: Any) -> dist.ProcessGroup | str | None:
    """The group, or its name under a symbolic tracer, which would store the group in the model and prevent copies."""
    group = resolve_process_group(pg_group, with_context_parallel=True)
    if group is not None and any(isinstance(value, torch.fx.Proxy) for value in values):
        return group.group_name
    return group


def _resolved(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group


@torch.fx.wrap
def _mean_over_ranks(value: SupportsFloat | torch.Tensor, group: dist.ProcessGroup | str | None) -> torch.Tensor:
    """`mean_over_ranks`, as a single node for symbolic tracers."""
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
    """`global_mean_loss`, as a single node for symbolic tracers."""
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
    scale = torch.where(count <= 0, 0.0, world_size / count)  # the count has no gradient, and may be NaN on a device
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
    """All-reduce a number; returns a new float64 scalar on `device`. Without a group, the number itself.

    A rank with an error contributes NaN, so that no further collective is needed while no rank has one.

    Raises:
        Exception: this rank's error; on the host, where reading the sum is free, the errors of all ranks.
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
    """Gather `values` of all ranks, int64 `(world_size, n)`."""
    gathered = torch.empty(dist.get_world_size(group) * len(values), dtype=torch.int64, device="cpu")
    all_gather_single(gathered, torch.from_numpy(values), group=group)
    return gathered.numpy().reshape(-1, len(values))


def _device_of_tensors(group: dist.ProcessGroup | None) -> torch.device:
    """The device of the other ranks' losses, as far as a rank without a tensor can determine it."""
    on_cuda = group is not None and serves(group, "cuda") and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _sum_error(local_sum: Any) -> Exception | None:
    """The error in a sum of loss terms, if any."""
    if not isinstance(local_sum, torch.Tensor):
        return TypeError(
            f"local_sum is {kind_of(local_sum)}; it must be a tensor with the model's graph, also on a rank "
            "without loss terms: pass the sum of its terms, which may be empty"
        )
    if local_sum.dim() != 0 or not local_sum.is_floating_point():
        return ValueError(
            f"local_sum has shape {tuple(local_sum.shape)} and dtype {local_sum.dtype}; it must be a floating-point "
            "scalar: sum the loss terms of the rank"
        )
    return None


def _count_error(name: str, count: Any) -> Exception | None:
    """The error in a count of loss terms, if any; a tensor on a device is not read."""
    error = _number_error(
        name, count, "of loss terms", ("count the rank's loss terms", "sum their mask, or pass int(...)")
    )
    if error is not None:
        return error
    on_device = isinstance(count, torch.Tensor) and count.device.type != "cpu"
    if on_device and name == "global_count":
        return TypeError(
            f"global_count is a tensor on {count.device}; it must be a number on the host, since reading it from a "
            "device waits: leave it out, and local_count is added up over the ranks"
        )
    if on_device or torch.compiler.is_compiling():
        return None
    if not 0 <= float(count) < float("inf"):
        return ValueError(f"{name} is {float(count)}; it must be finite and at least 0: count the loss terms")
    return None


def _number_error(name: str, value: Any, what: str, remedies: tuple[str, str]) -> Exception | None:
    """ValueError for a value that is not a scalar, TypeError for one that is not a number, else None.

    `what` is the end of "it must be a number …"; `remedies` are for the first and for the second.
    """
    shape = tuple(getattr(value, "shape", ()))
    if shape:
        return ValueError(f"{name} has shape {shape}; it must be a scalar: {remedies[0]}")
    kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    # Not isinstance(value, SupportsFloat), which torch.compile does not trace for a tensor.
    is_number = isinstance(value, torch.Tensor) or hasattr(value, "__float__")
    if kind.startswith(("bool", "complex")) or not is_number:
        return TypeError(f"{name} is of type {kind}; it must be a number {what}: {remedies[1]}")
    return None


def _as_float64(count: SupportsFloat | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new float64 scalar on `device`: one dtype on all ranks, exact up to 2^53.

    `full` passes a number from the host as a kernel argument; a copy from the host would wait for the forward pass.
    """
    if isinstance(count, torch.Tensor) and count.device == device:
        return count.detach().to(torch.float64, copy=True)
    return torch.full((), float(count), dtype=torch.float64, device=device)
