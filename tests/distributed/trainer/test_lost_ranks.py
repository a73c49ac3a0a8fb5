"""A collective of the model that fails names the ranks that have not noticed, and does not wait for half an hour."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from commons.distributed.control import RankMissingError
from commons.trainer.lost_ranks import limit_collectives, missing_ranks_named
from tests.helpers.rank_pool import RankPool


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
