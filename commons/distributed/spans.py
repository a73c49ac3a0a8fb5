"""Names of the stage's parts in a trace: evenrank/workload, gather, plan, wait, exchange and select.

docs/observe.md says on which thread each of them runs, and how to record them.
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
    """What one thread has done for a while; times are nanoseconds since 1970."""

    name: str
    thread: int  # its native id
    thread_name: str
    began: int
    ended: int


class SpanRecorder:
    """Records the spans of all threads but the one that makes it, from `start` to `stop`: for that one torch does.

    torch can record every thread too (`profile_all_threads`), but not safely while they run: in torch 2.13 a profiler
    that stops meanwhile waits for ever or corrupts memory.
    """

    current: SpanRecorder | None = None  # the one that records

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []
        self._left_out = threading.get_native_id()

    def start(self) -> None:
        """Record from now on; no other recorder does."""
        SpanRecorder.current = self

    def stop(self) -> None:
        """Record nothing more."""
        SpanRecorder.current = None

    def add(self, name: str, began: int) -> None:
        """Take a span that ends now."""
        thread = threading.current_thread()
        if thread.native_id is not None and thread.native_id != self._left_out:
            self.spans.append(RecordedSpan(name, thread.native_id, thread.name, began, time.time_ns()))


def span(part: Part) -> _Span:
    """A context manager: what is done in it is named in the trace of whatever profiler runs.

    While one of this process' profilers does, it is `record_function`, whose name is shown beside the GPU's work too.
    Otherwise it takes two microseconds, not ten, keeps the GIL, and serves profilers from outside.

    >>> with span("plan"):
    ...     pass
    """
    return _Span(f"evenrank/{part}")


class _Span:
    __slots__ = ("_began", "_name", "_named")

    def __init__(self, name: str) -> None:
        self._name, self._began = name, 0
        self._named: Any = torch.profiler.record_function if profiler._is_profiler_enabled else _RecordFunctionFast

    def __enter__(self) -> None:
        if SpanRecorder.current is not None:
            self._began = time.time_ns()
        self._named = self._named(self._name)
        self._named.__enter__()

    def __exit__(self, *error: object) -> None:
        try:  # noqa: SIM105  contextlib.suppress takes as long as all the rest
            self._named.__exit__(*error)
        except RuntimeError:  # torch's, where a profiler of all threads has begun meanwhile
            pass
        if self._began and (recorder := SpanRecorder.current) is not None:
            recorder.add(self._name, self._began)
