"""The helper that runs ranks says which rank raised, died or hung, and works again afterwards."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks.rank_pool import RankFailure, RankPool


def _sum_of_ranks() -> int:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("as asked")


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.slow
def test_a_failure_names_the_rank():
    with RankPool(2) as pool:
        for function, message, timeout in (
            (_raise_on, "rank 1 raised ValueError: as asked", 100),
            (_die_on, "rank 1 died with exit code 7", 100),
            (_sleep_on, "rank 1 hung", 1),
        ):
            assert pool.run(_sum_of_ranks) == [1, 1]  # of fresh ranks, whose start takes longer than the next call may
            with pytest.raises(RankFailure, match=message):
                pool.run(function, 1, timeout=timeout, grace=1)
        assert pool.run(_sum_of_ranks) == [1, 1]
