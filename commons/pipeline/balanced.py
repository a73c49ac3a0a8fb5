"""balanced(PipelineClass): a stock TorchRec pipeline with one hook.

The subclass wraps the data iterator in a LookAhead, which starts shuffles, and finishes each batch's shuffle on the
memcpy stream right after TorchRec has copied the batch. Nothing of TorchRec is copied or patched.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, ShuffleHandle
from commons.distributed.stats import ShuffleStats
from commons.pipeline.look_ahead import LookAhead


class _BalancedPipeline:
    """What every balanced pipeline adds: keywords, the wrapped iterator, and the stats of the batch trained last."""

    _device: torch.device
    _memcpy_stream: torch.Stream | None
    _stream_context: Any

    def __init__(
        self,
        *args: Any,
        batch_shuffler: BaseTaskBalancedBatchShuffler,
        pg_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(batch_shuffler, BaseTaskBalancedBatchShuffler):
            raise TypeError(
                f"batch_shuffler is a {type(batch_shuffler).__name__}; it must derive from "
                "BaseTaskBalancedBatchShuffler: create one with BatchShufflerFactory"
            )
        super().__init__(*args, **kwargs)
        if getattr(self, "_execute_all_batches", True) is False:
            raise ValueError(
                "execute_all_batches is False; it would drop batches whose rows are on other ranks by then: leave it out"
            )
        self.batch_shuffler = batch_shuffler
        self._pg_group = pg_group
        self._look_ahead: LookAhead | None = None
        self._handles: deque[ShuffleHandle] = deque()
        self._stats: deque[ShuffleStats | None] = deque()
        self._last_stats: ShuffleStats | None = None

    @property
    def last_stats(self) -> ShuffleStats | None:
        """Stats of the batch that the last `progress` trained; None in mode "off"."""
        return self._last_stats

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train one batch, as TorchRec's `progress` does.

        When the iterator changes, the batch that was read ahead from the old one is trained first.

        Raises:
            StopIteration: no rank has a batch left.
        """
        if self._look_ahead is None or self._look_ahead.source is not dataloader_iter:
            self._change_iterator(dataloader_iter)
        output = super().progress(self._look_ahead)  # type: ignore[misc]
        self._last_stats = self._stats.popleft()
        return output

    def reset(self) -> None:
        """Drop the batches in flight, after the shuffles that the worker has begun; called on all ranks together."""
        if self._look_ahead is not None:
            self._look_ahead.drain()
        for handle in self._handles:
            handle.drain()
        self._look_ahead = None
        self._handles.clear()
        self._stats.clear()
        super().reset()  # type: ignore[misc]

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> None:
        self._look_ahead = LookAhead(
            dataloader_iter, self.batch_shuffler, self._pg_group, self._handles, self._look_ahead
        )

    def _finish(self, batch: Any) -> Any:
        """Finish the oldest shuffle on the memcpy stream with its batch, which TorchRec has just copied."""
        handle = self._handles.popleft()
        with self._stream_context(self._memcpy_stream):
            result = self.batch_shuffler.finish_shuffle(batch, handle)
        if self._memcpy_stream is not None:
            # An in-place copy puts the batch into memory of the main stream, and the result lies in memory of the
            # memcpy stream: the allocator must know of both uses.
            batch.record_stream(self._memcpy_stream)
            result.record_stream(torch.get_device_module(self._device).current_stream())
        self._stats.append(handle.stats)
        return result


class _HookAtCopy(_BalancedPipeline):
    """For TrainPipelineBase, which copies one batch ahead."""

    _cur_batch: Any
    _data_iter_stopped: bool

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        super()._copy_batch_to_gpu(cur_batch)  # type: ignore[misc]
        self._cur_batch = self._finish(self._cur_batch)

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> None:
        super()._change_iterator(dataloader_iter)
        if self._data_iter_stopped:
            self._reset_data_iter()  # type: ignore[attr-defined]  # the stock class waits for reset() before a second epoch


class _HookAtEnqueue(_BalancedPipeline):
    """For TrainPipelineSparseDist and its kin, which copy in `enqueue_batch`."""

    batches: deque[Any]

    def enqueue_batch(self, dataloader_iter: Iterator[Any]) -> bool:
        """Copy the next batch as TorchRec does, then finish its shuffle."""
        enqueued = super().enqueue_batch(dataloader_iter)  # type: ignore[misc]
        if enqueued:
            self.batches[-1] = self._finish(self.batches[-1])
        return enqueued


# Subclasses of SparseDist schedule batches in ways of their own: each is listed once it has been tested.
_HOOKS: dict[type, type[_BalancedPipeline]] = {
    TrainPipelineBase: _HookAtCopy,
    TrainPipelineSparseDist: _HookAtEnqueue,
    TrainPipelineSparseDistLite: _HookAtEnqueue,
}


def _hook_for(pipeline_class: type) -> type[_BalancedPipeline] | None:
    """The hook of the nearest TorchRec ancestor; None if that one is not listed."""
    for ancestor in getattr(pipeline_class, "__mro__", ()):
        if ancestor.__module__.startswith("torchrec."):
            return _HOOKS.get(ancestor)
    return None


@functools.cache
def balanced(pipeline_class: type) -> type:
    """A subclass of a stock TorchRec pipeline that trains balanced batches.

    Args:
        pipeline_class: TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSparseDistLite, or a subclass of a
            user's own that leaves their scheduling as it is.

    Returns:
        A subclass whose constructor takes two more keywords, `batch_shuffler` and `pg_group=None`, and that has
        `last_stats`, the stats of the batch trained last.

    Raises:
        TypeError: a class without a known place after the host-to-device copy.
    """
    hook = _hook_for(pipeline_class)
    if hook is None:
        supported = ", ".join(known.__name__ for known in _HOOKS)
        raise TypeError(
            f"{getattr(pipeline_class, '__name__', pipeline_class)!s} has no known place for the shuffle after the "
            f"host-to-device copy; supported are {supported} and their subclasses: use one of them"
        )
    required = "_copy_batch_to_gpu" if hook is _HookAtCopy else "enqueue_batch"
    if not callable(getattr(pipeline_class, required, None)):
        raise TypeError(
            f"{pipeline_class.__name__} of this TorchRec has no {required}, where the shuffle is hooked in; TorchRec "
            "1.6 to 1.8 have it: install one of them"
        )
    return type(f"Balanced{pipeline_class.__name__}", (hook, pipeline_class), {"__module__": __name__})
