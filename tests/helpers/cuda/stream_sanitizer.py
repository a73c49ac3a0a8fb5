"""A stream sanitizer for the CPU: real tensors, pretended CUDA streams, and a vector clock for each stream.

Every operation that torch dispatches counts as a kernel of the current pretended stream; memory lies on the device if
the copy of a batch or a shuffle has made it, or an operation that read such memory. Reported are, of the memory that
the copy and the shuffle make,

    race    memory that is read or written on a stream which has not waited for the last write, or, for a write, for the
            last reads on other streams
    freed   memory that goes back to its stream's pool while another stream may still use it: there was no record_stream

It tells of the order that the code asks for, not of CUDA: operations of the backward pass run on the current stream.
Whether the host waits for the device: tests/device/test_exchange.py.
"""

from __future__ import annotations

import collections
import concurrent.futures.thread
import contextlib
import inspect
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.distributed.train_pipeline.utils import DataLoadingThread

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.exchange import row_exchange
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.open_batch import row_fields
from tests.helpers.cuda.pretended_streams import (
    PretendedEvent,
    PretendedStream,
    current_stream,
    known_to_host,
    learn,
    pretended_streams,
    replaced,
    set_device,
    threads_begin_with_device_0,
)

_DEVICE = torch.device("cpu")
# The module that calls it, its name there, the argument that it reads and the one that it writes.
_COLLECTIVES: list[tuple[Any, str, str, str]] = [
    (dist, "all_to_all_single", "input", "output"),
    (dist, "all_gather_into_tensor", "input_tensor", "output_tensor"),
    (row_exchange, "all_gather_single", "input_tensor", "output_tensor"),
    (dist, "all_reduce", "tensor", "tensor"),
]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Memory:
    """What is known of one storage on the device."""

    def __init__(self, stream: PretendedStream, of: str) -> None:
        self.stream = stream  # whose pool it comes from and goes back to
        self.of = of  # what made it, "copy" or "exchange"; "" for what is not reported
        self.write: tuple[PretendedStream, int] | None = None  # stream and number of the operation that wrote last
        self.reads: dict[PretendedStream, int] = {}  # since then, by stream, the number of the last one that read
        self.recorded: set[PretendedStream] = set()  # streams that the allocator was told of

    def uses(self) -> list[tuple[PretendedStream, int]]:
        return [*self.reads.items(), *([self.write] if self.write else [])]


class StreamSanitizer:
    """Follows memory, streams and the host; made by `sanitized`."""

    def __init__(self) -> None:
        self.reports: collections.Counter[str] = collections.Counter()  # hazards in words, and how often each was met
        self.operations = 0  # kernels that were looked at
        self._memory: dict[int, Memory] = {}
        self._of_group: dict[int, PretendedStream] = {}
        self._lock = threading.RLock()  # a loading thread has operations of its own
        self._thread = threading.local()

    @property
    def making(self) -> str:
        """What the calling thread is at: "copy", "exchange" or ""."""
        return getattr(self._thread, "making", "")

    @contextlib.contextmanager
    def at(self, making: str) -> Iterator[None]:
        before = self.making
        self._thread.making = before or making
        try:
            yield
        finally:
            self._thread.making = before

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return _key(tensor) in self._memory

    def operation(self, name: str, run: Callable[[], Any], inputs: list[torch.Tensor], written: set[int]) -> Any:
        """Run an operation as a kernel of the current stream, if it is one."""
        with self._lock:
            on_device = bool(self.making) or any(map(self.holds, inputs))
            stream = current_stream(_DEVICE)  # an operation runs on the device of its tensors
            if on_device:
                self.operations += 1
                time = stream.work()
                for tensor in inputs:
                    self._access(tensor, id(tensor) in written, stream, time, name)
        output = run()
        if on_device:
            known = set(map(_key, inputs))
            with self._lock:
                for tensor in _tensors(output):
                    if _key(tensor) not in known:
                        memory = self._allocate(tensor, stream)
                        memory.write = None if name.startswith("aten::empty") else (stream, time)
                        # What its stream did before may have been with the same memory.
                        memory.reads[stream] = time
        return output

    def collective(self, function: Callable[..., Any], reads: str, writes: str) -> Any:
        """A collective as NCCL has it: on the current stream or, asynchronous, on a stream of its group's own."""
        signature = inspect.signature(function)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            read, written = given.arguments[reads], given.arguments[writes]
            if self.making == "exchange":  # ranks on the CPU wait with a deadline; those on CUDA leave it to streams
                given.arguments["async_op"] = False
            with self._lock:
                on_device = any(map(self.holds, _tensors([read, written])))
                where = current_stream()
                if on_device and given.arguments.get("async_op"):
                    group = id(given.arguments.get("group"))
                    where = self._of_group.setdefault(group, PretendedStream(name=f"group {len(self._of_group)}"))
                    where.wait_stream(current_stream())
                if on_device:
                    time = where.work()
                    for tensor in _tensors(written):
                        self._allocate(tensor, current_stream())
                    for tensors, is_write in ((read, False), (written, True)):
                        for tensor in _tensors(tensors):
                            self._access(tensor, is_write, where, time, function.__name__)
                            self.record(tensor, where)  # NCCL keeps what it uses until it is waited for
            work = function(*given.args, **given.kwargs)
            return _Work(work, where) if on_device and work is not None else work

        return run

    def record(self, tensor: torch.Tensor, stream: PretendedStream) -> None:
        """What `Tensor.record_stream` tells the allocator."""
        if (memory := self._memory.get(_key(tensor))) is not None:
            memory.recorded.add(stream)

    def give_back(self, key: int, *, forget: bool) -> None:
        """Look whether memory may go back to its pool now."""
        with self._lock:
            memory = self._memory.get(key)
            if memory is None:
                return
            if forget:
                del self._memory[key]
            known = dict(memory.stream.clock)
            learn(known, known_to_host())
            for stream, time in memory.uses():
                if stream is not memory.stream and stream not in memory.recorded and known.get(stream.number, 0) < time:
                    self._report(memory, f"freed: memory of {memory.stream} while {stream} may still use it")

    def _allocate(self, tensor: torch.Tensor, stream: PretendedStream) -> Memory:
        key = _key(tensor)
        if key not in self._memory:
            self._memory[key] = Memory(stream, self.making)
            weakref.finalize(tensor.untyped_storage(), self.give_back, key, forget=True)
        return self._memory[key]

    def _access(self, tensor: torch.Tensor, writes: bool, stream: PretendedStream, time: int, name: str) -> None:
        memory = self._memory.get(_key(tensor))
        if memory is None:
            return
        what = "writes" if writes else "reads"
        if memory.write is not None and not stream.knows(memory.write[0].number, memory.write[1]):
            self._report(memory, f"race: {name} on {stream} {what} before {memory.write[0]} has written, {_where()}")
        if not writes:
            memory.reads[stream] = time
            return
        for other, read_at in memory.reads.items():
            if not stream.knows(other.number, read_at):
                self._report(memory, f"race: {name} on {stream} writes before {other} has read, {_where()}")
        memory.write, memory.reads = (stream, time), {}

    def _report(self, memory: Memory, text: str) -> None:
        if memory.of:
            self.reports[f"{text}; made by the {memory.of}"] += 1


