"""GATHER and PLAN: the worker thread's steps for one batch, or a window, over one data-parallel group.

Input: the description of this rank's batches, or no batch, or an error. Output: the plan of the global batch with this
rank's exchange, or that the data has ended on all ranks, or the error of any rank, raised on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from commons.distributed.channel.absence import RankMissingError, ShufflerAbortedError
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.engine.shuffle_handle import EXCHANGE, PreparedShuffle
from commons.distributed.errors import capture_error
from commons.distributed.exchange import verification
from commons.distributed.exchange.payload import PayloadLayout
from commons.distributed.exchange.row_exchange import ExchangeOrder, RowExchange
from commons.distributed.gather.local_rows import LocalRows, RowCosts, counted_keys, message_of
from commons.distributed.gather.peers import Peers
from commons.distributed.gather.rank_speeds import RankSpeeds, StepTimes
from commons.distributed.gather.schema_agreement import agree_on_schema
from commons.distributed.global_batch import attach_global_batches
from commons.distributed.process_group import model_parallel_group
from commons.distributed.spans import span
from commons.distributed.stats import stats_of_plan
from commons.perf_model.partitioner.core import address
from commons.perf_model.shuffle_plan import BATCH_NUMBERS, MESSAGE_NUMBERS, ShufflePlan, ShufflePlanner
from commons.perf_model.speed_control import LOOK_STEPS
from commons.sequence_batch.schema import BatchSchema

logger = logging.getLogger(__name__)

_NO_WORDS = np.zeros(0, dtype=np.int64)
# Seconds beyond the timeout that a step of the worker thread may take, in which ranks find out who is missing.
GRACE_SECONDS = 10.0


class ShuffleSession:
    """The shuffler's state for one group: its channel, the agreed layout and the size of the gather's buffer.

    `prepare` runs on the worker thread, once per step and in the same order on every rank.

    Args:
        channel: the ranks of the group.
        peers: the model-parallel peers; None if there are none, or nothing is measured.
        costs: has the shuffler and its calibration.
        step_times: this rank's reported times, which are sent with the comparison of plans, and the ranks' speeds.
        only_device: the device of all batches of the group; None if it depends on the batch.
        window: most batches of a rank that are planned together; the worker thread exchanges their rows on the host,
            over the group that it gathers with. None: one batch at a time, whose rows have a group of their own.
    """

    def __init__(
        self,
        channel: ControlChannel,
        peers: ControlChannel | None,
        costs: RowCosts,
        step_times: StepTimes,
        only_device: torch.device | None,
        window: int | None,
    ) -> None:
        self.channel, self.only_device, self._window, self.steps = channel, only_device, window, 0
        self.resets = 0  # how often a pipeline has dropped shuffles that it had started; equal on all ranks
        self._options = options = costs.shuffler.options
        # Most seconds that a step of the worker thread takes, whichever ranks are missing.
        self.longest_wait = 2 * options.timeout + GRACE_SECONDS
        self._calibrated, self._token_features = costs.calibrated, costs.token_features
        self._has_groups = costs.has_groups
        self._rows_group = channel.payload_group if window is None else channel.control_group
        lacks_all_to_all = window is None and not channel.has_all_to_all
        self._all_gather = options.transport == "all_gather" or (options.transport == "auto" and lacks_all_to_all)
        self._members, self._order = np.array(channel.members), ExchangeOrder(channel)
        self._header = MESSAGE_NUMBERS + BATCH_NUMBERS * (window or 1)
        self._capacity = 0
        self._num_planned = 0  # batches of a rank that were planned; a step in which the data ended has none
        self._layout: PayloadLayout | None = None
        self._planner: ShufflePlanner | None = None
        self._alike: BatchSchema | None = None  # schema of this rank's last batch, found equal to the agreed one
        self._counted = _NO_WORDS  # the keys that count as tokens
        calibration = None if costs.calibrated is None else dataclasses.asdict(costs.calibrated.calibration)
        unread = None if calibration else costs.problem(None)
        self._peers = None if peers is None else Peers(peers, calibration, unread)
        # What must be equal on all ranks.
        self._settings = {
            "options": dataclasses.asdict(options),
            "calibrations": calibration,
            "shuffler": type(costs.shuffler).__name__,
            "window": window or 1,
            "token_features": None if self._token_features is None else list(self._token_features),
            "get_groups overridden": self._has_groups,
        }
        self._speeds = RankSpeeds(channel.members, channel.rank, step_times, options.speeds)
        self._pins = False  # whether index arrays are pinned, because batches are trained on CUDA
        self._has_warned_of_end = False

    def next_step(self) -> int:
        """The number of the next step; the caller submits the step before another caller gets a number."""
        step = self.steps
        self.steps += 1
        return step

    def prepare(
        self, step: int, local: Sequence[LocalRows], device: torch.device | None = None, resets: int = 0
    ) -> PreparedShuffle:
        """Gather, plan, compare plans and build this rank's exchange.

        Args:
            step: number of the step, or of the window.
            local: descriptions of this rank's batches in order; without a batch, a single entry without a schema.
            device: where the batch is trained; None in a window, and if that is not known yet.
            resets: this rank's `resets` when the step was started; ranks with different ones must not exchange rows.

        Raises:
            RankMissingError: a rank did not join in time; every later call raises it too.
            ValueError, TypeError, KeyError, RuntimeError: an error of any rank, raised on all.
        """
        if self.channel.failure is not None:
            raise self.channel.failure
        self._pins = device is not None and device.type == "cuda" and self.channel.world_size > 1
        try:
            prepared = self._prepare(step, local, resets)
        except Exception as error:
            # The main thread may notice it much later, or never, if it waits for model-parallel peers that train on.
            is_urgent = isinstance(error, RankMissingError) or model_parallel_group() is not None
            if is_urgent and not isinstance(error, ShufflerAbortedError):
                logger.error("rank %d: %s", self.channel.members[self.channel.rank], error)
            raise
        if self._peers is not None and prepared.schema is not None:
            self._peers.planned.append(step)
        return prepared

    def _prepare(self, step: int, local: Sequence[LocalRows], resets: int) -> PreparedShuffle:
        started = time.perf_counter()
        speeds, peers, error = self._speeds, self._peers, local[0].error
        if step % LOOK_STEPS == 0:  # before all that can fail in one data-parallel group alone
            settles = step == 0 or self._options.speeds == "measured"
            speeds.own = peers.settle(step, speeds.found) if peers and settles else speeds.found
        if peers is not None and peers.problem is not None:
            local = [dataclasses.replace(local[0], error=error or peers.problem), *local[1:]]
        layout = self._layout = self._layout or self._agree(step, local)
        if layout is None:
            return PreparedShuffle()
        while True:
            with span("gather"):
                messages = self._gather(step, layout.schema, local, resets)
            with span("plan"):
                prepared = self._plan(step, local, layout, messages, (time.perf_counter() - started) * 1e3)
            if prepared is not None:
                return prepared

    def _plan(
        self, step: int, local: Sequence[LocalRows], layout: PayloadLayout, messages: np.ndarray, gather_ms: float
    ) -> PreparedShuffle | None:
        """Plan from the gathered messages; None if a message was cut off, so that all ranks must gather again."""
        started, schema, channel, options = time.perf_counter(), layout.schema, self.channel, self._options
        plan, exchange, error = self._try_plan(messages, layout)
        other_steps, steps, most_words = self._header_of(messages, error)
        if most_words > self._capacity:
            self._capacity = most_words + most_words // 4  # a margin, so that later batches seldom need more
            return None
        if other_steps:
            raise RuntimeError(
                f"ranks are at steps {messages[:, 0].tolist()} ({channel.description}); every rank must call the "
                "shuffler once per step, in the same order"
            )
        if not steps or self._ends_early(schema, messages):
            return PreparedShuffle()
        if options.mode == "off":
            rows_before = int(messages[: channel.rank, MESSAGE_NUMBERS : self._header : BATCH_NUMBERS].sum())
            return PreparedShuffle(schema, channel.rank, rows_before, steps)
        reports = self._require_same_plan(step, steps, plan, exchange, local, error)
        assert plan is not None and exchange is not None  # noqa: S101  the comparison raised the error
        self._require_rows_everywhere(schema, plan)
        if exchange.moves:
            self._order.plan(step)
        number, self._num_planned = self._num_planned, self._num_planned + steps
        describe = functools.partial(
            stats_of_plan,
            plan,
            number,
            gather_ms=gather_ms,
            plan_ms=(time.perf_counter() - started) * 1e3,
            bytes_sent=exchange.bytes_sent,
            ranks_per_node=options.ranks_per_node,
            units_per_ms=None if self._calibrated is None else self._calibrated.units_per_ms,
            lookups=reports[:, 3:],
            speeds=self._speeds.look(number, reports),
        )
        return PreparedShuffle(schema, channel.rank, 0, steps, plan, exchange, describe)

    def exchange_rows(self, step: int, prepared: PreparedShuffle, batches: Sequence[Any], *, pins: bool) -> list[Any]:
        """Exchange the rows of this rank's batches; on a device, on the stream that copied them.

        `batches` are at least one, which may be empty. `pins`: whether to put new batches into pinned memory.

        Returns:
            The batches that this rank trains, one for each step, see `attach_global_batches`. In mode "off", its own
            batches, with at least one row each if they can be padded, because TorchRec's modules need one.

        Raises:
            RankMissingError: a rank did not join in time, or raised an error (quoted); every later call raises it too.
            RuntimeError: with `verify`, rows have changed on their way, or a checksum could not be computed.
        """
        schema, exchange = prepared.schema, prepared.exchange
        assert schema is not None  # noqa: S101  some rank has a batch
        if exchange is None:
            given = [*batches, *[schema.empty_batch()] * (prepared.steps - len(batches))]
            return [
                schema.padded(each) if schema.states_padding and not schema.rows_of(each) else each for each in given
            ]
        layout, verify = exchange.layout, self._options.verify and self._options.mode == "balance"
        before, unknown = capture_error(lambda: verification.checksums(batches, layout)) if verify else (None, None)
        with self.channel.failures_posted(step, EXCHANGE):  # such as too little memory on this rank
            results = list(batches)
            if exchange.moves or exchange.changes:
                with span("exchange"):
                    buffer, sent, indices = exchange.pack(batches)
                    if exchange.moves:
                        self.send_rows(step, exchange, buffer, sent)
                with span("select"):
                    results = [
                        exchange.unpack(batches[min(index, len(batches) - 1)], buffer, indices, index)
                        if changes
                        else batches[index]
                        for index, (changes, *_) in enumerate(exchange.results)
                    ]
        if verify:
            verification.require_same_rows(
                self.channel, step, layout, before, results, unknown, on_main=self._window is None
            )
        with self.channel.failures_posted(step, EXCHANGE):
            if pins:
                results = [each if any(each is own for own in batches) else each.pin_memory() for each in results]
            # Last, because a user's own pin_memory may make a batch without the attachment.
            return attach_global_batches(results, prepared, self.channel.members)

    def send_rows(self, step: int, exchange: RowExchange, buffer: Sequence[torch.Tensor], sent: torch.Tensor) -> None:
        """Run the payload collective; waits for host tensors, while on a device only the stream waits."""
        assert self._rows_group is not None  # noqa: S101  rows move between at least two ranks
        self._order.begin(step)
        with self.channel.collective(step, EXCHANGE):
            work = exchange.send_rows(buffer, sent, self._rows_group, async_op=sent.device.type == "cpu")
            if work is not None:
                self.channel.wait(work, step, EXCHANGE)

    def _agree(self, step: int, local: Sequence[LocalRows]) -> PayloadLayout | None:
        """Compare settings and schemas of all ranks; the layout of their batches, or None if no rank has a batch."""
        counted = counted_keys(local[0].schema, self._token_features) if local[0].schema else _NO_WORDS
        own, _ = capture_error(lambda: [each.table(counted) for each in local])  # `_gather` raises their error
        schema, most_words = agree_on_schema(self.channel, step, self._settings, local, own or ())
        self._capacity = most_words + most_words // 4
        if schema is None:
            return None
        if self._window is not None and not schema.states_padding:
            raise ValueError(
                f"window is {self._window}, and {schema.type_name} cannot state padding; the batches of a window are "
                "padded if ranks have different numbers of rows: give it a field actual_batch_size that its to() "
                "keeps, derive it from BaseBatch, or use no window"
            )
        self._counted = counted_keys(schema, self._token_features)
        return PayloadLayout.of(schema)

    def _make_planner(self, layout: PayloadLayout) -> ShufflePlanner:
        """The planner for every batch of the run."""

        def allocate(size: int) -> tuple[torch.Tensor, int]:
            if self._pins:
                pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
                return pinned, pinned.data_ptr()
            indices = np.empty(size, dtype=np.int64)  # not torch.empty, which releases the GIL
            return torch.from_numpy(indices), address(indices)

        return ShufflePlanner(
            self.channel.world_size,
            self._window or 1,
            **self._options.plan_arguments(),
            carry_out=self._options.mode == "balance",
            pads=layout.schema.states_padding,
            has_plan=self._options.mode != "off",
            parts=layout.table,
            rank=self.channel.rank,
            all_gather=self._all_gather,
            allocate=allocate,
            num_keys=layout.schema.num_keys,
            num_kept=len(layout.schema.host_fields) + self._has_groups,
            has_groups=self._has_groups,
        )

    def _try_plan(
        self, messages: np.ndarray, layout: PayloadLayout
    ) -> tuple[ShufflePlan | None, RowExchange | None, Exception | None]:
        """The plan and this rank's exchange, or an error, such as too little memory."""
        try:
            planner = self._planner = self._planner or self._make_planner(layout)
            plan = planner.plan_messages(messages, self._capacity, self._speeds.to_plan_with)
            return plan, None if plan is None else RowExchange.of(planner, layout), None
        except Exception as error:
            return None, None, error

    def _header_of(self, messages: np.ndarray, error: Exception | None) -> tuple[int, int, int]:
        """Whether ranks are at different steps, the most batches of a rank, and the most words of a rank.

        They depend only on the messages, which are equal on all ranks, so that all ranks gather again or none does.
        """
        if error is None and self._planner is not None:
            head = self._planner.head
            return head["other_steps"], head["steps"], head["most_words"]
        words = messages[:, MESSAGE_NUMBERS + 2 : self._header : BATCH_NUMBERS].sum(axis=1)
        return bool((messages[:, 0] != messages[0, 0]).any()), int(messages[:, 1].max()), int(words.max())

    def _gather(self, step: int, schema: BatchSchema, local: Sequence[LocalRows], resets: int) -> np.ndarray:
        """Gather the message of every rank, int64 `(world_size, n)`: header and rows, cut off at the capacity."""
        tables = [self._own_table(schema, each) for each in local]
        error = next((each.error for each in local if each.error is not None), None)
        message = message_of(step, local, tables, self._header, self._capacity)
        call = f"gather after {resets} reset()" if resets else "gather"
        return self.channel.agree(call, {}, error, message, step)

    def _own_table(self, agreed: BatchSchema, local: LocalRows) -> np.ndarray:
        """The packed rows of a batch, see `LocalRows.table`; a mistake in it becomes `LocalRows.error`."""
        try:
            if local.schema is not self._alike and local.schema is not None and local.schema != agreed:
                raise ValueError(
                    f"this batch differs from the first: {'; '.join(agreed.differences(local.schema))}; type, "
                    "structure, keys, dtypes and plain values must stay the same: make every batch alike, or turn "
                    f"values that depend on the rows into properties{agreed.way_out(local.schema)}"
                )
            self._alike = local.schema
            return local.table(self._counted)
        except Exception as error:
            local.error = local.error or error
            return _NO_WORDS

    def _require_rows_everywhere(self, schema: BatchSchema, plan: ShufflePlan) -> None:
        """Raise ValueError, on all ranks, if one would train no row of a batch that cannot state padding."""
        if self._options.mode != "balance" or schema.states_padding:
            return
        without = self._members[plan.result_real_rows == 0].tolist()
        if without:
            raise ValueError(
                f"ranks {without} would train no row, and {schema.type_name} cannot state padding; such a "
                "batch needs at least one row on every rank: give it a field actual_batch_size that its to() "
                "keeps, or derive it from BaseBatch"
            )

    def _require_same_plan(
        self,
        step: int,
        steps: int,
        plan: ShufflePlan | None,
        exchange: RowExchange | None,
        local: Sequence[LocalRows],
        error: Exception | None,
    ) -> np.ndarray:
        """Raise, on all ranks, if a rank has failed or the ranks did not make the same plan.

        Returns:
            int64 `(world_size, 3 + 2 · steps)`, further numbers of each rank for the stats: nanoseconds and load of its
            own work on an earlier batch, its speed, and the embedding lookups of each step before and after.
        """
        before = [each.lookups for each in local] + [0] * (steps - len(local))
        after = [0] * steps if exchange is None else exchange.lookups
        numbers = [0 if plan is None else plan.digest(), *self._speeds.report(), *before, *after]
        table = self.channel.agree("comparison of plans", {}, error, numbers, step)
        digests = table[:, 0]
        if (digests == digests[0]).all():
            return table[:, 1:]
        values, counts = np.unique(digests, return_counts=True)
        most = digests[0] if (digests == digests[0]).sum() == counts.max() else values[counts.argmax()]
        others = self._members[digests != most].tolist()
        raise RuntimeError(
            f"ranks {others} made another plan than the rest of {self.channel.description} at step {step}; a plan must "
            "be a pure function of what was gathered: use the same evenrank version and settings on every rank"
        )

    def _ends_early(self, schema: BatchSchema, messages: np.ndarray) -> bool:
        """Whether the data ends on all ranks: one has none, batches cannot be empty, and no rows move to it."""
        if self._options.mode == "balance" or schema.states_padding:
            return False
        dry = self._members[messages[:, 1] == 0].tolist()
        if dry and self.channel.rank == 0 and not self._has_warned_of_end:
            self._has_warned_of_end = True
            logger.warning(
                "the data of ranks %s ended at step %d, and %s cannot state padding, so that the data ends on all "
                "ranks: the %d rows that the others have read, and any later ones, are not trained; to train them, use "
                "mode 'balance', or a batch with a field actual_batch_size",
                dry,
                messages[0, 0],
                schema.type_name,
                messages[:, MESSAGE_NUMBERS + 1 : self._header : BATCH_NUMBERS].sum(),
            )
        return bool(dry)
