"""ShuffleHandle: a shuffle between start and finish, and the batch that it belongs to."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.shuffle_session import PreparedShuffle, ShuffleSession
from commons.distributed.stats import ShuffleStats
from commons.sequence_batch.fields import IDENTITY, batch_device, row_counts, row_fields


class Described(NamedTuple):
    """What tells a batch from another, without a look at its values.

    Attributes:
        type_name: its class.
        rows: batch_size.
        real_rows: rows that are no padding.
        sizes: elements of every row field.
    """

    type_name: str
    rows: int
    real_rows: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, batch: Any) -> Described:
        """Describe a batch."""
        sizes = tuple(_values(value).numel() for _, value in row_fields(batch))
        return cls(type(batch).__name__, *row_counts(batch), sizes)

    def __str__(self) -> str:
        return f"a {self.type_name} of {self.rows} rows, {self.real_rows} of them real, and {sum(self.sizes)} elements"


class ShuffleHandle:
    """A shuffle that has been started; to be finished once, with the batch it was started with.

    Attributes:
        step: number of the step within the group.
        stats: what happened; None before `finish_shuffle`, and in mode "off".
    """

    def __init__(
        self,
        step: int,
        session: ShuffleSession,
        batch: Any | None,
        described: Described | None,
        future: Future[PreparedShuffle],
    ) -> None:
        self.step = step
        self.stats: ShuffleStats | None = None
        self.session = session
        self.wait_ms = 0.0
        self._batch = batch
        self._described = described
        self._future = future
        self._finished = False
        if batch is not None and hasattr(batch, "__dict__"):
            batch.__dict__[IDENTITY] = id(batch)

    @property
    def ended(self) -> bool:
        """Whether no rank brought a batch; waits for the gather, and raises any rank's error."""
        return self.prepared().schema is None

    @property
    def failed_elsewhere(self) -> bool:
        """Whether the batches of other ranks alone were the reason of this step's error; waits for the gather."""
        error = self._future.exception()
        return error is not None and hasattr(error, "failed_ranks") and error.__cause__ is None

    def prepared(self) -> PreparedShuffle:
        """The worker's result; waits for it, and raises any rank's error."""
        started = time.perf_counter()
        try:
            return self._future.result()
        finally:
            self.wait_ms += (time.perf_counter() - started) * 1e3

    def empty_batch(self) -> Any:
        """A host batch of no rows, for a rank that brought none but takes part in the others'.

        Raises:
            ValueError: no rank has a batch.
        """
        schema = self.prepared().schema
        if schema is None:
            raise ValueError(f"no rank has a batch at step {self.step}; the data has ended: check handle.ended first")
        return schema.empty_batch()

    def follow(self, copied: Any) -> None:
        """Go on with a copy of the batch, or with the empty batch of a rank that brought none."""
        self._batch = copied

    def drain(self) -> None:
        """Wait for the worker and drop the result; an error of a batch that is given up does not matter."""
        self._finished = True
        self._batch = None
        self._future.exception()

    def take(self, batch: Any) -> Described:
        """Check that the handle may be finished with this batch, and mark it used.

        Raises:
            ValueError: it has been used, or belongs to another batch.
        """
        if self._finished:
            raise ValueError(f"the handle of step {self.step} is used twice; a shuffle is finished once: start another")
        described = Described.of(batch)
        expected = self._described or Described(described.type_name, 0, 0, described.sizes)
        if described != expected or not self._belongs_to(batch):
            other = "another one" if described == expected else str(described)
            raise ValueError(
                f"the handle of step {self.step} was started with {expected} and is finished with {other}; "
                "finish a shuffle with the batch it was started with, or with the copy that its to() returns"
            )
        self._finished = True
        self._batch = None
        return described

    def _belongs_to(self, batch: Any) -> bool:
        """Whether `batch` is the one that was started, or a copy of it.

        Copies by BaseBatch.to and pin_memory inherit its identity. Another type's copy on the same device has the same
        memory; on another device there is nothing to compare without waiting for it, beyond the sizes.
        """
        if batch is self._batch or self._batch is None:
            return True
        identity = getattr(batch, "__dict__", {}).get(IDENTITY)
        if identity is not None:
            return identity == id(self._batch)
        if batch_device(batch) != batch_device(self._batch):
            return True
        fields = zip(row_fields(self._batch), row_fields(batch))
        return all(_values(mine).data_ptr() == _values(other).data_ptr() for (_, mine), (_, other) in fields)


def _values(value: KeyedJaggedTensor | torch.Tensor) -> torch.Tensor:
    return value.values() if isinstance(value, KeyedJaggedTensor) else value
