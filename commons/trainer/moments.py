"""Moments in a rank's work: of the wall clock on the CPU, CUDA events elsewhere, which nobody need wait for."""

from __future__ import annotations

import time
from typing import Any

import torch


def now(device: torch.device) -> Any:
    """The present moment: seconds of a clock or, on the current stream of a GPU, an event."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def has_passed(moment: Any) -> bool:
    """Whether a moment is over; does not wait for a GPU."""
    return isinstance(moment, float) or moment.query()


def wait_for(moment: Any) -> None:
    """Wait until a moment is over."""
    if not isinstance(moment, float):
        moment.synchronize()


def milliseconds(begun: Any, ended: Any) -> float:
    """Between two moments of one device that are over."""
    return (ended - begun) * 1e3 if isinstance(begun, float) else begun.elapsed_time(ended)
