"""The same attention by fused CUDA kernels, where the package `hstu_attn` is installed.

The kernels (NVIDIA's recsys-examples, corelib/hstu) know the masks but not the biases: a bias by position or time would
be a dense tensor of longest² numbers per row and head, so a model for them has none. Before their first use they are
compared with `hstu.model.attention` on a small batch, on the device that they will run on.

Their successor, fbgemm_gpu_hstu, is imported as `hstu`, which is the name of this package: it cannot stand beside it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hstu.model.attention import hstu_attention
from hstu.model.attention_plan import plan_attention
from hstu.model.config import HSTUConfig

_HEAD_DIMS = (32, 64, 128, 256)
_INSTALL = "git clone https://github.com/NVIDIA/recsys-examples && cd recsys-examples/corelib/hstu && make install"
# Two bfloat16 results of a few dozen sums of numbers around 1.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class FusedPlan:
    """What the kernels need to know of a batch.

    Attributes:
        offsets: int32 `(batch_size + 1,)`, where rows begin.
        num_contextual: int32 `(batch_size,)`, or None.
        num_targets: int32 `(batch_size,)`, or None.
        longest: tokens of the longest row.
        is_causal: whether a token sees only itself and what precedes it.
        target_group_size: targets that see one another.

    """

    offsets: torch.Tensor
    num_contextual: torch.Tensor | None
    num_targets: torch.Tensor | None
    longest: int
    is_causal: bool
    target_group_size: int


def require_fused_kernels(config: HSTUConfig) -> None:
    """Raise ValueError unless the package is there and has kernels for these layers."""
    fused_kernel()
    wants = {
        "position_bias": (config.position_bias, "none"),
        "time_bias": (config.time_bias, False),
        "compute_dtype": (config.execution.compute_dtype, "bf16"),
    }
    for name, (value, needed) in wants.items():
        if value != needed:
            raise ValueError(
                f"kernel_backend is 'hstu_attn' and {name} is {value!r}; its kernels compute in bfloat16 and add no "
                f"bias: set {name} to {needed!r}, or kernel_backend to 'pytorch'"
            )
    if config.kv_channels not in _HEAD_DIMS:
        raise ValueError(
            f"kernel_backend is 'hstu_attn' and kv_channels is {config.kv_channels}; its kernels are made for "
            f"{list(_HEAD_DIMS)}: choose one of them, or kernel_backend 'pytorch'"
        )


def fused_kernel() -> Callable[..., torch.Tensor]:
    """The package's function.

    Raises:
        ValueError: it is not installed.

    """
    try:
        return importlib.import_module("hstu_attn").hstu_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"kernel_backend is 'hstu_attn' and its package cannot be imported ({error}); it is built from source for "
            f"the GPU at hand: run `{_INSTALL}`, or choose kernel_backend 'pytorch'"
        ) from None


def plan_fused_attention(
    lengths: torch.Tensor,
    num_targets: torch.Tensor | None,
    num_contextual: torch.Tensor | None,
    *,
    is_causal: bool,
    target_group_size: int,
    device: torch.device,
) -> FusedPlan:
    """Describe a batch; arguments as those of `plan_attention`, lengths on the host."""

    def on_device(counts: torch.Tensor | None) -> torch.Tensor | None:
        wanted = is_causal and counts is not None and bool(counts.any())
        return counts.to(device, torch.int32) if counts is not None and wanted else None

    return FusedPlan(
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32),
        num_contextual=on_device(num_contextual),
        num_targets=on_device(num_targets),
        longest=int(lengths.max()) if lengths.numel() else 0,
        is_causal=is_causal,
        target_group_size=target_group_size,
    )


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: FusedPlan, *, normalizer: float
) -> torch.Tensor:
    """As `hstu_attention`, without biases.

    Raises:
        RuntimeError: the installed kernels compute something else.

    """
    require_agreement(query.device, query.shape[2])
    return _attend(query, key, value, plan, normalizer)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: FusedPlan, normalizer: float
) -> torch.Tensor:
    if query.shape[0] == 0:
        return query + key + value  # nothing, with the graph of all three
    options: dict[str, Any] = {"window_size": (-1, 0) if plan.is_causal else (-1, -1)}
    if plan.num_contextual is not None:
        options["num_contexts"] = plan.num_contextual
    if plan.num_targets is not None:
        options |= {"num_targets": plan.num_targets, "target_group_size": plan.target_group_size}
    offsets, longest = plan.offsets, plan.longest
    attended = fused_kernel()(query, key, value, offsets, offsets, longest, longest, **options)
    return attended * (longest / normalizer)  # the kernels divide by the longest row of the batch


@functools.cache
def require_agreement(device: torch.device, head_dim: int) -> None:
    """Raise RuntimeError unless the kernels compute what `hstu_attention` does, for every mask; looked at once."""
    generator = torch.Generator().manual_seed(0)
    lengths, targets, contextual = (torch.tensor(part) for part in ([9, 40, 3], [4, 6, 0], [2, 1, 0]))
    q, k, v = (torch.randn(52, 2, head_dim, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    for is_causal, group, first in ((True, 1, None), (True, 2, contextual), (False, 1, None)):
        masks: dict[str, Any] = {"is_causal": is_causal, "target_group_size": group, "device": device}
        expected = hstu_attention(
            q,
            k,
            v,
            torch.zeros(2, 40 if is_causal and first is None else 79, device=device),
            plan_attention(lengths, targets, first, num_heads=2, **masks),
            normalizer=8.0,
        )
        plan = plan_fused_attention(lengths, targets, first, **masks)
        error = float((_attend(q, k, v, plan, 8.0).float() - expected.float()).abs().max())
        if not error <= _TOLERANCE * float(expected.float().abs().max()):
            raise RuntimeError(
                f"hstu_attn and evenrank differ by {error:.3g} where values are up to "
                f"{float(expected.float().abs().max()):.3g} (causal {is_causal}, target groups of {group}); this "
                "version of the package masks or scales otherwise: choose kernel_backend 'pytorch'"
            )
