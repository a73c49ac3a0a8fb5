"""Records rows, lengths and step times of TorchRec's pipelines, without changes to the user's script.

The lengths of a batch are read on the host when a pipeline has read the batch, and recorded when `progress` has trained
it; batches are trained in the order in which they are read. There is no communication, and batches are not changed.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.pipeline.look_ahead import ShufflingBatch
from commons.sequence_batch.fields import batch_items

# Pipelines whose `reset`, if they define it, drops batches: subclasses call it. The one they inherit drops nothing.
_RESET = (
    train_pipelines.TrainPipelineBase,
    train_pipelines.TrainPipelineSparseDist,
    train_pipelines.StagedTrainPipeline,
)
# Types that hold no tensor, for speed: a batch may have hundreds of names.
_PLAIN = (str, int, float)


class _Flight:
    """The batches of one pipeline that were read and are not yet trained."""

    def __init__(self) -> None:
        # of each batch the lengths, and the handle of its shuffle; None for unknown lengths, or without a shuffle
        self.batches: deque[tuple[np.ndarray | None, Any]] = deque()
        self.ended: float | None = None  # time at the end of the last step; None before the first step of an epoch
        self.num_trained = 0  # batches that were trained
        self.is_returned = False  # whether the caller of a staged pipeline has a batch to train
        self.is_reading = False  # whether `_next_batch` is called, which may call the method that it overrides


class Recorder:
    """The training steps of this rank, from the first to at most `most_steps`.

    Attributes:
        lengths: for each step, the tokens of its rows, int64 `(rows,)`.
        seconds: for each step, the seconds since the end of the previous step; NaN for the first step of an epoch.
        balanced: number of steps in which evenrank's shuffler moved rows.
        unknown: number of steps without lengths, see `_lengths_of`.
        has_begun: whether a step was trained.

    Args:
        begin: called after the first step.
        most_steps: limits the memory.
    """

    def __init__(self, begin: Callable[[], Any] = lambda: None, most_steps: float = math.inf) -> None:
        self._begin, self._most_steps = begin, most_steps
        self.has_begun = False
        self.lengths: list[np.ndarray] = []
        self.seconds: list[float] = []
        self.unknown = self.balanced = 0
        self._flights: weakref.WeakKeyDictionary[Any, _Flight] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Start to record all of TorchRec's training pipelines, and subclasses that the script defines."""
        base = train_pipelines.TrainPipeline
        for pipeline in _RESET:
            if "reset" in vars(pipeline):
                self._wrap(pipeline, "reset", self._dropping)
        self._wrap_iterator(train_pipelines.TrainPipelinePT2)
        for pipeline in _subclasses(base):
            self._record(pipeline)

        def record_subclass(pipeline: type[train_pipelines.TrainPipeline[Any, Any]], **kwargs: Any) -> None:
            super(base, pipeline).__init_subclass__(**kwargs)
            self._record(pipeline)

        base.__init_subclass__ = classmethod(record_subclass)

    def _record(self, pipeline: type) -> None:
        """Record the steps of a pipeline that defines `progress`; of an evaluation too, whose batches are dropped."""
        if "_next_batch" in vars(pipeline):
            self._wrap(pipeline, "_next_batch", self._reading)
        if "progress" in vars(pipeline):
            is_staged = issubclass(pipeline, train_pipelines.StagedTrainPipeline)
            self._wrap(pipeline, "progress", self._staging if is_staged else self._training)

    @staticmethod
    def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            return around(pipeline, functools.partial(method, pipeline, *args, **kwargs))

        setattr(owner, name, wrapped)

    def _wrap_iterator(self, owner: Any) -> None:
        """Record what the `progress` of a class reads from its iterator itself, without `_next_batch`."""
        method = owner.progress

        @functools.wraps(method)
        def wrapped(pipeline: Any, dataloader_iter: Iterator[Any]) -> Any:
            if hasattr(dataloader_iter, "__next__"):  # TorchRec refuses anything else
                dataloader_iter = map(functools.partial(self._noted, pipeline), dataloader_iter)
            return method(pipeline, dataloader_iter)

        owner.progress = wrapped

    def _flight(self, pipeline: Any) -> _Flight:
        return self._flights.setdefault(pipeline, _Flight())

    def _reading(self, pipeline: Any, read: Callable[[], Any]) -> Any:
        """Call a `_next_batch`; of nested calls only the outer one returns what the pipeline trains."""
        flight = self._flight(pipeline)
        if flight.is_reading:
            return read()
        flight.is_reading = True
        try:
            batch = read()
        finally:
            flight.is_reading = False
        return self._noted(pipeline, batch)

    def _noted(self, pipeline: Any, batch: Any) -> Any:
        if batch is not None:
            handle = batch.handle if isinstance(batch, ShufflingBatch) else None
            self._flight(pipeline).batches.append((_lengths_of(batch), handle))
        return batch

    def _dropping(self, pipeline: Any, reset: Callable[[], Any]) -> None:
        """Call a `reset`, which drops the batches in flight."""
        reset()
        self._flights.pop(pipeline, None)

    def _training(self, pipeline: Any, train: Callable[[], Any]) -> Any:
        """Call a `progress`, which trains a batch itself or in calls of other ones, such as `super().progress`."""
        flight = self._flight(pipeline)
        before = flight.num_trained
        try:
            result = train()
        except StopIteration:
            flight.ended = None
            raise
        if flight.num_trained == before and flight.batches:
            self._trained(pipeline, flight)
        return result

    def _staging(self, pipeline: Any, advance: Callable[[], Any]) -> Any:
        """Call `progress` of a staged pipeline, whose caller trains the batch that it returns until the next call."""
        flight = self._flight(pipeline)
        if flight.is_returned and flight.batches:
            self._trained(pipeline, flight)
        flight.is_returned = False
        batch = advance()
        flight.is_returned |= batch is not None  # true already if a nested call has returned one
        if not flight.is_returned:  # the end of an epoch
            flight.ended = None
        return batch

    def _trained(self, pipeline: Any, flight: _Flight) -> None:
        (lengths, handle), now, began = flight.batches.popleft(), time.perf_counter(), flight.ended
        flight.ended, flight.num_trained = now, flight.num_trained + 1
        evaluates = any(each.__name__.startswith("Eval") for each in type(pipeline).__mro__)
        if evaluates or not getattr(getattr(pipeline, "_model", None), "training", True):
            return
        if not self.has_begun:
            self.has_begun = True
            self._begin()
        if lengths is None:
            self.unknown += 1
        elif len(self.lengths) < self._most_steps:
            self.lengths.append(lengths)
            stats = None if handle is None else handle.stats
            self.balanced += stats is not None and stats.moved
            self.seconds.append(float("nan") if began is None else now - began)


