"""The shuffler: workload → gather → plan → exchange, in two phases.

`start_shuffle` takes a rank's next batch, as soon as it is known, and lets the worker thread gather and plan while
earlier batches compute. `finish_shuffle` takes the same batch on its device, right after the copy, and exchanges rows.
`shuffle` is one after the other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import numbers
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from commons.distributed.control import RankMissingError, ShufflerAbortedError
from commons.distributed.group_pool import only_device
from commons.distributed.local_rows import LocalRows
from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import require_process_group, resolve_process_group
from commons.distributed.rank_speeds import StepTimes
from commons.distributed.shuffle_handle import ShuffleHandle
from commons.distributed.shuffle_session import GRACE_SECONDS, ShuffleSession
from commons.distributed.spans import span
from commons.distributed.stats import ShuffleStats
from commons.distributed.window import ShuffledWindow, WindowReader, describe_blocked_loader, shuffle_window
from commons.distributed.worker import DaemonWorker
from commons.perf_model.calibration import CalibratedTask, describe_device, load_calibration
from commons.perf_model.task_estimator import AttentionTask
from commons.sequence_batch.fields import batch_device, batch_rows, real_rows
from commons.sequence_batch.schema import BatchSchema, register_batch_type

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long close() waits for the worker thread, and abort(), which has answered for it.
_CLOSE_SECONDS = 5.0
_ABORT_SECONDS = 1.0

# By group, and window or None.
_Sessions: TypeAlias = "dict[tuple[dist.ProcessGroup | None, int | None], ShuffleSession]"
# What collected shufflers leave behind. Not theirs to close: the last reference to a process group, were it that of a
# daemon thread when the program ends, would abort the program.
_ABANDONED: deque[tuple[list[DaemonWorker], _Sessions]] = deque()


class BaseTaskBalancedBatchShuffler(ABC):
    """Re-deals the rows of a global batch so that all ranks carry equal work.

    A subclass says what a row costs, in one method; everything else is here. All ranks of a group construct the
    shuffler with equal options and call it once per step, in the same order.

    Args:
        options: settings; the defaults balance.
        pg_group: ranks that share a global batch; default megatron-core's data-parallel group where parallel_state is
            initialised, else all ranks. Where torch.distributed is not initialised yet, the group is looked up at first
            use.

    Attributes:
        options: the settings.
        last_stats: stats of the batch that was finished last; None before, and in mode "off".
        num_cap_exceeded: batches in which no plan could keep `max_tokens_per_rank`.
        look_ahead: the iterator of a StagedTrainPipeline that starts this shuffler's shuffles; it is the pipeline's,
            and kept here to live as long as the shuffler.
        drivers: the pipelines that may start more shuffles of it; kept here by the pipelines as well.
        token_feature_names: keys of KeyedJaggedTensors whose values are tokens, for that cap and the stats: a subclass
            may name them, the same on all ranks. None counts all but the labels', and so whatever else comes with a
            row, such as times or drawn negatives.
    """

    token_feature_names: Sequence[str] | None = None

    def __init__(self, options: ShufflerOptions | None = None, pg_group: dist.ProcessGroup | None = None) -> None:
        if options is not None and not isinstance(options, ShufflerOptions):
            raise TypeError(f"options is a {type(options).__name__}; it must be ShufflerOptions: build one")
        if pg_group is not None:
            require_process_group(pg_group)
        self.options = options or ShufflerOptions()
        self.last_stats: ShuffleStats | None = None
        self.num_cap_exceeded = 0
        self.look_ahead: Any = None
        self.drivers: list[Any] = []
        self._pg_group = pg_group
        self._sessions: _Sessions = {}
        self._worker = DaemonWorker(f"evenrank-{type(self).__name__}")
        self._window_worker = DaemonWorker(f"evenrank-windows-{type(self).__name__}")
        self._order = threading.Lock()
        self._step_times = StepTimes()
        self._closed = False
        self._aborted_for: ShufflerAbortedError | None = None
        # Whoever drops a shuffler without close() closes it; without waiting, since that can happen at any line.
        self._when_collected = weakref.finalize(self, _abandon, [self._worker, self._window_worker], self._sessions)
        self._when_collected.atexit = False
        self._calibrated: CalibratedTask | None = None
        self._calibration_error: Exception | None = None
        self._device: torch.device | None = None
        self._calibrated_device: torch.device | None = None
        self.connect()

    def connect(self, pg_group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        """Make the process groups for a data-parallel group now, rather than with its first shuffle.

        All ranks of the group call this together, on the main thread; pipelines do so when they are made. Without
        effect where torch.distributed is not initialised.

        Args:
            pg_group: the group, if not the shuffler's own.
            device: where batches are trained. Not given, and where the group serves the host and CUDA, the shuffler
                learns it from the first batch that it finishes.

        Raises:
            ValueError: this process is no member of the group.
        """
        self._device = device or self._device
        if dist.is_available() and dist.is_initialized():
            self._session(pg_group)

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Cost of every row of a batch.

        Args:
            batch: a host batch where the pipeline has one, else the batch on its device.

        Returns:
            int64 `(batch_size,)` on the device of the batch, not negative; the values of padding rows are ignored.
        """

    def calibrated(self, task: AttentionTask) -> AttentionTask | CalibratedTask:
        """What a subclass computes its workloads with: measured times if `options.calibration` is set, else the task.

        To be called once, by the subclass' constructor after that of this class. A file that cannot be read, or was
        measured on another model, is reported by the first shuffle, on every rank, since the ranks of other machines
        may have a good one; so is one that was measured on another device, as soon as the batches' is known.

        Args:
            task: operations of the model.
        """
        if self.options.calibration is None or self.options.mode == "off":
            return task
        try:
            self._calibrated = CalibratedTask(task, load_calibration(self.options.calibration))
        except (OSError, ValueError) as error:
            self._calibration_error = ValueError(f"calibration {self.options.calibration!r}: {error}")
            return task
        return self._calibrated

    def shuffle(
        self,
        batch: T,
        pg_group: dist.ProcessGroup | None = None,
        return_indices: bool = False,
        return_workloads: bool = False,
    ) -> Any:
        """Start and finish a shuffle at once.

        Args:
            batch: this rank's batch.
            pg_group: the group, if not the shuffler's own.
            return_indices: also return the global ids of the rows of the result.
            return_workloads: also return their workloads.

        Returns:
            The batch, or a tuple of the batch and then int64 CPU tensors `(actual_batch_size,)`: the indices (ascending
            global ids: rows of the ranks before, padding included, plus the row) and the workloads.

        Raises:
            ValueError, TypeError, KeyError: a mistake on any rank, on all of them; a field that requires grad is one.
            RankMissingError: a rank did not take part in time.
        """
        with contextlib.suppress(TypeError, ValueError):  # which are raised on all ranks below
            self._device = batch_device(batch)
        handle = self.start_shuffle(batch, pg_group)
        workloads = self.get_workloads(batch) if return_workloads and self.options.mode == "off" else None
        result = self.finish_shuffle(batch, handle)
        extras: list[torch.Tensor] = []
        if return_indices:
            extras.append(self._indices(handle, batch))
        if return_workloads:
            extras.append(self._workloads(handle, batch, workloads))
        return (result, *extras) if extras else result

    def start_shuffle(
        self,
        batch: Any | None,
        pg_group: dist.ProcessGroup | None = None,
        *,
        error: Exception | None = None,
    ) -> ShuffleHandle:
        """Begin the shuffle of one step; returns at once, the worker thread gathers and plans.

        Args:
            batch: this rank's batch, on the host or on its device; None if it has none.
            pg_group: the group, if not the shuffler's own.
            error: an exception of the dataloader, to be raised on every rank.

        Returns:
            The handle for `finish_shuffle`.

        Raises:
            RuntimeError: the shuffler is closed, or this process was forked from the shuffler's.
        """
        self._require_open()
        session = self._session(pg_group)
        device = self._device or only_device(self._group(pg_group))
        problem = error or self._calibration_problem(device)
        local = LocalRows(device=device, error=problem)
        if batch is not None and problem is None:
            local = self._describe(batch, device)
        names = None if self.token_feature_names is None else tuple(self.token_feature_names)
        calibrated = self._calibrated
        with self._order:  # a pipeline's loading thread may start shuffles too
            step = session.next_step()
            spent = self._step_times.take()
            future = self._worker.submit(lambda: session.prepare(step, [local], calibrated, names, spent), device)
        return ShuffleHandle(step, session, batch, local, future)

    def finish_shuffle(self, batch: T, handle: ShuffleHandle) -> T:
        """Exchange rows according to the plan of `start_shuffle`.

        On CUDA call it on the stream that copied the batch; nothing is read back from the device.

        Args:
            batch: the batch that the shuffle was started with, on its device; `handle.empty_batch()` there if it was
                started with None.
            handle: what `start_shuffle` returned.

        Returns:
            The rows this rank trains, in ascending global id, padding last; `batch_size` is the largest of 1, the
            batch's own and the number of real rows.

        Raises:
            ValueError: a handle used twice or on another batch, or no rank had a batch.
            Exception: what went wrong on any rank.
        """
        if not isinstance(handle, ShuffleHandle):
            raise TypeError(
                f"handle is a {type(handle).__name__}; finish needs what start_shuffle returned: start first"
            )
        self.require_own_process()
        if self._aborted_for is not None:
            raise self._aborted_for
        prepared, schema = handle.prepared(), handle.schema()
        try:
            handle.take(batch)
        except Exception as error:
            handle.session.post_failure(handle.step, error)
            raise
        self._device = batch_device(batch)
        started = time.perf_counter()
        if prepared.exchange is None:
            return _padding_batch(schema, batch) if handle.local.rows == 0 and schema.states_padding else batch
        session = handle.session
        results = session.exchange_rows(handle.step, prepared.exchange, [batch])
        (result,) = session.with_global_batch(prepared, results)
        exchange_ms = (time.perf_counter() - started) * 1e3
        handle.stats = prepared.stats[0].carried_out(handle.wait_ms, exchange_ms)
        self.note([handle.stats])
        return result

    def connect_window(self, window: int, pg_group: dist.ProcessGroup | None = None) -> None:
        """Make the process groups for windows now; as `connect`.

        Args:
            window: most batches of a rank that are planned together.
            pg_group: the group, if not the shuffler's own.
        """
        self._session(pg_group, window)

    def note(self, stats: Sequence[ShuffleStats]) -> None:
        """Take the stats of steps whose rows are where they are trained, at least one."""
        self.last_stats = stats[-1]
        self._count_exceeded_cap(stats[0])

    def report_step_time(
        self, milliseconds: float, stats: ShuffleStats | None, pg_group: dist.ProcessGroup | None = None
    ) -> None:
        """Say how long this rank's own work on a batch took, for `rank_speeds` and the warning of a slow rank.

        What counts is a part of the step that waits for no other rank and takes time by the load: the forward pass of
        the dense layers, say, timed by CUDA events that have passed. The time of a whole step says nothing, since in
        collective training all ranks take as long as the slowest. Another rank learns of it with a later batch; ranks
        may report every step or some, and no plan depends on it.

        Args:
            milliseconds: positive.
            stats: of the batch, such as the pipeline's `last_stats` after it was trained; None has no effect.
            pg_group: the group, if not the shuffler's own.

        Raises:
            ValueError: not a positive number.
        """
        if not (isinstance(milliseconds, numbers.Real) and 0 < milliseconds < math.inf):
            raise ValueError(f"milliseconds is {milliseconds!r}; a step takes a positive number of them: correct it")
        if stats is None:
            return
        group = self._group(pg_group)
        self._step_times.add(float(milliseconds), stats.loads_after[0 if group is None else dist.get_rank(group)])

    def start_window(self, reader: WindowReader, pg_group: dist.ProcessGroup | None = None) -> Future[ShuffledWindow]:
        """Begin a window of host batches; returns at once, a thread of its own reads, plans and exchanges it.

        All ranks of the group call this together, on the main thread; windows are made one after another.

        Args:
            reader: of this rank's batches.
            pg_group: the group, if not the shuffler's own.

        Returns:
            The window, or the error of any rank, on every rank; nothing that was read is lost with it.

        Raises:
            RuntimeError: the shuffler is closed.
        """
        self._require_open()
        session = self._session(pg_group, reader.window)
        device = self._device or only_device(self._group(pg_group))
        problem = self._calibration_problem(device)
        names = None if self.token_feature_names is None else tuple(self.token_feature_names)
        calibrated, step, spent = self._calibrated, session.next_step(), self._step_times.take()

        def describe(batch: Any) -> LocalRows:
            return LocalRows(error=problem) if problem is not None else self._describe(batch, torch.device("cpu"))

        return self._window_worker.submit(
            lambda: shuffle_window(session, step, reader, describe, calibrated, names, spent), device
        )

    def await_window(self, window: Future[ShuffledWindow]) -> None:
        """Wait for a window that nobody will train, whatever comes of it.

        Raises:
            RuntimeError: it is not there ten seconds after the timeout, because the iterator has not given a batch.
        """
        self.require_own_process()
        limit = self.options.timeout + GRACE_SECONDS
        if not concurrent.futures.wait([window], limit).done:
            raise RuntimeError(describe_blocked_loader("close()", limit))

    def realign(self, pg_group: dist.ProcessGroup | None = None, until: Callable[[], bool] = lambda: True) -> None:
        """Bring all ranks to the same step, after threads of theirs have started different numbers of shuffles.

        Ranks that are behind take part in the others' steps without a batch. All ranks call this together.

        Args:
            pg_group: the group, if not the shuffler's own.
            until: says that no thread of this rank starts shuffles any more.
        """
        session = self._session(pg_group)
        while True:
            quiet = until()
            said = session.channel.gather_on_main([session.steps, int(quiet)], session.steps, "realignment")
            furthest = max(steps for steps, _ in said)
            if all(quiet for _, quiet in said) and all(steps == furthest for steps, _ in said):
                return
            while session.steps < furthest:
                self.start_shuffle(None, pg_group)
            time.sleep(0.001)

    @property
    def failure(self) -> RankMissingError | None:
        """Which rank is missing, as soon as the worker thread knows; None while all is well."""
        failures = (session.failure for session in list(self._sessions.values()))
        return self._aborted_for or next((each for each in failures if each is not None), None)

    def drain(self) -> None:
        """Wait until the worker threads are idle.

        Raises:
            RuntimeError: they are not, ten seconds after the timeout: an iterator of windows has not given its batch.
        """
        self.require_own_process()
        limit = self.options.timeout + GRACE_SECONDS
        if self._aborted_for is None and not (self._worker.drain(limit) and self._window_worker.drain(limit)):
            raise RuntimeError(describe_blocked_loader("drain()", limit))

    def abort(self) -> None:
        """Break off whatever waits in this shuffler, on any thread, and close it: for a restart within the process.

        A wait for a shuffle, for a window or for another rank raises ShufflerAbortedError at once, on this rank; the
        others hear of it as of any rank that fails. What is called later raises it too. Takes a second at most, and
        leaves neither a thread nor a connection that waits for a rank; a thread inside the user's iterator ends when
        that returns. May be called on any thread, before the first shuffle, after `close`, and again.

        NCCL's collectives are not this method's to end: `torch.distributed` aborts those.
        """
        self.require_own_process()
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        error = ShufflerAbortedError(
            f"the shuffler of rank {rank} was aborted; whatever waits in it ends, and it cannot be used again: make a "
            "new one when the process groups are there"
        )
        self._aborted_for = self._aborted_for or error
        self._closed = True
        self._when_collected.detach()
        sessions, workers = list(self._sessions.values()), (self._worker, self._window_worker)
        for session in sessions:
            session.abort(self._aborted_for)
        for worker in workers:
            worker.abandon(self._aborted_for)
        deadline = time.monotonic() + _ABORT_SECONDS
        ended = [worker.stop(max(0.0, deadline - time.monotonic())) for worker in workers]
        if all(ended):
            _close_sessions(self._sessions)

    def close(self) -> None:
        """End the worker thread and give back the shuffler's groups; the shuffler cannot be used afterwards."""
        if self._closed:
            return
        self.require_own_process()
        self._closed = True
        self._when_collected.detach()
        # A worker that waits for a rank that will not come is left behind: a daemon, whose groups are not used again.
        limit = min(_CLOSE_SECONDS, self.options.timeout)
        ended = [worker.stop(timeout=limit) for worker in (self._worker, self._window_worker)]
        if all(ended):
            _close_sessions(self._sessions)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a process that was forked from one in which the shuffler has been used."""
        for session in list(self._sessions.values()):
            session.require_own_process()

    def _require_open(self) -> None:
        if self._aborted_for is not None:
            raise self._aborted_for
        if self._closed:
            raise RuntimeError("the shuffler is closed; it cannot start another shuffle: make a new one")

    def _calibration_problem(self, device: torch.device | None) -> Exception | None:
        """Why the workloads are not the measured ones that were asked for, on the device if it is known."""
        if self.options.calibration is None or self.options.mode == "off":
            return None
        if self._calibrated is not None:
            if self._calibration_error is None and device is not None and device != self._calibrated_device:
                self._calibrated_device = device
                try:
                    self._calibrated.calibration.require_match(None, describe_device(device))
                except ValueError as error:
                    self._calibration_error = ValueError(f"calibration {self.options.calibration!r}: {error}")
            return self._calibration_error
        return self._calibration_error or ValueError(
            f"calibration is {self.options.calibration!r}, but {type(self).__name__} does not compute its workloads "
            "with self.calibrated(task); its costs stay as they are: remove the option, or use calibrated() in its "
            "constructor"
        )

    def _group(self, pg_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        return resolve_process_group(pg_group if pg_group is not None else self._pg_group)

    def _session(self, pg_group: dist.ProcessGroup | None, window: int | None = None) -> ShuffleSession:
        self.require_own_process()
        group = self._group(pg_group)
        if (group, window) not in self._sessions:
            _close_abandoned()
            self._sessions[group, window] = ShuffleSession(group, self.options, type(self).__name__, window)
        return self._sessions[group, window]

    def _describe(self, batch: Any, device: torch.device | None) -> LocalRows:
        """What this rank brings; a mistake included, so that all ranks raise it."""
        try:
            register_batch_type(type(batch))
            get_workloads = None if self.options.mode == "off" else self._workloads_of
            with span("workload"):
                return LocalRows.of(batch, device, get_workloads, moves=self.options.mode == "balance")
        except Exception as error:
            return LocalRows(device=device, error=error)

    def _workloads_of(self, batch: Any, schema: BatchSchema) -> Any:
        self._check_token_features(schema)
        try:
            return self.get_workloads(batch)
        except KeyError as error:
            asked = str(error.args[0]) if error.args else ""
            keys = [key for field in schema.jagged for key in field.keys]
            if len(asked.split()) != 1 or asked in keys:
                raise  # a sentence, which says enough, or the key of something else
            # A bare key, as batch.features["item"] raises it, would be all that the ranks get to read.
            raise KeyError(
                f"get_workloads asks for {asked!r}; the batch's keys are {keys}: correct get_workloads"
            ) from error

    def _check_token_features(self, schema: BatchSchema) -> None:
        keys = [key for field in schema.jagged if field.name != "labels" for key in field.keys]
        unknown = [name for name in self.token_feature_names or () if name not in keys]
        if unknown:
            raise KeyError(f"features {unknown} are not among the batch's keys {keys}: correct token_feature_names")

    def _indices(self, handle: ShuffleHandle, batch: Any) -> torch.Tensor:
        prepared = handle.prepared()
        if prepared.plan is None:
            return prepared.rows_before + torch.arange(real_rows(batch))
        rows = prepared.plan.rows_for(handle.session.channel.rank)
        return torch.from_numpy(prepared.plan.gathered.global_id[rows])

    def _workloads(self, handle: ShuffleHandle, batch: Any, own: torch.Tensor | None) -> torch.Tensor:
        plan = handle.prepared().plan
        if plan is None:
            return torch.as_tensor(own)[: real_rows(batch)].cpu()
        return torch.from_numpy(plan.gathered.workloads[plan.rows_for(handle.session.channel.rank)])

    def _count_exceeded_cap(self, stats: ShuffleStats) -> None:
        if not stats.excess_tokens:
            return
        self.num_cap_exceeded += 1
        if self.num_cap_exceeded == 1:
            logger.warning(
                "no plan of step %d keeps max_tokens_per_rank=%s, the best one exceeds it by %d tokens; later ones are "
                "counted in num_cap_exceeded: raise the cap or lower the batch size",
                stats.step,
                self.options.max_tokens_per_rank,
                stats.excess_tokens,
            )


class IdentityBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    """Moves nothing; its use is the agreement on the end of the data, in training without balancing and evaluation."""

    def __init__(self, options: ShufflerOptions | None = None, pg_group: dist.ProcessGroup | None = None) -> None:
        if options is None or isinstance(options, ShufflerOptions):
            options = dataclasses.replace(options or ShufflerOptions(), mode="off")
        super().__init__(options, pg_group)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """One per row."""
        return torch.ones(batch_rows(batch), dtype=torch.int64, device=batch_device(batch))


def _abandon(workers: list[DaemonWorker], sessions: _Sessions) -> None:
    for worker in workers:
        worker.finish()
    _ABANDONED.append((workers, sessions))


def _close_abandoned() -> None:
    """Give back the groups of collected shufflers whose work has ended; called where groups are made."""
    for _ in range(len(_ABANDONED)):
        workers, sessions = _ABANDONED.popleft()
        if all(worker.has_ended for worker in workers):
            _close_sessions(sessions, collected=True)
        else:
            _ABANDONED.append((workers, sessions))


def _close_sessions(sessions: _Sessions, collected: bool = False) -> None:
    for session in sessions.values():
        session.close(collected=collected)


def _padding_batch(schema: BatchSchema, batch: Any) -> Any:
    """One row of padding on the device of a batch without rows: TorchRec's modules need at least one."""
    return schema.empty_batch(1).to(batch_device(batch), non_blocking=True)
