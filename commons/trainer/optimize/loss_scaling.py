"""Training in float16: the loss is scaled up so that gradients do not vanish, and the updates see them unscaled.

    tables ─► values ─► layers in float16 ─► loss ─► × scale
    tables ◄─ ÷ scale ◄─────── backward ◄───────────┘
                                   └► dense gradients, still scaled ─► unscale, clip, update

Tables that train themselves use a gradient as soon as the backward pass has it, which is before a GradScaler could
divide the scale out. So it is divided out at the border between tables and layers, where gradients are float32 again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class LossScaler:
    """A dynamic loss scale, torch's GradScaler (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

    A step whose dense gradients overflow is left out on all ranks, which see the same averaged gradients, and the scale
    is halved; after `growth_interval` steps without one it is doubled. Tables that train themselves leave out the
    gradients of a rank where they overflowed, and use the other ranks'.

    Args:
        device: of this rank.
        initial_scale: where the scale starts.
        growth_interval: updates without an overflow after which the scale doubles.
    """

    def __init__(self, device: torch.device, *, initial_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type, init_scale=initial_scale, growth_interval=growth_interval)
        self.scale()  # GradScaler makes its tensors when it first scales

    def scale(self) -> torch.Tensor:
        """The scale of now: float32, 0-dimensional, on the device; nothing is read from there."""
        return self._scaler.scale(torch.ones((), device=self._device))

    def step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> None:
        """Unscale the gradients of an optimizer, clip them, update unless they overflowed, and adapt the scale.

        Reads one number from the device. `max_grad_norm` limits the norm of the unscaled gradients; None for no limit.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if not parameters:
            return
        self._scaler.unscale_(optimizer)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        self._scaler.step(optimizer)
        self._scaler.update()

    def value(self) -> float:
        """The scale of now, read from the device."""
        return self._scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Numbers that a run has to have to go on as it would have, JSON-ready."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._scaler.load_state_dict(state)


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
