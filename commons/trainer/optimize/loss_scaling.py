"""Loss scaling for float16: the loss is scaled up so that gradients do not vanish, and unscaled before updates.

    tables ─► values ─► layers in float16 ─► loss ─► × scale
    tables ◄─ ÷ scale ◄─────── backward ◄───────────┘
                                   └► dense gradients, still scaled ─► unscale, clip, update

torch's GradScaler sets the scale (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2). If dense
gradients overflow, all ranks skip the step: they have the same averaged gradients.

Tables that are updated in the backward pass use their gradients before a GradScaler could unscale them. So gradients
are unscaled between layers and tables, where they are float32 again. If a rank's gradients overflow there, the tables
skip the gradients of this rank and use those of the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unscaled_gradients(values: Sequence[torch.Tensor], scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same values, and divide their gradients by `scale`, 0-dimensional, in the backward pass.

    If any element of any gradient is not finite, all gradients become zero. Values must be wider than float16.
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
