"""How long this rank's own work on a batch takes: the forward pass of the layers, which waits for no other rank."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from commons.distributed.stats import ShuffleStats
from commons.trainer.moments import has_passed, milliseconds, now

_Pairs = list[tuple[Any, Any]]


class OwnTime:
    """Times a module's forward passes in training: wall time on the CPU, CUDA events elsewhere, never waited for.

    Args:
        module: one without a collective in its forward pass, whose operations are what loads count; None times nothing.
        device: of this rank.

    Attributes:
        last_ms: milliseconds of the step that has ended last; None as long as its end is not known, or without it.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self._device = device
        self.last_ms: float | None = None
        self._begun: Any = None
        self._is_last_timed = False
        # Of the step that is under way; then of those whose end a device may not have reached.
        self._passes: _Pairs = []
        self._ended: deque[tuple[_Pairs, ShuffleStats]] = deque()
        self._hooks: list[Any] = []
        if module is not None:
            self._hooks = [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]

    @property
    def is_on(self) -> bool:
        """Whether there is a module to time; the same on all ranks."""
        return bool(self._hooks)

    def step(self, stats: ShuffleStats | None) -> None:
        """End a step.

        Args:
            stats: of the batch that it trained; None for one that was not balanced, which is not timed.
        """
        passes, self._passes = self._passes, []
        self.last_ms, self._is_last_timed = None, stats is not None and bool(passes)
        if stats is not None and passes:
            self._ended.append((passes, stats))

    def take(self) -> list[tuple[float, ShuffleStats]]:
        """Milliseconds and stats of the steps since the last call whose end is known."""
        taken = []
        while self._ended and has_passed(self._ended[0][0][-1][1]):
            passes, stats = self._ended.popleft()
            taken.append((sum(milliseconds(*each) for each in passes), stats))
        if taken and not self._ended and self._is_last_timed:
            self.last_ms = taken[-1][0]
        return [each for each in taken if each[0] > 0]

    def close(self) -> None:
        """Time nothing from here on."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # TorchRec traces the model before its first step.
        is_trained = module.training and not any(isinstance(each, Proxy) for each in args)
        self._begun = now(self._device) if is_trained else None

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._begun is not None:
            self._passes.append((self._begun, now(self._device)))
            self._begun = None
