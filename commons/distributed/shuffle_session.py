"""GATHER and PLAN: what the shuffler's worker thread does for one batch, over one data-parallel group.

Input: what this rank knows of its batch, or that it has none, or an error. Output: the plan of the global batch with
this rank's exchange, or that the data has ended for all, or the error of any rank, raised on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.control import ControlChannel, RankMissingError
from commons.distributed.errors import attempt
from commons.distributed.local_rows import LocalRows
from commons.distributed.options import ShufflerOptions
from commons.distributed.payload import PayloadLayout
from commons.distributed.peer_calibration import require_equal_among_peers
from commons.distributed.row_exchange import RowExchange
from commons.distributed.schema_agreement import agree_on_schema
from commons.distributed.stats import ShuffleStats, stats_of_plan
from commons.perf_model.calibration import CalibratedTask
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan, plan_shuffle
from commons.sequence_batch.schema import BatchSchema

logger = logging.getLogger(__name__)

_EXCHANGE = "exchange"
# Columns of the gathered table before workloads and lengths.
_STEP, _HAS_BATCH, _ROWS, _REAL_ROWS, _HEADER = range(5)


@dataclass(frozen=True)
class PreparedShuffle:
    """What the worker hands to `finish_shuffle`.

    Attributes:
        schema: the agreed schema; None if no rank has a batch any more.
        rows_before: rows of the ranks before this one; global ids start there.
        plan: the plan, the same on every rank; None in mode "off".
        exchange: this rank's part of it; None in mode "off".
        stats: of the plan; None in mode "off".
    """

    schema: BatchSchema | None = None
    rows_before: int = 0
    plan: ShufflePlan | None = None
    exchange: RowExchange | None = None
    stats: ShuffleStats | None = None


class ShuffleSession:
    """The shuffler's state for one group: its channel, the agreed layout and the size of the gather's buffer.

    Made on the main thread by all ranks of the group; `prepare` runs on the worker thread, once per step and in the
    same order on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: ShufflerOptions, shuffler_type: str) -> None:
        self.channel = ControlChannel(group, options.timeout, moves_rows=options.mode == "balance")
        self.steps = 0
        self._layout: PayloadLayout | None = None
        self._options = options
        self._shuffler_type = shuffler_type
        self._capacity = 0
        self._has_told_end = False
        self._broken: RankMissingError | None = None
        self._all_gather = options.transport == "all_gather" or (
            options.transport == "auto" and not self.channel.has_all_to_all
        )

    def next_step(self) -> int:
        """Number the next step; the caller submits it to the worker before anyone else numbers one."""
        step = self.steps
        self.steps += 1
        return step

    def prepare(
        self,
        step: int,
        local: LocalRows,
        calibrated: CalibratedTask | None = None,
        token_features: tuple[str, ...] | None = None,
    ) -> PreparedShuffle:
        """Gather, plan, compare plans and build this rank's exchange.

        Args:
            step: number of the step.
            local: what this rank brings.
            calibrated: what makes times of the workloads; None where they are operations.
            token_features: keys that count as tokens; None for all but the labels'.

        Raises:
            RankMissingError: a rank did not take part; so does every later call.
            ValueError, TypeError, KeyError, RuntimeError: an error of any rank, on all of them.
        """
        if self._broken is not None:
            raise self._broken
        try:
            started = time.perf_counter()
            self._layout = self._layout or self._agree(step, local, calibrated)
            if self._layout is None:
                return PreparedShuffle()
            schema = self._layout.schema
            table = self._gather(step, schema, local)
            if not table[:, _HAS_BATCH].any() or self._ends_early(schema, table):
                return PreparedShuffle()
            if self._options.mode == "off":
                return PreparedShuffle(schema, int(table[: self.channel.rank, _ROWS].sum()))
            gather_ms = (time.perf_counter() - started) * 1e3
            return self._plan(step, self._layout, table, local.device, token_features, calibrated, gather_ms)
        except RankMissingError as error:
            self._broken = error
            raise

    def send_rows(self, step: int, exchange: RowExchange, packed: torch.Tensor, buffer: torch.Tensor) -> None:
        """Run the payload collective of a step, on the main thread.

        Host tensors are waited for while asking the store for failures; on a device the stream waits, the host does
        not.

        Raises:
            RankMissingError: a rank did not take part, or has failed, with its message; so does every later call.
        """
        channel = self.channel
        assert channel.payload_group is not None  # noqa: S101  rows move between at least two ranks
        try:
            with channel.collective(step, _EXCHANGE):
                on_host = packed.device.type == "cpu"
                work = exchange.send_rows(packed, buffer, channel.payload_group, async_op=on_host)
                if work is not None:
                    channel.wait(work, step, _EXCHANGE)
        except RankMissingError as error:
            self._broken = error
            raise

    def post_failure(self, step: int, error: Exception) -> None:
        """Tell the others, who may wait in the exchange of a step, that this rank failed before it."""
        self.channel.post_failure(step, _EXCHANGE, error)

    def close(self, *, collected: bool = False) -> None:
        """Give the groups back; called when the worker thread has ended, or collected, by it."""
        self.channel.close(collected=collected)

    def _agree(self, step: int, local: LocalRows, calibrated: CalibratedTask | None) -> PayloadLayout | None:
        options, calibration = self._options, None if calibrated is None else calibrated.calibration
        if options.calibration is not None and options.mode != "off":
            generation, limit = self.channel.generation, options.timeout / 2
            _, error = attempt(lambda: require_equal_among_peers(calibration, generation, limit))
            local = dataclasses.replace(local, error=local.error or error)
        schema, self._capacity = agree_on_schema(self.channel, step, options, self._shuffler_type, calibration, local)
        return None if schema is None else PayloadLayout.of(schema)

    def _gather(self, step: int, schema: BatchSchema, local: LocalRows) -> np.ndarray:
        """The gathered table: header and rows of every rank; once more, larger, if a rank's rows outgrew the buffer."""
        columns = 0 if self._options.mode == "off" else 1 + schema.num_keys
        own, error = attempt(lambda: _own_table(schema, local, columns))
        error = local.error or error
        own = np.zeros(0, dtype=np.int64) if own is None else own
        while True:
            message = np.zeros(_HEADER + self._capacity * columns, dtype=np.int64)
            message[:_HEADER] = (step, local.schema is not None, local.rows, local.real_rows)
            sent = own[: len(message) - _HEADER]
            message[_HEADER : _HEADER + len(sent)] = sent
            table = self.channel.agree("gather", {}, error, message, step)
            if (table[:, _STEP] != step).any():
                raise RuntimeError(
                    f"ranks are at steps {table[:, _STEP].tolist()} ({self.channel.description}); every rank must call "
                    "the shuffler once per step, in the same order"
                )
            largest = int(table[:, _REAL_ROWS].max())
            if columns == 0 or largest <= self._capacity:
                return table
            self._capacity = largest + largest // 4

    def _plan(
        self,
        step: int,
        layout: PayloadLayout,
        table: np.ndarray,
        device: torch.device | None,
        token_features: tuple[str, ...] | None,
        calibrated: CalibratedTask | None,
        gather_ms: float,
    ) -> PreparedShuffle:
        """Plan and build this rank's exchange; then all ranks compare their plans."""
        started = time.perf_counter()
        options, rank = self._options, self.channel.rank
        units_per_ms = None if calibrated is None else calibrated.units_per_ms

        def make() -> tuple[ShufflePlan, RowExchange, ShuffleStats, int]:
            plan = plan_shuffle(
                _read_table(layout.schema, table, token_features),
                carry_out=options.mode == "balance",
                pads=layout.schema.states_padding,
                **options.plan_arguments(units_per_ms),
            )
            on_cuda = device is not None and device.type == "cuda" and self.channel.world_size > 1
            exchange = RowExchange.of(plan, layout, rank, all_gather=self._all_gather, pin_memory=on_cuda)
            stats = stats_of_plan(
                plan,
                step,
                gather_ms=gather_ms,
                bytes_sent=exchange.bytes_sent,
                ranks_per_node=options.ranks_per_node,
                units_per_ms=units_per_ms,
            )
            return plan, exchange, stats, plan.digest()

        made, error = attempt(make)  # too little memory, say, on this rank alone: the comparison tells the others
        self._require_same_plan(step, 0 if made is None else made[-1], error)
        assert made is not None  # noqa: S101  the comparison raised the error
        plan, exchange, stats, _ = made
        self._require_rows_everywhere(layout.schema, plan)
        stats = dataclasses.replace(stats, plan_ms=(time.perf_counter() - started) * 1e3)
        return PreparedShuffle(layout.schema, int(table[:rank, _ROWS].sum()), plan, exchange, stats)

    def _require_rows_everywhere(self, schema: BatchSchema, plan: ShufflePlan) -> None:
        """Raise ValueError, on all ranks, if one would train no row of a batch that cannot state padding."""
        without = np.flatnonzero(plan.result_real_rows == 0)
        if len(without) and self._options.mode == "balance" and not schema.states_padding:
            raise ValueError(
                f"ranks {self._named(without)} would train no row, and {schema.type_name} cannot state padding; such a "
                "batch needs at least one row on every rank: give it a field actual_batch_size, or derive it from "
                "BaseBatch"
            )

    def _require_same_plan(self, step: int, digest: int, error: Exception | None) -> None:
        """Stop, on all ranks, if one of them has failed or the ranks did not make the same plan."""
        digests = self.channel.agree("comparison of plans", {}, error, [digest], step)[:, 0]
        if (digests == digests[0]).all():
            return
        values, counts = np.unique(digests, return_counts=True)
        most = digests[0] if (digests == digests[0]).sum() == counts.max() else values[counts.argmax()]
        others = self._named(np.flatnonzero(digests != most))
        raise RuntimeError(
            f"ranks {others} made another plan than the rest of {self.channel.description} at step {step}; a plan must "
            "be a pure function of what was gathered: use the same evenrank version and settings on every rank"
        )

    def _ends_early(self, schema: BatchSchema, table: np.ndarray) -> bool:
        """Whether the data ends for all: a rank has none, its batches cannot be empty, and no rows may move."""
        dry = np.flatnonzero(table[:, _HAS_BATCH] == 0)
        if not len(dry) or self._options.mode == "balance" or schema.states_padding:
            return False
        if self.channel.rank == 0 and not self._has_told_end:
            self._has_told_end = True
            logger.warning(
                "the data of ranks %s ended at step %d, and %s cannot state padding, so that it ends for all: the %d "
                "rows that the others have read, and what they would still read, are not trained; mode 'balance' "
                "shares them out, and so does a field actual_batch_size",
                self._named(dry),
                table[0, _STEP],
                schema.type_name,
                table[:, _REAL_ROWS].sum(),
            )
        return True

    def _named(self, ranks: np.ndarray) -> list[int]:
        """Global numbers of ranks of the group."""
        return [self.channel.members[rank] for rank in ranks.tolist()]


