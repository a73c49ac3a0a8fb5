"""CUDA streams, pretended on the CPU: TorchRec's stock pipelines run with the streams that they would have on CUDA.

Everything runs at once, in the order in which it is issued. What a stream would have to wait for is kept as a vector
clock (Mattern 1989): of every stream, how much of its work is known to be done. A stream learns from the streams and
events that it waits for, and from the thread that issues its work; tests/helpers/cuda/stream_sanitizer.py asks it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelinePT2

Clock = dict[int, int]

_numbers = itertools.count()
_this_thread = threading.local()
_known_to_thread: collections.defaultdict[int, Clock] = collections.defaultdict(dict)
_streams: weakref.WeakSet[PretendedStream] = weakref.WeakSet()
_STREAMS_OF_PIPELINES = ("_memcpy_stream", "_data_dist_stream", "_prefetch_stream", "_default_stream")


def learn(clock: Clock, other: Clock) -> None:
    """Add to a clock what another one knows."""
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def known_to_host() -> Clock:
    """What the calling thread has waited for."""
    return _known_to_thread[threading.get_ident()]


class PretendedStream:
    """A stream of the pretended device."""

    device = torch.device("cpu")
    device_type = "cpu"

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        self.number = next(_numbers)
        self.name = name or f"stream {self.number}"
        self.time = 0
        self.clock: Clock = {}
        _streams.add(self)

    def __repr__(self) -> str:
        return self.name

    def work(self) -> int:
        """Issue one operation; returns its number on this stream."""
        learn(self.clock, known_to_host())
        self.time += 1
        self.clock[self.number] = self.time
        return self.time

    def knows(self, stream: int, time: int) -> bool:
        """Whether what is issued now runs after another stream's operation of that number."""
        return self.clock.get(stream, 0) >= time

    def wait_stream(self, other: PretendedStream) -> None:
        learn(self.clock, other.clock)

    def wait_event(self, event: PretendedEvent) -> None:
        learn(self.clock, event.clock)

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        event = event or PretendedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        learn(known_to_host(), self.clock)

    def query(self) -> bool:
        return True


class PretendedEvent:
    """An event: what its stream knew when it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: PretendedStream | None = None) -> None:
        self.clock = dict((stream or current_stream()).clock)

    def wait(self, stream: PretendedStream | None = None) -> None:
        learn((stream or current_stream()).clock, self.clock)

    def synchronize(self) -> None:
        learn(known_to_host(), self.clock)

    def query(self) -> bool:
        return True


DEFAULT_STREAM = PretendedStream(name="default stream")
# What a thread gets that has not set its device and names none: on CUDA every thread begins with device 0.
STREAM_OF_DEVICE_0 = PretendedStream(name="default stream of device 0")


def current_stream(device: Any = None) -> PretendedStream:
    """The stream of the calling thread: of the pretended device or, if none is named, of the device that it has set."""
    has_device = device is not None or getattr(_this_thread, "has_device", True)
    return getattr(_this_thread, "stream", DEFAULT_STREAM if has_device else STREAM_OF_DEVICE_0)


@contextlib.contextmanager
def threads_begin_with_device_0() -> Iterator[None]:
    """Within the block, threads that are started have not set their device, like those of CUDA on rank 1 and above."""
    run = threading.Thread.run

    def run_on_device_0(thread: threading.Thread) -> None:
        _this_thread.has_device = False
        run(thread)

    with replaced((threading.Thread, "run", run_on_device_0)):
        yield


def set_device() -> None:
    """What `torch.cuda.set_device` does for the calling thread."""
    _this_thread.has_device = True


@contextlib.contextmanager
def on_stream(stream: PretendedStream | None) -> Iterator[None]:
    """Issue work on a stream; None changes nothing, as in torch."""
    before = current_stream()
    if stream is not None:
        _this_thread.stream = stream
    try:
        yield
    finally:
        _this_thread.stream = before


def _synchronize(device: Any = None) -> None:
    for stream in list(_streams):
        stream.synchronize()


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of objects, as (object, name, value), for the time of the block."""
    with contextlib.ExitStack() as patches:
        for change in changes:
            patches.enter_context(mock.patch.object(*change))
        yield


@contextlib.contextmanager
def pretended_streams() -> Iterator[None]:
    """Within the block, the streams and events that torch makes for the CPU are pretended ones."""
    with replaced(
        (torch.cpu, "Stream", PretendedStream),
        (torch.cpu, "Event", PretendedEvent),
        (torch.cpu, "stream", on_stream),
        (torch.cpu, "current_stream", current_stream),
        (torch.cpu, "synchronize", _synchronize),
        # TorchRec asks these whatever the device; a process with GPUs shall answer like one without.
        (torch.cuda, "stream", on_stream),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "Stream", PretendedStream),
        (torch.cuda, "Event", PretendedEvent),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda device: None),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield


_from_now_on = contextlib.ExitStack()


def pretend_from_now_on() -> None:
    """Pretend streams to the end of this process: for pipelines that a test makes and runs here and there."""
    if torch.cpu.current_stream is not current_stream:
        _from_now_on.enter_context(pretended_streams())


def on_pretended_streams(pipeline_class: type) -> type:
    """A subclass for the CPU of a pipeline that asks CUDA for its streams; its schedule is the stock one."""

    @functools.wraps(pipeline_class.__init__)  # type: ignore[misc]
    def make(pipeline: Any, *args: Any, **kwargs: Any) -> None:
        pretend_from_now_on()
        pipeline_class.__init__(pipeline, *args, **kwargs)  # type: ignore[misc]
        with_streams(pipeline)

    return type(f"{pipeline_class.__name__}OnCpu", (pipeline_class,), {"__init__": make})


def with_streams(pipeline: Any) -> Any:
    """Give a pipeline, made for the CPU and therefore without streams, those that it would have on CUDA."""
    if isinstance(pipeline, TrainPipelinePT2):  # which has none there either
        return pipeline
    for name in _STREAMS_OF_PIPELINES:
        is_lite = name == "_data_dist_stream" and "Lite" in type(pipeline).__name__
        if hasattr(pipeline, name) and not is_lite:  # that one distributes on the default stream
            setattr(pipeline, name, PretendedStream(name=name.strip("_").replace("_", " ")))
    if hasattr(pipeline, "_emb_lookup_stream"):
        pipeline._emb_lookup_stream = pipeline._data_dist_stream
    if "Stash" in type(pipeline).__name__ or "EMS" in type(pipeline).__name__:
        MemoryStashingManager.set_streams(pipeline._memcpy_stream, PretendedStream(name="stash stream"))
    pipeline._stream_context = on_stream
    return pipeline
