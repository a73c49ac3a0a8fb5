"""WINDOW: several host batches of every rank, planned together and exchanged on the host.

The shuffler's window thread reads a window, gathers and plans as for one batch, and moves the rows over gloo; all of it
while the window before trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from commons.available_memory import require_memory
from commons.checks import as_count
from commons.distributed.engine.shuffle_session import ShuffleSession
from commons.distributed.errors import attempt
from commons.distributed.gather.local_rows import LocalRows
from commons.distributed.gather.schema_agreement import SchemasDifferError
from commons.distributed.global_batch import attach_global_batches
from commons.distributed.stats import ShuffleStats, WindowStats
from commons.sequence_batch.fields import require_dataclass
from commons.sequence_batch.open_batch import batch_device
from commons.sequence_batch.schema import BatchSchema

# Copies of a window that lie on the host at the worst moment: the one that trains, and of the next one the batches as
# they were read, the buffer of the exchange, and the result.
_COPIES = 4


@dataclass(frozen=True)
class ShuffledWindow:
    """Batches that need no further shuffle."""

    batches: list[Any]  # one for each step, as many on every rank; none where no rank has data any more
    stats: list[ShuffleStats | None]  # of every step; None in mode "off"
    whole: WindowStats | None = None  # of the window; None in mode "off", and without batches. Nobody has waited yet.


class WindowReader:
    """One rank's own batches, read a window at a time.

    What has been read stays until a window has been made of it: where a rank fails, only a batch that was the reason is
    left out.

    Args:
        source: host batches; a None is its end, as in TorchRec. Read on the shuffler's window thread alone.
        window: most batches to read at a time.
    """

    def __init__(self, source: Iterator[Any], window: Any) -> None:
        checked, self._problem = attempt(lambda: as_count(window, "window", 1))
        self._problem = self._problem or attempt(lambda: _require_iterator(source))[1]
        self.window = checked or 1
        self._source = source
        self._read: list[tuple[Any, LocalRows]] = []
        self._exhausted = False
        self._fits = False

    def fill(self, describe: Callable[[Any], LocalRows]) -> list[LocalRows]:
        """Read what is missing of a window.

        Args:
            describe: what a rank brings with a batch, or why it cannot.

        Returns:
            Of every batch; an error comes last. One without a schema if there is no batch.
        """
        if self._problem is not None:
            return [LocalRows(error=self._problem)]
        while len(self._read) < self.window and not self._exhausted:
            batch, error = attempt(lambda: next(self._source, None))
            self._exhausted = batch is None and error is None
            if self._exhausted:
                break
            local = LocalRows(error=error) if error is not None else self._describe(batch, describe)
            if local.error is not None:
                return [*(read for _, read in self._read), local]
            self._read.append((batch, local))
        return [local for _, local in self._read] or [LocalRows()]

    def take(self) -> list[Any]:
        """The batches that have been read, which a window has been made of."""
        batches, self._read = [batch for batch, _ in self._read], []
        return batches

    def drop_first(self) -> None:
        """Leave out the batch that the ranks could not agree on, as all of them do."""
        self._read = self._read[1:]

    def drop(self, problem_with: Callable[[LocalRows], Exception | None]) -> None:
        """Leave out the batches that were the reason of an error."""
        self._read = [(batch, local) for batch, local in self._read if problem_with(local) is None]

    def _describe(self, batch: Any, describe: Callable[[Any], LocalRows]) -> LocalRows:
        _, error = attempt(lambda: self._require_host(batch))
        if error is not None:
            return LocalRows(error=error)
        local = describe(batch)
        if local.schema is not None and not self._fits:
            _, error = attempt(lambda: self._require_memory(local.schema, batch))
            self._fits = error is None
            local = replace(local, error=error)
        return local

    @staticmethod
    def _require_host(batch: Any) -> None:
        require_dataclass(batch)
        device = batch_device(batch)
        if device.type != "cpu":
            raise ValueError(
                f"the batch of a window is on {device}; rows of a window are exchanged on the host: give host batches, "
                "and let the pipeline copy them"
            )

    def _require_memory(self, schema: BatchSchema | None, batch: Any) -> None:
        """Refuse a window that this machine has no memory for, as far as its first batch tells."""
        tensors = [] if schema is None else schema.row_tensors(batch)
        window_bytes = self.window * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        require_memory(_COPIES * window_bytes, f"window is {self.window}", "use a smaller window")


def describe_blocked_loader(call: str, seconds: float) -> str:
    """What to say where a window's thread has not come back in time, which only the iterator can keep so long.

    Args:
        call: who waited.
        seconds: how long.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return (
        f"{call} has waited {seconds:g} s for the iterator of rank {rank}, whose next() has not returned; the thread "
        "that reads windows cannot be ended within it: mend the loader, or end the program"
    )


def _require_iterator(source: Any) -> None:
    if not hasattr(source, "__next__"):
        raise TypeError(
            f"iterator is a {type(source).__name__}; a window goes on where the one before ended, which takes an "
            "iterator: give iter() of it"
        )


def shuffle_window(
    session: ShuffleSession,
    step: int,
    reader: WindowReader,
    describe: Callable[[Any], LocalRows],
) -> ShuffledWindow:
    """Read a window, plan it and exchange its rows; called by all ranks together, on the window thread.

    Args:
        session: of windows, over the group.
        step: number of the window.
        reader: of this rank's batches.
        describe: what a rank brings with a batch, or why it cannot.

    Raises:
        RankMissingError: a rank did not take part.
        Exception: what went wrong on any rank.
    """
    started = time.perf_counter()
    local = reader.fill(describe)
    read_ms = (time.perf_counter() - started) * 1e3
    try:
        prepared = session.prepare(step, local)
    except SchemasDifferError:
        reader.drop_first()
        raise
    except Exception:
        reader.drop(session.problem_with)
        raise
    schema = prepared.schema
    if schema is None:
        return ShuffledWindow([], [])
    batches = reader.take()
    if prepared.exchange is None:
        batches += [None] * (prepared.steps - len(batches))
        results = [schema.empty_batch(1) if each is None or not schema.rows_of(each) else each for each in batches]
        return ShuffledWindow(results, [None] * len(results))
    started = time.perf_counter()
    results = session.exchange_rows(step, prepared.exchange, batches or [schema.empty_batch()])
    if _are_pinned(schema, batches):
        own = {id(batch) for batch in batches}
        results = [each if id(each) in own else each.pin_memory() for each in results]
    results = attach_global_batches(results, prepared, session.channel.members)
    exchange_ms = (time.perf_counter() - started) * 1e3 / len(results)
    stats = [replace(each, exchange_ms=exchange_ms) for each in prepared.describe()]
    speeds = None if prepared.plan is None else prepared.plan.speeds
    return ShuffledWindow(results, list(stats), WindowStats.of(step, stats, read_ms, speeds))


def _are_pinned(schema: BatchSchema, batches: list[Any]) -> bool:
    """Whether the loader has put the batches into pinned memory, where the results belong too."""
    # Memory is pinned by a GPU that is in use; another one must not be touched.
    if not torch.cuda.is_initialized():
        return False
    return any(tensor.is_pinned() for batch in batches for tensor in schema.row_tensors(batch))
