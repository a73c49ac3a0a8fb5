"""The multi-GPU job's script works: its cases run here over gloo, and without a GPU it says what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return subprocess.run(
        ["bash", "ci/test_gpu.sh", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_job_s_cases_pass_over_gloo():
    job = run("--cpu", "2")
    assert job.returncode == 0, job.stdout + job.stderr
    assert " passed, 6 skipped" in job.stdout and "failed" not in job.stdout  # six need CUDA


def test_a_failing_case_fails_the_job():
    job = run("--cpu", "2", "-k", "no such case")
    assert job.returncode != 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_to_do():
    job = run()
    assert job.returncode == 2 and job.stderr.strip().endswith("use --cpu N to run its cases over gloo")
