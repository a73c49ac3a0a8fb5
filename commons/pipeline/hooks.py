"""Hooks that balance a stock TorchRec pipeline: a shuffle starts when a batch is read, and ends after its copy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from commons.checks import kind_of
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, require_shuffler
from commons.distributed.engine.engine import Starter
from commons.distributed.engine.shuffle_handle import ShuffleHandle, no_stats
from commons.distributed.stats import ShuffleStats
from commons.pipeline.look_ahead import LookAhead, ShufflingBatch


class BalancedPipeline:
    """Base of all balanced pipelines: the keywords, the wrapped iterator, and the stats of the last trained batch."""

    _device: torch.device
    _memcpy_stream: torch.Stream | None
    _stream_context: Any

    hooked: ClassVar[tuple[str, ...]]  # TorchRec's methods that the hook needs
    starts_on_thread = False

    def __init__(
        self,
        *args: Any,
        batch_shuffler: BaseTaskBalancedBatchShuffler,
        pg_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        require_shuffler("batch_shuffler", batch_shuffler)
        super().__init__(*args, **kwargs)
        if getattr(self, "_execute_all_batches", True) is False:
            raise ValueError(
                "execute_all_batches is False; it would drop batches whose rows have moved to other ranks: leave it out"
            )
        batch_shuffler.engine.connect(pg_group, self._device)
        self.batch_shuffler = batch_shuffler
        self._pg_group = pg_group
        self._look_ahead: LookAhead | None = None
        self._handed_out: deque[ShuffleHandle] = deque()  # handles of batches that were read and not yet copied
        self._stats: deque[Callable[[], ShuffleStats | None]] = deque()  # functions that read the stats, in flight
        self._read_stats: Callable[[], ShuffleStats | None] = no_stats
        self._num_trained = 0  # batches of the current `progress`, as far as TorchRec's methods tell
        self._broken_by: str | None = None
        self._starter = Starter(type(self).__name__, self.starts_on_thread)

    @property
    def last_stats(self) -> ShuffleStats | None:
        """Stats of the last batch that the last `progress` trained; None in mode "off"."""
        return self._read_stats()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train one batch, as TorchRec's `progress` does.

        When the iterator changes, the batch that was read ahead from the old iterator is trained first. An error of any
        rank's dataloader or `get_workloads` is raised on every rank, once, after all earlier batches were trained; the
        next call continues, with this iterator or another.

        Raises:
            StopIteration: no rank has a batch left.
            RuntimeError: an earlier call raised in the middle of a step, and `reset` was not called after it.
            ValueError: the shuffler also serves another pipeline, and one of the two has a loading thread.
        """
        if self._broken_by is not None:
            raise RuntimeError(
                f"an earlier progress of this {type(self).__name__} raised {self._broken_by}, in the middle of a step; "
                "batches in flight may be half trained: call reset() on every rank, which drops them, or make a new "
                "pipeline"
            )
        self._num_trained = 0
        look_ahead = self._reading(dataloader_iter)
        output = self._advance(look_ahead)
        if not self._stats and look_ahead.ended and not self._handed_out:  # a subclass returned at the end
            if (error := look_ahead.error_at_end(type(self).__name__)) is not None:
                raise error
            return output
        if not self._stats:
            raise RuntimeError(
                f"{type(self).__name__} trained a batch whose shuffle was never finished; this TorchRec, or a subclass "
                "of yours, copies batches where the hook does not expect it: use a version that evenrank supports, "
                "and do not change the schedule"
            )
        self._take_stats(at_least=1)
        return output

    def _take_stats(self, at_least: int) -> None:
        """Take the stats of the trained batches out of those in flight: a subclass may train several in one call."""
        for _ in range(min(max(at_least, self._num_trained), len(self._stats))):
            self._read_stats = self._stats.popleft()
        self._num_trained = 0

    def _advance(self, look_ahead: LookAhead) -> Any:
        try:
            return self._progress_from(look_ahead)
        finally:
            self._starter.in_flight = not look_ahead.ended

    def _progress_from(self, look_ahead: LookAhead) -> Any:
        try:
            return super().progress(look_ahead)  # type: ignore[misc]
        except StopIteration:
            self._take_stats(at_least=0)  # a subclass may have trained the last batch in this call
            if (error := look_ahead.error_at_end(type(self).__name__)) is None:
                raise
        except BaseException as caught:
            self._broken_by = f"{type(caught).__name__}: {caught}"
            raise
        raise error

    def reset(self) -> None:
        """Wait for the shuffles that have started and drop the batches in flight; all ranks call this together.

        A rank that resets alone in the middle of the data moves no rows: it raises ValueError at its next shuffle. The
        others raise it too, or time out in an exchange that it dropped.
        """
        if self._look_ahead is not None:
            # Loading threads reach the end of the data at different times; `realign` brings all ranks together.
            self._look_ahead.drain(is_counted=not self.starts_on_thread)
        self._look_ahead = None
        self._broken_by = None
        self._starter.in_flight = False
        self._handed_out.clear()
        self._stats.clear()
        super().reset()  # type: ignore[misc]

    def _reading(self, source: Iterator[Any]) -> LookAhead:
        """The iterator that starts the shuffles of a source's batches; a new one if the source has changed."""
        if source is not self._look_ahead and self._must_change_iterator(source):
            self.batch_shuffler.engine.begin(self._starter)
            self._look_ahead = self._change_iterator(source)
        assert self._look_ahead is not None  # noqa: S101  the first call sets it
        return self._look_ahead

    def _must_change_iterator(self, dataloader_iter: Iterator[Any]) -> bool:
        look_ahead = self._look_ahead
        return look_ahead is None or look_ahead.source is not dataloader_iter or look_ahead.has_failed

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> LookAhead:
        self._starter.in_flight = True
        return LookAhead(dataloader_iter, self.batch_shuffler, self._pg_group, self._look_ahead, self._handed_out)

    def _finished(self, copied: Any) -> Any:
        """Finish the shuffle of a batch that may just have been copied; returns a finished batch unchanged.

        Raises:
            ValueError: the user's own copy dropped a batch, or returned a batch that cannot be matched to a handle.
        """
        if not self._handed_out:
            return copied
        oldest = self._handed_out[0]
        with oldest.failures_posted():  # an error of only this rank
            if not isinstance(copied, ShufflingBatch):  # the user's own copy made a new batch
                if len(self._handed_out) > 1:
                    raise ValueError(
                        f"{type(self).__name__} got {kind_of(copied)} that is not the result of the batch's to(), "
                        f"while {len(self._handed_out)} batches that were read wait for their shuffle; it cannot be "
                        "matched to one of them: let your own copy return the result of to()"
                    )
                oldest.follow(copied)
                copied = ShufflingBatch(copied, oldest)
            elif copied.handle is not oldest:
                raise ValueError(
                    f"{type(self).__name__} copied the batch of step {copied.handle.step} before that of step "
                    f"{oldest.step}, which was read first; rows of a skipped batch would be missing on other ranks: "
                    "copy every batch that is read, in order, and choose batches in the iterator"
                )
        self._handed_out.popleft()
        return self._finish(copied)

    def _finish(self, shuffling: ShufflingBatch) -> Any:
        """Finish the shuffle of a batch that TorchRec has just copied, on the memcpy stream."""
        batch, handle = shuffling.batch, shuffling.handle
        with self._stream_context(self._memcpy_stream):
            result = self.batch_shuffler.finish_shuffle(batch, handle)
        if self._memcpy_stream is not None:
            # An in-place copy puts the batch into memory of the main stream, and the result is in memory of the memcpy
            # stream. Record both uses with the allocator.
            batch.record_stream(self._memcpy_stream)
            result.record_stream(torch.get_device_module(self._device).current_stream(self._device))
        self._stats.append(handle.read_stats)
        return result


