"""The daemon worker: jobs in order, and what nobody waits for any more is passed over."""

from __future__ import annotations

import threading

from commons.distributed.worker import DaemonWorker


def test_a_job_that_was_cancelled_before_its_turn_is_passed_over():
    worker, go_on, ran = DaemonWorker("test"), threading.Event(), []
    first = worker.submit(lambda: go_on.wait(10))
    given_up = worker.submit(lambda: ran.append("given up"))
    last = worker.submit(lambda: ran.append("last"))
    assert given_up.cancel()
    go_on.set()
    last.result(10)
    assert first.result() and ran == ["last"]
    assert worker.stop(10)


def test_threads_that_submit_at_once_share_one_thread():
    worker, start, threads = DaemonWorker("test"), threading.Barrier(8), set()

    def submit():
        start.wait(10)
        threads.add(worker.submit(threading.get_ident).result(10))

    users = [threading.Thread(target=submit) for _ in range(8)]
    for user in users:
        user.start()
    for user in users:
        user.join(10)
    assert len(threads) == 1
    assert worker.stop(10)


def test_a_job_that_ends_its_own_worker_does_not_wait_for_itself():
    worker = DaemonWorker("test")
    assert worker.submit(lambda: worker.stop(10)).result(10) is False
    assert worker.stop(10)
