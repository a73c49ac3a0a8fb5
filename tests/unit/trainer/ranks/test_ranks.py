"""Processes as ranks: their numbers, the variables of other libraries, signals of loaders' workers, exit statuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.utils.data import DataLoader

from commons.trainer.ranks.rank_info import RankInfo
from commons.trainer.ranks.stop import keep_workers
from commons.trainer.torchrun import _exit_status

ONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, address="localhost:29500")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 1}, "rank is 1, world_size is 1; "),
        ({"local_rank": -1}, "local_rank is -1, local_world_size is 1; "),
        ({"local_world_size": 2}, "rank 0 of 1 is number 0 of 2 on its machine; a machine cannot have more ranks"),
        ({"address": "localhost"}, "address is 'localhost'; it is `host:port`, .*: give rank 0's host"),
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
    ranks.set_environment()
    assert os.environ["MASTER_ADDR"] == "::1" and os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert RankInfo.of_torchrun() == RankInfo(5, 7, 1, 2, "::1:29500")


def make_file(worker):
    Path(f"worker{worker}").touch()


def test_workers_outlive_the_signal_of_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loader = DataLoader(list(range(40)), batch_size=None, num_workers=2, worker_init_fn=make_file)
    keep_workers(loader)
    keep_workers(loader)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]  # one of each worker
    workers = [worker.pid for worker in batches._workers]
    subprocess.run(["kill", "-TERM", *map(str, workers)], check=True)  # sent by another process than the parent
    assert list(batches) == list(range(2, 40))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker0", "worker1"]


def test_workers_end_when_their_parent_says_so():
    loader = DataLoader(list(range(40)), batch_size=None, num_workers=1, persistent_workers=True)
    keep_workers(loader)
    batches = iter(loader)
    assert next(batches) == 0
    worker = batches._workers[0]
    worker.terminate()
    worker.join(5)
    status = worker.exitcode
    worker.kill()
    assert status == 0


def failed(*exits):
    """Ranks that ended in this order, each (rank, status); a negative status is a signal."""
    failures = {}
    for when, (rank, status) in enumerate(exits):
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=status, error_file="/nowhere")
        failure.timestamp = when
        failures[rank] = failure
    return ChildFailedError("program", failures)


@pytest.mark.parametrize(
    ("exits", "status", "said"),
    [
        ([(1, 2), (0, -15)], 2, ""),  # torchrun ends the peers of a failed rank
        ([(1, -15), (0, 1)], 143, "error: rank 1 was ended by SIGTERM\n"),  # and here somebody else ended one
        ([(0, 1), (1, -9), (2, -15)], 137, "error: rank 1 was ended by SIGKILL\n"),
        ([(0, 1)], 1, ""),
    ],
)
def test_exit_status(exits, status, said, capsys):
    assert _exit_status(failed(*exits)) == status
    assert capsys.readouterr().err == said
