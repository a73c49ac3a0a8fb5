"""Which rank a process is: numbers that do not fit, and the variables that other libraries read."""

from __future__ import annotations

import os

import pytest

from commons.trainer.ranks.rank_info import RankInfo

ONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, address="localhost:29500")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 1}, "rank is 1, world_size is 1; "),
        ({"local_rank": -1}, "local_rank is -1, local_world_size is 1; "),
        ({"local_world_size": 2}, "rank 0 of 1 is number 0 of 2 on its machine; a machine has some of the ranks"),
        ({"address": "localhost"}, "address is 'localhost'; it is `host:port` of a machine .*: give rank 0's host"),
        ({"address": "localhost:99999"}, "address is 'localhost:99999'; "),
        ({"address": ":29500"}, "address is ':29500'; "),
    ],
)
def test_numbers_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        RankInfo(**(vars(ONE) | changes))


def test_libraries_are_told_what_torchrun_tells(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    ranks = RankInfo(rank=5, world_size=7, local_rank=1, local_world_size=2, address="[::1]:29500", gpu=None)
    ranks.tell_libraries()
    assert os.environ["MASTER_ADDR"] == "::1" and os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert RankInfo.of_torchrun() == RankInfo(5, 7, 1, 2, "::1:29500")
