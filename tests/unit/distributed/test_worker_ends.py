"""Whoever waits for a worker thread is told if the thread ends without an answer."""

from __future__ import annotations

import threading

import pytest

from commons.distributed.worker import DaemonWorker


class BrokenQueue:
    """Ends the thread that asks for its second job, as an exception set from outside does."""

    def __init__(self, jobs):
        self._jobs, self._calls = jobs, 0
        self.put = jobs.put

    def get(self):
        self._calls += 1
        item = self._jobs.get()
        if self._calls == 2:
            raise SystemExit
        return item


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_of_a_thread_that_has_ended_is_answered():
    worker, go = DaemonWorker("evenrank-test"), threading.Event()
    worker._jobs = BrokenQueue(worker._jobs)
    first, taken, waiting = worker.submit(go.wait), worker.submit(lambda: 2), worker.submit(lambda: 3)
    go.set()
    assert first.result(timeout=60)
    later = worker.submit(lambda: 4)
    for future in (taken, waiting, later):
        with pytest.raises(RuntimeError, match="the worker thread evenrank-test has ended and left a job undone"):
            future.result(timeout=60)
    assert worker.stop(timeout=60)
