"""The hooks that make a stock TorchRec pipeline a balanced one: where a shuffle starts and where it is finished."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.stats import ShuffleStats
from commons.pipeline.look_ahead import Driver, LookAhead, ShufflingBatch, drive


class BalancedPipeline:
    """What every balanced pipeline adds: keywords, the wrapped iterator, and the stats of the batch trained last."""

    _device: torch.device
    _memcpy_stream: torch.Stream | None
    _stream_context: Any

    starts_on_thread = False

    def __init__(
        self,
        *args: Any,
        batch_shuffler: BaseTaskBalancedBatchShuffler,
        pg_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(batch_shuffler, BaseTaskBalancedBatchShuffler):
            kind = "the class " if isinstance(batch_shuffler, type) else "a "
            name = (batch_shuffler if isinstance(batch_shuffler, type) else type(batch_shuffler)).__name__
            raise TypeError(
                f"batch_shuffler is {kind}{name}; it must be an object of a class that derives from "
                "BaseTaskBalancedBatchShuffler: create one with BatchShufflerFactory"
            )
        super().__init__(*args, **kwargs)
        if getattr(self, "_execute_all_batches", True) is False:
            raise ValueError(
                "execute_all_batches is False; it would drop batches whose rows are on other ranks then: leave it out"
            )
        batch_shuffler.connect(pg_group, self._device)
        self.batch_shuffler = batch_shuffler
        self._pg_group = pg_group
        self._look_ahead: LookAhead | None = None
        self._stats: deque[ShuffleStats | None] = deque()
        self._last_stats: ShuffleStats | None = None
        self._broken_by: str | None = None
        self._driver = Driver(type(self).__name__, self.starts_on_thread)

    @property
    def last_stats(self) -> ShuffleStats | None:
        """Stats of the batch that the last `progress` trained; None in mode "off"."""
        return self._last_stats

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train one batch, as TorchRec's `progress` does.

        When the iterator changes, the batch that was read ahead from the old one is trained first. An error of any
        rank's dataloader or `get_workloads` is raised on every rank, once, after the batches before it have been
        trained; the next call goes on, with this iterator or with another one.

        Raises:
            StopIteration: no rank has a batch left.
            RuntimeError: an earlier call has raised in the middle of a step, and `reset` has not been called since.
            ValueError: the shuffler drives another pipeline, and one of the two has a loading thread.
        """
        if self._broken_by is not None:
            raise RuntimeError(
                f"an earlier progress of this {type(self).__name__} raised {self._broken_by}, in the middle of a step; "
                "what was in flight may be half trained: call reset() on every rank, which drops it, or make a new "
                "pipeline"
            )
        if self._must_change_iterator(dataloader_iter):
            drive(self._driver, self.batch_shuffler)
            self._look_ahead = self._change_iterator(dataloader_iter)
        assert self._look_ahead is not None  # noqa: S101  the first call changes it
        output = self._advance(self._look_ahead)
        if not self._stats:
            raise RuntimeError(
                f"{type(self).__name__} trained a batch whose shuffle was never finished; this TorchRec copies batches "
                "elsewhere than the hook expects: use the versions that evenrank names"
            )
        self._last_stats = self._stats.popleft()
        return output

    def _advance(self, look_ahead: LookAhead) -> Any:
        try:
            return self._progress_from(look_ahead)
        finally:
            self._driver.in_flight = not look_ahead.ended

    def _progress_from(self, look_ahead: LookAhead) -> Any:
        try:
            return super().progress(look_ahead)  # type: ignore[misc]
        except StopIteration:
            error = look_ahead.take_error()
            if error is None:
                raise
        except BaseException as caught:
            self._broken_by = f"{type(caught).__name__}: {caught}"
            raise
        raise error

    def reset(self) -> None:
        """Drop the batches in flight, after the shuffles that the worker has begun; called on all ranks together."""
        if self._look_ahead is not None:
            self._look_ahead.drain()
        self._look_ahead = None
        self._broken_by = None
        self._driver.in_flight = False
        self._stats.clear()
        super().reset()  # type: ignore[misc]

    def _must_change_iterator(self, dataloader_iter: Iterator[Any]) -> bool:
        look_ahead = self._look_ahead
        return look_ahead is None or look_ahead.source is not dataloader_iter or look_ahead.spent

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> LookAhead:
        self._driver.in_flight = True
        return LookAhead(dataloader_iter, self.batch_shuffler, self._pg_group, self._look_ahead)

    def _finish(self, shuffling: ShufflingBatch) -> Any:
        """Finish the shuffle of a batch that TorchRec has just copied, on the memcpy stream."""
        batch, handle = shuffling.batch, shuffling.handle
        with self._stream_context(self._memcpy_stream):
            result = self.batch_shuffler.finish_shuffle(batch, handle)
        if self._memcpy_stream is not None:
            # An in-place copy puts the batch into memory of the main stream, and the result lies in memory of the
            # memcpy stream: the allocator must know of both uses.
            batch.record_stream(self._memcpy_stream)
            result.record_stream(torch.get_device_module(self._device).current_stream())
        self._stats.append(handle.stats)
        return result


