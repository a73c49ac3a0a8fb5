"""Hooks of TorchRec's SparseDist and related pipelines, which schedule copies and input distributions of batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from commons.pipeline.hooks import BalancedPipeline
from commons.pipeline.look_ahead import LookAhead, ShufflingBatch


class HookInSparseDist(BalancedPipeline):
    """For TrainPipelineSparseDist and related pipelines.

    The main thread finishes a shuffle at the first of three points at which it has the copied batch: at the return of
    the copy, which a subclass may override; when the batch is enqueued, if another method copied it; and at the start
    of its input distribution, if another thread copied it.
    """

    hooked: ClassVar[tuple[str, ...]] = ("copy_batch_to_gpu", "enqueue_batch", "wait_sparse_data_dist", "attach")

    batches: deque[Any]
    contexts: deque[Any]

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        """Copy the next batch as TorchRec or a subclass does, then finish its shuffle."""
        finished = len(self._stats)
        copied, context = super().copy_batch_to_gpu(dataloader_iter)  # type: ignore[misc]
        return self._after_copy(copied, context, finished), context

    def inplace_copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        """Copy the next batch into memory of the main stream, then finish its shuffle."""
        finished = len(self._stats)
        copied, context = super().inplace_copy_batch_to_gpu(dataloader_iter)  # type: ignore[misc]
        return self._after_copy(copied, context, finished), context

    def enqueue_batch(self, dataloader_iter: Iterator[Any]) -> bool:
        """Copy and enqueue the next batch; finish its shuffle if neither of the two copies above did."""
        finished = len(self._stats)
        enqueued = super().enqueue_batch(dataloader_iter)  # type: ignore[misc]
        if enqueued:
            newest = next(reversed(self.batches))  # not batches[-1], which would wait for a copying thread
            result = self._after_copy(newest, self.contexts[-1], finished)
            if result is not newest:
                self.batches[-1] = result
        return enqueued

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        """Finish the shuffle of a batch that another thread copied, then distribute inputs as TorchRec does."""
        if isinstance(batch, ShufflingBatch):
            position = next(i for i, known in enumerate(self.contexts) if known is context)
            batch = self.batches[position] = self._finished(batch)
        super().start_sparse_data_dist(batch, context)  # type: ignore[misc]

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Attach the model to the pipeline again, as TorchRec does, with the batches in flight.

        TorchRec starts the input distribution of the oldest batch again but does not wait for it in the next step, so
        an EmbeddingCollection would find no input; this method waits for it at once.
        """
        super().attach(model, sparse_dist)  # type: ignore[misc]
        if self.contexts and sparse_dist:
            self.wait_sparse_data_dist(self.contexts[0])  # type: ignore[attr-defined]

    def _after_copy(self, copied: Any, context: Any, finished: int) -> Any:
        """Finish the shuffle of the copied batch, unless the copy did.

        `copied` is None at the end of the data, and a Future if another thread copies. `finished` is the length of
        `_stats` before the copy; if it has grown, the copy finished this batch's shuffle.
        """
        if copied is None or isinstance(copied, Future) or len(self._stats) > finished:
            return copied
        return self._finished(copied)

    def _must_change_iterator(self, dataloader_iter: Iterator[Any]) -> bool:
        # Train the remaining batches of an ended iterator first: with too few batches in flight, TorchRec would enqueue
        # the next iterator's first batch and never start its input distribution. Prefetch of TorchRec 1.6 does not keep
        # its batches in `batches`, but their stats are in `_stats`.
        if self._look_ahead is not None and self._look_ahead.ended and (self.batches or self._stats):
            return False
        return super()._must_change_iterator(dataloader_iter)


class HookWithEvents(HookInSparseDist):
    """For TrainPipelineSemiSync, whose streams wait for events of the batch and not for the memcpy stream."""

    def _after_copy(self, copied: Any, context: Any, finished: int) -> Any:
        """Finish the shuffle, and record one more event to wait for."""
        result = super()._after_copy(copied, context, finished)
        if result is not copied:
            with self._stream_context(self._memcpy_stream):
                event = torch.get_device_module(self._device).Event()
                event.record()
            context.events.append(event)
        return result


class HookBehindThread(HookInSparseDist):
    """For EvalPipelineSparseDist, whose loading thread reads and copies batches.

    Shuffles start on the loading thread, and the main thread finishes them before the batch's input distribution.
    """

    _batch_loader: Any

    hooked = ("start_sparse_data_dist", "wait_sparse_data_dist", "attach")
    starts_on_thread = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Iterators that the user has replaced and that still have batches; each has its own loading thread.
        self._leaving: deque[LookAhead] = deque()

    def reset(self) -> None:
        """Drop the batches in flight; all ranks call this together.

        Loading threads read ahead at different speeds: they are stopped, and ranks that are behind run empty steps, so
        that the next batch has the same step number on every rank.
        """
        loader = self._batch_loader
        if loader is not None:
            loader.stop()
            # TorchRec's thread class overrides a method that is_alive() and join() need, so search the list of threads.
            self.batch_shuffler.engine.realign(self._pg_group, until=lambda: loader not in threading.enumerate())
        super().reset()
        self._leaving.clear()

    def _must_change_iterator(self, dataloader_iter: Iterator[Any]) -> bool:
        # Without look_ahead.ended, which a loading thread sets earlier on some ranks than on others.
        return BalancedPipeline._must_change_iterator(self, dataloader_iter)

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> LookAhead:
        if self._look_ahead is not None and self._starter.in_flight:
            self._look_ahead.abandon()
            self._leaving.append(self._look_ahead)
        # A loading thread reads one iterator; the next step starts a thread, after the replaced iterators have ended.
        if not self._leaving:
            self._batch_loader = None
        return super()._change_iterator(dataloader_iter)

    def _advance(self, look_ahead: LookAhead) -> Any:
        while self._leaving:
            try:
                return self._progress_from(self._leaving[0])
            except StopIteration:  # after the same step on every rank, even if some have read ahead further
                self._leaving.popleft()
                self._batch_loader = None
        try:
            return self._progress_from(look_ahead)
        except BaseException as error:
            # Without look_ahead.ended, which a loading thread sets earlier on some ranks than on others.
            self._starter.in_flight = not (isinstance(error, StopIteration) or look_ahead.has_failed)
            raise
