"""GATHER and PLAN: what the shuffler's worker thread does for one batch, over one data-parallel group.

Input: the host copy of a rank's workloads and lengths, or the news that it has no batch, or an error. Output: the plan
of the global batch with this rank's index arrays, the news that the data has ended for all, or the error of any rank,
raised on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.agreement import agree
from commons.distributed.batch_exchange import Collective, ExchangeArrays, prepare_arrays
from commons.distributed.control import ControlChannel, RankMissingError
from commons.distributed.options import ShufflerOptions
from commons.distributed.payload import PayloadLayout
from commons.distributed.peer_calibration import require_equal_among_peers
from commons.distributed.row_routes import RowRoutes, route_rows
from commons.perf_model.calibration import CalibratedTask
from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan, plan_shuffle
from commons.sequence_batch.schema import BatchSchema

logger = logging.getLogger(__name__)

_BATCH, _NONE, _ERROR = 0, 1, 2
_EXCHANGE = "exchange"
_HEADER = 4  # step, status, rows, real rows


@dataclass(frozen=True)
class RankInput:
    """What one rank brings to one step.

    Attributes:
        schema: of its batch; None if it has none.
        rows: batch_size.
        real_rows: rows that are no padding.
        workloads: what `get_workloads` returned, on the host; None in mode "off".
        lengths: lengths `(keys, rows)` of every KeyedJaggedTensor field, on the host.
        num_values: values that each of these fields holds.
        copied: the event after which host copies from a device are complete.
        error: what went wrong on this rank so far.
        calibrated: what makes times of the workloads; None where they are operations.
        token_features: keys that count as tokens; None for all but the labels'.
        device: where its batch is trained; None if that is not known yet.
    """

    schema: BatchSchema | None = None
    rows: int = 0
    real_rows: int = 0
    workloads: Any = None
    lengths: tuple[torch.Tensor, ...] = ()
    num_values: tuple[int, ...] = ()
    copied: torch.Event | None = None
    error: Exception | None = None
    calibrated: CalibratedTask | None = None
    token_features: tuple[str, ...] | None = None
    device: torch.device | None = None


@dataclass(frozen=True)
class PlannedExchange:
    """A plan, and what one rank needs to carry it out.

    Attributes:
        plan: the plan, the same on every rank.
        layout: the parts of a row.
        routes: this rank's index arrays.
        arrays: the same as tensors.
        plan_ms: milliseconds of planning, comparing and building the arrays.
    """

    plan: ShufflePlan
    layout: PayloadLayout
    routes: RowRoutes
    arrays: ExchangeArrays
    plan_ms: float = 0.0


@dataclass(frozen=True)
class PreparedShuffle:
    """What the worker hands to `finish_shuffle`.

    Attributes:
        schema: the agreed schema; None if no rank has a batch any more.
        rows_before: rows of the ranks before this one; global ids start there.
        planned: the plan; None in mode "off".
        gather_ms: milliseconds of the gather.
    """

    schema: BatchSchema | None = None
    rows_before: int = 0
    planned: PlannedExchange | None = None
    gather_ms: float = 0.0


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know of their batches.

    Attributes:
        schema: of every batch.
        layout: the parts of its rows.
        pads: whether its type can state padding.
    """

    schema: BatchSchema
    layout: PayloadLayout
    pads: bool


