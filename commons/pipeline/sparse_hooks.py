"""The hooks of TorchRec's SparseDist and its kin, which schedule copies and input distributions of several batches."""

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
    """For TrainPipelineSparseDist and its kin.

    A shuffle is finished in the first of three places in which the main thread has the copied batch: where the copy
    returns, which a subclass may override; where the batch is enqueued, if it came there by another way; and where its
    input distribution starts, if another thread has copied it.
    """

    hooked: ClassVar[tuple[str, ...]] = ("copy_batch_to_gpu", "enqueue_batch", "wait_sparse_data_dist", "attach")

    batches: deque[Any]
    contexts: deque[Any]

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        """Copy the next batch as TorchRec, or a subclass, does, then finish its shuffle."""
        finished = len(self._stats)
        copied, context = super().copy_batch_to_gpu(dataloader_iter)  # type: ignore[misc]
        return self._after_copy(copied, context, finished), context

    def inplace_copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        """The same into memory of the main stream."""
        finished = len(self._stats)
        copied, context = super().inplace_copy_batch_to_gpu(dataloader_iter)  # type: ignore[misc]
        return self._after_copy(copied, context, finished), context

    def enqueue_batch(self, dataloader_iter: Iterator[Any]) -> bool:
        """Copy and enqueue the next batch; of one that came by another way than the above, finish the shuffle."""
        finished = len(self._stats)
        enqueued = super().enqueue_batch(dataloader_iter)  # type: ignore[misc]
        if enqueued:
            newest = next(reversed(self.batches))  # not batches[-1]: where another thread copies, that waits for it
            result = self._after_copy(newest, self.contexts[-1], finished)
            if result is not newest:
                self.batches[-1] = result
        return enqueued

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        """Finish the shuffle of a batch that another thread has copied, then distribute as TorchRec does."""
        if isinstance(batch, ShufflingBatch):
            position = next(i for i, known in enumerate(self.contexts) if known is context)
            batch = self.batches[position] = self._finished(batch)
        super().start_sparse_data_dist(batch, context)  # type: ignore[misc]

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Take the model back into the pipeline, as TorchRec does, with the batches that are in flight.

        TorchRec starts the input distribution of the oldest batch again and, when the next step comes, does not wait
        for it, so that an EmbeddingCollection finds nothing there; here it is waited for at once.
        """
        super().attach(model, sparse_dist)  # type: ignore[misc]
        if self.contexts and sparse_dist:
            self.wait_sparse_data_dist(self.contexts[0])  # type: ignore[attr-defined]

    def _after_copy(self, copied: Any, context: Any, finished: int) -> Any:
        """The copied batch, its shuffle finished.

        Args:
            copied: the batch; None at the end of the data, a Future where another thread copies.
            context: TorchRec's, of the batch.
            finished: how many shuffles were finished, and not yet trained, before the copy; more if this one is too.
        """
        if copied is None or isinstance(copied, Future) or len(self._stats) > finished:
            return copied
        return self._finished(copied)

    def _must_change_iterator(self, dataloader_iter: Iterator[Any]) -> bool:
        # What is left of an iterator that has ended comes first: TorchRec, with fewer batches in flight than it needs,
        # would enqueue the first of the next one and never start its input distribution. Prefetch of TorchRec 1.6 keeps
        # its batches elsewhere than in `batches`; their stats are here.
        if self._look_ahead is not None and self._look_ahead.ended and (self.batches or self._stats):
            return False
        return super()._must_change_iterator(dataloader_iter)


class HookWithEvents(HookInSparseDist):
    """For TrainPipelineSemiSync, whose streams wait for events of the batch rather than for the memcpy stream."""

    def _after_copy(self, copied: Any, context: Any, finished: int) -> Any:
        """Finish the shuffle, and record that as one more event to wait for."""
        result = super()._after_copy(copied, context, finished)
        if result is not copied:
            with self._stream_context(self._memcpy_stream):
                event = torch.get_device_module(self._device).Event()
                event.record()
            context.events.append(event)
        return result


class HookBehindThread(HookInSparseDist):
    """For EvalPipelineSparseDist, whose loading thread reads and copies batches.

    Shuffles start on that thread, and are finished by the main thread just before the batch's input distribution.
    """

    _batch_loader: Any

    hooked = ("start_sparse_data_dist", "wait_sparse_data_dist", "attach")
    starts_on_thread = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Iterators that the user has left, with batches still to come; each has its own loading thread.
        self._leaving: deque[LookAhead] = deque()

    def reset(self) -> None:
        """Drop the batches in flight; called on all ranks together.

        Loading threads read ahead at their own pace: they are joined, and ranks that are behind catch up with empty
        steps, so that the next batch is the same step on every rank.
        """
        loader = self._batch_loader
        if loader is not None:
            loader.stop()
            # TorchRec's thread class hides a method that is_alive() and join() need; the list of threads does not.
            self.batch_shuffler.engine.realign(self._pg_group, until=lambda: loader not in threading.enumerate())
        super().reset()
        self._leaving.clear()

    def _must_change_iterator(self, dataloader_iter: Iterator[Any]) -> bool:
        # Not look_ahead.ended, which a loading thread sets at its own pace.
        return BalancedPipeline._must_change_iterator(self, dataloader_iter)

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> LookAhead:
        if self._look_ahead is not None and self._starter.in_flight:
            self._look_ahead.abandon()
            self._leaving.append(self._look_ahead)
        # A loading thread serves one iterator; the next step starts one, after those that are left.
        if not self._leaving:
            self._batch_loader = None
        return super()._change_iterator(dataloader_iter)

    def _advance(self, look_ahead: LookAhead) -> Any:
        while self._leaving:
            try:
                return self._progress_from(self._leaving[0])
            except StopIteration:  # after the same step on every rank, wherever their loading threads were
                self._leaving.popleft()
                self._batch_loader = None
        try:
            return self._progress_from(look_ahead)
        except BaseException as error:
            # Not look_ahead.ended, which a loading thread sets at its own pace.
            self._starter.in_flight = not (isinstance(error, StopIteration) or look_ahead.spent)
            raise
