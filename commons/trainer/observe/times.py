"""Times of a run: of whole steps, and of this rank's own work in them, which waits for no other rank.

A moment is a reading of the wall clock on the CPU and a CUDA event elsewhere, so that no measurement waits for a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from commons.distributed.stats import ShuffleStats

_Pairs = list[tuple[Any, Any]]


class StepClock:
    """Durations of steps: wall time on the CPU, CUDA events elsewhere, which nobody waits for until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Any = None
        self._steps: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a step; what has passed since the last one belongs to none."""
        self._begin = _now(self._device)

    def end(self) -> None:
        """End a step, and begin the next one."""
        ended = _now(self._device)
        self._steps.append((self._begin, ended))
        self._begin = ended

    def take(self) -> list[float]:
        """Milliseconds of the steps since the last call."""
        steps, self._steps = self._steps, []
        if steps and not isinstance(steps[-1][1], float):
            steps[-1][1].synchronize()
        return [_milliseconds(begin, end) for begin, end in steps]


class ForwardTimer:
    """Times a module's forward passes in training: wall time on the CPU, CUDA events elsewhere, never waited for.

    The module has no collective in its forward pass, and its operations are what loads count; None times nothing.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self._device = device
        self.last_ms: float | None = None  # of the last step; None as long as its end is not known, or without it
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
        """End a step; one that was not balanced has no `stats`, and is not timed."""
        passes, self._passes = self._passes, []
        self.last_ms, self._is_last_timed = None, stats is not None and bool(passes)
        if stats is not None and passes:
            self._ended.append((passes, stats))

    def take(self) -> list[tuple[float, ShuffleStats]]:
        """Milliseconds and stats of the steps since the last call whose end is known."""
        taken = []
        while self._ended:
            end = self._ended[0][0][-1][1]
            if not (isinstance(end, float) or end.query()):  # a GPU that is not there yet is not waited for
                break
            passes, stats = self._ended.popleft()
            taken.append((sum(_milliseconds(*each) for each in passes), stats))
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
        self._begun = _now(self._device) if is_trained else None

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._begun is not None:
            self._passes.append((self._begun, _now(self._device)))
            self._begun = None


def _now(device: torch.device) -> Any:
    """The present moment: seconds of a clock or, on the current stream of a GPU, an event."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begun: Any, ended: Any) -> float:
    """Between two moments of one device that are over."""
    return (ended - begun) * 1e3 if isinstance(begun, float) else begun.elapsed_time(ended)
