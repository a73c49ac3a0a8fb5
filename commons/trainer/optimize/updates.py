"""What happens between a backward pass and the next forward pass: accumulate, clip, schedule, update.

TorchRec's pipelines call the optimizer inside `progress`. `DeferredOptimizer` lets these calls pass; the loop updates
when it has the step's output, whose number of loss terms gradient accumulation needs, and clears the gradients.
Tables that train themselves in the backward pass are neither accumulated nor clipped, and follow the learning rate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from commons.trainer.config.args import OptimizationArgs
from commons.trainer.optimize.schedule import Schedule
from commons.trainer.ranks.collectives import all_reduce, gather_numbers


class DeferredOptimizer:
    """Stands in for an optimizer within a pipeline: updating and clearing gradients wait for the loop.

    Most of TorchRec's pipelines clear gradients before the forward pass; SemiSync after `step`, before the loop sees
    them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer; SemiSync looks whether it shares parameters with the tables."""
        return self._optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leave the gradients to the loop, which clears them once they are used."""

    def step(self, closure: Any = None) -> None:
        """Leave the update to the loop."""


class StepUpdate:
    """Updates the dense parameters, and sets the learning rate of everything.

    With accumulation over k steps, the gradient of an update is that of the mean over all loss terms of its k global
    batches: each step's gradient, a mean over its own terms, is weighed by their number. The sum is kept in float32, or
    in the parameter's dtype where that is wider.

    Args:
        args: settings.
        optimizer: of the dense parameters.
        model: its fused optimizers, if it has some, follow the schedule.
        total: steps of the run or, with a schedule in rows, its rows; for the cosine.
        device: of this rank.
        loss_scaler: of the gradients, where the model scales its loss.
        schedule: what learning rates follow: updates or, if it is in rows, the rows trained.
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
        self._args = args
        self._optimizer = optimizer
        self._loss_scaler = loss_scaler
        self._fused = getattr(model, "fused_optimizer", None)
        self._schedule = schedule or Schedule()
        self._total = total
        self._device = device
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scheduled = [optimizer] if self._fused is None else [optimizer, self._fused]
        self._base_rates = [[group["lr"] for group in each.param_groups] for each in self._scheduled]
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._terms: torch.Tensor | None = None

    def is_whole_after(self, step: int) -> bool:
        """Whether nothing is accumulated after a step, counted from 1, so that a run may end there."""
        return step % self._args.accumulation_steps == 0

    def before_step(self, step: int) -> None:
        """Set the learning rates of a step, counted from 0; tables use theirs in its backward pass."""
        if self._args.lr_schedule == "constant" and self._args.warmup_steps == 0:
            return
        steps = self._args.accumulation_steps
        first = step - step % steps  # of this update
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
            self._fused.step()  # hands the rate to the tables

    def after_step(self, step: int, num_loss_tokens: int) -> None:
        """Take and clear the gradients of a step, counted from 0; update with those of as many as are accumulated."""
        if self._args.accumulation_steps == 1:
            self._update()
            return
        self._accumulate(num_loss_tokens)
        self._optimizer.zero_grad()
        if (step + 1) % self._args.accumulation_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Update with what has been accumulated, if there is something."""
        if self._terms is None:
            return
        terms = self._terms.clamp(min=1)
        for parameter, total in zip(self._parameters, self._sums):
            parameter.grad = None if total is None else (total / terms).to(parameter.dtype)
        self._sums, self._terms = [None] * len(self._parameters), None
        self._update()

    def _accumulate(self, num_loss_tokens: int) -> None:
        # Written by a kernel's argument: a copy from the host would wait for the backward pass.
        terms = torch.full((), float(num_loss_tokens), dtype=torch.float64, device=self._device)
        all_reduce(terms, "count of loss terms")
        self._terms = terms if self._terms is None else self._terms + terms
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                # In float32 at least: gradient times terms overflows float16, and has too few digits in bfloat16.
                weighed = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32)) * terms
                before = self._sums[index]
                self._sums[index] = weighed if before is None else before.add_(weighed)

    def _update(self) -> None:
        scaler = self._loss_scaler
        if all(parameter.grad is None for parameter in self._parameters):
            scaler = None  # it refuses an optimizer without gradients
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        if self._args.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._args.max_grad_norm)
        if scaler is None:
            self._optimizer.step()
        else:  # reads from the device whether the gradients overflowed
            scaler.step(self._optimizer)
            scaler.update()
        self._optimizer.zero_grad()


def learning_rate_factor(args: OptimizationArgs, done: int, total: int, own: int = 1) -> float:
    """What learning rates are multiplied by: a linear warm-up, then 1 or a half cosine (Loshchilov and Hutter 2017).

    All numbers count updates, or all count rows: `done` before this update, `total` of the run, `own` of this update.

    >>> args = OptimizationArgs(warmup_steps=2, lr_schedule="cosine", min_lr_ratio=0.1)
    >>> [round(learning_rate_factor(args, update, 6), 3) for update in range(7)]
    [0.333, 0.667, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if done < args.warmup_steps:
        return (done + own) / (args.warmup_steps + own)
    if args.lr_schedule == "constant":
        return 1.0
    part = min(1.0, (done - args.warmup_steps) / max(1, total - args.warmup_steps))
    return args.min_lr_ratio + (1 - args.min_lr_ratio) * (1 + math.cos(math.pi * part)) / 2


class FiniteLossGuard:
    """Notices a loss that is not finite, and says on which rank and at which step, without waiting in every step.

    `in_float16` says that the layers compute in float16, which may be why.
    """

    def __init__(self, device: torch.device, *, in_float16: bool = False) -> None:
        self._device = device
        self._remedy = "with compute_dtype bf16, or " if in_float16 else ""
        self._never = torch.tensor(torch.iinfo(torch.int64).max, device=device)
        self._first = self._never
        self._step = 0

    def look(self, step: int, loss: torch.Tensor) -> None:
        """Take the loss of this rank's part of a step; nothing is read from the device."""
        found = torch.where(torch.isfinite(loss).all(), self._never, torch.full_like(self._never, step))
        self._first = torch.minimum(self._first, found)
        self._step = step

    def check(self) -> None:
        """Raise on all ranks if one has seen such a loss; called on all ranks together, waits for the device.

        Raises:
            ArithmeticError: names the first step, and the ranks that saw it there.
            RankMissingError: a rank did not take part; names it.
        """
        steps = gather_numbers(self._first.view(1), "look at the losses", step=self._step)[:, 0].tolist()
        if min(steps) == int(self._never):
            return
        ranks = [rank for rank, step in enumerate(steps) if step == min(steps)]
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        raise ArithmeticError(
            f"the loss of {names} is not finite at step {min(steps)}; nothing can be learnt from there on: go on from "
            f"an earlier checkpoint {self._remedy}with a lower learning rate or max_grad_norm, or look at that step's "
            "data"
        )
