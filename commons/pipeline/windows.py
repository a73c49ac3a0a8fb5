"""windowed_iter: batches that were balanced over several steps, in front of any pipeline.

A window of host batches of every rank is read, planned and exchanged while the window before trains. What it hands out
needs no further shuffle: any pipeline trains it, TorchRec's own as well, and ranks end together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.engine.window import ShuffledWindow, WindowReader
from commons.distributed.spans import span
from commons.distributed.stats import ShuffleStats, WindowStats

# Of so many batches handed out the stats wait to be taken; a program that never takes them shall not fill its memory.
_MOST_WAITING = 256


class WindowedBatches(Iterator[Any]):
    """Host batches, as many on every rank, balanced window by window; made by `windowed_iter`.

    Attributes:
        last_window: stats of the window that was begun last; None before, and in mode "off".
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        shuffler: BaseTaskBalancedBatchShuffler,
        window: int,
        pg_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.last_window: WindowStats | None = None
        self._shuffler = shuffler
        self._pg_group = pg_group
        self._reader = WindowReader(iterator, window)
        self._ready: deque[Any] = deque()
        self._stats: deque[ShuffleStats | None] = deque()
        self._num_rows: list[int | None] = []  # of every step that a window has given
        self._next: Future[ShuffledWindow] | None = None
        self._ended = False
        shuffler.engine.connect(pg_group, window=self._reader.window)

    def __next__(self) -> Any:
        """The next batch, one of padding alone if this rank has none left while others do.

        Raises:
            StopIteration: no rank has a batch left.
            RankMissingError: a rank did not take part; the next call raises it again.
            Exception: of any rank's data or workloads, on every rank, after the windows before; the next call goes on,
                without the batch that was the reason: where the first ones of the ranks differ, without these.
        """
        if not self._ready and not self._ended:
            self._begin_window()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def take_stats(self) -> ShuffleStats | None:
        """Stats of the batch that is trained next; to be called once for each, after its step.

        Those of the last 256 batches handed out, or a window if that is more, are kept.

        Returns:
            None in mode "off".

        Raises:
            ValueError: as many have been taken as batches were handed out in windows.
        """
        if not self._stats:
            raise ValueError("no batch is without its stats taken; take them once for each batch that was trained")
        return self._stats.popleft()

    def num_rows(self, step: int) -> int | None:
        """Rows that a step trains, over all ranks; waits for its window where all before it have been handed out.

        Args:
            step: counted from 0, the first that this iterator gives.

        Returns:
            None where it is not known: in mode "off", behind the end, and for windows further ahead.

        Raises:
            Exception: as the next batch would.
        """
        if step >= len(self._num_rows) and not self._ready and not self._ended:
            self._begin_window()
        return self._num_rows[step] if step < len(self._num_rows) else None

    def close(self) -> None:
        """Wait for the window that is under way, and drop it; called on all ranks together.

        What has been read of it is not trained. Without it, the window is dropped when it is there.

        Raises:
            RuntimeError: it is not there ten seconds after the shuffler's timeout: the iterator has not given a batch.
        """
        under_way, self._next, self._ended = self._next, None, True
        self._ready.clear()
        if under_way is not None:
            self._shuffler.engine.await_window(under_way)

    def _begin_window(self) -> None:
        self._shuffler.engine.require_own_process()  # the thread that makes the window is that of another one
        started = time.perf_counter()
        under_way = self._next or self._start()
        self._next = None
        with span("wait"):
            shuffled = under_way.result()
        wait_ms = (time.perf_counter() - started) * 1e3
        self._ended = not shuffled.batches
        if self._ended:
            return
        self._next = self._start()
        self._ready.extend(shuffled.batches)
        stats = [
            None if each is None else each.carried_out(wait_ms / each.window, each.exchange_ms)  # its share of it
            for each in shuffled.stats
        ]
        self._num_rows += [None if each is None else each.num_rows for each in stats]
        while len(self._stats) > _MOST_WAITING:  # of batches that were all handed out before this window
            self._stats.popleft()
        self._stats.extend(stats)
        if shuffled.whole is not None:
            self.last_window = replace(shuffled.whole, wait_ms=wait_ms)
            planned = [each for each in stats if each is not None]
            self._shuffler.engine.note(planned[0].step, lambda: planned[-1], planned[0].excess_tokens)

    def _start(self) -> Future[ShuffledWindow]:
        return self._shuffler.engine.start_window(self._reader, self._pg_group)


def windowed_iter(
    iterator: Iterator[Any],
    shuffler: BaseTaskBalancedBatchShuffler,
    window: int,
    pg_group: dist.ProcessGroup | None = None,
) -> WindowedBatches:
    """Batches that are balanced over `window` steps at a time, for any pipeline, which need no further shuffle.

    `window` batches of every rank are planned together: every row is trained once, but which rows share a step changes.
    As many steps are trained as the rank with the most batches has; ranks that run dry go on with rows of the others.
    The size of the global batch stays, but for the last window, whose rows are spread over its steps, and with
    equal_size=False, where the sizes of a window's steps may differ. The next window is read, planned and exchanged, by
    a thread and over gloo, while one trains, so that two windows lie on the host, and two more copies of one while its
    rows are exchanged.

    Called on the main thread by all ranks of the group together. An iterator is left to this one: it is read by the
    thread, ahead of what is trained.

    Args:
        iterator: the rank's own host batches; ranks may end at different steps. Batches state their padding.
        shuffler: says what rows cost; its options count. In mode "observe" the stats say what a window would give.
        window: batches of a rank to plan together, at least 1.
        pg_group: the group, if not the shuffler's own.

    Raises:
        TypeError: no shuffler.

    What else is wrong is raised with the first batch, on every rank: ValueError for a window that is below 1, differs
    between ranks or takes more memory than there is, and for batches that cannot state padding or lie on a device;
    TypeError for what is no iterator.
    """
    if not isinstance(shuffler, BaseTaskBalancedBatchShuffler):
        raise TypeError(
            f"shuffler is a {type(shuffler).__name__}; it must be an object of a class that derives from "
            "BaseTaskBalancedBatchShuffler: create one with BatchShufflerFactory"
        )
    return WindowedBatches(iterator, shuffler, window, pg_group)
