"""Durations of whole steps, and of this rank's forward pass, which waits for no other rank.

Times are taken with the wall clock on the CPU and with CUDA events on a GPU, so that no measurement synchronises.
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
    """Measures the durations of steps: wall time on the CPU, CUDA events on a GPU; only `take` waits for events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Any = None
        self._steps: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a step; the time since the last step belongs to no step."""
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
    """Times a module's forward passes in training: wall time on the CPU, CUDA events on a GPU; never waits for them.

    The module's forward pass must contain no collective, and the workloads must count its FLOPs. None times nothing.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self._device = device
        self.last_ms: float | None = None  # time of the last step; None until the GPU has finished it, or if not timed
        self._begun: Any = None
        self._is_last_timed = False
        # Begin and end of the passes of the current step; then of steps that the GPU may not have finished.
        self._passes: _Pairs = []
        self._ended: deque[tuple[_Pairs, ShuffleStats]] = deque()
        self._hooks: list[Any] = []
        if module is not None:
            self._hooks = [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]

    @property
    def is_on(self) -> bool:
        """Whether there is a module to time; equal on all ranks."""
        return bool(self._hooks)

    def step(self, stats: ShuffleStats | None) -> None:
        """End a step; a step without shuffle (`stats` is None) is not timed."""
        passes, self._passes = self._passes, []
        self.last_ms, self._is_last_timed = None, stats is not None and bool(passes)
        if stats is not None and passes:
            self._ended.append((passes, stats))

    def take(self) -> list[tuple[float, ShuffleStats]]:
        """Milliseconds and stats of the steps that the device has finished since the last call."""
        taken = []
        while self._ended:
            end = self._ended[0][0][-1][1]
            if not (isinstance(end, float) or end.query()):  # the GPU has not finished the step; do not wait for it
                break
            passes, stats = self._ended.popleft()
            taken.append((sum(_milliseconds(*each) for each in passes), stats))
        if taken and not self._ended and self._is_last_timed:
            self.last_ms = taken[-1][0]
        return [each for each in taken if each[0] > 0]

    def close(self) -> None:
        """Remove the hooks: later passes are not timed."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Not timed: evaluation, and TorchRec's symbolic tracing of the model before the first step.
        is_trained = module.training and not any(isinstance(each, Proxy) for each in args)
        self._begun = _now(self._device) if is_trained else None

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._begun is not None:
            self._passes.append((self._begun, _now(self._device)))


def _now(device: torch.device) -> Any:
    """The current time: seconds of a clock or, on a GPU, an event on the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begun: Any, ended: Any) -> float:
    """Milliseconds between two times of `_now`; on a GPU both events must have completed."""
    return (ended - begun) * 1e3 if isinstance(begun, float) else begun.elapsed_time(ended)
