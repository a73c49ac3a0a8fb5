"""ShuffleHandle: a shuffle between start and finish, and the batch that it belongs to; what the worker made of it."""

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
from commons.sequence_batch.fields import IDENTITY
from commons.sequence_batch.open_batch import row_counts, row_fields
from commons.sequence_batch.schema import BatchSchema

if TYPE_CHECKING:
    from commons.distributed.engine.shuffle_session import ShuffleSession

_LOOK_SECONDS = 1.0


@dataclass(eq=False)
class PreparedShuffle:
    """What the worker hands to `finish_shuffle`."""

    schema: BatchSchema | None = None  # the agreed one; None if no rank has a batch any more
    rank: int = 0  # this one
    rows_before: int = 0  # in mode "off", of the ranks before this one; global ids start there
    steps: int = 0  # batches that every rank trains: 1, or as many as the rank with most of them brought to a window
    plan: ShufflePlan | None = None  # the same on every rank; None in mode "off"
    exchange: RowExchange | None = None  # this rank's part of the plan; None in mode "off"
    # The stats of the plan, one for each step; none in mode "off". Made for those who read them: the thread that
    # launches kernels would wait for as long as the worker made them.
    describe: Callable[[], tuple[ShuffleStats, ...]] = tuple

    def rows_trained(self, real_rows: int, workloads: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Global ids and workloads, int64 `(actual_batch_size,)`, of the rows that this rank trains in a batch.

        Args:
            real_rows: that it brought.
            workloads: of these, int64 `(batch_size,)`, for mode "off".
        """
        if self.plan is None:
            own = None if workloads is None else torch.as_tensor(workloads)[:real_rows].cpu()
            return self.rows_before + torch.arange(real_rows), own
        rows, gathered = self.plan.rows_for(self.rank), self.plan.gathered
        return torch.from_numpy(gathered.global_id[rows]), torch.from_numpy(gathered.workloads[rows])


class ShuffleHandle:
    """A shuffle that has been started; to be finished once, with the batch it was started with.

    Attributes:
        step: number of the step within the group.
        read_stats: gives `stats`, without keeping the batch.
        local: what the rank brought.
        session: of the group.
        wait_ms: how long the main thread has waited for the worker.
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
        if batch is not None and hasattr(batch, "__dict__"):
            batch.__dict__[IDENTITY] = id(batch)

    @property
    def stats(self) -> ShuffleStats | None:
        """What happened; None before `finish_shuffle`, and in mode "off"."""
        return self.read_stats()

    def has_ended(self) -> bool:
        """Whether no rank brought a batch; waits for the gather, and raises any rank's error."""
        return self.prepared().schema is None

    def failed_elsewhere(self) -> bool:
        """Whether the batches of other ranks alone were the reason of this step's error; waits for the gather."""
        self._await()
        error = self._future.exception()
        return error is not None and hasattr(error, "failed_ranks") and error.__cause__ is None

    def prepared(self) -> PreparedShuffle:
        """The worker's result; waits for it, and raises any rank's error."""
        if self._prepared is not None:
            return self._prepared
        started = time.perf_counter()
        try:
            with span("wait"):
                self._await()
                self._prepared = self._future.result()
        except RankMissingError as error:
            raise error.with_traceback(None) from None  # the worker's frames say nothing and keep the batch
        finally:
            self.wait_ms += (time.perf_counter() - started) * 1e3
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
        """A host batch of no rows, for a rank that brought none but takes part in the others'.

        Raises:
            ValueError: no rank has a batch.
        """
        return self.schema().empty_batch()

    def carried_out(self, prepared: PreparedShuffle, exchange_ms: float) -> None:
        """Note that the rows are where they are trained, after so many milliseconds of the main thread."""
        describe, wait_ms = prepared.describe, self.wait_ms
        self.read_stats = functools.cache(lambda: describe()[0].carried_out(wait_ms, exchange_ms))

    def follow(self, copied: Any) -> None:
        """Go on with a copy of the batch, or with the empty batch of a rank that brought none."""
        self._batch = copied

    def drain(self) -> None:
        """Wait for the worker and drop the result; an error of a batch that is given up does not matter."""
        self._finished = True
        self._batch = None
        self._await()
        self._future.exception()

    def _await(self) -> None:
        """Wait for the worker, which ends by itself; not for ever for one that does not, nor in a forked process.

        Raises:
            RuntimeError: there is no worker in this process, or it is stuck.
        """
        self.session.channel.require_own_process()
        # In short waits, counted: a process that was stopped for long gives its worker time to say who was missing.
        for _ in range(math.ceil(self.session.longest_wait / _LOOK_SECONDS)):
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._future.exception(_LOOK_SECONDS)
                return
        raise RuntimeError(
            f"step {self.step} is not planned after {self.session.longest_wait:.0f} s, though no rank is waited for so "
            "long; the worker thread is stuck: look at its stack (py-spy dump), and start again from a checkpoint"
        )

    def take(self, batch: Any) -> None:
        """Check that the handle may be finished with this batch, and mark it used.

        Raises:
            ValueError: it has been used, or belongs to another batch, or no rank has one.
        """
        if self._finished:
            raise ValueError(f"the handle of step {self.step} is used twice; a shuffle is finished once: start another")
        schema = self.schema()
        if not self._looks_like(batch, schema) or not self._belongs_to(batch, schema):
            local = self.local
            mine = _describe(schema.class_name, local.rows, local.real_rows, local.elements)
            sizes = (
                value.numel() if isinstance(value, torch.Tensor) else len(value.values())
                for _, value in row_fields(batch)
            )
            other = _describe(type(batch).__name__, *row_counts(batch), sum(sizes))
            raise ValueError(
                f"the handle of step {self.step} was started with {mine} and is finished with "
                f"{'another one' if other == mine else other}; finish a shuffle with the batch it was started with, or "
                "with the copy that its to() returns"
            )
        self._finished = True
        self._batch = None

    def _looks_like(self, batch: Any, schema: BatchSchema) -> bool:
        """Whether `batch` has the type and sizes of the one that was started; its fields are read by name."""
        local = self.local
        if type(batch).__name__ != schema.class_name:
            return False
        try:
            rows, sizes = schema.rows_of(batch), schema.sizes(schema.row_tensors(batch))
        except (AttributeError, LookupError, TypeError, RuntimeError):  # a field that it lacks, or of another kind
            return False
        if rows != local.rows or getattr(batch, "actual_batch_size", None) not in (None, local.real_rows):
            return False
        return local.schema is None or sizes == local.sizes

    def _belongs_to(self, batch: Any, schema: BatchSchema) -> bool:
        """Whether `batch` is the one that was started, or a copy of it.

        Copies by BaseBatch.to and pin_memory inherit its identity. Another type's copy on the same device has the same
        memory; on another device there is nothing to compare without waiting for it, beyond the sizes.
        """
        if batch is self._batch or self._batch is None:
            return True
        identity = getattr(batch, "__dict__", {}).get(IDENTITY)
        if identity is not None:
            return identity == id(self._batch)
        pairs = list(zip(schema.row_tensors(self._batch), schema.row_tensors(batch)))
        return pairs[0][0].device != pairs[0][1].device or all(a.data_ptr() == b.data_ptr() for a, b in pairs)


def no_stats() -> ShuffleStats | None:
    """The stats of a shuffle that has not been finished, or was not planned."""
    return None


def _describe(type_name: str, rows: int, real_rows: int, elements: int) -> str:
    return f"a {type_name} of {rows} rows, {real_rows} of them real, and {elements} elements"
