"""SIGTERM: all ranks stop after the same step, so that they can save a checkpoint together."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.distributed.channel.agree import ControlChannel
from commons.distributed.options import ShufflerOptions

# Name of the collective in messages.
_COLLECTIVE = "agreement to stop"


class _StopChannel(ControlChannel):
    remedy = "every rank must reach the end of every step: see the log there, or raise trainer.shuffler.timeout"


class StopSignal:
    """Catches SIGTERM and agrees on it; a context manager around the steps of a run, entered by all ranks.

    A cluster's signal reaches ranks at different times, or only some of them. After every step the ranks MAX-reduce
    whether they have received it, in the background over their own gloo group, and read the result one step later.

    Args:
        enabled: False leaves the signal's handler unchanged. Python handles signals only on the main thread: a run on
            another thread, as in Ray Train, receives none, and stops with the ranks that do.
        timeout: seconds after which a rank that is missing from the collective is reported.
    """

    def __init__(self, enabled: bool = True, timeout: float = ShufflerOptions.timeout) -> None:
        self.agreed = False  # a rank had received the signal one step earlier; equal on all ranks after every step
        self._handling = sigterm_calls(self._handle) if enabled else contextlib.nullcontext()
        self._received = False
        self._num_steps = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        # Pairwise: with many ranks too, control_group is one group over all ranks.
        self._channel = _StopChannel(dist.group.WORLD, timeout, moves_rows=False, pairwise=True) if enabled else None

    def __enter__(self) -> StopSignal:
        self._handling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handling.__exit__(kind, error, trace)
        if kind is None:
            self._take_result()
            if self._channel is not None:
                self._channel.close()

    def after_step(self) -> None:
        """Read the result of the step before and start the next reduction; called on all ranks.

        Raises:
            RankMissingError: a rank did not join the reduction in time; the error names the rank.
        """
        if self._channel is None:
            return
        self._take_result()
        received, group = torch.tensor([int(self._received)], device="cpu"), self._channel.control_group
        if group is None:  # a single rank
            self.agreed = self._received
            return
        with self._channel.collective(self._num_steps, _COLLECTIVE):
            self._pending = received, dist.all_reduce(received, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def agree(self) -> None:
        """Read what ranks have received until now, after work that took long; called as `after_step`."""
        self.after_step()
        self._take_result()

    def _take_result(self) -> None:
        if self._pending is None or self._channel is None:
            return
        received, work = self._pending
        self._channel.wait(work, self._num_steps, _COLLECTIVE)
        self.agreed = self.agreed or bool(received)
        self._num_steps += 1
        self._pending = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True


@contextlib.contextmanager
def sigterm_calls(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """A context in which SIGTERM calls `handler`; without effect on another thread than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None if C has set it, before Python started


def keep_workers(loader: Any) -> None:
    """Make a loader's worker processes ignore SIGTERM unless their rank sends it; called before its first iteration.

    torchrun and clusters send SIGTERM to all processes of a rank. If it ended a worker, the rank would fail before it
    has saved, or closed its sinks. Workers still end when their rank ends them, or has exited. Those of a fork server
    stay as they are, because the signal ends the server, which also serves other processes of the program.
    """
    if isinstance(loader, DataLoader) and loader.num_workers > 0 and not isinstance(loader.worker_init_fn, _KeepWorker):
        context = copy.copy(loader.multiprocessing_context or get_context())
        kept = _WORKERS.get(context.get_start_method())
        if kept is not None:
            context.Process = kept  # type: ignore[misc]  # to mypy, the name of a class
            loader.multiprocessing_context, loader.worker_init_fn = context, _KeepWorker(loader.worker_init_fn)


class _Worker(BaseProcess):
    """Starts with SIGTERM blocked: worker_init_fn would block it too late.

    A spawned worker imports for seconds before, and a library may start a thread at a fork, as OpenTelemetry does, in
    which torch's handler would end the worker.
    """

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _ForkWorker(_Worker, ForkProcess):
    pass


class _SpawnWorker(_Worker, SpawnProcess):
    pass


_WORKERS = {"fork": _ForkWorker, "spawn": _SpawnWorker}


class _KeepWorker:
    """A worker_init_fn that calls the user's own, and lets only the parent's SIGTERM end the worker."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        # A Python handler does not get the sender of a signal; sigwaitinfo does.
        threading.Thread(target=_end_on_signal_of_parent, name="evenrank-sigterm", daemon=True).start()
        if self._then is not None:
            self._then(worker)


def _end_on_signal_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's own handler
