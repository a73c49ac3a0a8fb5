"""Whole HSTU training jobs under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TINY = [
    *("--trainer.train-batch-size", "6", "--trainer.eval-batch-size", "4", "--trainer.device", "cpu"),
    *("--trainer.log-interval", "2", "--trainer.eval-interval", "4", "--trainer.max-eval-iters", "2"),
    *("--dataset.dataset-name", "random", "--dataset.num-batches", "6", "--dataset.max-history-seqlen", "20"),
    *("--dataset.max-num-candidates", "3", "--model.hidden-size", "16", "--model.num-layers", "1"),
    *("--model.num-attention-heads", "2", "--model.kv-channels", "8", "--model.prediction-head-arch", "8", "1"),
]


def start(launcher, *arguments):
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc_per_node=2", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,  # a group of its own, for Ctrl-C and for ending it
    )


def run(launcher, *arguments):
    process = start(launcher, *arguments)
    try:
        output, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output, errors
