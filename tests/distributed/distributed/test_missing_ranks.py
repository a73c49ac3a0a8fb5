"""Survivors in different collectives name the same rank; one that comes when others have given up is named too."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from commons.distributed.channel.absence import FailedChannel
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.shuffle_session import ShuffleSession
from tests.helpers.faults import NAMES_SECONDS, limit_waits, my_batch
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.stopped_ranks import fault, run_with_fault

TIMEOUT = 3.0
LIMIT = 60.0


def _stop_in_the_exchange(folder):
    """Rank 3 stops before it sends rows; rank 2 waits for these, the others, who need none, wait in the next gather."""
    shuffler = CubicShuffler()
    shuffler.shuffle(my_batch())
    dist.barrier()
    limit_waits(TIMEOUT)
    send_rows = ShuffleSession.send_rows

    def send(*arguments):
        if dist.get_rank() == 3:
            fault(folder, signal.SIGSTOP)
        send_rows(*arguments)

    with mock.patch.object(ShuffleSession, "send_rows", send):
        handle = shuffler.start_shuffle(batch := my_batch(1))
        if dist.get_rank() < 2:
            handle.has_ended()  # waits for the plan
        else:
            shuffler.finish_shuffle(batch, handle)
        shuffler.shuffle(my_batch(2))


@contextlib.contextmanager
def _noting(folder, waiting):
    """An event is set when this rank begins to wait in a collective, and a file made when it asks who is missing."""
    wait, who_is_missing = ControlChannel.wait, FailedChannel.who_is_missing

    def noted_wait(*arguments, **keywords):
        waiting.set()
        wait(*arguments, **keywords)

    def noted_question(*arguments):
        (folder / f"gave up {dist.get_rank()}").touch()
        return who_is_missing(*arguments)

    with (
        mock.patch.object(ControlChannel, "wait", noted_wait),
        mock.patch.object(FailedChannel, "who_is_missing", noted_question),
        mock.patch.object(*NAMES_SECONDS, LIMIT),
    ):
        yield


def _stop(folder, in_a_gather):
    """Rank 2 stops before a gather, or within one that rank 1 comes to later, and goes on when others have given up."""
    shuffler, waiting = CubicShuffler(), threading.Event()
    shuffler.shuffle(my_batch())
    dist.barrier()
    limit_waits(TIMEOUT)

    def others_have_given_up():
        while len(list(folder.glob("gave up *"))) < 3:
            time.sleep(0.05)
        time.sleep(1.0)  # it has stood still for longer than a slow rank

    handle = None
    with _noting(folder, waiting):
        if dist.get_rank() == 2:
            if in_a_gather:
                handle = shuffler.start_shuffle(my_batch(1))
                waiting.wait()
                time.sleep(0.2)
            fault(folder, signal.SIGSTOP, others_have_given_up)
        elif in_a_gather and dist.get_rank() == 1:
            time.sleep(1.0)
        handle = handle or shuffler.start_shuffle(my_batch(1))
        handle.has_ended()  # waits for the gather


@pytest.mark.slow
def test_survivors_in_different_collectives_name_the_same_rank(tmp_path):
    ended = run_with_fault(tmp_path, _stop_in_the_exchange, waits_for=[0, 1, 2], limit=LIMIT)
    for each in ended[:3]:
        assert each.status == 1
        assert each.error.startswith("RankMissingError: rank 3 did not take part in the ")
    assert "exchange of step 1" in ended[2].error and "gather of step 2" in ended[0].error


@pytest.mark.parametrize(
    "in_a_gather, what", [(False, "came to the gather of step 1 only when the others gave up"), (True, "stood still")]
)
def test_a_rank_that_comes_back_while_names_are_asked_for_is_named(tmp_path, in_a_gather, what):
    ended = run_with_fault(tmp_path, _stop, in_a_gather, waits_for=[0, 1, 2, 3], limit=LIMIT)
    for each in ended:
        assert each.status == 1
        assert each.error.startswith(f"RankMissingError: rank 2 {what}"), each.error
        assert "raise ShufflerOptions.timeout" in each.error
