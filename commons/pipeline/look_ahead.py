"""LookAhead: the iterator that starts the shuffle of batch t+1 while batch t is copied and trained.

It reads one host batch ahead of the pipeline and starts that batch's shuffle at once, so that gathering and planning
overlap with the compute of earlier batches. It returns each batch as a ShufflingBatch, which carries the handle through
the copy. It also implements the agreement on the end of the data: a rank whose source has ended continues with empty
batches until no rank has a batch.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.streamable import Pipelineable

from commons.checks import kind_of
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, ShuffleHandle
from commons.distributed.channel.absence import RankMissingError
from commons.distributed.engine.shuffle_handle import StuckWorkerError
from commons.distributed.engine.window import require_iterator

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ShufflingBatch(Pipelineable):
    """A batch with the handle of its shuffle, from the iterator to the end of the shuffle.

    Both are in one object, so that an exception cannot leave a handle with another batch. All other attributes are
    those of the batch.
    """

    batch: Any  # on the host, or its copy on the device
    handle: ShuffleHandle

    def to(self, *args: Any, **kwargs: Any) -> ShufflingBatch:
        """The copy by the batch's own `to`, with the same handle."""
        return self._followed_by(lambda: self.batch.to(*args, **kwargs))

    def pin_memory(self) -> ShufflingBatch:
        """The batch's copy in pinned memory, with the same handle."""
        return self._followed_by(self.batch.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the batch."""
        self.batch.record_stream(stream)

    def __copy__(self) -> ShufflingBatch:
        """With a copy of the batch: TorchRec turns a copy of the first batch into proxies for its tracer."""
        return ShufflingBatch(copy.copy(self.batch), self.handle)

    def _followed_by(self, copy_batch: Callable[[], Any]) -> ShufflingBatch:
        with self.handle.failures_posted():  # such as too little memory for the copy
            copied = copy_batch()
        self.handle.follow(copied)
        return ShufflingBatch(copied, self.handle)

    def __getattr__(self, name: str) -> Any:
        if name in ("batch", "handle"):  # not set yet, during construction
            raise AttributeError(name)
        return getattr(self.batch, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("batch", "handle"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.batch, name, value)


def _require_pipelineable(batch: Any) -> None:
    """Raise TypeError for a batch that TorchRec cannot copy; here, because an error here reaches every rank."""
    missing = [name for name in ("to", "record_stream") if not callable(getattr(batch, name, None))]
    if missing:
        raise TypeError(
            f"the batch is {kind_of(batch)}, without {' and '.join(missing)}; a pipeline trains dataclasses "
            "that are also torchrec.streamable.Pipelineable: add its to, record_stream and pin_memory, or derive the "
            "class from BaseBatch, which has them"
        )


@dataclass(eq=False)
class LookAhead(Iterator[ShufflingBatch]):
    """An iterator over the host batches of one rank that starts their shuffles.

    An error of any rank's source or `get_workloads` ends the iterator on all ranks at the same step, so that batches in
    flight can be trained before `take_error` returns the error. If this rank's batch of that step did not cause the
    error, it is kept for the next iterator.

    Attributes:
        ended: whether no rank has a batch left, or a rank has failed.
        has_failed: whether the iterator ended by an error, which `take_error` has returned.
    """

    source: Iterator[Any]  # the rank's own host batches; it may end at any step, and None ends it, as in TorchRec
    shuffler: BaseTaskBalancedBatchShuffler  # starts the shuffles
    pg_group: dist.ProcessGroup | None = None  # None for the shuffler's own
    previous: LookAhead | None = None  # the iterator before this one, whose remaining batches come first
    handed_out: deque[ShuffleHandle] | None = None  # the handles of returned batches are appended to it; None for none

    def __post_init__(self) -> None:
        self.ended = self.has_failed = False
        self._num_ends = 0  # how often a pipeline has found it at its end
        self._error: Exception | None = None
        self._next: tuple[Any | None, ShuffleHandle] | None = None
        self._kept: Any | None = None
        self._exhausted = False
        if (previous := self.previous) is not None:
            # Do not read again, after an error, from a source that has ended: it might block, or start again.
            has_more = not previous.ended or previous.has_failed or previous._error is not None
            self._exhausted = previous.source is self.source and previous._exhausted and has_more
            previous.abandon()

    def __next__(self) -> ShufflingBatch:
        """The next batch; an empty batch if this rank has none left but other ranks have.

        Raises:
            StopIteration: no rank has a batch left, or a rank has failed.
            RankMissingError: a rank is missing; the batches in flight cannot be trained either.
        """
        if self.previous is not None:
            with contextlib.suppress(StopIteration):
                return LookAhead.__next__(self.previous)
            # The previous iterator has ended: take over its error and the batch that it kept.
            previous, self.previous = self.previous, None
            self._kept, self._error = previous._kept, previous.take_error()
            self.ended = self._error is not None
        if self.ended:
            raise StopIteration
        if self._next is None:
            self._next = self._read_ahead()
        batch, handle = self._next
        try:
            handle.wait()
        except StuckWorkerError:
            raise
        except Exception as error:  # a signal handler's, on this rank only: torch's, if a loader's worker was killed
            self._error = error
        try:
            self.ended = handle.has_ended()
        except RankMissingError:
            raise
        except Exception as error:
            self.ended, self._error = True, error
            self._kept = batch if handle.failed_elsewhere() else None
        if self.ended:
            self._next = None
            raise StopIteration
        if batch is None:
            batch = handle.empty_batch()
        self._next = self._read_ahead()
        if self.handed_out is not None:
            self.handed_out.append(handle)
        return ShufflingBatch(batch, handle)

    def take_error(self) -> Exception | None:
        """The error that ended the iterator before its data; None if there is none or it was already returned."""
        error, self._error = self._error, None
        self.has_failed = self.has_failed or error is not None
        return error

    def error_at_end(self, pipeline: str) -> Exception | None:
        """`take_error` for a pipeline that is at the end; without an error, the second call warns."""
        error = self.take_error()
        self._num_ends += error is None
        if error is None and self._num_ends == 2:
            logger.warning(
                "%s got an iterator again whose data have ended, and trains nothing of it; torch's DataLoader "
                "with persistent_workers=True returns the same iterator in every epoch: pass (batch for batch "
                "in dataloader) instead of iter(dataloader)",
                pipeline,
            )
        return error

    def abandon(self) -> None:
        """Stop reading from the source; a batch that was read ahead is still returned."""
        self._exhausted = True

    def drain(self, is_counted: bool) -> None:
        """Wait for the shuffle in progress and drop it; the same for the previous iterators.

        `is_counted`: whether this adds to the session's `resets`, which ranks compare; only where all of them drop a
        shuffle or none does.
        """
        if self.previous is not None:
            self.previous.drain(is_counted)
        if self._next is not None:
            handle = self._next[1]
            handle.drain()
            handle.session.resets += is_counted
            self._next = None
        self._kept = None

    def _read_ahead(self) -> tuple[Any | None, ShuffleHandle]:
        batch, error = self._kept, self._error
        self._kept = self._error = None
        if batch is None and error is None and not self._exhausted:
            try:
                require_iterator(self.source)
                batch = next(self.source, None)
                if batch is None:
                    self._exhausted = True  # and never False again: another thread may have abandoned this meanwhile
                else:
                    _require_pipelineable(batch)
                    batch = copy.copy(batch)  # a loader may return one object again, with other tensors
            except RankMissingError:  # from a source with collectives: do not wait for the missing rank again
                raise
            except Exception as caught:  # sent to every rank, which raises it instead of waiting for this rank
                error = caught
        return batch, self.shuffler.start_shuffle(batch, self.pg_group, error=error)
