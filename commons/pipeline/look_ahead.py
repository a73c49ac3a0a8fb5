"""LookAhead: the iterator that starts the shuffle of batch t+1 while batch t is on its way.

It reads one host batch ahead of the pipeline and starts that batch's shuffle at once, so that gathering and planning
run behind the compute of the batches before it. Each batch leaves as a ShufflingBatch, which carries its handle through
the copy. It also carries the agreement on the end of the data: a rank whose source has ended goes on with empty
batches, until no rank has one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.streamable import Pipelineable

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, ShuffleHandle
from commons.distributed.channel.absence import RankMissingError


@dataclass(eq=False)
class ShufflingBatch(Pipelineable):
    """A batch between the iterator and the end of its shuffle, with the handle that belongs to it.

    The two travel as one object, so that no exception on the way can pair a handle with another batch. Whatever a
    stage asks of the batch meanwhile, the batch answers.
    """

    batch: Any  # on the host, or its copy
    handle: ShuffleHandle  # of its shuffle

    def to(self, *args: Any, **kwargs: Any) -> ShufflingBatch:
        """The batch's copy by its own `to`, with the same handle."""
        return self._followed_by(self.batch.to(*args, **kwargs))

    def pin_memory(self) -> ShufflingBatch:
        """The batch's copy in pinned memory, with the same handle."""
        return self._followed_by(self.batch.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the batch."""
        self.batch.record_stream(stream)

    def _followed_by(self, copied: Any) -> ShufflingBatch:
        self.handle.follow(copied)
        return ShufflingBatch(copied, self.handle)

    def __getattr__(self, name: str) -> Any:
        if name in ("batch", "handle"):  # not set yet: the object is being made
            raise AttributeError(name)
        return getattr(self.batch, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("batch", "handle"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.batch, name, value)


def _require_pipelineable(batch: Any) -> None:
    """Refuse a batch that TorchRec cannot copy here, where the mistake still reaches every rank."""
    missing = [name for name in ("to", "record_stream") if not callable(getattr(batch, name, None))]
    if missing:
        raise TypeError(
            f"the batch is a {type(batch).__name__}, without {' and '.join(missing)}; a pipeline trains dataclasses "
            "that are also torchrec.streamable.Pipelineable: add its to, record_stream and pin_memory, or derive the "
            "class from BaseBatch, which has them"
        )


class LookAhead(Iterator[ShufflingBatch]):
    """Host batches of one rank, each with its shuffle under way.

    An error of any rank's source or `get_workloads` ends the iterator on all ranks at the same step, so that what is in
    flight can be trained before `take_error` hands it out. A batch that this rank brought to that step, and that was
    not the reason, is kept for the iterator that follows.

    Args:
        source: the rank's own iterator of host batches; it may end at any step. A None is its end, as in TorchRec.
        shuffler: starts the shuffles.
        pg_group: the group, if not the shuffler's own.
        previous: the iterator that comes before this one: what it has read ahead, or kept, comes first.
        handed_out: where the handles of batches that leave are noted, in order.

    Attributes:
        source: the rank's own iterator.
        ended: no rank has a batch left, or a rank has failed.
        spent: it has ended by an error, which has been raised.
    """

    def __init__(
        self,
        source: Iterator[Any],
        shuffler: BaseTaskBalancedBatchShuffler,
        pg_group: dist.ProcessGroup | None = None,
        previous: LookAhead | None = None,
        handed_out: deque[ShuffleHandle] | None = None,
    ) -> None:
        self.source = source
        self._handed_out = handed_out
        self.ended = False
        self.spent = False
        self._error: Exception | None = None
        self._shuffler = shuffler
        self._pg_group = pg_group
        self._previous = previous
        self._next: tuple[Any | None, ShuffleHandle] | None = None
        self._kept: Any | None = None
        self._exhausted = False
        if previous is not None:
            # A source that has ended is not asked again: it might block, or begin anew.
            self._exhausted = previous.source is source and previous._exhausted
            previous.abandon()

    def __next__(self) -> ShufflingBatch:
        """The next batch, an empty one if this rank has none left while others do.

        Raises:
            StopIteration: no rank has a batch left, or a rank has failed.
            RankMissingError: a rank did not take part; the batches in flight cannot be trained either.
        """
        if self._previous is not None:
            following = next(self._previous, None)
            if following is not None:
                return following
            # Go on after it, with its error if it has failed since it was left.
            previous, self._previous = self._previous, None
            self._kept, self._error = previous._kept, previous.take_error()
            self.ended = self._error is not None
        if self.ended:
            raise StopIteration
        if self._next is None:
            self._next = self._read_ahead()
        batch, handle = self._next
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
            handle.follow(batch)
        self._next = self._read_ahead()
        if self._handed_out is not None:
            self._handed_out.append(handle)
        return ShufflingBatch(batch, handle)

    def take_error(self) -> Exception | None:
        """Why the iterator has ended before the data; None if it has not, and when it has been asked before."""
        error, self._error = self._error, None
        self.spent = self.spent or error is not None
        return error

    def abandon(self) -> None:
        """Read nothing more from the source; what has been read ahead is still handed out."""
        self._exhausted = True

    def drain(self) -> None:
        """Wait for the shuffle that is under way and drop it, and that of an abandoned iterator before."""
        if self._previous is not None:
            self._previous.drain()
        if self._next is not None:
            self._next[1].drain()
            self._next = None
        self._kept = None

    def _read_ahead(self) -> tuple[Any | None, ShuffleHandle]:
        batch, error = self._kept, None
        self._kept = None
        if batch is None and not self._exhausted:
            try:
                batch = next(self.source, None)
                self._exhausted = batch is None
                if batch is not None:
                    _require_pipelineable(batch)
            except RankMissingError:  # of a source that talks to the others: they would be waited for once more
                raise
            except Exception as caught:  # travels to every rank, which raises it instead of waiting for this one
                error = caught
        return batch, self._shuffler.start_shuffle(batch, self._pg_group, error=error)
