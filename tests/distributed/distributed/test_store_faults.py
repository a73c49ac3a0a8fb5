"""The process that hosts the store stands still, ends, or leaves first: the others end in time, and say who it was."""

from __future__ import annotations

import signal
import time

import pytest
import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from tests.helpers.faults import limit_waits, my_batch
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.stopped_ranks import fault, run_with_fault

TIMEOUT = 2.0
# Seconds from the fault to the end of a process; far fewer than torch's store waits.
LIMIT = 60.0


def _shuffle(folder, victim, number, back_when=None):
    """One step, the fault, and another step."""
    shuffler = CubicShuffler()
    shuffler.shuffle(my_batch())
    dist.barrier()
    limit_waits(TIMEOUT if back_when is None else 10 * TIMEOUT)
    if dist.get_rank() == victim:
        fault(folder, number, back_when)
    shuffler.shuffle(my_batch(1))
    shuffler.shuffle(my_batch(2))


def _make_shuffler(folder, victim, number):
    """The fault, and a shuffler that is made after it."""
    dist.barrier()
    if dist.get_rank() == victim:
        fault(folder, number)
    CubicShuffler(ShufflerOptions(timeout=TIMEOUT))


def _fail_alone(folder, victim, number):
    """A rank fails by itself, in front of an exchange in which the others wait, and leaves at once."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=60.0))
    own = my_batch()
    handle = shuffler.start_shuffle(own)
    if dist.get_rank() == victim:
        fault(folder)
        shuffler.finish_shuffle(my_batch(1, rows=5), handle)
    shuffler.finish_shuffle(own, handle)


def _survivors(folder, work, victim, number, *args, world_size=4):
    others = [rank for rank in range(world_size) if rank != victim]
    ended = run_with_fault(folder, work, victim, number, *args, waits_for=others, limit=LIMIT, world_size=world_size)
    for rank in others:
        assert ended[rank].status == 1, (rank, ended[rank])
        assert "frame #" not in ended[rank].stderr
        assert ended[rank].stderr.count("Traceback") == 1  # of the program; torch's own errors are a line of ours
    return [ended[rank] for rank in others]


@pytest.mark.parametrize(
    "work, what",
    [
        pytest.param(_shuffle, "gather of step 1", id="step"),
        pytest.param(_make_shuffler, "connection of step 0", id="made", marks=pytest.mark.slow),
    ],
)
def test_a_host_of_the_store_that_stands_still_is_named_and_not_waited_for(tmp_path, work, what):
    for each in _survivors(tmp_path, work, 0, signal.SIGSTOP, world_size=2):
        assert each.error.startswith(f"RankMissingError: the {what} failed on rank ")
        assert "the store does not answer; rank 0 hosts it and has stopped or is overloaded" in each.error


def _nap():
    time.sleep(1.5)


@pytest.mark.slow
def test_where_the_host_of_the_store_goes_on_in_time_so_do_all(tmp_path):
    ended = run_with_fault(tmp_path, _shuffle, 0, signal.SIGSTOP, _nap, waits_for=[0, 1, 2, 3], limit=LIMIT)
    assert [each.status for each in ended] == [0] * 4, ended


def test_where_the_host_of_the_store_ends_it_is_named(tmp_path):
    for each in _survivors(tmp_path, _shuffle, 0, signal.SIGKILL, world_size=2):
        assert "the store cannot be reached; rank 0 hosts it and has ended" in each.error


def test_all_survivors_name_who_is_missing_though_the_host_of_the_store_leaves_too(tmp_path):
    for each in _survivors(
        tmp_path, _shuffle, 1, signal.SIGKILL, world_size=3
    ):  # a neighbour of rank 0, which knows at once
        assert each.error.startswith("RankMissingError: rank 1 did not take part in the gather of step 1")


@pytest.mark.slow
def test_what_the_host_of_the_store_says_of_itself_is_read_before_it_leaves(tmp_path):
    for each in _survivors(tmp_path, _fail_alone, 0, None):
        assert each.error.startswith(
            "RankMissingError: rank 0 failed in the exchange of step 0: ValueError: the handle"
        )
