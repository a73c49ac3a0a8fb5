"""The process that hosts the store stands still, ends, or leaves first: the others end in time, and say who it was."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from tests.helpers.faults import my_batch
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.stopped_ranks import fault, run_with_fault

TIMEOUT = 2.0
# Seconds from the fault to an error, and to the end of the process, which takes a second of a processor by itself.
SOON = TIMEOUT + 8.0
LIMIT = 60.0


def _shuffle(folder, victim, number, back_after=None):
    """One step, the fault, and another step."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    shuffler.shuffle(my_batch())
    dist.barrier()
    if dist.get_rank() == victim:
        fault(folder, number, back_after)
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


def _survivors(folder, work, victim, number, *args):
    others = [rank for rank in range(4) if rank != victim]
    ended = run_with_fault(folder, work, victim, number, *args, waits_for=others, limit=LIMIT)
    for rank in others:
        assert ended[rank].status == 1, (rank, ended[rank])
        assert ended[rank].seconds < SOON
        assert "frame #" not in ended[rank].stderr
        assert ended[rank].stderr.count("Traceback") == 1  # of the program; torch's own errors are a line of ours
    return [ended[rank] for rank in others]


@pytest.mark.parametrize(
    "work, what", [(_shuffle, "gather of step 1"), (_make_shuffler, "connection of step 0")], ids=["step", "made"]
)
def test_a_host_of_the_store_that_stands_still_is_named_and_not_waited_for(tmp_path, work, what):
    for each in _survivors(tmp_path, work, 0, signal.SIGSTOP):
        assert each.error.startswith(f"RankMissingError: the {what} failed on rank ")
        assert "the store does not answer; rank 0 hosts it and has stopped or is overloaded" in each.error


def test_where_the_host_of_the_store_goes_on_in_time_so_do_all(tmp_path):
    ended = run_with_fault(tmp_path, _shuffle, 0, signal.SIGSTOP, 1.5, waits_for=[0, 1, 2, 3], limit=LIMIT)
    assert [each.status for each in ended] == [0] * 4, ended


def test_where_the_host_of_the_store_ends_it_is_named(tmp_path):
    for each in _survivors(tmp_path, _shuffle, 0, signal.SIGKILL):
        assert "the store cannot be reached; rank 0 hosts it and has ended" in each.error


def test_all_survivors_name_who_is_missing_though_the_host_of_the_store_leaves_too(tmp_path):
    for each in _survivors(tmp_path, _shuffle, 1, signal.SIGKILL):  # a neighbour of rank 0, which knows at once
        assert each.error.startswith("RankMissingError: rank 1 did not take part in the gather of step 1")


def test_what_the_host_of_the_store_says_of_itself_is_read_before_it_leaves(tmp_path):
    for each in _survivors(tmp_path, _fail_alone, 0, None):
        assert each.error.startswith(
            "RankMissingError: rank 0 failed in the exchange of step 0: ValueError: the handle"
        )
