"""What ranks agree on after every step does not wait for a rank that stays away longer than the timeout."""

from __future__ import annotations

import time
from unittest import mock

import torch.distributed as dist

from commons.distributed import gather_grid, group_pool
from commons.distributed.control import RankMissingError
from commons.trainer.stop import StopSignal
from tests.helpers.rank_pool import RankPool


def _stays_away():
    stop = StopSignal(timeout=2.0)
    stop.after_step()
    started = time.monotonic()
    try:
        with stop:
            stop.after_step()
            if dist.get_rank() == 1:
                time.sleep(12)
                return "", 0.0
            stop.after_step()
    except RankMissingError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_rank_that_does_not_come_to_the_end_of_a_step_is_named():
    pool = RankPool(2)  # of its own: groups with a failed collective are not used again
    try:
        text, seconds = pool.run(_stays_away)[0]
    finally:
        pool.stop()
    assert text.startswith("rank 1 did not take part in the agreement to stop of step 2")
    assert "raise trainer.shuffler.timeout" in text and seconds < 30  # the ranks' own group waits twice as long


def _agrees(ranks_that_hear):
    with StopSignal() as stop:
        answers = []
        for step in range(4):
            if step == 1 and dist.get_rank() in ranks_that_hear:
                stop._hear(15, None)
            stop.after_step()
            answers.append(stop.agreed)
    return answers


def test_all_ranks_stop_after_the_same_step(ranks):
    assert ranks.run(_agrees, [1]) == [[False, False, True, True]] * ranks.world_size
    assert ranks.run(_agrees, []) == [[False] * 4] * ranks.world_size


def _agrees_as_many_ranks_do(ranks_that_hear):
    pools = mock.patch.object(group_pool, "_POOL", group_pool._Pool())
    with pools, mock.patch.object(gather_grid, "FEWEST_RANKS", 4):
        return _agrees(ranks_that_hear)


def test_ranks_that_gather_in_a_grid_stop_together_too(rank_pools):
    assert rank_pools[4].run(_agrees_as_many_ranks_do, [1]) == [[False, False, True, True]] * 4
