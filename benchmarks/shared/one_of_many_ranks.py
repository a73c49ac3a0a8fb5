"""One rank of many in a single process: the other ranks' messages come from a list, and no rows are received.

With torch's fake process group, the whole start and finish of one rank run; received tensors have the right size but
no values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.shared.lengths import CONTEXT, NODE, make_batch
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.engine import engine
from commons.distributed.exchange.payload import PayloadLayout
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.gather.local_rows import LocalRows, counted_keys
from commons.perf_model.partitioner import core
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan, ShufflePlanner, plan_shuffle
from commons.perf_model.task_estimator import HSTUAttentionTask
from commons.sequence_batch.schema import BatchSchema

# The two numbers that a channel sends before those of a call.
_HEAD_BYTES = 16
SIZES: dict[str, Any] = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "num_layers": 4}


def packed_rows(
    rows: np.ndarray,
    real_rows: np.ndarray,
    workloads: np.ndarray,
    tokens: np.ndarray,
    lengths: np.ndarray,
    kept: np.ndarray | None = None,
    steps: int = 1,
) -> GatheredRows:
    """What was gathered of rows with lengths int64 `(N, num_keys)` and kept numbers int64 `(N, num_kept)`.

    The other arguments are those of `GatheredRows`.
    """
    kept = np.zeros((len(lengths), 0), np.int64) if kept is None else kept
    blocks, ends = [], np.cumsum(real_rows)[:-1]
    for own, own_kept in zip(np.split(lengths, ends), np.split(kept, ends)):
        zeros, count = np.zeros(len(own), np.int64), len(own)
        block = core.encode_rows(zeros, [own.T], [int(own.sum())], list(own_kept.T), [], count, count)
        assert block is not None
        blocks.append(block)
    sizes = np.array([len(block) for block in blocks], np.int64).reshape(-1, steps)
    words = np.zeros((len(sizes), sizes.sum(axis=1).max(initial=0)), np.int64)
    for rank, of_rank in enumerate(sizes.sum(axis=1)):
        words[rank, :of_rank] = np.concatenate(blocks[rank * steps : (rank + 1) * steps])
    first = (np.cumsum(sizes, axis=1) - sizes).ravel()
    keys = {"num_keys": lengths.shape[1], "num_kept": kept.shape[1]}
    return GatheredRows(rows, real_rows, workloads, tokens, steps, words, first, **keys)


def words_of_rows(gathered: GatheredRows, layout: PayloadLayout) -> np.ndarray:
    """int64 `(N,)`, words of all rows in the payload."""
    words = np.zeros(len(gathered.workloads), np.int64)
    for part in layout.parts:
        if part.is_dense:
            words += part.words
            continue
        keys = range(part.first_key, part.first_key + part.num_segments)
        for first in range(0, len(keys), 16):  # not the lengths of all at once
            words += part.words * gathered.lengths_of_keys(keys[first : first + 16]).sum(axis=0)
    return words


def planned_exchange(
    gathered: GatheredRows,
    destination: np.ndarray,
    layout: PayloadLayout,
    rank: int,
    *,
    all_gather: bool = False,
    pin_memory: bool = False,
) -> RowExchange:
    """One rank's part of a finished plan."""

    def allocate(size: int) -> tuple[torch.Tensor, int]:
        indices = torch.empty(size, dtype=torch.int64, pin_memory=pin_memory)
        return indices, indices.data_ptr()

    exchange: dict[str, Any] = {"parts": layout.table, "rank": rank, "all_gather": all_gather, "allocate": allocate}
    planner = ShufflePlanner(gathered.num_ranks, gathered.steps, **exchange)
    planner.plan(gathered, destination)
    return RowExchange.of(planner, layout)


