"""The update between a backward pass and the next forward pass: accumulate, clip, set learning rates, update.

TorchRec's pipelines call the optimizer inside `progress`. `DeferredOptimizer` ignores these calls; the loop updates and
clears the gradients after the step, because accumulation needs the number of loss terms from the step's output. Tables
that are updated in the backward pass are neither accumulated nor clipped; only the learning rates apply to them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from commons.distributed.errors import name_ranks
from commons.trainer.config.args import OptimizationArgs
from commons.trainer.optimize.schedule import Schedule
from commons.trainer.ranks.collectives import all_reduce, gather_numbers


class DeferredOptimizer:
    """An optimizer for pipelines that does nothing: the loop updates and clears gradients.

    Most of TorchRec's pipelines clear gradients before the forward pass, but SemiSync clears them after `step`, before
    the loop could use them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; SemiSync checks whether they share parameters with the tables."""
        return self._optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the loop clears the gradients after it has used them."""

    def step(self, closure: Any = None) -> None:
        """Do nothing: the loop updates."""


class StepUpdate:
    """Updates the dense parameters, and sets the learning rates of all optimizers.

    With accumulation over k steps, the gradient of an update is the gradient of the mean over all loss terms of its k
    global batches: each step's gradient, a mean over the step's terms, is weighted by their number. The sum has dtype
    float32, or the parameter's dtype if that is wider.

    Args:
        args: the settings.
        optimizer: optimizer of the dense parameters.
        model: the model; learning rates of its fused optimizers, if any, are set too.
        total: steps of the run or, with a schedule in rows, rows of the run; for the cosine.
        device: this rank's device.
        loss_scaler: the scaler of a model that scales its loss, else None.
        schedule: unit of the learning rates' schedule, updates or trained rows; None for updates.
    """

    def __init__(
        self,
        args: OptimizationArgs,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        total: int,
        device: torch.device,
        loss_scaler: torch.amp.GradScaler | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._args, self._total, self._schedule = args, total, schedule or Schedule()
        self._optimizer, self._loss_scaler, self._device = optimizer, loss_scaler, device
        self._fused = getattr(model, "fused_optimizer", None)
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scheduled = [optimizer] if self._fused is None else [optimizer, self._fused]
        self._base_rates = [[group["lr"] for group in each.param_groups] for each in self._scheduled]
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._terms: torch.Tensor | None = None

    def is_whole_after(self, step: int) -> bool:
        """Whether no accumulation is unfinished after a step, counted from 1, so that a run may end there."""
        return step % self._args.accumulation_steps == 0

    def before_step(self, step: int) -> None:
        """Set the learning rates for a step, counted from 0; before its backward pass, which updates tables."""
        if self._args.lr_schedule == "constant" and self._args.warmup_steps == 0:
            return
        steps = self._args.accumulation_steps
        first = step - step % steps  # first step of this update
        if self._schedule.in_rows:
            done = self._schedule.rows_after(first)
            own = (self._schedule.rows_after(first + 1) - done) * steps
            factor = learning_rate_factor(self._args, done, self._total, own)
        else:
            factor = learning_rate_factor(self._args, first // steps, -(-self._total // steps))
        for optimizer, rates in zip(self._scheduled, self._base_rates):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor
        if self._fused is not None:
            self._fused.step()  # only passes the learning rate to the tables

    def after_step(self, step: int, num_loss_tokens: int) -> None:
        """Accumulate and clear the gradients of a step, counted from 0; update at the end of an accumulation."""
        if self._args.accumulation_steps == 1:
            self._update()
            return
        # torch.full passes the number as a kernel argument; a copy from the host would wait for the backward pass.
        terms = torch.full((), float(num_loss_tokens), dtype=torch.float64, device=self._device)
        all_reduce(terms, "count of loss terms")
        self._terms = terms if self._terms is None else self._terms + terms
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                # At least float32: gradient times terms overflows float16, and bfloat16 has too few digits.
                weighted = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32)) * terms
                before = self._sums[index]
                self._sums[index] = weighted if before is None else before.add_(weighted)
        self._optimizer.zero_grad()
        if self.is_whole_after(step + 1):
            self.flush()

    def flush(self) -> bool:
        """Update with the accumulated gradients, if there are any; returns whether there were."""
        if self._terms is None:
            return False
        terms = self._terms.clamp(min=1)
        for parameter, total in zip(self._parameters, self._sums):
            parameter.grad = None if total is None else (total / terms).to(parameter.dtype)
        self._sums, self._terms = [None] * len(self._parameters), None
        self._update()
        return True

    def _update(self) -> None:
        scaler = self._loss_scaler
        if all(parameter.grad is None for parameter in self._parameters):
            scaler = None  # GradScaler raises for an optimizer without gradients
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        if self._args.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._args.max_grad_norm)
        if scaler is None:
            self._optimizer.step()
        else:  # synchronises with the device, to check whether the gradients overflowed
            scaler.step(self._optimizer)
            scaler.update()
        self._optimizer.zero_grad()


def learning_rate_factor(args: OptimizationArgs, done: int, total: int, own: int = 1) -> float:
    """The factor on learning rates: a linear warm-up, then 1 or a half cosine (Loshchilov and Hutter 2017).

    `done` counts updates or rows before this update, `total` those of the run, `own` those of this update.

    >>> args = OptimizationArgs(warmup_steps=2, lr_schedule="cosine", min_lr_ratio=0.1)
    >>> [round(learning_rate_factor(args, update, 6), 3) for update in range(8)]
    [0.333, 0.667, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """
    if done < args.warmup_steps:
        return (done + own) / (args.warmup_steps + own)
    if args.lr_schedule == "constant":
        return 1.0
    part = min(1.0, (done - args.warmup_steps) / max(1, total - args.warmup_steps))
    return args.min_lr_ratio + (1 - args.min_lr_ratio) * (1 + math.cos(math.pi * part)) / 2


class FiniteLossGuard:
    """Detects a loss that is not finite, with its rank and step, without a synchronisation in every step.

    `in_float16`: whether the layers compute in float16, so that the error can suggest bfloat16.
    """

    def __init__(self, device: torch.device, *, in_float16: bool = False) -> None:
        self._device = device
        self._remedy = "with compute_dtype bf16, or " if in_float16 else ""
        self._never = torch.tensor(torch.iinfo(torch.int64).max, device=device)
        self._first = self._never
        self._step = 0

    def record(self, step: int, loss: torch.Tensor) -> None:
        """Record the loss of this rank in a step; reads nothing from the device."""
        found = torch.where(torch.isfinite(loss).all(), self._never, torch.full_like(self._never, step))
        self._first = torch.minimum(self._first, found)
        self._step = step

    def check(self) -> None:
        """Raise on all ranks if any rank had a loss that is not finite; a collective call, waits for the device.

        Raises:
            ArithmeticError: names the first such step and its ranks.
            RankMissingError: a rank did not call it in time; the error names the rank.
        """
        steps = gather_numbers(self._first.view(1), "check of the losses", step=self._step)[:, 0].tolist()
        if min(steps) == int(self._never):
            return
        names = name_ranks([rank for rank, step in enumerate(steps) if step == min(steps)])
        raise ArithmeticError(
            f"the loss of {names} is not finite at step {min(steps)}; training cannot recover from it: continue from "
            f"an earlier checkpoint {self._remedy}with a lower learning rate or max_grad_norm, or check that step's "
            "data"
        )
