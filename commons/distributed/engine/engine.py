"""ENGINE: the threads, process groups and sessions of a shuffler, used by pipelines and windows."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.channel.absence import RankMissingError, ShufflerAbortedError
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.channel.groups import only_device
from commons.distributed.engine.shuffle_handle import ShuffleHandle, no_stats
from commons.distributed.engine.shuffle_session import GRACE_SECONDS, ShuffleSession
from commons.distributed.engine.window import ShuffledWindow, WindowReader, shuffle_window
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.gather.local_rows import LocalRows, RowCosts
from commons.distributed.gather.rank_speeds import StepTimes
from commons.distributed.process_group import model_parallel_group, resolve_process_group
from commons.distributed.stats import ShuffleStats
from commons.sequence_batch.open_batch import batch_device

if TYPE_CHECKING:
    from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler

logger = logging.getLogger(__name__)

# Seconds that close() and abort() wait for the worker threads.
_CLOSE_SECONDS = 5.0
_ABORT_SECONDS = 1.0
# Least seconds that drain() waits for a thread, which may be idle, after the time was spent on the other one.
_LAST_LOOK_SECONDS = 1.0
_CLOSED = "the shuffler is closed; it cannot start or finish a shuffle any more: make a new one"

# A group, and a window's size or None.
_Key: TypeAlias = "tuple[dist.ProcessGroup | None, int | None]"
_Channels: TypeAlias = "dict[_Key, ControlChannel]"
# Workers and channels of shufflers that were garbage-collected, or closed while a worker waited, kept until the workers
# end: a daemon thread must not hold the last reference to a process group, because the interpreter would abort at exit.
_ABANDONED: deque[tuple[list[DaemonWorker], _Channels]] = deque()


@dataclass(eq=False)
class Starter:
    """A pipeline, or the iterator of a staged pipeline, that starts shuffles of an engine.

    The engine keeps a reference to it, because garbage collection is not synchronised across ranks, and the checks of
    `ShuffleEngine.begin` must have the same result on all ranks.
    """

    name: str  # of the pipeline's class, for messages
    on_thread: bool = False  # whether it starts shuffles on its own thread, in no fixed order with the main thread
    in_flight: bool = False  # whether it may start more shuffles; equal on every rank
    last: Any = None  # of a staged pipeline, the last iterator; the next one returns its remaining batches first


class ShuffleEngine:
    """Runs the shuffles of one shuffler, to which it holds no strong reference, over one group or several.

    Attributes:
        costs: computes workloads and groups of rows with the shuffler's methods.
        step_times: this rank's reported times, and the speeds of all ranks.
        starters: pipelines that may start shuffles.
        read_stats: returns the stats of the last finished batch.
        num_cap_exceeded: number of batches for which no plan keeps the token cap.
    """

    def __init__(
        self, shuffler: BaseTaskBalancedBatchShuffler, pg_group: dist.ProcessGroup | None, has_groups: bool
    ) -> None:
        self.costs = RowCosts(shuffler, has_groups)
        self.step_times = StepTimes()
        self.starters: list[Starter] = []
        self.read_stats: Callable[[], ShuffleStats | None] = no_stats
        self.num_cap_exceeded = 0
        self._options, self._pg_group = shuffler.options, pg_group
        self._channels: _Channels = {}
        self._sessions: dict[_Key, ShuffleSession] = {}
        name = type(shuffler).__name__
        self._worker, self._window_worker = DaemonWorker(f"evenrank-{name}"), DaemonWorker(f"evenrank-windows-{name}")
        self._order = threading.Lock()
        self._device: torch.device | None = None
        self._is_closed = False
        self._aborted_for: ShufflerAbortedError | None = None
        # For a shuffler that is garbage-collected without close(); must not wait, because it may run at any line.
        self._when_collected = weakref.finalize(self, _abandon, [self._worker, self._window_worker], self._channels)
        self._when_collected.atexit = False

    def connect(
        self,
        pg_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        window: int | None = None,
    ) -> None:
        """Make the process groups for a data-parallel group now, not with its first shuffle.

        All ranks of the group call this together, on the main thread; pipelines do so when they are made. Without
        effect if torch.distributed is not initialised.

        Args:
            pg_group: the group, if not the shuffler's own.
            device: where batches are trained. None: if the group supports both host and CUDA, the device of the first
                finished batch.
            window: most batches of a rank that are planned together; None to plan each batch separately.

        Raises:
            ValueError: this process is not a member of the group.
            RuntimeError: the shuffler is closed.
        """
        self._require_open()
        self._device = device or self._device
        if window is not None or (dist.is_available() and dist.is_initialized()):
            self.require_own_process()
            group = self._group(pg_group)
            self._channel(group, window)
            self._peers(group, window)

    def begin(self, starter: Starter) -> None:
        """Register a pipeline that starts shuffles from now on.

        Ranks number shuffles in the order in which they start. Two pipelines on the main thread have the same order on
        all ranks; a loading thread runs at a different pace on each rank.

        Raises:
            ValueError: another pipeline has not ended, and one of the two starts shuffles on its own thread.
        """
        others = [each for each in self.starters if each is not starter and (each.in_flight or each.last)]
        for other in others:
            if other.in_flight and (other.on_thread or starter.on_thread):
                raise ValueError(
                    f"this shuffler already drives a {other.name} whose data has not ended, and cannot drive a "
                    f"{starter.name} beside it: ranks would start their shuffles in different orders; give each "
                    "pipeline a shuffler of its own, or call reset() on the other one first"
                )
        self.starters = [*others, starter]

    def look_at(self, batch: Any) -> None:
        """Set the device where batches are trained to that of a batch."""
        with contextlib.suppress(TypeError, ValueError):  # the shuffle raises them, on all ranks
            self._device = batch_device(batch)

    def start(
        self, batch: Any | None, pg_group: dist.ProcessGroup | None = None, error: Exception | None = None
    ) -> ShuffleHandle:
        """Describe a batch, and submit its gather and plan to the worker thread; see the shuffler's `start_shuffle`."""
        self._require_open()
        session = self._session(pg_group)
        device = self._device or session.only_device
        local = self.costs.describe(batch, error or self.costs.problem(device))
        with self._order:  # a pipeline's loading thread may start shuffles too
            step, resets = session.next_step(), session.resets
            future = self._worker.submit(lambda: session.prepare(step, [local], device, resets), device)
        return ShuffleHandle(step, session, batch, local, future)

    def finish(self, batch: Any, handle: ShuffleHandle) -> Any:
        """Exchange the rows of a batch; see `BaseTaskBalancedBatchShuffler.finish_shuffle`."""
        self.require_own_process()
        self._require_open()
        prepared, session = handle.prepared(), handle.session
        handle.schema()  # raises if the data has ended, on all ranks
        with handle.failures_posted():
            if session not in self._sessions.values():
                raise ValueError(
                    f"the handle of step {handle.step} belongs to another shuffler, which has its groups and stats: "
                    "finish a shuffle with the shuffler that started it"
                )
            handle.take(batch, balances=self._options.mode == "balance")
        self._device = batch_device(batch)
        started = time.perf_counter()
        (result,) = session.exchange_rows(handle.step, prepared, [batch], pins=False)
        if prepared.plan is not None:
            handle.carried_out(prepared, (time.perf_counter() - started) * 1e3)
            self.note(handle.read_stats, prepared.plan.excess_tokens)
        return result

    def note(self, read_stats: Callable[[], ShuffleStats | None], excess_tokens: int) -> None:
        """Record the stats of a finished shuffle, and warn of the first plan that exceeds the token cap.

        Of a window, `read_stats` returns the stats of its last step, and the warning names its first one.
        """
        self.read_stats = read_stats
        if not excess_tokens or self._options.mode != "balance":  # "observe" does not carry out its plan
            return
        self.num_cap_exceeded += 1
        if self.num_cap_exceeded == 1 and (last := read_stats()) is not None:
            logger.warning(
                "no plan found for step %d, counted from 0, keeps max_tokens_per_rank=%s, the best one exceeds it by "
                "%d tokens; later ones are counted in num_cap_exceeded: raise the cap or lower the batch size",
                last.step + 1 - last.window,
                self._options.max_tokens_per_rank,
                excess_tokens,
            )

    def start_window(self, reader: WindowReader, pg_group: dist.ProcessGroup | None = None) -> Future[ShuffledWindow]:
        """Start a window of host batches and return at once; the thread for windows reads, plans and exchanges it.

        All ranks of the group call this together, on the main thread; windows are made one after another.

        Returns:
            A future of the window; or of an error of any rank, on every rank, with which no read batch is lost.

        Raises:
            RuntimeError: the shuffler is closed.
        """
        self._require_open()
        session, shuffler = self._session(pg_group, reader.window), self.costs.shuffler
        device = self._device or session.only_device
        problem, step = self.costs.problem(device), session.next_step()

        def describe(batch: Any) -> LocalRows:
            # The job keeps the shuffler alive.
            return shuffler.engine.costs.describe(batch, problem)

        return self._window_worker.submit(lambda: shuffle_window(session, step, reader, describe), device)

    def await_window(self, window: Future[ShuffledWindow]) -> None:
        """Wait for a window that will not be trained, and ignore its result or error; raises as `drain`."""
        self.require_own_process()
        if not concurrent.futures.wait([window], self._longest_read).done:
            raise self._blocked("close()", _own_rank())

    def realign(self, pg_group: dist.ProcessGroup | None = None, until: Callable[[], bool] = lambda: True) -> None:
        """Bring all ranks to the same step, after their loading threads have started different numbers of shuffles.

        Ranks that are behind start the missing shuffles without a batch. All ranks call this together. `until` returns
        whether this rank's loading threads have stopped starting shuffles.

        Raises:
            RuntimeError: a loading thread still reads ten seconds after the timeout; on all ranks.
        """
        session, deadline = self._session(pg_group), time.monotonic() + self._longest_read
        while True:
            busy = not until()
            own = np.array([session.steps, busy, busy and time.monotonic() > deadline], dtype=np.int64)
            states = session.channel.gather(own, session.steps, "realignment", on_main=True)
            steps, reads, is_late = states.T
            if is_late.any():
                raise self._blocked("reset()", session.channel.members[is_late.argmax()])
            furthest = steps.max()
            if not reads.any() and (steps == furthest).all():
                return
            while session.steps < furthest:
                self.start(None, pg_group)
            time.sleep(0.001)

    @property
    def failure(self) -> RankMissingError | None:
        """See `BaseTaskBalancedBatchShuffler.failure`."""
        failures = (channel.failure for channel in list(self._channels.values()))
        return self._aborted_for or next((each for each in failures if each is not None), None)

    def drain(self) -> None:
        """See `BaseTaskBalancedBatchShuffler.drain`."""
        self.require_own_process()
        deadline = time.monotonic() + self._longest_read
        for worker in (self._worker, self._window_worker):
            left = max(_LAST_LOOK_SECONDS, deadline - time.monotonic())
            if not worker.drain(left):
                raise self._blocked("drain()", _own_rank())

    def abort(self) -> None:
        """See `BaseTaskBalancedBatchShuffler.abort`."""
        self.require_own_process()
        self._aborted_for = self._aborted_for or ShufflerAbortedError(
            f"the shuffler of rank {_own_rank()} was aborted; calls that wait in it raise this, and it cannot be used "
            "again: make a new one after you have made new process groups"
        )
        for channel in list(self._channels.values()):
            channel.abort(self._aborted_for)
        for worker in (self._worker, self._window_worker):
            worker.abandon(self._aborted_for)
        self._stop(_ABORT_SECONDS)

    def close(self) -> None:
        """End the worker threads and release the groups."""
        if not self._is_closed:
            self.require_own_process()
            self._stop(min(_CLOSE_SECONDS, self._options.timeout))

    def report_step_time(self, milliseconds: float, stats: ShuffleStats, pg_group: dist.ProcessGroup | None) -> None:
        """See `BaseTaskBalancedBatchShuffler.report_step_time`."""
        group = self._group(pg_group)
        ranks, known = 1 if group is None else dist.get_world_size(group), len(stats.loads_after)
        if known != ranks:
            raise ValueError(
                f"the stats have the loads of {known} ranks, and pg_group has {ranks} ranks; a time belongs to this "
                "rank's load in the group of its shuffle: pass that group as pg_group"
            )
        self.step_times.add(milliseconds, stats.loads_after[0 if group is None else dist.get_rank(group)])

    @property
    def _longest_read(self) -> float:
        """Seconds after which an iterator that a thread reads counts as blocked."""
        return self._options.timeout + GRACE_SECONDS

    def _blocked(self, call: str, rank: int) -> RuntimeError:
        """The error if a thread that reads has not ended in time, which only the user's iterator can cause."""
        return RuntimeError(
            f"{call} has waited {self._longest_read:g} s for the iterator of rank {rank}, whose next() has not "
            "returned; the thread that reads it cannot be ended meanwhile: fix the loader, or end the program"
        )

    def _require_open(self) -> None:
        """Raise RuntimeError once the shuffler is closed or aborted."""
        if self._aborted_for is not None:
            raise self._aborted_for
        if self._is_closed:
            raise RuntimeError(_CLOSED)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a process that was forked from one in which the shuffler has been used."""
        for channel in list(self._channels.values()):
            channel.require_own_process()

    def _stop(self, seconds: float) -> None:
        self._is_closed = True
        self._when_collected.detach()
        deadline = time.monotonic() + seconds
        workers = [self._worker, self._window_worker]
        for worker in workers:  # first: a loading thread may be about to submit a job, which would start a thread again
            worker.refuse(self._aborted_for or RuntimeError(_CLOSED))
        ended = [worker.stop(max(0.0, deadline - time.monotonic())) for worker in workers]
        if all(ended):
            _close_channels(self._channels)
        else:  # a worker still waits for a late or missing rank
            _ABANDONED.append((workers, self._channels))

    def _channel(
        self, group: dist.ProcessGroup | None, window: int | None, *, of_peers: bool = False
    ) -> ControlChannel:
        if (group, window) not in self._channels:
            _close_abandoned()
            self._channels[group, window] = ControlChannel(
                group,
                # Half the timeout: a missing peer must be reported before the data-parallel ranks' wait times out.
                self._options.timeout / (2 if of_peers else 1),
                moves_rows=self._options.mode == "balance" and window is None and not of_peers,
                pairwise=window is not None and not of_peers,
            )
        return self._channels[group, window]

    def _peers(self, group: dist.ProcessGroup | None, window: int | None) -> ControlChannel | None:
        """The channel of this rank's model-parallel peers; None without peers, and without measured numbers.

        The peers are in different data-parallel groups, which plan separately and must make the same plan. They gather
        the same batches, but the times that they have measured or read from a file may differ.
        """
        options, peers = self._options, model_parallel_group()
        measures = options.mode != "off" and (options.calibration is not None or options.speeds == "measured")
        return self._channel(peers, window, of_peers=True) if measures and peers not in (None, group) else None

    def _session(self, pg_group: dist.ProcessGroup | None, window: int | None = None) -> ShuffleSession:
        """The session of a group, made at the first shuffle, when all settings are final."""
        self.require_own_process()
        key = self._group(pg_group), window
        if key not in self._sessions:
            channel, peers, device = self._channel(*key), self._peers(*key), only_device(key[0])
            self._sessions[key] = ShuffleSession(channel, peers, self.costs, self.step_times, device, window)
        return self._sessions[key]

    def _group(self, pg_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        return resolve_process_group(pg_group if pg_group is not None else self._pg_group)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _abandon(workers: list[DaemonWorker], channels: _Channels) -> None:
    for worker in workers:
        worker.finish()
    _ABANDONED.append((workers, channels))


def _close_abandoned() -> None:
    """Release the groups of abandoned shufflers whose workers have ended; called before groups are made."""
    for _ in range(len(_ABANDONED)):
        workers, channels = _ABANDONED.popleft()
        if all(worker.has_ended for worker in workers):
            _close_channels(channels)
        else:
            _ABANDONED.append((workers, channels))


def _close_channels(channels: _Channels) -> None:
    """Return the groups to the pool, at different times on the ranks, because workers do not end at the same time."""
    for channel in channels.values():
        channel.close(ordered=False)