def plan_batch(
    lengths: np.ndarray, world_size: int, *, ranks_per_node: int | None = NODE
) -> tuple[ShufflePlan, PayloadLayout]:
    """The shuffle of a batch of `make_batch` of all ranks, planned from its lengths, int64 `(rows,)` in their order."""
    layout = PayloadLayout.of(BatchSchema.of(make_batch(lengths[:1])))
    by_key = np.repeat(lengths[:, None], len(CONTEXT) + 3, axis=1)
    by_key[:, : len(CONTEXT)] = 1
    tokens = len(CONTEXT) + 2 * lengths
    counts = np.full(world_size, len(lengths) // world_size, dtype=np.int64)
    gathered = packed_rows(counts, counts, HSTUAttentionTask(**SIZES).get_workloads(tokens), tokens, by_key)
    return plan_shuffle(gathered, slack=0.01, ranks_per_node=ranks_per_node), layout


class _RecordedError(Exception):
    """A rank's message has been recorded; ends the rank's work, which would need the other messages."""


class ListedMessages:
    """A stand-in for ControlChannel: records every rank's message, and returns the messages recorded so far."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True, pairwise: bool = False
    ) -> None:
        assert group is not None
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.members = list(range(self.world_size))
        self.description, self.control_group, self.payload_group = "all ranks", group, group
        self.has_all_to_all, self.failure = True, None
        self.most_words = 0
        self.records = False
        self.message_bytes = self.compared_bytes = 0
        self._gathered = np.empty((self.world_size, 0), dtype=np.int64)

    def agree(
        self, call: str, options: Any, error: Exception | None, numbers: Any = (), step: int = 0, room: int = 0
    ) -> np.ndarray:
        if error is not None:
            raise error
        own = np.array([self.most_words, 0] if call == "shuffle" else numbers, dtype=np.int64)  # 0: no digest of rows
        if call == "comparison of plans":
            self.compared_bytes = own.nbytes + _HEAD_BYTES
        if call != "gather":
            return np.repeat(own[None], self.world_size, axis=0)
        # The table is ready before the measurement: a real channel receives the messages without the GIL.
        known = self._gathered.shape[1]
        if known == 0:
            self._gathered = np.repeat(own[None], self.world_size, axis=0)
        elif known < len(own):  # longer than the earlier messages
            self._gathered = np.pad(self._gathered, ((0, 0), (0, len(own) - known)))
        self._gathered[self.rank] = own
        if self.records:
            raise _RecordedError
        self._gathered[:, 0] = step
        self.message_bytes = own.nbytes + _HEAD_BYTES
        return self._gathered

    def gather_text(self, text: str, step: int) -> list[str]:
        return [text] * self.world_size

    @contextlib.contextmanager
    def collective(self, step: int, what: str) -> Iterator[None]:
        yield

    def failures_posted(self, step: int, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def post_failure(self, step: int, what: str, error: Exception) -> None: ...

    def require_own_process(self) -> None: ...

    def close(self, *, ordered: bool = True) -> None: ...


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """A context with torch's fake process group, in which shufflers get the other ranks' messages from a list."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(engine, "ControlChannel", ListedMessages):
            yield
    finally:
        dist.destroy_process_group()


def record_all_ranks(
    shuffler: BaseTaskBalancedBatchShuffler, batches: Iterable[Any], window: int | None = None
) -> None:
    """Record the messages of every rank for the shuffler of one rank; within `fake_ranks`.

    `batches` has the batch of every rank, in order; with a window, a list of batches for each rank.
    """
    session = shuffler.engine._session(None) if window is None else shuffler.engine._session(None, window)
    channel: Any = session.channel
    own, channel.records = channel.rank, True
    for rank, of_rank in enumerate(batches):
        channel.rank = rank
        costs = shuffler.engine.costs
        local = [costs.describe(batch) for batch in (of_rank if window is not None else [of_rank])]
        channel.most_words = 0
        for each in local:
            assert isinstance(each, LocalRows) and each.error is None and each.schema is not None, each.error
            channel.most_words += len(each.table(counted_keys(each.schema, session._token_features)))
        session._capacity = max(session._capacity, channel.most_words + channel.most_words // 4)
        with contextlib.suppress(_RecordedError):
            session.prepare(0, local)
    channel.rank, channel.records = own, False