def _lengths_of(batch: Any) -> np.ndarray | None:
    """Tokens of the real rows of a batch on the host, int64 `(rows,)`: the lengths of all keys except labels.

    None if lengths are on a device, or if there is no jagged tensor, one with inverse indices, or several that differ
    in their numbers of rows.
    """
    if isinstance(batch, ShufflingBatch):  # its handle has the same rows again
        batch = batch.batch
    total: torch.Tensor | None = None
    for value in _jagged_tensors(batch, set()):
        lengths, keyed = value.lengths(), isinstance(value, KeyedJaggedTensor)
        # With inverse indices, rows are not those of the batch, even if they are equally many.
        if lengths.device.type != "cpu" or (keyed and value.inverse_indices_or_none() is not None):
            return None
        try:
            rows = lengths.view(len(value.keys()), value.stride()).sum(0) if keyed else lengths
        except (RuntimeError, ValueError):  # different numbers of rows
            return None
        if total is not None and total.shape != rows.shape:
            return None
        # A copy: a batch of a loader's worker is in shared memory, which its views keep open.
        total = rows.to(torch.int64, copy=True) if total is None else total + rows
    return None if total is None else total[: getattr(batch, "actual_batch_size", None)].numpy()


def _jagged_tensors(batch: Any, entered: set[int]) -> Iterator[KeyedJaggedTensor | JaggedTensor]:
    """The jagged tensors of a batch; `entered` has the ids of its parts so far, since one may refer to its owner."""
    if isinstance(batch, (KeyedJaggedTensor, JaggedTensor)):
        yield batch
        return
    parts: Iterable[Any] = ()
    # The fields of a dataclass may be slots.
    items = batch_items(batch) if hasattr(type(batch), "__dataclass_fields__") else batch
    if isinstance(items, dict):
        parts = [value for name, value in items.items() if name != "labels"]
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif hasattr(batch, "__dict__") and not isinstance(batch, torch.Tensor):
        parts = [vars(batch)]
    if id(batch) not in entered:
        entered.add(id(batch))
        for part in parts:
            if not isinstance(part, _PLAIN):
                yield from _jagged_tensors(part, entered)


def _subclasses(base: type) -> set[type]:
    """A class and all its subclasses."""
    return {base}.union(*map(_subclasses, base.__subclasses__()))