def _own_table(agreed: BatchSchema, local: LocalRows, columns: int) -> np.ndarray:
    """This rank's part of the gathered table, flat; empty without a batch, and where no columns are asked for."""
    if local.schema is None:
        return np.zeros(0, dtype=np.int64)
    if local.schema != agreed:
        raise ValueError(
            f"this batch differs from the first: {'; '.join(agreed.differences(local.schema))}; type, keys, dtypes and "
            "plain values stay the same: make every batch alike, or a property what depends on the rows"
        )
    return local.table().ravel() if columns else np.zeros(0, dtype=np.int64)


def _read_table(schema: BatchSchema, table: np.ndarray, token_features: tuple[str, ...] | None) -> GatheredRows:
    """The rows of all ranks, from the gathered table."""
    rows, real_rows = table[:, _ROWS].copy(), table[:, _REAL_ROWS].copy()
    columns = 1 + schema.num_keys
    bodies = [
        table[rank, _HEADER : _HEADER + count * columns].reshape(count, columns)
        for rank, count in enumerate(real_rows.tolist())
    ]
    whole = np.concatenate(bodies)
    lengths = whole[:, 1:]
    return GatheredRows(rows, real_rows, whole[:, 0].copy(), _tokens(schema, lengths, token_features), lengths)


def _tokens(schema: BatchSchema, lengths: np.ndarray, features: tuple[str, ...] | None) -> np.ndarray:
    """Tokens per row: lengths of the jagged fields' keys, labels left out; 1 for a batch that has none to count."""
    counted = [
        field.name != "labels" and (features is None or key in features)
        for field in schema.jagged
        for key in field.keys
    ]
    if not any(counted):
        return np.ones(len(lengths), dtype=np.int64)
    return lengths[:, np.array(counted)].sum(axis=1)
