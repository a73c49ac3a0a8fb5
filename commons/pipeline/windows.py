"""windowed_iter: batches balanced over several steps, for any pipeline.

A window of host batches of every rank is read, planned and exchanged while the previous window trains. Its batches need
no further shuffle: any pipeline can train them, also TorchRec's own, and all ranks end at the same step.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from typing_extensions import TypeVar

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, require_shuffler
from commons.distributed.engine.window import ShuffledWindow, WindowReader
from commons.distributed.spans import span
from commons.distributed.stats import ShuffleStats, WindowStats

B = TypeVar("B", default=Any)

# Number of batches whose stats are kept, so that a program that never takes them does not run out of memory.
_MOST_WAITING = 256


class WindowedBatches(Iterator[B]):
    """An iterator over host batches, equally many on every rank, balanced by window; made by `windowed_iter`.

    Attributes:
        last_window: stats of the current window; None before the first window, and in mode "off".
        speeds: speeds of the ranks in the plan of the current window; None if they are equal.
    """

    def __init__(
        self,
        iterator: Iterator[B],
        shuffler: BaseTaskBalancedBatchShuffler,
        window: int,
        pg_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.last_window: WindowStats | None = None
        self.speeds: list[int] | None = None
        self._shuffler = shuffler
        self._pg_group = pg_group
        self._reader = WindowReader(iterator, window)
        self._ready: deque[B] = deque()
        self._stats: deque[ShuffleStats | None] = deque()
        self._num_rows: list[int | None] = []  # of every step up to the end of the current window
        self._next: Future[ShuffledWindow] | None = None
        self._ended = False
        shuffler.engine.connect(pg_group, window=self._reader.window)

    def __next__(self) -> B:
        """The next batch; only padding if this rank has no rows left but other ranks have.

        Raises:
            StopIteration: no rank has a batch left.
            RankMissingError: a rank is missing; the next call raises it again.
            Exception: an error of any rank's data or workloads, on every rank, after the earlier windows. The next call
                continues without the batch that caused it; if the ranks' first batches differ, without all of them.
        """
        if not self._ready and not self._ended:
            self._begin_window()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def take_stats(self) -> ShuffleStats | None:
        """Stats of the next trained batch; call it once after each step.

        The stats of the last 256 batches, or of a window if it is longer, are kept.

        Returns:
            None in mode "off".

        Raises:
            ValueError: the stats of all returned batches were taken or dropped.
        """
        if not self._stats:
            raise ValueError(
                "no stats are left; every batch has stats once, and only the latest are kept: call take_stats() once "
                "after each step"
            )
        return self._stats.popleft()

    def num_rows(self, step: int) -> int | None:
        """Number of rows that a step trains, over all ranks.

        Waits for the next window if all earlier batches were returned and the step is not in the current window.

        Args:
            step: counted from 0, the iterator's first step.

        Returns:
            None if unknown: in mode "off", after the end of the data, and for later windows.

        Raises:
            Exception: as for the next batch.
        """
        if step >= len(self._num_rows) and not self._ready and not self._ended:
            self._begin_window()
        return self._num_rows[step] if step < len(self._num_rows) else None

    def close(self) -> None:
        """Wait for the window in progress, and drop it with the batches that were read for it.

        All ranks call this together, before they use the loader again. Without this call, the thread may read on for a
        while, and the window is dropped when it is ready.

        Raises:
            RuntimeError: the window is not ready ten seconds after the shuffler's timeout, because the iterator has not
                returned a batch.
        """
        in_progress, self._next, self._ended = self._next, None, True
        self._ready.clear()
        if in_progress is not None:
            self._shuffler.engine.await_window(in_progress)

    def _begin_window(self) -> None:
        self._shuffler.engine.require_own_process()  # a forked process does not have the thread that makes windows
        started = time.perf_counter()
        in_progress = self._next = self._next or self._start()
        with span("wait"):
            concurrent.futures.wait([in_progress])  # a KeyboardInterrupt here loses no window
        self._next = None
        shuffled = in_progress.result()
        wait_ms = (time.perf_counter() - started) * 1e3
        self._ended = not shuffled.batches
        if self._ended:
            return
        self._next = self._start()
        self._ready.extend(shuffled.batches)
        stats = [
            None if each is None else each.carried_out(wait_ms / each.window, each.exchange_ms)  # a step's share
            for each in shuffled.stats
        ]
        self._num_rows += [None if each is None else each.num_rows for each in stats]
        while len(self._stats) > _MOST_WAITING:  # the batches of all these stats were returned before this window
            self._stats.popleft()
        self._stats.extend(stats)
        if shuffled.whole is not None:
            self.last_window = replace(shuffled.whole, wait_ms=wait_ms)
            self.speeds = shuffled.speeds
            planned = [each for each in stats if each is not None]
            self._shuffler.engine.note(lambda: planned[-1], planned[0].excess_tokens)

    def _start(self) -> Future[ShuffledWindow]:
        return self._shuffler.engine.start_window(self._reader, self._pg_group)


def windowed_iter(
    iterator: Iterator[B],
    shuffler: BaseTaskBalancedBatchShuffler,
    window: int,
    pg_group: dist.ProcessGroup | None = None,
) -> WindowedBatches[B]:
    """An iterator over batches that are balanced over `window` steps, for any pipeline, without a further shuffle.

    `window` batches of every rank are planned together: every row is trained once, but which rows share a step changes.
    The number of steps is that of the rank with the most batches; ranks without data left continue with rows of other
    ranks. The rows of a window are spread evenly over its steps, so that the size of the global batch changes only in
    the last window and where batches have different sizes; with equal_size=False the steps of a window may have
    different sizes. A thread reads, plans and exchanges the next window, over gloo, while one window trains. So the
    host needs memory for two windows, and for two more copies of one window during the exchange.

    All ranks of the group call this together, on the main thread. Do not use `iterator` elsewhere: a thread reads it,
    ahead of training.

    Args:
        iterator: the rank's own host batches; ranks may end at different steps. Batches must state padding.
        shuffler: computes the workloads; its options apply. In mode "observe" the stats predict the effect of a window.
        window: number of batches of a rank to plan together, at least 1.
        pg_group: the process group; None for the shuffler's own.

    Raises:
        TypeError: `shuffler` is not a shuffler.
        RuntimeError: the shuffler is closed.

    Other errors are raised with the first batch, on every rank: ValueError for a window that is below 1, differs
    between ranks or needs more memory than available, and for batches that cannot state padding or are on a device;
    TypeError if `iterator` is not an iterator.
    """
    require_shuffler("shuffler", shuffler)
    return WindowedBatches(iterator, shuffler, window, pg_group)
