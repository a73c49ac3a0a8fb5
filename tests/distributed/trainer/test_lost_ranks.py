"""A collective of the model that fails names the ranks that have not noticed, and does not wait for half an hour."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist

from commons.distributed.control import RankMissingError
from commons.distributed.options import ShufflerOptions
from commons.trainer.lost_ranks import limit_collectives, missing_ranks_named
from commons.trainer.optimization import FiniteLossGuard
from tests.helpers.faults import my_batch
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.rank_pool import RankPool
from tests.helpers.stopped_ranks import fault, run_with_fault


def _stays_away():
    limit_collectives(1.0)
    dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == 2:
        time.sleep(14)
        return "", 0.0
    try:
        with missing_ranks_named(lambda: 7):
            dist.all_reduce(torch.ones(1))
    except RankMissingError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_rank_that_stays_away_from_the_model_s_collective_is_named():
    pool = RankPool(3)  # of its own: groups with a failed collective are not used again
    try:
        answers = pool.run(_stays_away)
    finally:
        pool.stop()
    for rank in range(2):
        text, seconds = answers[rank]
        assert text.startswith(
            f"a collective of the model failed in step 7 on rank {rank} and was not noticed on rank 2"
        )
        assert seconds < 45  # the ranks' own group waits for 60


def _fails_by_itself():
    with missing_ranks_named(lambda: 7):
        raise RuntimeError("shapes differ")


def test_other_errors_stay_as_they_are(two_ranks):
    assert two_ranks.run(_is_untouched) == [True, True]


def _is_untouched():
    with pytest.raises(RuntimeError, match=r"^shapes differ$") as error:
        _fails_by_itself()
    return not isinstance(error.value, RankMissingError)


def _in_the_trainer_s():
    guard = FiniteLossGuard(torch.device("cpu"))
    guard.look(7, torch.ones(()))
    guard.check()


def _in_the_model_s():
    dist.all_reduce(torch.ones(1))


def _waits_elsewhere(folder, collective, group_timeout):
    """The worker thread learns that a rank stands still while the main thread waits for it in another collective."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=2.0))
    shuffler.shuffle(my_batch())
    limit_collectives(group_timeout)
    dist.barrier()
    if dist.get_rank() == 1:
        fault(folder, signal.SIGSTOP)
    shuffler.start_shuffle(my_batch(1))
    with missing_ranks_named(lambda: 7, [shuffler]):
        collective()


@pytest.mark.parametrize("collective, group_timeout", [(_in_the_trainer_s, 600.0), (_in_the_model_s, 4.0)])
def test_the_main_thread_says_what_the_worker_knows(tmp_path, collective, group_timeout):
    work = run_with_fault(
        tmp_path, _waits_elsewhere, collective, group_timeout, waits_for=[0], limit=60.0, world_size=2
    )
    assert work[0].status == 1 and work[0].seconds < 45, work[0]
    assert work[0].error.startswith("RankMissingError: rank 1 did not take part in the gather of step 1 (ranks [0, 1])")