class ShuffleSession:
    """The shuffler's state for one group: its channel, the agreed schema and the size of the gather's buffer.

    Made on the main thread by all ranks of the group; `prepare` runs on the worker thread, once per step and in the
    same order on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: ShufflerOptions, shuffler_type: str) -> None:
        self.channel = ControlChannel(group, options.timeout, moves_rows=options.mode == "balance")
        self._agreed: _Agreed | None = None
        self._options = options
        self._shuffler_type = shuffler_type
        self._capacity = 0
        self.steps = 0
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

    def prepare(self, step: int, mine: RankInput) -> PreparedShuffle:
        """Gather, plan, compare plans and build this rank's arrays.

        Raises:
            RankMissingError: a rank did not take part; so does every later call.
            ValueError, TypeError, KeyError, RuntimeError: an error of any rank, on all of them.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._prepare(step, mine)
        except RankMissingError as error:
            self._broken = error
            raise

    def transfer(self, step: int, collective: Collective, device: torch.device) -> int:
        """Run the payload collective of a step, on the main thread; returns the bytes sent.

        Host tensors are waited for while listening for the alarm; on a device the stream waits, and the host does not.

        Raises:
            RankMissingError: a rank did not take part, or has failed, with its message; so does every later call.
        """
        channel = self.channel
        assert channel.payload_group is not None  # noqa: S101  rows move between at least two ranks
        try:
            work, bytes_sent = collective(channel.payload_group, device.type == "cpu")
            if work is not None:
                channel.wait(work, step, _EXCHANGE)
        except RankMissingError as error:
            self._broken = error
            raise
        except RuntimeError as error:  # of the collective: a peer has ended or stalls
            self._broken = channel.name_missing(step, _EXCHANGE)
            raise self._broken from error
        return bytes_sent

    def post_failure(self, step: int, error: Exception) -> None:
        """Tell the others, who may wait in the exchange of a step, that this rank failed before it."""
        self.channel.post_failure(step, _EXCHANGE, error)

    def close(self, *, collected: bool = False) -> None:
        """Give the groups back; called when the worker thread has ended, or collected, by it."""
        self.channel.close(intact=self._broken is None, collected=collected)

    def _prepare(self, step: int, mine: RankInput) -> PreparedShuffle:
        started = time.perf_counter()
        agreed = self._agreed = self._agreed or self._agree(step, mine)
        if agreed is None:
            return PreparedShuffle()
        body, error = self._body(agreed.schema, mine)
        table = self._gather(step, body, mine, error)
        if (table[:, 1] == _NONE).all() or self._ends_early(agreed, table):
            return PreparedShuffle()
        gather_ms = (time.perf_counter() - started) * 1e3
        rows_before = int(table[: self.channel.rank, 2].sum())
        planned = None if self._options.mode == "off" else self._plan_exchange(step, agreed, table, mine)
        return PreparedShuffle(agreed.schema, rows_before, planned, gather_ms)

    def _plan_exchange(self, step: int, agreed: _Agreed, table: np.ndarray, mine: RankInput) -> PlannedExchange:
        started = time.perf_counter()
        planned, digest, error = None, 0, None
        try:
            gathered, lengths = _unpack(agreed.schema, table, mine.token_features)
            plan = self._plan(gathered, agreed.pads, 1 if mine.calibrated is None else mine.calibrated.units_per_ms)
            routes = route_rows(plan, lengths, agreed.layout, self.channel.rank, self._all_gather)
            on_cuda = mine.device is not None and mine.device.type == "cuda"
            arrays = prepare_arrays(routes, agreed.layout, on_cuda and self.channel.world_size > 1)
            planned, digest = PlannedExchange(plan, agreed.layout, routes, arrays), plan.digest()
        except Exception as caught:  # of this rank alone, such as too little memory: the comparison tells the others
            error = caught
        self._compare(step, digest, error)
        assert planned is not None  # noqa: S101  the comparison raised the error
        without = np.flatnonzero(planned.plan.result_real_rows == 0)
        if len(without) and self._options.mode == "balance" and not agreed.pads:
            raise self._cannot_pad(agreed.schema, without)
        return dataclasses.replace(planned, plan_ms=(time.perf_counter() - started) * 1e3)

    def _agree(self, step: int, mine: RankInput) -> _Agreed | None:
        error, calibration = mine.error, None if mine.calibrated is None else mine.calibrated.calibration
        if self._options.calibration is not None and self._options.mode != "off":
            try:
                require_equal_among_peers(calibration, self.channel.generation, self._options.timeout / 2)
            except Exception as caught:
                error = error or caught
        agreement = agree(
            self.channel, step, self._options, self._shuffler_type, mine.schema, mine.real_rows, error, calibration
        )
        if agreement.schema is None:
            return None
        self._capacity = agreement.max_real_rows
        return _Agreed(agreement.schema, PayloadLayout.of(agreement.schema), agreement.states_padding)

    def _body(self, schema: BatchSchema, mine: RankInput) -> tuple[np.ndarray, Exception | None]:
        """Workload and lengths of every real row, int64 `(real rows, 1 + keys)`; or the error that prevents them."""
        columns = 0 if self._options.mode == "off" else 1 + schema.num_keys
        nothing = np.zeros((0, columns), dtype=np.int64)
        if mine.error is not None or mine.schema is None:
            return nothing, mine.error
        try:
            if mine.schema != schema:
                raise ValueError(
                    f"this batch differs from the first: {'; '.join(schema.differences(mine.schema))}; type, "
                    "keys, dtypes and plain values stay the same: make every batch alike, or a property what depends "
                    "on the rows"
                )
            if columns == 0:
                return nothing, None
            if mine.copied is not None:
                mine.copied.synchronize()
            workloads = as_int64_workloads(_one_per_row(mine.workloads, mine.rows)[: mine.real_rows])
            return np.concatenate([workloads[:, None], *_real_lengths(mine)], axis=1), None
        except Exception as error:
            return nothing, error

    def _gather(self, step: int, body: np.ndarray, mine: RankInput, error: Exception | None) -> np.ndarray:
        """Gather header and body of every rank; once more, larger, if a rank's rows outgrew the buffer."""
        columns = body.shape[1]
        status = _ERROR if error is not None else _NONE if mine.schema is None else _BATCH
        while True:
            message = np.zeros(_HEADER + self._capacity * columns, dtype=np.int64)
            message[:_HEADER] = (step, status, mine.rows, mine.real_rows)
            sent = body.ravel()[: len(message) - _HEADER]
            message[_HEADER : _HEADER + len(sent)] = sent
            table = self.channel.gather(message, step)
            if (table[:, 1] == _ERROR).any():
                self.channel.raise_on_all(error, step)
            if (table[:, 0] != step).any():
                raise RuntimeError(
                    f"ranks are at steps {table[:, 0].tolist()} ({self.channel.description}); every rank must call the "
                    "shuffler once per step, in the same order"
                )
            largest = int(table[:, 3].max())
            if columns == 0 or largest <= self._capacity:
                return table
            self._capacity = largest + largest // 4

    def _plan(self, gathered: GatheredRows, pads: bool, units_per_ms: int) -> ShufflePlan:
        options = self._options
        return plan_shuffle(
            gathered,
            method=options.partitioner,
            equal_size=options.equal_size,
            slack=options.slack,
            ranks_per_node=options.ranks_per_node,
            max_tokens=options.max_tokens_per_rank,
            min_gain=options.min_gain,
            min_gain_load=round(options.min_gain_ms * units_per_ms),
            carry_out=options.mode == "balance",
            pads=pads,
        )

    def _ends_early(self, agreed: _Agreed, table: np.ndarray) -> bool:
        """Whether the data ends for all: a rank has none, its batches cannot be empty, and no rows may move."""
        dry = np.flatnonzero(table[:, 1] == _NONE)
        if not len(dry) or self._options.mode == "balance" or agreed.pads:
            return False
        if self.channel.rank == 0 and not self._has_told_end:
            self._has_told_end = True
            logger.warning(
                "the data of ranks %s ended at step %d, and %s cannot state padding, so that it ends for all: the %d "
                "rows that the others have read, and what they would still read, are not trained; mode 'balance' "
                "shares them out, and so does a field actual_batch_size",
                [self.channel.members[rank] for rank in dry.tolist()],
                table[0, 0],
                agreed.schema.type_name,
                table[:, 3].sum(),
            )
        return True

    def _cannot_pad(self, schema: BatchSchema, without: np.ndarray) -> ValueError:
        ranks = [self.channel.members[rank] for rank in without.tolist()]
        return ValueError(
            f"ranks {ranks} would train no row, and {schema.type_name} cannot state padding; such a batch needs at "
            "least one row on every rank: give it a field actual_batch_size, or derive it from BaseBatch"
        )

    def _compare(self, step: int, digest: int, error: Exception | None) -> None:
        """Stop, on all ranks, if one of them has failed or the ranks did not make the same plan."""
        low, high, failed = self.channel.min_max(digest, error is not None, step)
        if failed:
            self.channel.raise_on_all(error, step)
        if low == high:
            return
        digests = self.channel.gather(np.array([digest]), step, "gather of digests")[:, 0].tolist()
        most = max(set(digests), key=lambda value: (digests.count(value), value == digests[0]))
        others = [self.channel.members[rank] for rank, value in enumerate(digests) if value != most]
        raise RuntimeError(
            f"ranks {others} made another plan than the rest of {self.channel.description} at step {step}; a plan must "
            "be a pure function of what was gathered: use the same evenrank version and settings on every rank"
        )


