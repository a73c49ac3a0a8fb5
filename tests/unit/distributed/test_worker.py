"""The daemon worker: jobs in order, none for nobody, and an answer for all who wait if its thread ends."""

import itertools
import os
import signal
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.engine import shuffle_session
from commons.distributed.engine import worker as worker_module
from commons.distributed.engine.shuffle_handle import ShuffleHandle, StuckWorkerError
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.options import ShufflerOptions
from commons.pipeline.look_ahead import LookAhead
from tests.helpers.batches.random_batches import random_batch
from tests.helpers.jobs.programs import run_program

# Programs whose end waits 0.2 s for the worker. Finalization of the first takes 1.5 s more, and the job, which waits in
# C++ for 0.9 s, returns within it; the job of the second comes back from C++ again and again.
WAITS_IN_C = """
import datetime, sys, time
import torch.distributed as dist
from commons.distributed.engine.worker import DaemonWorker

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

slow, store, worker = Slow(), dist.HashStore(), DaemonWorker("test", exit_seconds=0.2)
worker.submit(lambda: store.wait(["never"], datetime.timedelta(seconds=0.9)))
time.sleep(0.1)
sys.exit(3)
"""
MULTIPLIES = """
import sys
import torch
from commons.distributed.engine.worker import DaemonWorker

def work():
    while True:
        torch.rand(300, 300) @ torch.rand(300, 300)

DaemonWorker("test", exit_seconds=0.2).submit(work)
sys.exit(3)
"""


def test_a_job_that_was_cancelled_before_its_turn_is_passed_over():
    worker, go_on, ran = DaemonWorker("test"), threading.Event(), []
    first = worker.submit(lambda: go_on.wait(10))
    given_up = worker.submit(lambda: ran.append("given up"))
    last = worker.submit(lambda: ran.append("last"))
    assert given_up.cancel()
    go_on.set()
    last.result(60)
    assert first.result() and ran == ["last"]
    assert worker.stop(60)


def test_threads_that_submit_at_once_share_one_thread():
    worker, start, threads = DaemonWorker("test"), threading.Barrier(8), set()

    def submit():
        start.wait(10)
        threads.add(worker.submit(threading.get_ident).result(60))

    users = [threading.Thread(target=submit) for _ in range(8)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
    assert len(threads) == 1
    assert worker.stop(60)


def test_a_job_that_ends_its_own_worker_does_not_wait_for_itself():
    worker = DaemonWorker("test")
    assert worker.submit(lambda: worker.stop(60)).result(60) is False
    assert worker.stop(60)


def test_a_signal_handler_may_abandon_the_worker_while_its_thread_starts(monkeypatch):
    worker, start, stopped = DaemonWorker("test"), threading.Thread.start, []

    def interrupted(thread):
        worker.abandon(OSError("aborted"))
        stopped.append(worker.stop(60))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(OSError, match="aborted"):
        worker.submit(lambda: None).result(60)
    assert stopped == [False] and worker.stop(60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads
def test_a_forked_process_has_a_thread_of_its_own():
    worker = DaemonWorker("test")
    assert worker.submit(os.getpid).result(60) == os.getpid()
    if (child := os.fork()) == 0:
        status = 1
        try:
            status = int(worker.submit(os.getpid).result(10) != os.getpid())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.submit(os.getpid).result(60) == os.getpid()


def test_on_a_gpu_its_thread_leaves_captures_of_other_threads_alone(monkeypatch):
    """Before its first job, which may pin memory; the mode is that of cuda.h."""
    done = []
    driver = SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=lambda mode: done.append((threading.get_ident(), mode._obj.value))
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(worker_module.ctypes, "CDLL", lambda name: driver)
    worker = DaemonWorker("test")
    gpu = torch.device("cuda", 1)
    threads = [worker.submit(lambda: done.append("job") or threading.get_ident(), gpu).result(10) for _ in range(2)]
    assert done == [(threads[0], 1), "job", "job"] and threads[0] != threading.get_ident()
    worker.submit(lambda: None).result(10)
    assert worker.stop(10) and len(done) == 3


def test_a_shuffle_does_not_wait_for_ever_for_a_worker_that_is_stuck(monkeypatch):
    monkeypatch.setattr(shuffle_session, "GRACE_SECONDS", 0.0)
    shuffler, go_on = IdentityBalancedBatchShuffler(ShufflerOptions(timeout=0.5)), threading.Event()
    shuffler.engine._worker.submit(lambda: go_on.wait(60))
    batch = random_batch(0, 4)
    handle = shuffler.start_shuffle(batch)
    with pytest.raises(RuntimeError, match="step 0 is not planned after 1 s, longer .* the worker thread is stuck"):
        shuffler.finish_shuffle(batch, handle)
    waits = mock.patch.object(ShuffleHandle, "wait", autospec=True, side_effect=ShuffleHandle.wait)
    with waits as called, pytest.raises(StuckWorkerError, match="^step 1 is not planned"):
        next(LookAhead(iter([batch]), shuffler))
    assert called.call_count == 1  # a caller of the pipeline waits once
    go_on.set()
    assert shuffler.engine._worker.drain(60)
    assert torch.equal(shuffler.finish_shuffle(batch, handle).sample_id, batch.sample_id)
    shuffler.close()


def test_a_timeout_error_of_a_signals_handler_ends_a_wait():
    shuffler, go_on = IdentityBalancedBatchShuffler(), threading.Event()
    shuffler.engine._worker.submit(lambda: go_on.wait(60))
    handle = shuffler.start_shuffle(random_batch(0, 4))

    def on_alarm(number, frame):
        go_on.set()
        raise TimeoutError("of the user")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(TimeoutError, match="of the user"):
        handle.wait()
    signal.signal(signal.SIGALRM, before)
    shuffler.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_of_a_thread_that_has_ended_is_answered():
    """Ended with its second job, as by an exception that is set from outside."""
    worker, go = DaemonWorker("evenrank-test"), threading.Event()
    jobs, calls = worker._jobs, itertools.count(1)

    def get():
        job = jobs.get()
        if next(calls) == 2:
            raise SystemExit
        return job

    worker._jobs = SimpleNamespace(put=jobs.put, get=get)
    first, taken, waiting = worker.submit(go.wait), worker.submit(lambda: 2), worker.submit(lambda: 3)
    go.set()
    assert first.result(timeout=60)
    later = worker.submit(lambda: 4)
    for future in (taken, waiting, later):
        with pytest.raises(RuntimeError, match="the worker thread evenrank-test has ended before its job was done"):
            future.result(timeout=60)
    assert worker.stop(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("program", [WAITS_IN_C, MULTIPLIES])
def test_a_program_that_ends_while_a_job_runs_has_its_own_status(program):
    """A thread that came back from C++ after the interpreter's end would abort it."""
    done = run_program(sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (3, "")
