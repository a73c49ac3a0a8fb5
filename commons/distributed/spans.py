"""Spans: name the stage's parts in a profiler's trace as evenrank/workload, gather, plan, wait, exchange and select.

docs/observe.md lists the thread of each part, and shows how to record them.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal, NamedTuple

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

Part = Literal["workload", "gather", "plan", "wait", "exchange", "select"]


class RecordedSpan(NamedTuple):
    """One span of one thread; times are nanoseconds since 1970."""

    name: str
    thread: int  # its native id
    thread_name: str
    began: int
    ended: int


class SpanRecorder:
    """Records the spans of all threads except its own, whose spans torch's profiler records.

    torch's `profile_all_threads` is not safe while other threads run: in torch 2.13, stopping the profiler meanwhile
    hangs or corrupts memory.
    """

    current: SpanRecorder | None = None  # the active recorder

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []
        self._left_out = threading.get_native_id()

    def start(self) -> None:
        """Start recording; replaces the active recorder."""
        SpanRecorder.current = self

    def stop(self) -> None:
        """Stop recording."""
        SpanRecorder.current = None

    def add(self, name: str, began: int) -> None:
        """Add a span that ends now."""
        thread = threading.current_thread()
        if thread.native_id is not None and thread.native_id != self._left_out:
            self.spans.append(RecordedSpan(name, thread.native_id, thread.name, began, time.time_ns()))


class span:
    """A context manager that names its body in a profiler's trace.

    While a profiler of this process runs, it uses `record_function`, whose name also appears beside the GPU's work.
    Otherwise it uses torch's fast variant for external profilers, which takes two microseconds, not ten, and keeps the
    GIL.

    >>> with span("plan"):
    ...     pass
    """

    __slots__ = ("_began", "_name", "_named")

    def __init__(self, part: Part) -> None:
        self._name, self._began = f"evenrank/{part}", 0
        named: Any = torch.profiler.record_function if profiler._is_profiler_enabled else _RecordFunctionFast
        self._named = named(self._name)

    def __enter__(self) -> None:
        if SpanRecorder.current is not None:
            self._began = time.time_ns()
        self._named.__enter__()

    def __exit__(self, *error: object) -> None:
        try:  # noqa: SIM105  contextlib.suppress would double the time
            self._named.__exit__(*error)
        except RuntimeError:  # from torch, if a profiler of all threads has started meanwhile
            pass
        if self._began and (recorder := SpanRecorder.current) is not None:
            recorder.add(self._name, self._began)
