"""GATHER and PLAN: what the shuffler's worker thread does for one batch, or a window, over one data-parallel group.

Input: what this rank knows of its batches, or that it has none, or an error. Output: the plan of the global batch with
this rank's exchange, or that the data has ended for all, or the error of any rank, raised on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.control import ControlChannel, RankMissingError
from commons.distributed.errors import attempt
from commons.distributed.global_batch import attach_global_batches
from commons.distributed.local_rows import LocalRows
from commons.distributed.options import ShufflerOptions
from commons.distributed.payload import PayloadLayout
from commons.distributed.peer_calibration import require_equal_among_peers
from commons.distributed.rank_speeds import RankSpeeds
from commons.distributed.row_exchange import PackedRows, RowExchange
from commons.distributed.schema_agreement import agree_on_schema
from commons.distributed.spans import span
from commons.distributed.stats import ShuffleStats, stats_of_plan
from commons.distributed.verification import checksums_of_all, require_unchanged
from commons.perf_model.calibration import CalibratedTask
from commons.perf_model.row_table import RowTable
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan, plan_shuffle
from commons.sequence_batch.fields import batch_device
from commons.sequence_batch.schema import BatchSchema

logger = logging.getLogger(__name__)

_EXCHANGE = "exchange"
# How much later than the timeout a step of the worker thread ends at the latest: ranks tell each other who is missing.
GRACE_SECONDS = 10.0
# First columns of the gathered table. Then, for each batch of a window, its rows, its real rows and the words of these;
# then these words, see row_table.py.
_STEP, _NUM_BATCHES, _COUNTS = range(3)
_PER_BATCH = 3


@dataclass(frozen=True)
class PreparedShuffle:
    """What the worker hands to `finish_shuffle`.

    Attributes:
        schema: the agreed schema; None if no rank has a batch any more.
        rows_before: rows of the ranks before this one; global ids start there.
        steps: batches that every rank trains: 1, or as many as the rank with most of them has brought to a window.
        plan: the plan, the same on every rank; None in mode "off".
        exchange: this rank's part of it; None in mode "off".
        stats: of the plan, one for each step; none in mode "off".
    """

    schema: BatchSchema | None = None
    rows_before: int = 0
    steps: int = 0
    plan: ShufflePlan | None = None
    exchange: RowExchange | None = None
    stats: tuple[ShuffleStats, ...] = ()


@dataclass(frozen=True)
class GatheredTable:
    """What every rank says of one step; the few numbers of each in lists, which numpy would be slower with.

    Attributes:
        at_step: the step that each rank is at.
        num_batches: batches that each rank brings.
        rows: by rank, the rows of each batch, padding included; 0 for one that it does not bring.
        real_rows: by rank, those that are no padding.
        num_words: by rank, the words of their blocks.
        body: int64 `(world_size, n)`, the blocks of each rank, then anything.
    """

    at_step: list[int]
    num_batches: list[int]
    rows: list[tuple[int, ...]]
    real_rows: list[tuple[int, ...]]
    num_words: list[tuple[int, ...]]
    body: np.ndarray

    @classmethod
    def of(cls, messages: np.ndarray, header: int) -> GatheredTable:
        """Take the messages of all ranks apart, whose first `header` numbers say how many rows follow."""
        columns = messages[:, :header].T.tolist()
        return cls(
            at_step=columns[_STEP],
            num_batches=columns[_NUM_BATCHES],
            rows=list(zip(*columns[_COUNTS::_PER_BATCH])),
            real_rows=list(zip(*columns[_COUNTS + 1 :: _PER_BATCH])),
            num_words=list(zip(*columns[_COUNTS + 2 :: _PER_BATCH])),
            body=messages[:, header:],
        )

    @property
    def steps(self) -> int:
        """Batches of the rank that brings most."""
        return max(self.num_batches)

    def rows_before(self, rank: int) -> int:
        """Rows of the ranks before one, padding included."""
        return sum(map(sum, self.rows[:rank]))


class ShuffleSession:
    """The shuffler's state for one group: its channel, the agreed layout and the size of the gather's buffer.

    Made on the main thread by all ranks of the group; `prepare` runs on the worker thread, once per step and in the
    same order on every rank.

    Args:
        group: the ranks.
        options: of the shuffler.
        shuffler_type: name of its class.
        window: most batches of a rank that are planned together. Given, rows are exchanged on the host, by the worker
            thread and over the group that it plans with; None: batch by batch, over a group of their own.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, options: ShufflerOptions, shuffler_type: str, window: int | None = None
    ) -> None:
        on_host = window is not None
        moves_rows = options.mode == "balance" and not on_host
        self.channel = ControlChannel(group, options.timeout, moves_rows=moves_rows, pairwise=on_host)
        self.rows_group = self.channel.control_group if on_host else self.channel.payload_group
        self.steps = 0
        self._process = os.getpid()
        self._window = window
        self._header = _COUNTS + _PER_BATCH * (window or 1)
        self._layout: PayloadLayout | None = None
        self._options = options
        self._shuffler_type = shuffler_type
        self._capacity = 0
        self._has_told_end = False
        self._speeds = RankSpeeds(self.channel.members, warns=self.channel.rank == 0)
        self._broken: RankMissingError | None = None
        has_all_to_all = on_host or self.channel.has_all_to_all
        self._all_gather = options.transport == "all_gather" or (options.transport == "auto" and not has_all_to_all)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a process that was forked from this session's: it has no worker thread to wait for."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the shuffler belongs to process {self._process}, and process {os.getpid()} was forked from it; a "
                "fork takes over neither threads nor connections: shuffle in the first, or start the second by spawn"
            )

    @property
    def longest_wait(self) -> float:
        """Seconds after which the worker thread has ended a step, whichever ranks are missing."""
        return 2 * self._options.timeout + GRACE_SECONDS

    def next_step(self) -> int:
        """Number the next step; the caller submits it to the worker before anyone else numbers one."""
        step = self.steps
        self.steps += 1
        return step

    def prepare(
        self,
        step: int,
        local: Sequence[LocalRows],
        calibrated: CalibratedTask | None = None,
        token_features: tuple[str, ...] | None = None,
        spent: tuple[int, int] = (0, 0),
    ) -> PreparedShuffle:
        """Gather, plan, compare plans and build this rank's exchange.

        Args:
            step: number of the step, or of the window.
            local: what this rank brings, its batches in order; a single entry without a schema for none.
            calibrated: what makes times of the workloads; None where they are operations.
            token_features: keys that count as tokens; None for all but the labels'.
            spent: nanoseconds of this rank's own work on an earlier batch, and its load; zeros for not known.

        Raises:
            RankMissingError: a rank did not take part; so does every later call.
            ValueError, TypeError, KeyError, RuntimeError: an error of any rank, on all of them.
        """
        if self._broken is not None:
            raise self._broken
        try:
            started = time.perf_counter()
            self._layout = self._layout or self._agree(step, local, calibrated, token_features)
            if self._layout is None:
                return PreparedShuffle()
            schema = self._layout.schema
            if self._window is not None and not schema.states_padding:
                raise ValueError(
                    f"window is {self._window}, and {schema.type_name} cannot state padding; the batches of a window "
                    "are padded where ranks have brought fewer rows: give it a field actual_batch_size, derive it from "
                    "BaseBatch, or use no window"
                )
            with span("gather"):
                table = self._gather(step, schema, local, token_features)
            if not table.steps or self._ends_early(schema, table):
                return PreparedShuffle()
            if self._options.mode == "off":
                return PreparedShuffle(schema, table.rows_before(self.channel.rank), table.steps)
            gather_ms = (time.perf_counter() - started) * 1e3
            with span("plan"):
                return self._plan(step, self._layout, table, local, calibrated, gather_ms, spent)
        except RankMissingError as error:
            if self._broken is None:  # nobody may come to ask for long: the main thread may wait elsewhere
                logger.error("rank %d: %s", self.channel.members[self.channel.rank], error)
            self._broken = self._broken or error
            raise

    def problem_with(self, local: LocalRows) -> Exception | None:
        """What this rank cannot tell of a batch, once there is a schema; None for nothing."""
        layout = self._layout
        return local.error if layout is None else attempt(lambda: self._own_table(layout.schema, local, None))[1]

    def exchange_rows(self, step: int, exchange: RowExchange, batches: Sequence[Any]) -> list[Any]:
        """Carry out a plan; on a device, on the stream that copied the batches.

        Args:
            step: number of the step or window.
            exchange: this rank's part of the plan.
            batches: what this rank has brought, at least one, if only an empty one.

        Returns:
            The batches that this rank trains, one for each step; one whose rows stay as they are is the same object.

        Raises:
            RankMissingError: a rank did not take part, or has failed, with its message; so does every later call.
            RuntimeError: with `verify`, rows that did not arrive as they were, or whose checksum fails on any rank.
        """
        layout, verify = exchange.layout, self._options.verify and self._options.mode == "balance"
        before, unknown = attempt(lambda: checksums_of_all(batches, layout)) if verify else (None, None)
        try:
            results = list(batches)
            if exchange.moves or exchange.changes:
                with span("exchange"):
                    packed = exchange.pack(batches)
                    if exchange.moves:
                        self.send_rows(step, exchange, packed)
                with span("select"):
                    results = [
                        exchange.unpack(batches[0], packed, index) if result.changes else batches[index]
                        for index, result in enumerate(exchange.results)
                    ]
        except RankMissingError:
            raise
        except Exception as error:  # of this rank alone, such as too little memory
            self.post_failure(step, error)
            raise
        if verify:
            self._compare_checksums(step, layout, before, unknown, results)
        return results

    def _compare_checksums(
        self, step: int, layout: PayloadLayout, before: torch.Tensor | None, error: Exception | None, results: list[Any]
    ) -> None:
        """Raise, on all ranks, if rows are not what they were before the exchange, or a rank cannot tell."""
        after, problem = attempt(lambda: checksums_of_all(results, layout))
        error = error or problem
        # The last number counts the ranks that cannot tell.
        told = torch.zeros(len(layout.parts) + 2, dtype=torch.int64, device=batch_device(results[0]))
        if before is None or after is None:
            told[-1] = 1
        else:
            told[:-1] = after - before
        try:
            *wrong, failed = self.channel.sum_over_ranks(told, self.rows_group, step, "comparison of checksums")
            if failed:
                self.channel.raise_on_all(error, step, on_main=self._window is None)
        except RankMissingError as missing:
            self._broken = missing
            raise
        require_unchanged(wrong, layout, step)

    def send_rows(self, step: int, exchange: RowExchange, packed: PackedRows) -> None:
        """Run the payload collective of a step, on the main thread; of a window, on the worker thread.

        Host tensors are waited for while asking the store for failures; on a device the stream waits, the host does
        not.

        Raises:
            RankMissingError: a rank did not take part, or has failed, with its message; so does every later call.
        """
        channel = self.channel
        assert self.rows_group is not None  # noqa: S101  rows move between at least two ranks
        try:
            with channel.collective(step, _EXCHANGE):
                on_host = packed.buffer.device.type == "cpu"
                work = exchange.send_rows(packed, self.rows_group, async_op=on_host)
                if work is not None:
                    channel.wait(work, step, _EXCHANGE)
        except RankMissingError as error:
            self._broken = error
            raise

    def with_global_batch(self, prepared: PreparedShuffle, batches: Sequence[Any]) -> list[Any]:
        """The batches that this rank trains, with what is known of the global batches that they are parts of."""
        if prepared.plan is None or prepared.schema is None or prepared.exchange is None:
            return list(batches)
        is_new = [result.changes for result in prepared.exchange.results]
        return attach_global_batches(batches, is_new, prepared.schema, prepared.plan, self.channel.members)

    def post_failure(self, step: int, error: Exception) -> None:
        """Tell the others, who may wait in the exchange of a step, that this rank failed before it."""
        self.channel.post_failure(step, _EXCHANGE, error)

    @property
    def failure(self) -> RankMissingError | None:
        """Why nothing can be shuffled any more; None while all is well."""
        return self._broken

    def abort(self, error: RankMissingError) -> None:
        """Let whatever waits in this session raise `error`, now or later; from any thread, waits for nothing."""
        self._broken = error
        self.channel.abort(error)

    def close(self, *, collected: bool = False) -> None:
        """Give the groups back; called when the worker thread has ended, or collected, by it. A fork has none."""
        if os.getpid() == self._process:
            self.channel.close(collected=collected)

    def _agree(
        self,
        step: int,
        local: Sequence[LocalRows],
        calibrated: CalibratedTask | None,
        token_features: tuple[str, ...] | None,
    ) -> PayloadLayout | None:
        options, calibration = self._options, None if calibrated is None else calibrated.calibration
        if options.calibration is not None and options.mode != "off":
            generation, limit = self.channel.generation, options.timeout / 2
            _, error = attempt(lambda: require_equal_among_peers(calibration, generation, limit))
            local = [dataclasses.replace(local[0], error=local[0].error or error), *local[1:]]
        # What is wrong with the rows is said in their gather.
        own, _ = attempt(lambda: [self._own_table(each.schema, each, token_features) for each in local if each.schema])
        schema, most_words = agree_on_schema(
            self.channel,
            step,
            options,
            self._shuffler_type,
            calibration,
            self._window or 1,
            token_features,
            local,
            sum(map(len, own or ())),
        )
        self._capacity = _with_room(most_words)
        return None if schema is None else PayloadLayout.of(schema)

    def _gather(
        self, step: int, schema: BatchSchema, local: Sequence[LocalRows], token_features: tuple[str, ...] | None
    ) -> GatheredTable:
        """What every rank says, header and rows; once more, larger, if a rank's words outgrew the buffer."""
        error = next((each.error for each in local if each.error is not None), None)
        own, problem = attempt(lambda: [self._own_table(schema, each, token_features) for each in local if each.schema])
        error = error or problem
        batches = [each for each in local if each.schema is not None]
        counts = [count for each, words in zip(batches, own or ()) for count in (each.rows, each.real_rows, len(words))]
        header = self._header
        while True:
            message = np.empty(header + self._capacity, dtype=np.int64)
            message[:header] = 0
            message[:_COUNTS] = (step, len(batches))
            message[_COUNTS : _COUNTS + len(counts)] = counts
            at = header
            for words in own or ():
                message[at : at + len(words)] = words[: max(0, len(message) - at)]
                at += len(words)
            message[at:] = 0  # few numbers, unlike np.zeros without a turn of the interpreter lock
            table = GatheredTable.of(self.channel.agree("gather", {}, error, message, step), header)
            if any(at != step for at in table.at_step):
                raise RuntimeError(
                    f"ranks are at steps {table.at_step} ({self.channel.description}); every rank must call "
                    "the shuffler once per step, in the same order"
                )
            largest = max(map(sum, table.num_words))
            if largest <= self._capacity:
                return table
            self._capacity = _with_room(largest)

    def _own_table(self, agreed: BatchSchema, local: LocalRows, token_features: tuple[str, ...] | None) -> np.ndarray:
        """What this rank says of the rows of a batch, int64 `(words,)`; nothing where they are not planned."""
        if local.schema is not None and local.schema != agreed:
            raise ValueError(
                f"this batch differs from the first: {'; '.join(agreed.differences(local.schema))}; type, keys, dtypes "
                "and plain values stay the same: make every batch alike, or a property what depends on the rows"
            )
        if local.schema is None or self._options.mode == "off":
            return np.zeros(0, dtype=np.int64)
        return local.table(_counted_keys(agreed, token_features))

    def _plan(
        self,
        step: int,
        layout: PayloadLayout,
        table: GatheredTable,
        local: Sequence[LocalRows],
        calibrated: CalibratedTask | None,
        gather_ms: float,
        spent: tuple[int, int],
    ) -> PreparedShuffle:
        """Plan and build this rank's exchange; then all ranks compare their plans."""
        started = time.perf_counter()
        options, rank, device = self._options, self.channel.rank, local[0].device
        units_per_ms = None if calibrated is None else calibrated.units_per_ms

        def make() -> tuple[ShufflePlan, RowExchange, int]:
            plan = plan_shuffle(
                _read_table(layout.schema, table),
                carry_out=options.mode == "balance",
                pads=layout.schema.states_padding,
                **options.plan_arguments(units_per_ms),
            )
            on_cuda = device is not None and device.type == "cuda" and self.channel.world_size > 1
            exchange = RowExchange.of(plan, layout, rank, all_gather=self._all_gather, pin_memory=on_cuda)
            return plan, exchange, plan.digest()

        made, error = attempt(make)  # too little memory, say, on this rank alone: the comparison tells the others
        # What the stats tell of ranks beside the plan, which has been made by now.
        before = [each.lookups for each in local] + [0] * (table.steps - len(local))
        after = [0] * table.steps if made is None else [result.lookups for result in made[1].results]
        told = self._require_same_plan(step, 0 if made is None else made[2], error, [*spent, *before, *after])
        assert made is not None  # noqa: S101  the comparison raised the error
        plan, exchange, _ = made
        self._require_rows_everywhere(layout.schema, plan)
        stats = stats_of_plan(
            plan,
            step * (self._window or 1),
            gather_ms=gather_ms,
            plan_ms=(time.perf_counter() - started) * 1e3,
            bytes_sent=exchange.bytes_sent,
            ranks_per_node=options.ranks_per_node,
            units_per_ms=units_per_ms,
            lookups=told[:, 2:],
            rank_speeds=self._speeds.look(step, *told[:, :2].T.tolist()),
        )
        rows_before = table.rows_before(rank)
        return PreparedShuffle(layout.schema, rows_before, plan.gathered.steps, plan, exchange, stats)

    def _require_rows_everywhere(self, schema: BatchSchema, plan: ShufflePlan) -> None:
        """Raise ValueError, on all ranks, if one would train no row of a batch that cannot state padding."""
        without = [rank for rank, rows in enumerate(plan.result_real_rows.tolist()) if not rows]
        if without and self._options.mode == "balance" and not schema.states_padding:
            raise ValueError(
                f"ranks {self._named(without)} would train no row, and {schema.type_name} cannot state padding; such a "
                "batch needs at least one row on every rank: give it a field actual_batch_size, or derive it from "
                "BaseBatch"
            )

    def _require_same_plan(self, step: int, digest: int, error: Exception | None, told: list[int]) -> np.ndarray:
        """Stop, on all ranks, if one of them has failed or the ranks did not make the same plan.

        Returns:
            int64 `(world_size, len(told))`, what each rank has told.
        """
        table = self.channel.agree("comparison of plans", {}, error, [digest, *told], step)
        digests = table[:, 0]
        if len(set(digests.tolist())) == 1:
            return table[:, 1:]
        values, counts = np.unique(digests, return_counts=True)
        most = digests[0] if (digests == digests[0]).sum() == counts.max() else values[counts.argmax()]
        others = self._named(np.flatnonzero(digests != most).tolist())
        raise RuntimeError(
            f"ranks {others} made another plan than the rest of {self.channel.description} at step {step}; a plan must "
            "be a pure function of what was gathered: use the same evenrank version and settings on every rank"
        )

    def _ends_early(self, schema: BatchSchema, table: GatheredTable) -> bool:
        """Whether the data ends for all: a rank has none, its batches cannot be empty, and no rows may move."""
        dry = [rank for rank, count in enumerate(table.num_batches) if not count]
        if not dry or self._options.mode == "balance" or schema.states_padding:
            return False
        if self.channel.rank == 0 and not self._has_told_end:
            self._has_told_end = True
            logger.warning(
                "the data of ranks %s ended at step %d, and %s cannot state padding, so that it ends for all: the %d "
                "rows that the others have read, and what they would still read, are not trained; mode 'balance' "
                "shares them out, and so does a field actual_batch_size",
                self._named(dry),
                table.at_step[0],
                schema.type_name,
                sum(map(sum, table.real_rows)),
            )
        return True

    def _named(self, ranks: Iterable[int]) -> list[int]:
        """Global numbers of ranks of the group."""
        return [self.channel.members[rank] for rank in ranks]