class HookAtCopy(BalancedPipeline):
    """For TrainPipelineBase, which copies one batch ahead."""

    hooked = ("_copy_batch_to_gpu", "_reset_data_iter")

    _cur_batch: Any
    _data_iter_stopped: bool

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        super()._copy_batch_to_gpu(cur_batch)  # type: ignore[misc]
        self._cur_batch = self._finished(self._cur_batch)

    def _wait_for_batch(self, cur_batch: Any) -> None:
        super()._wait_for_batch(cur_batch)  # type: ignore[misc]
        self._num_trained += 1

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> LookAhead:
        if self._data_iter_stopped:  # the stock class needs reset() before a second epoch
            self._reset_data_iter()  # type: ignore[attr-defined]
        return super()._change_iterator(dataloader_iter)


class HookAtTransform(BalancedPipeline):
    """For TrainPipelinePT2, which copies each batch on the current stream and gives it to `input_transformer`."""

    hooked = ("_reset_data_iter",)

    _input_transformer: Callable[[Any], Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memcpy_stream = None
        self._stream_context = torch.cuda.stream
        transform = self._input_transformer

        def finish_and_transform(copied: Any) -> Any:
            self._num_trained += 1  # its training follows in the same `progress`
            return transform(self._finished(copied))

        self._input_transformer = finish_and_transform


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

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Fill the pipeline as TorchRec does; a user may call this before `progress`."""
        super().fill_pipeline(self._reading(dataloader_iter))  # type: ignore[misc]

    def dequeue_batch(self) -> None:
        """Remove a trained batch, as TorchRec does, and count it."""
        super().dequeue_batch()  # type: ignore[misc]
        self._num_trained += 1

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
