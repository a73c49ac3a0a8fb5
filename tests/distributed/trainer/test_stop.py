"""What ranks agree on after every step does not wait for a rank that stays away longer than the timeout."""

from __future__ import annotations

import torch.distributed as dist

from commons.distributed.channel.absence import RankMissingError
from commons.trainer.ranks.stop import StopSignal
from tests.helpers.ranks.faults import limit_waits, meet
from tests.helpers.ranks.rank_pool import RankPool


def _stays_away():
    stop = StopSignal()
    stop.after_step()
    try:
        with stop:
            stop.after_step()
            if dist.get_rank() == 1:
                meet("rank 0 has given up")
                return ""
            limit_waits(0.5)
            stop.after_step()
    except RankMissingError as error:
        meet("rank 0 has given up")
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_to_the_end_of_a_step_is_named():
    with RankPool(2) as pool:  # of its own: groups with a failed collective are not used again
        text, _ = pool.run(_stays_away, timeout=100)
    assert text.startswith("rank 1 did not take part in the agreement to stop of step 2")
    assert "raise trainer.shuffler.timeout" in text


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
