"""Survivors in different collectives name the same rank; one that comes when others have given up is named too."""

from __future__ import annotations

import signal
import time
from unittest import mock

import pytest
import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from commons.distributed.shuffle_session import ShuffleSession
from tests.helpers.faults import my_batch
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.stopped_ranks import fault, run_with_fault

TIMEOUT = 3.0
# A stopped rank goes on within the seconds in which the others ask who is there.
BACK_AFTER = TIMEOUT + 2.5
LIMIT = 60.0


def _stop_in_the_exchange(folder):
    """Rank 3 stops before it sends rows; rank 2 waits for these, the others, who need none, wait in the next gather."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    shuffler.shuffle(my_batch())
    dist.barrier()
    send_rows = ShuffleSession.send_rows

    def send(session, step, exchange, packed):
        if dist.get_rank() == 3:
            fault(folder, signal.SIGSTOP)
        send_rows(session, step, exchange, packed)

    with mock.patch.object(ShuffleSession, "send_rows", send):
        handle = shuffler.start_shuffle(batch := my_batch(1))
        if dist.get_rank() < 2:
            handle.ended  # noqa: B018  waits for the plan
        else:
            shuffler.finish_shuffle(batch, handle)
        shuffler.shuffle(my_batch(2))


def _stop(folder, in_a_gather):
    """Rank 2 stops before a gather, or within one that rank 1 comes to later, and goes on when others have given up."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    shuffler.shuffle(my_batch())
    dist.barrier()
    handle = None
    if dist.get_rank() == 2:
        if in_a_gather:
            handle = shuffler.start_shuffle(my_batch(1))
            time.sleep(0.5)
        fault(folder, signal.SIGSTOP, BACK_AFTER)
    elif in_a_gather and dist.get_rank() == 1:
        time.sleep(1.5)
    if handle is None:
        handle = shuffler.start_shuffle(my_batch(1))
    handle.ended  # noqa: B018  waits for the gather


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
