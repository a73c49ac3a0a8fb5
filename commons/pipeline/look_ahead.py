"""LookAhead: the iterator that starts the shuffle of batch t+1 while batch t is on its way.

It reads one host batch ahead of the pipeline and starts that batch's shuffle at once, so that gathering and planning
run behind the compute of the batches before it. It also carries the agreement on the end of the data: a rank whose
source has ended goes on with empty batches, until no rank has one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, ShuffleHandle


class LookAhead(Iterator[Any]):
    """Host batches of one rank, each with its shuffle under way.

    Args:
        source: the rank's own iterator of host batches; it may end at any step. A None is its end, as in TorchRec.
        shuffler: starts the shuffles.
        pg_group: the group, if not the shuffler's own.
        handles: handles of the batches handed out, oldest first, are appended here.
        previous: the iterator that the user left for this one; the batch it has read ahead comes first.

    Attributes:
        source: the rank's own iterator.
        ended: no rank has a batch left.
    """

    def __init__(
        self,
        source: Iterator[Any],
        shuffler: BaseTaskBalancedBatchShuffler,
        pg_group: dist.ProcessGroup | None,
        handles: deque[ShuffleHandle],
        previous: LookAhead | None = None,
    ) -> None:
        self.source = source
        self._shuffler = shuffler
        self._pg_group = pg_group
        self._handles = handles
        self._previous = previous
        self._next: tuple[Any | None, ShuffleHandle] | None = None
        self._exhausted = False
        self.ended = False
        if previous is not None:
            previous.abandon()

    def __next__(self) -> Any:
        """The next batch, an empty one if this rank has none left while others do.

        Raises:
            StopIteration: no rank has a batch left.
            Exception: an error of any rank's source or get_workloads, on every rank.
        """
        if self._previous is not None:
            try:
                return next(self._previous)
            except StopIteration:
                self._previous = None
        if self.ended:
            raise StopIteration
        if self._next is None:
            self._next = self._read_ahead()
        batch, handle = self._next
        if handle.ended:
            self.ended, self._next = True, None
            raise StopIteration
        if batch is None:
            batch = handle.empty_batch()
        self._handles.append(handle)
        self._next = self._read_ahead()
        return batch

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

    def _read_ahead(self) -> tuple[Any | None, ShuffleHandle]:
        batch, error = None, None
        if not self._exhausted:
            try:
                batch = next(self.source, None)
            except Exception as caught:  # travels to every rank, which raises it instead of waiting for this one
                error = caught
            # A source that has ended is not asked again: it might block, or begin anew.
            self._exhausted = batch is None
        return batch, self._shuffler.start_shuffle(batch, self._pg_group, error=error)
