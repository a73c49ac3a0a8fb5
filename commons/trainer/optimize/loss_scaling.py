"""Training in float16: the loss is scaled up so that gradients do not vanish, and the updates see them unscaled.

    tables ─► values ─► layers in float16 ─► loss ─► × scale
    tables ◄─ ÷ scale ◄─────── backward ◄───────────┘
                                   └► dense gradients, still scaled ─► unscale, clip, update

The scale is that of torch's GradScaler (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2). A step
whose dense gradients overflow is left out on all ranks, which see the same averaged gradients.

Tables that train themselves use a gradient as soon as the backward pass has it, which is before a GradScaler could
divide the scale out. So it is divided out at the border between tables and layers, where gradients are float32 again.
They leave out the gradients of a rank where they overflowed, and use the other ranks'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unscaled_gradients(values: Sequence[torch.Tensor], scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same values, whose gradients are divided by a scale, 0-dimensional, on their way back.

    If any element of any of these gradients is not finite, all of them are zero. Values are wider than float16.
    """
    return _UnscaledGradients.apply(scale, *values)


class _UnscaledGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(scale)
        return tuple(each.view_as(each) for each in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        finite = torch.stack([torch.isfinite(each).all() for each in gradients]).all()
        return None, *(torch.where(finite, each / scale, torch.zeros_like(each)) for each in gradients)
