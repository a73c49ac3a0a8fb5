"""The daemon worker: jobs in order, and what nobody waits for any more is passed over."""

from __future__ import annotations

import threading

import pytest
import torch

from commons.distributed import shuffle_session
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.distributed.worker import DaemonWorker
from tests.helpers.batches import random_batch


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


def test_a_shuffle_does_not_wait_for_ever_for_a_worker_that_is_stuck(monkeypatch):
    monkeypatch.setattr(shuffle_session, "GRACE_SECONDS", 0.0)
    shuffler, go_on = IdentityBalancedBatchShuffler(ShufflerOptions(timeout=0.5)), threading.Event()
    shuffler._worker.submit(lambda: go_on.wait(60))
    batch = random_batch(0, 4)
    handle = shuffler.start_shuffle(batch)
    with pytest.raises(RuntimeError, match="step 0 is not planned after 1 s, though .* the worker thread is stuck"):
        shuffler.finish_shuffle(batch, handle)
    go_on.set()
    assert torch.equal(shuffler.finish_shuffle(batch, handle).sample_id, batch.sample_id)
    shuffler.close()