def _unpack(
    schema: BatchSchema, table: np.ndarray, token_features: tuple[str, ...] | None
) -> tuple[GatheredRows, np.ndarray]:
    """The gathered rows of all ranks, and their lengths, int64 `(N, keys)`."""
    rows, real_rows = table[:, 2].copy(), table[:, 3].copy()
    columns = 1 + schema.num_keys
    bodies = [
        table[rank, _HEADER : _HEADER + count * columns].reshape(count, columns)
        for rank, count in enumerate(real_rows.tolist())
    ]
    whole = np.concatenate(bodies)
    lengths = whole[:, 1:]
    return GatheredRows(rows, real_rows, whole[:, 0].copy(), _tokens(schema, lengths, token_features)), lengths


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


def _real_lengths(mine: RankInput) -> list[np.ndarray]:
    """int64 `(real rows, keys)` lengths of every jagged field, after a look at whether they fit its values."""
    assert mine.schema is not None  # noqa: S101  a rank without a batch has no lengths
    tables = []
    for field, lengths, num_values in zip(mine.schema.jagged, mine.lengths, mine.num_values):
        table = lengths.numpy().astype(np.int64)
        stated = int(table.sum())
        if table.min(initial=0) < 0:
            raise ValueError(
                f"field {field.name!r} has a length of {table.min()}; lengths are not negative: correct it"
            )
        if stated != num_values:
            raise ValueError(
                f"field {field.name!r} has lengths that add up to {stated} and {num_values} values; values must be "
                "exactly those of the rows: build the KeyedJaggedTensor from them alone"
            )
        if table[:, mine.real_rows :].any():
            raise ValueError(
                f"field {field.name!r} has values in padding rows [{mine.real_rows}, {mine.rows}); padding rows have "
                "zero lengths: raise actual_batch_size or empty these rows"
            )
        tables.append(table[:, : mine.real_rows].T)
    return tables


def _one_per_row(workloads: Any, rows: int) -> Any:
    count = len(workloads) if hasattr(workloads, "__len__") else None
    if isinstance(workloads, torch.Tensor) and workloads.dim() != 1:
        raise ValueError(
            f"workloads have shape {tuple(workloads.shape)}, batch_size is {rows}; one number per row is needed: "
            f"return shape ({rows},)"
        )
    if count != rows:
        raise ValueError(
            f"workloads has {count} entries, batch_size is {rows}; one per row is needed, padding included: return one "
            "per sample"
        )
    return workloads
