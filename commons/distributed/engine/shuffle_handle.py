"""ShuffleHandle: a shuffle between start and finish, with its batch; PreparedShuffle: the worker's result for it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from commons.distributed.channel.absence import RankMissingError
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.gather.local_rows import LocalRows
from commons.distributed.spans import span
from commons.distributed.stats import ShuffleStats
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.open_batch import row_counts, row_fields
from commons.sequence_batch.schema import BatchSchema

if TYPE_CHECKING:
    from commons.distributed.engine.shuffle_session import ShuffleSession

EXCHANGE = "exchange"  # name of the payload collective in messages
_LOOK_SECONDS = 1.0


class StuckWorkerError(RuntimeError):
    """The worker has not planned a step in the time that the waits for other ranks may take."""


@dataclass(eq=False)
class PreparedShuffle:
    """The worker's result, for `finish_shuffle`."""

    schema: BatchSchema | None = None  # of all ranks' batches; None if no rank has a batch any more
    rank: int = 0  # this rank
    rows_before: int = 0  # in mode "off", rows of the ranks before this one, where its global ids start
    steps: int = 0  # batches that every rank trains: 1; in a window, the most batches of any rank
    plan: ShufflePlan | None = None  # the same on every rank; None in mode "off"
    exchange: RowExchange | None = None  # this rank's part of the plan; None in mode "off"
    # Makes the stats of the plan, one for each step; none in mode "off". Called when stats are read, because making
    # them on the worker would hold the GIL while the main thread launches kernels.
    describe: Callable[[], tuple[ShuffleStats, ...]] = tuple

    def rows_trained(self, real_rows: int, workloads: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Global ids and workloads, int64 `(actual_batch_size,)`, of the rows that this rank trains in a batch.

        In mode "off" they are those of its own batch: `real_rows`, and `workloads`, int64 `(real_rows,)`.
        """
        if self.plan is None:
            return self.rows_before + torch.arange(real_rows, device="cpu"), workloads
        rows, gathered = self.plan.rows_for(self.rank), self.plan.gathered
        return torch.from_numpy(gathered.global_id[rows]), torch.from_numpy(gathered.workloads[rows])


class ShuffleHandle:
    """A shuffle that has been started, to be finished once, with the batch that it was started with.

    Attributes:
        step: number of the step within the group.
        read_stats: returns `stats`; holds no reference to the batch.
        local: description of this rank's batch.
        session: of the group.
        wait_ms: how long the main thread has waited for the worker, in milliseconds.
    """

    def __init__(
        self,
        step: int,
        session: ShuffleSession,
        batch: Any | None,
        local: LocalRows,
        future: Future[PreparedShuffle],
    ) -> None:
        self.step = step
        self.read_stats: Callable[[], ShuffleStats | None] = no_stats
        self.local = local
        self.session = session
        self.wait_ms = 0.0
        self._batch = batch
        self._future = future
        self._prepared: PreparedShuffle | None = None
        self._finished = False
        if isinstance(batch, BaseBatch):
            batch._identity = id(batch)

    @property
    def stats(self) -> ShuffleStats | None:
        """Stats of the shuffle; None before `finish_shuffle`, and in mode "off"."""
        return self.read_stats()

    def has_ended(self) -> bool:
        """Whether no rank has a batch; waits for the gather, and raises any rank's error."""
        return self.prepared().schema is None

    def failed_elsewhere(self) -> bool:
        """Whether this step failed because of other ranks' batches only; waits for the gather."""
        self.wait()
        error = self._future.exception()
        return error is not None and hasattr(error, "failed_ranks") and error.__cause__ is None

    def prepared(self) -> PreparedShuffle:
        """The worker's result; waits for it, and raises any rank's error."""
        if self._prepared is None:
            self.wait()
            try:
                self._prepared = self._future.result()
            except RankMissingError as error:
                raise error.with_traceback(None) from None  # the worker's frames would keep the batch alive
        return self._prepared

    def schema(self) -> BatchSchema:
        """The agreed schema; waits for the gather.

        Raises:
            ValueError: no rank has a batch.
        """
        schema = self.prepared().schema
        if schema is None:
            raise ValueError(
                f"no rank has a batch at step {self.step}; the data has ended: check handle.has_ended() first"
            )
        return schema

    def empty_batch(self) -> Any:
        """A host batch without rows, for a rank that has no batch but receives rows of other ranks.

        Raises:
            ValueError: no rank has a batch.
        """
        return self.schema().empty_batch()

    def carried_out(self, prepared: PreparedShuffle, exchange_ms: float) -> None:
        """Record that the exchange is done, and how many milliseconds it took on the main thread."""
        describe, wait_ms = prepared.describe, self.wait_ms
        self.read_stats = functools.cache(lambda: describe()[0].carried_out(wait_ms, exchange_ms))

    def follow(self, copied: Any) -> None:
        """Expect a copy of the batch in `finish_shuffle`."""
        self._batch = copied

    def failures_posted(self) -> contextlib.AbstractContextManager[None]:
        """A context for work before the exchange of this step: the ranks that wait there raise an error of this one."""
        return self.session.channel.failures_posted(self.step, EXCHANGE)

    def drain(self) -> None:
        """Wait for the worker, and drop its result or error."""
        self._finished = True
        self._batch = None
        self.wait()
        self._future.exception()

    def wait(self) -> None:
        """Wait until the worker is done, for as long as it may take.

        Raises:
            RuntimeError: this is a forked process, which has no worker.
            StuckWorkerError: the worker needs longer than the waits for other ranks may take.
        """
        self.session.channel.require_own_process()
        started = time.perf_counter()
        try:
            with span("wait"):
                # Counts short waits, not time: after a long stop of the process, its worker still has time to report.
                for _ in range(math.ceil(self.session.longest_wait / _LOOK_SECONDS)):
                    if self._future.done() or concurrent.futures.wait([self._future], _LOOK_SECONDS).done:
                        return
        finally:
            self.wait_ms += (time.perf_counter() - started) * 1e3
        raise StuckWorkerError(
            f"step {self.step} is not planned after {self.session.longest_wait:.0f} s, longer than the wait for any "
            "rank; the worker thread is stuck: look at its stack (py-spy dump), and restart from a checkpoint"
        )

    def take(self, batch: Any, *, balances: bool) -> None:
        """Check that the handle may be finished with this batch, and mark it used.

        With `balances`, rows may move, so that the batch's fields must have the form in which they were described.

        Raises:
            ValueError: the handle has been used, or belongs to another batch or one of other fields, or no rank has a
                batch.
            TypeError: None instead of a batch.
        """
        if self._finished:
            raise ValueError(f"the handle of step {self.step} is used twice; a shuffle is finished once: start another")
        schema = self.schema()
        if batch is None:
            raise TypeError(
                f"the handle of step {self.step} is finished with None; a shuffle that was started without a batch is "
                "finished with handle.empty_batch(), on the device of the others: pass it"
            )
        if balances and type(batch).__name__ == schema.class_name:
            schema.require_same_fields(batch)
        if not self._looks_like(batch, schema) or not self._belongs_to(batch, schema):
            local = self.local
            mine = _describe(schema.class_name, local.rows, local.real_rows, sum(local.sizes))
            sizes = (
                value.numel() if isinstance(value, torch.Tensor) else len(value.values())
                for _, value in row_fields(batch)
            )
            other = _describe(type(batch).__name__, *row_counts(batch), sum(sizes))
            raise ValueError(
                f"the handle of step {self.step} was started with {mine} and is finished with "
                f"{'another one' if other == mine else other}; finish a shuffle with the batch it was started with, or "
                "with the copy that its to() returns, which must be of its class and keep all fields"
            )
        self._finished = True
        self._batch = None

    def _looks_like(self, batch: Any, schema: BatchSchema) -> bool:
        """Whether `batch` has the type and sizes of the batch that the shuffle was started with."""
        local = self.local
        if type(batch).__name__ != schema.class_name:
            return False
        try:
            rows, sizes = schema.rows_of(batch), schema.sizes(schema.row_tensors(batch))
        except (AttributeError, LookupError, TypeError, RuntimeError):  # a field is missing, or of another type
            return False
        if rows != local.rows or getattr(batch, "actual_batch_size", None) not in (None, local.real_rows):
            return False
        return local.schema is None or sizes == local.sizes

    def _belongs_to(self, batch: Any, schema: BatchSchema) -> bool:
        """Whether `batch` is the batch that the shuffle was started with, or a copy of it.

        Copies by BaseBatch.to and pin_memory inherit its identity. A copy of another type on the same device shares its
        memory; on another device only sizes can be compared without waiting for the device.
        """
        if batch is self._batch or self._batch is None:
            return True
        identity = getattr(batch, "_identity", None) if isinstance(batch, BaseBatch) else None
        if identity is not None:
            return identity == id(self._batch)
        pairs = list(zip(schema.row_tensors(self._batch), schema.row_tensors(batch)))
        return pairs[0][0].device != pairs[0][1].device or all(a.data_ptr() == b.data_ptr() for a, b in pairs)


def no_stats() -> ShuffleStats | None:
    """The stats of a shuffle that is not finished, or was not planned: None."""
    return None


def _describe(type_name: str, rows: int, real_rows: int, elements: int) -> str:
    return f"a {type_name} of {rows} rows, {real_rows} of them real, and {elements} elements"
