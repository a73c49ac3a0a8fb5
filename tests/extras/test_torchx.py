"""TorchX starts agents that train together here, and makes requests for Slurm and Kubernetes of the same arguments."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.helpers.documents.documented import commands_in, documented_blocks
from tests.helpers.jobs.programs import run_program

pytestmark = [pytest.mark.extra("torchx"), pytest.mark.timeout(420), pytest.mark.slow]


@pytest.fixture(scope="module")
def commands():
    """The page's commands by scheduler, as lists of arguments."""
    printed = commands_in(documented_blocks()["docs/launch.md", "TorchX", 0].text)
    arguments = [shlex.split(command) for command in printed]
    return {each[each.index("--scheduler") + 1]: each for each in arguments}


def run(command, *flags):
    bin_dir = Path(sys.executable).parent  # agents look for torchrun there
    env = {"PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    return run_program(*command, *flags, timeout=400, env=env)


def test_two_agents_train_together(commands, tmp_path):
    short = ["--trainer.max-train-iters", 4, "--trainer.log-interval", 2, "--trainer.max-eval-iters", 1]
    done = run(commands["local_cwd"], *short, "--trainer.device", "cpu", "--trainer.run-dir", tmp_path)
    assert done.returncode == 0 and "Job finished: SUCCEEDED" in done.stderr, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [2, 4]
    # One rank alone would have nothing to balance.
    assert all(line["imbalance_before"] > line["imbalance_after"] for line in trained)


@pytest.mark.parametrize(("scheduler", "request_of"), [("slurm", "#SBATCH"), ("kubernetes", "kind: Job")])
def test_clusters_are_asked_for_the_same(commands, scheduler, request_of):
    done = run(commands[scheduler])
    assert done.returncode == 0, done.stderr[-3000:]
    assert request_of in done.stdout and "--nnodes 2 --nproc_per_node 8" in " ".join(done.stdout.split())
    assert "hstu.train" in done.stdout and "--trainer.enable-balanced-shuffler" in done.stdout
