"""DaemonWorker: one daemon thread that runs jobs in order.

The interpreter joins an executor's threads at exit, and would wait for a collective's timeout; a daemon thread does not
keep a failed process alive. The exit waits a few seconds for the running job, and then makes it fail if the worker has
a way to. If the thread returns from C++ after the interpreter has ended, Python before 3.14 would abort the process
(3.14 lets the thread hang): so the thread is blocked for ever.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import torch

from commons.perf_model.partitioner.core import hold_unwound_threads

T = TypeVar("T")

_CAPTURE_MODE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h

# Seconds that the end of a program waits for its workers, for all of them together.
_EXIT_SECONDS = 5.0
# Most seconds until a job fails after `break_off`.
_BROKEN_OFF_SECONDS = 1.0
_STARTED: weakref.WeakSet[DaemonWorker] = weakref.WeakSet()


class DaemonWorker:
    """Runs submitted functions one after another on a thread of its own, started with the first.

    A job whose future has been cancelled before its turn is skipped.

    Args:
        name: of the thread.
        exit_seconds: how long the exit of the program waits for the running job.
        break_off: a context, entered after that wait, that makes a job that still runs fail, and left when the thread
            has ended or a second has passed; None for a job that cannot be stopped.
    """

    def __init__(
        self,
        name: str,
        exit_seconds: float = _EXIT_SECONDS,
        break_off: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self._name = name
        self._break_off = break_off
        self._exit_seconds = exit_seconds
        self._starting = threading.RLock()  # a signal handler may submit or refuse jobs too
        self._process = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], int | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Futures without a result; they get an error if the thread ends.
        self._open: set[Future[Any]] = set()
        self._has_left = False
        self._abandoned_for: Exception | None = None

    def submit(self, job: Callable[[], T], device: torch.device | None = None) -> Future[T]:
        """Queue a job; a `device` of CUDA is the thread's current device while it runs, which is else the first GPU."""
        gpu = None
        if device is not None and device.type == "cuda":
            gpu = torch.cuda.current_device() if device.index is None else device.index
        with self._starting:
            if self._process != os.getpid():  # forked: the thread and its jobs are in the other process
                self._process, self._thread = os.getpid(), None
                self._jobs, self._open = queue.SimpleQueue(), set()
            if self._thread is None and self._abandoned_for is None:
                self._has_left = False
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
                _end_at_exit(self)
        future: Future[T] = Future()
        self._open.add(future)
        self._jobs.put((future, job, gpu))
        if self._has_left or self._abandoned_for is not None:
            self._fail([future])
        return future

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all queued jobs are done; False if they are not after `timeout` seconds."""
        if self._thread is None:
            return True
        return bool(concurrent.futures.wait([self.submit(lambda: None)], timeout).done)

    def finish(self) -> None:
        """Let queued jobs finish, then end the thread; does not wait."""
        if self._thread is not None:
            self._jobs.put(None)

    def refuse(self, error: Exception) -> None:
        """Set an error on every job that is submitted from now on; from any thread, does not wait."""
        with self._starting:
            self._abandoned_for = error

    def abandon(self, error: Exception) -> None:
        """`refuse`, and set the error on every job that is not done, and run no further one; does not wait.

        The thread ends after the running job.
        """
        self.refuse(error)
        self.finish()
        self._fail(list(self._open))

    @property
    def has_ended(self) -> bool:
        """Whether no thread runs."""
        return self._thread is None or not self._thread.is_alive()

    def stop(self, timeout: float) -> bool:
        """Let queued jobs finish, end the thread and wait for it; False if it still runs after `timeout` seconds."""
        self.finish()
        thread = self._thread
        if thread is threading.current_thread():  # a loader, on the window thread, aborts its shuffler
            return False
        if thread is not None:
            if thread.ident is None:  # a signal handler has interrupted its start
                return False
            thread.join(timeout)
            if thread.is_alive():
                return False
            self._thread = None
        return True

    def _serve(self) -> None:
        try:
            self._run_jobs()
        finally:
            self._has_left = True
            self._fail(list(self._open))

    def _fail(self, futures: list[Future[Any]]) -> None:
        """Set an error on jobs without a result: the worker was abandoned, or its thread ended outside of a job."""
        for future in futures:
            with contextlib.suppress(InvalidStateError):  # done meanwhile
                future.set_exception(
                    self._abandoned_for
                    or RuntimeError(
                        f"the worker thread {self._name} has ended before its job was done; something outside of it "
                        "has ended it: see the log"
                    )
                )

    def _run_jobs(self) -> None:
        current: int | None = None
        while (item := self._jobs.get()) is not None:
            future, job, gpu = item
            try:
                if future.done() and not future.cancelled():  # the worker was abandoned
                    continue
                if not future.set_running_or_notify_cancel():
                    continue
                if gpu is not None and gpu != current:
                    torch.cuda.set_device(gpu)
                    _spare_captures()
                    current = gpu
                future.set_result(job())
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):  # abandoned meanwhile
                    future.set_exception(error)
            finally:
                self._open.discard(future)
                # A daemon thread must not hold the last reference to a process group while it waits.
                del item, future, job


def _spare_captures() -> None:
    """Allow this thread to pin memory and wait for events while another thread captures a CUDA graph.

    In CUDA's default mode both calls would fail, and so would the capture.
    """
    with contextlib.suppress(OSError, AttributeError):  # torch for ROCm
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)))


def _end_at_exit(worker: DaemonWorker) -> None:
    if not _STARTED:
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _STARTED.add(worker)


def _end_all() -> None:
    """Wait for every worker's running job; then break off jobs that can be, and leave the rest running."""
    started = time.monotonic()
    workers = list(_STARTED)
    for worker in workers:
        worker.finish()
    for worker in workers:
        ended = worker.stop(timeout=max(0.0, started + worker._exit_seconds - time.monotonic()))
        if not ended and worker._break_off is not None:
            with worker._break_off():
                worker.stop(timeout=_BROKEN_OFF_SECONDS)
    if not all(worker.has_ended for worker in workers):
        hold_unwound_threads()
