"""What SIGTERM does to the worker processes of a loader."""

from __future__ import annotations

import subprocess
from pathlib import Path

from torch.utils.data import DataLoader

from commons.trainer.ranks.stop import keep_workers


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