def _where() -> str:
    """The callers outside torch, innermost first."""
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if "/torch/" not in frame.filename and "stream_sanitizer" not in frame.filename
    ]
    return " < ".join(reversed(places[-3:]))


class _Work(dist.Work):
    """The work of an asynchronous collective: waiting for it makes the current stream wait."""

    def __init__(self, work: dist.Work, stream: PretendedStream) -> None:
        super().__init__()
        self._work = work
        self._event: PretendedEvent = stream.record_event()

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        self._event.wait()
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()


class _Watch(TorchDispatchMode):
    """Hands every operation of the calling thread to a sanitizer."""

    def __init__(self, sanitizer: StreamSanitizer) -> None:
        super().__init__()
        self._sanitizer = sanitizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("c10d") or getattr(func, "is_view", False):  # no kernel; collectives are looked at above
            return func(*args, **kwargs)
        written = set()
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                written |= set(map(id, _tensors(value)))
        inputs = _tensors((args, kwargs))
        return self._sanitizer.operation(name, lambda: func(*args, **kwargs), inputs, written)


@contextlib.contextmanager
def sanitized() -> Iterator[StreamSanitizer]:
    """Within the block the CPU is the device, with pretended streams, and everything on it is looked at."""
    sanitizer = StreamSanitizer()
    copy_batch, finish, load = BaseBatch.to, BaseTaskBalancedBatchShuffler.finish_shuffle, DataLoadingThread.run
    work = concurrent.futures.thread._WorkItem.run
    copy_tensor, resize = torch.Tensor.to, torch.UntypedStorage.resize_

    def to(batch: BaseBatch, device: torch.device, non_blocking: bool = False, data_copy_stream: Any = None) -> Any:
        if not non_blocking:  # a batch's way on the host
            return copy_batch(batch, device, non_blocking, data_copy_stream)
        with sanitizer.at("copy"):
            return copy_batch(batch, device, non_blocking, data_copy_stream)

    def tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved = copy_tensor(tensor, *args, **kwargs)
        is_copy = sanitizer.making and kwargs.get("non_blocking") and moved is tensor and not sanitizer.holds(tensor)
        return tensor.clone() if is_copy else moved  # from the host to the device, which are one here

    def finish_shuffle(shuffler: Any, batch: Any, handle: Any) -> Any:
        handle.prepared()  # what the plan needs of the host is not the exchange's
        with sanitizer.at("exchange"):
            return finish(shuffler, batch, handle)

    def record_stream(batch: BaseBatch, stream: PretendedStream) -> None:
        for _, value in row_fields(batch):
            value.record_stream(stream)

    def resize_storage(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0:
            sanitizer.give_back(storage._cdata, forget=False)
        return resize(storage, size)

    def run_thread(thread: DataLoadingThread) -> None:
        set_device()  # as it does itself on CUDA
        with _Watch(sanitizer):
            load(thread)

    def run_item(item: Any) -> None:  # of an executor: TorchRec has one that copies batches
        with _Watch(sanitizer):
            work(item)

    collectives = [
        (module, name, sanitizer.collective(getattr(module, name), reads, writes))
        for module, name, reads, writes in _COLLECTIVES
    ]
    with (
        pretended_streams(),
        threads_begin_with_device_0(),
        replaced(
            (BaseBatch, "to", to),
            (BaseBatch, "record_stream", record_stream),
            (BaseTaskBalancedBatchShuffler, "finish_shuffle", finish_shuffle),
            (DataLoadingThread, "run", run_thread),
            (concurrent.futures.thread._WorkItem, "run", run_item),
            (torch.Tensor, "to", tensor_to),
            (torch.Tensor, "record_stream", lambda tensor, stream: sanitizer.record(tensor, stream)),
            (torch.UntypedStorage, "resize_", resize_storage),
            *collectives,
        ),
        _Watch(sanitizer),
    ):
        yield sanitizer
