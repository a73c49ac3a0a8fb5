"""A job that loses a rank goes on from its last checkpoint, to what it would have come to without the fault."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from commons.trainer.checkpoint.folder import list_checkpoints
from commons.trainer.config.load import load_config
from commons.trainer.run import open_run_folder, run_training
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig
from tests.helpers.jobs.run_folders import losses
from tests.helpers.jobs.training_configs import TINY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STEPS, SAVED_EVERY = 12, 3
FLAGS = (
    "--trainer.train-batch-size 4 --trainer.log-interval 1 --trainer.eval-interval 6 --trainer.max-eval-iters 1 "
    f"--trainer.max-train-iters {STEPS} --trainer.ckpt-save-interval {SAVED_EVERY} --trainer.ckpt-keep 9 "
    "--trainer.enable-balanced-shuffler --trainer.shuffler.timeout 60 --trainer.sinks --dataset.dataset-name ml-1m "
    "--dataset.shuffle --dataset.max-history-seqlen 24 --optimizer.sharding row_wise"
)


def flags(data, folder):
    """One command, which starts a run in a folder and goes on with it."""
    saved = folder / "checkpoints"
    return [
        *TINY,
        *FLAGS.split(),
        *("--dataset.dataset-path", str(data), "--trainer.run-dir", str(folder)),
        *("--trainer.ckpt-save-dir", str(saved), "--trainer.ckpt-load-dir", str(saved)),
    ]


def _train(arguments):
    config = load_config(TrainConfig, arguments)
    open_run_folder(config, torch.device("cpu"), logs_to_file=False)
    run_training(HSTURecipe(config, torch.device("cpu")))


def launch(arguments, *options):
    """torchrun, whose ranks get a new store with every attempt; the page docs/launch.md says why."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", *options)
    command = [*torchrun, "-m", "tests.helpers.ranks.killed_ranks", *arguments]
    return subprocess.Popen(
        [str(each) for each in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        start_new_session=True,
    )


def output_of(job, folder, seconds=300):
    """What a job has printed, once it has ended; nothing of it is left, also where it hangs."""
    try:
        return job.communicate(timeout=seconds)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            for process in Path("/proc").glob("[0-9]*"):  # ranks are in sessions of their own
                with contextlib.suppress(OSError):
                    if str(folder).encode() in (process / "cmdline").read_bytes():
                        os.kill(int(process.name), signal.SIGKILL)


def weights(folder):
    """The model and optimizer of the last checkpoint; what a rank draws next is left out."""
    path = list_checkpoints(folder / "checkpoints")[-1]
    assert path.name == f"step_{STEPS:08d}"
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return {name: value for name, value in state.items() if not name.startswith("random")}


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint(two_ranks, data, tmp_path):
    two_ranks.run(_train, flags(data, tmp_path / "whole"))
    step, rank = 2 * SAVED_EVERY, 1  # while a checkpoint is written, or just after
    job = launch(
        [step, rank, *flags(data, tmp_path / "killed")], "--standalone", "--nproc-per-node=2", "--max-restarts=2"
    )
    said = output_of(job, tmp_path)
    assert job.returncode == 0, f"rank {rank} killed after step {step}: {said}"
    # A rank that is killed while a checkpoint is written leaves the one before.
    last = step // SAVED_EVERY * SAVED_EVERY
    texts = [
        f"resumed after step {saved}, from " if saved > 0 else "has no checkpoint yet: a new run"
        for saved in (last, last - SAVED_EVERY)
    ]
    assert any(text in said for text in texts), said
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole"), f"rank {rank} killed after step {step}"
    assert list(losses(tmp_path / "killed")) == list(range(1, STEPS + 1))  # every step once
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert expected.keys() == found.keys() and len(expected) > 5
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_a_job_that_loses_a_host_goes_on_with_the_other(two_ranks, data, tmp_path):
    """The steps stay as large as they were, and so the same."""
    size = ["--trainer.global-batch-size", "8"]
    two_ranks.run(_train, flags(data, tmp_path / "whole") + size)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    step = 2 * SAVED_EVERY + 1  # before the first checkpoint one rank begins anew, with its own weights
    elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=job"]
    elastic += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    arguments = flags(data, tmp_path / "lost") + size
    # Both join while the first waits for others; when one is gone, it need not wait for long. The one that is not the
    # host waits for the other's store, so it may start first, and does not come too late.
    waits = "last_call_timeout=20"
    lost = launch([step, "host", *arguments], *elastic, f"--rdzv-conf=is_host=0,{waits}")
    stays = launch([step, "nobody", *arguments], *elastic, f"--rdzv-conf=is_host=1,{waits}")
    try:
        said = output_of(stays, tmp_path)
    finally:
        said_there = output_of(lost, tmp_path, 20)
    assert stays.returncode == 0 and lost.returncode == -signal.SIGKILL, f"after step {step}: {said}"
    assert "1 rank on the CPU" in said, said
    assert "2 ranks on the CPU" in said + said_there, said + said_there  # rank 0 says it, on either host
    assert losses(tmp_path / "lost") == pytest.approx(losses(tmp_path / "whole"), rel=2e-4), step
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "lost")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)