def _read_table(schema: BatchSchema, table: GatheredTable) -> GatheredRows:
    """The rows of all ranks, in the order of their places."""
    steps = table.steps
    rows, real_rows = (
        np.array([count for counts in of_ranks for count in counts[:steps]], dtype=np.int64)
        for of_ranks in (table.rows, table.real_rows)
    )
    first = np.zeros_like(rows)
    if steps > 1:
        num_words = np.array(table.num_words, dtype=np.int64)[:, :steps]
        first = (np.cumsum(num_words, axis=1) - num_words).ravel()
    packed = RowTable(table.body, first, real_rows, schema.num_keys, len(schema.host_fields))
    workloads, tokens = packed.workloads_and_tokens()
    return GatheredRows(rows, real_rows, workloads, tokens, packed, steps)


def _with_room(words: int) -> int:
    """Words of a buffer that batches like one of so many words seldom outgrow."""
    return words + words // 4


def _counted_keys(schema: BatchSchema, features: tuple[str, ...] | None) -> list[int]:
    """The keys whose lengths are a row's tokens: all but the labels'; none for a batch that has none to count."""
    names = [(field.name, key) for field in schema.jagged for key in field.keys]
    return [
        index
        for index, (field_name, key) in enumerate(names)
        if field_name != "labels" and (features is None or key in features)
    ]