class HookAtCopy(BalancedPipeline):
    """For TrainPipelineBase, which copies one batch ahead."""

    _cur_batch: Any
    _data_iter_stopped: bool

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        super()._copy_batch_to_gpu(cur_batch)  # type: ignore[misc]
        self._cur_batch = self._finish(self._cur_batch)

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> LookAhead:
        if self._data_iter_stopped:  # the stock class would wait for reset() before a second epoch
            self._reset_data_iter()  # type: ignore[attr-defined]
        return super()._change_iterator(dataloader_iter)


class HookAtEnqueue(BalancedPipeline):
    """For TrainPipelineSparseDist and its kin, which copy in `enqueue_batch`."""

    batches: deque[Any]
    contexts: deque[Any]

    def enqueue_batch(self, dataloader_iter: Iterator[Any]) -> bool:
        """Copy the next batch as TorchRec does, then finish its shuffle."""
        enqueued = super().enqueue_batch(dataloader_iter)  # type: ignore[misc]
        if enqueued:
            self.batches[-1] = self._finish(self.batches[-1])
        return enqueued

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Take the model back into the pipeline, as TorchRec does, with the batches that are in flight.

        TorchRec starts the input distribution of the oldest batch again and, when the next step comes, does not wait
        for it, so that an EmbeddingCollection finds nothing there; here it is waited for at once.
        """
        super().attach(model, sparse_dist)  # type: ignore[misc]
        if self.contexts and sparse_dist:
            self.wait_sparse_data_dist(self.contexts[0])  # type: ignore[attr-defined]

    def _must_change_iterator(self, dataloader_iter: Iterator[Any]) -> bool:
        # What is left of an iterator that has ended comes first: TorchRec, with fewer batches in flight than it needs,
        # would enqueue the first of the next one and never start its input distribution.
        if self._look_ahead is not None and self._look_ahead.ended and self.batches:
            return False
        return super()._must_change_iterator(dataloader_iter)


class HookAtEnqueueWithEvents(HookAtEnqueue):
    """For TrainPipelineSemiSync, whose streams wait for events of the batch rather than for the memcpy stream."""

    def enqueue_batch(self, dataloader_iter: Iterator[Any]) -> bool:
        """Copy the next batch, finish its shuffle, and record that as one more event to wait for."""
        enqueued = super().enqueue_batch(dataloader_iter)
        if enqueued:
            with self._stream_context(self._memcpy_stream):
                event = torch.get_device_module(self._device).Event()
                event.record()
            # The batch's own context, the one just appended: contexts compare equal, so none could be searched for.
            self.contexts[-1].events.append(event)
        return enqueued


class HookAtDataDist(BalancedPipeline):
    """For EvalPipelineSparseDist, whose loading thread reads and copies batches.

    Shuffles start on that thread, and are finished by the main thread just before the batch's input distribution.
    """

    batches: deque[Any]
    contexts: deque[Any]
    _batch_loader: Any

    starts_on_thread = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Iterators that the user has left, with batches still to come; each has its own loading thread.
        self._leaving: deque[LookAhead] = deque()

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        """Finish the batch's shuffle, once (TorchRec comes here twice with the first batch), then go on as TorchRec."""
        if isinstance(batch, ShufflingBatch):
            position = next(i for i, known in enumerate(self.contexts) if known is context)
            batch = self.batches[position] = self._finish(batch)
        super().start_sparse_data_dist(batch, context)  # type: ignore[misc]

    def reset(self) -> None:
        """Drop the batches in flight; called on all ranks together.

        Loading threads read ahead at their own pace: they are joined, and ranks that are behind catch up with empty
        steps, so that the next batch is the same step on every rank.
        """
        loader = self._batch_loader
        if loader is not None:
            loader.stop()
            # TorchRec's thread class hides a method that is_alive() and join() need; the list of threads does not.
            self.batch_shuffler.realign(self._pg_group, until=lambda: loader not in threading.enumerate())
        super().reset()
        self._leaving.clear()

    def _change_iterator(self, dataloader_iter: Iterator[Any]) -> LookAhead:
        if self._look_ahead is not None and self._driver.in_flight:
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
            self._driver.in_flight = not (isinstance(error, StopIteration) or look_ahead.spent)
            raise
