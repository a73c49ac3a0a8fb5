"""WINDOW: several host batches of every rank, planned together and exchanged on the host.

While a window trains, the shuffler's window thread reads the next one, gathers and plans as for one batch, and moves
the rows over gloo.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from commons.available_memory import require_memory
from commons.checks import as_count, kind_of
from commons.distributed.channel.absence import RankMissingError
from commons.distributed.engine.shuffle_session import ShuffleSession
from commons.distributed.errors import capture_error
from commons.distributed.gather.local_rows import LocalRows
from commons.distributed.gather.schema_agreement import SchemasDifferError
from commons.distributed.stats import ShuffleStats, WindowStats
from commons.sequence_batch.fields import require_dataclass
from commons.sequence_batch.open_batch import batch_device
from commons.sequence_batch.schema import BatchSchema

# Most copies of a window in host memory at a time: the window that trains and, of the next one, the batches as read,
# the buffer of the exchange, and the result.
_COPIES = 4


@dataclass(frozen=True)
class ShuffledWindow:
    """A window's batches after the exchange."""

    batches: list[Any]  # one for each step, equally many on every rank; none if no rank has data any more
    stats: list[ShuffleStats | None]  # of every step; None in mode "off"
    whole: WindowStats | None = None  # of the window, without `wait_ms`; None in mode "off", and without batches
    speeds: list[int] | None = None  # of the ranks, in the plan; None if they are equal


class WindowReader:
    """Reads one rank's batches, a window at a time.

    It keeps the batches until they are in a window: if a rank fails, only the batch with the error is dropped.

    Args:
        source: iterator of host batches; None ends it, as in TorchRec. Read only on the shuffler's window thread.
        window: most batches to read at a time.
    """

    def __init__(self, source: Iterator[Any], window: Any) -> None:
        checked, self._problem = capture_error(lambda: as_count(window, "window", 1))
        self._problem = self._problem or capture_error(lambda: require_iterator(source))[1]
        self.window = checked or 1
        self._source = source
        self._read: list[tuple[Any, LocalRows]] = []
        self._exhausted = False
        self._fits = False

    def fill(self, describe: Callable[[Any], LocalRows]) -> list[LocalRows]:
        """Read batches until the window is full or the iterator ends; `describe` puts its error into its result.

        Returns:
            LocalRows of every batch; an error comes last. A single one without a schema if there is no batch.
        """
        if self._problem is not None:
            return [LocalRows(error=self._problem)]
        while len(self._read) < self.window and not self._exhausted:
            found, error = capture_error(lambda: self._read_one(describe))
            if isinstance(error, RankMissingError):  # from a source with collectives: do not wait for the rank again
                raise error
            if error is not None:
                found = None, LocalRows(error=error)
            if found is None:
                self._exhausted = True
            elif found[1].error is not None:
                return [*(local for _, local in self._read), found[1]]
            else:
                self._read.append(found)
        return [local for _, local in self._read] or [LocalRows()]

    def take(self) -> list[Any]:
        """Remove and return all batches that have been read."""
        batches, self._read = [batch for batch, _ in self._read], []
        return batches

    def drop_first(self) -> None:
        """Drop the first batch, whose schema differs between ranks; called on all of them."""
        self._read = self._read[1:]

    def drop_mistakes(self) -> None:
        """Drop the batches that have an error."""
        self._read = [(batch, local) for batch, local in self._read if local.error is None]

    def _read_one(self, describe: Callable[[Any], LocalRows]) -> tuple[Any, LocalRows] | None:
        """The next batch and its description; None at the end."""
        batch = next(self._source, None)
        if batch is None:
            return None
        require_dataclass(batch)
        device = batch_device(batch)
        if device.type != "cpu":
            raise ValueError(
                f"the batch of a window is on {device}; rows of a window are exchanged on the host: give host batches, "
                "and let the pipeline copy them"
            )
        batch = copy.copy(batch)  # a loader may return one object again, with other tensors
        local = describe(batch)
        if local.schema is not None and not self._fits:  # the first batch is an estimate of the others
            tensors = local.schema.row_tensors(batch)
            window_bytes = self.window * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            require_memory(_COPIES * window_bytes, f"window is {self.window}", "use a smaller window")
            self._fits = True
        return batch, local


def require_iterator(source: Any) -> None:
    """Raise TypeError for a source of batches that is no iterator, such as a DataLoader."""
    if not hasattr(source, "__next__"):
        raise TypeError(
            f"the batches come from {kind_of(source)}; a pipeline reads them from an iterator: pass iter(...) "
            "of it, the same one in every step"
        )


def shuffle_window(
    session: ShuffleSession,
    step: int,
    reader: WindowReader,
    describe: Callable[[Any], LocalRows],
) -> ShuffledWindow:
    """Read the window numbered `step`, plan it and exchange its rows; called by all ranks on the window thread.

    Raises:
        RankMissingError: a rank did not join in time.
        Exception: an error of any rank, raised on all.
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
        reader.drop_mistakes()
        raise
    schema, plan = prepared.schema, prepared.plan
    if schema is None:
        return ShuffledWindow([], [])
    batches, started = reader.take(), time.perf_counter()
    pins = _are_pinned(schema, batches)
    results = session.exchange_rows(step, prepared, batches or [schema.empty_batch()], pins=pins)
    if plan is None:  # mode "off"
        return ShuffledWindow(results, [None] * len(results))
    exchange_ms = (time.perf_counter() - started) * 1e3 / len(results)
    stats = [replace(each, exchange_ms=exchange_ms) for each in prepared.describe()]
    whole = WindowStats.of(step, stats, read_ms, plan.speeds)
    return ShuffledWindow(results, list(stats), whole, None if plan.speeds is None else plan.speeds.tolist())


def _are_pinned(schema: BatchSchema, batches: list[Any]) -> bool:
    """Whether the loader has pinned the batches' memory, so that the results should be pinned too."""
    # Without an initialised GPU nothing is pinned, and the check must not initialise one.
    if not torch.cuda.is_initialized():
        return False
    return any(tensor.is_pinned() for batch in batches for tensor in schema.row_tensors(batch))
