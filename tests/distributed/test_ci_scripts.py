"""Scripts in ci/: the multi-GPU job runs its cases over gloo here, and two hosts on one machine train alike."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from tests.helpers.jobs.programs import ROOT, TWO_RANKS, run_program


def run(*arguments):
    return run_program("bash", "ci/test_gpu.sh", *arguments, timeout=580)


@pytest.mark.slow
def test_the_job_s_cases_pass_over_gloo():
    job = run("--cpu", "2")
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"\d\d passed, \d+ skipped", job.stdout) and "failed" not in job.stdout
    reasons = [line for line in job.stdout.splitlines() if line.startswith("SKIPPED")]
    # TorchRec 1.6 frees no features early, and copies of batches on a worker came with 1.9.
    known = ("needs CUDA: ", "kernels of Triton cannot run on cpu", "of TorchRec 1.6", "has no async_inplace_copy")
    assert reasons and [line for line in reasons if not any(reason in line for reason in known)] == []


@pytest.mark.slow
def test_cases_of_pipelines_pass_on_one_rank():
    """As on a machine with one GPU: no row has another rank to go to."""
    job = run("--cpu", "1", "-k", "stashed or windows")
    assert job.returncode == 0 and re.search(r"\d passed", job.stdout), job.stdout + job.stderr


# A Python that counts two GPUs and fails at everything else.
FAILING = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 2; else echo "ran ${*: -3}"; exit 1; fi
"""


def test_a_section_that_fails_fails_the_job_after_the_others(tmp_path):
    shutil.copytree(ROOT / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("__pycache__", "build_backend"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAILING)
    python.chmod(0o755)
    job = run_program("bash", tmp_path / "ci" / "test_gpu.sh")
    assert job.returncode == 1 and job.stderr == ""
    assert [line for line in job.stdout.splitlines() if line.startswith("ran ")] == [
        "ran cuda -p no:cacheprovider",
        "ran no:cacheprovider -k take_turns or sparse",
        "ran --ranks 2 --quick",
    ]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("arguments", [(), ("--gpus", "2"), ("--share",)])
def test_without_a_gpu_it_says_what_to_do(arguments):
    job = run(*arguments)
    assert job.returncode == 2 and job.stderr.strip().endswith("use --cpu N to run its cases over gloo")
    assert job.stderr.count("\n") == 1


@pytest.mark.slow
def test_cases_of_the_exchange_run_on_each_kind_of_process_groups_that_users_have():
    """Listed here without a GPU. Models, which take long to compile, run on what the trainer makes."""
    command = f"{sys.executable} -m pytest tests/gpu --device cuda --collect-only -q -o addopts= -p no:cacheprovider"
    job = run_program(*command.split())
    bound, kinds = "nccl with device_id", ["nccl", "nccl with device_id", "cpu:gloo,cuda:nccl"]
    for case in ("test_transports_are_bit_identical", "test_two_shufflers_take_turns", "test_a_whole_step"):
        assert sorted(re.findall(rf"::{case}\[(.*)\]", job.stdout)) == sorted(kinds)
    assert set(re.findall(r"::test_a_model_is_that_of_the_host\[([^-]*)-", job.stdout)) == {bound}


@pytest.mark.slow
def test_ranks_that_share_a_gpu_pass_for_hosts():
    """Two ranks as NCCL would see them: a host each, on the first GPU, over the loopback interface."""
    names = ("NCCL_HOSTID", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_NET", "NCCL_SOCKET_IFNAME", "WORLD_SIZE")
    # In one write: of two ranks that print at once, the words and the ends of lines come in any order.
    program = f"import os; os.write(1, (' '.join(os.environ[name] for name in {names}) + chr(10)).encode())"
    job = run_program(*TWO_RANKS, "--no-python", "ci/share_gpu.sh", sys.executable, "-c", program)
    assert sorted(job.stdout.splitlines()) == [f"shared-gpu-{rank} 0 1 Socket lo 2" for rank in range(2)]


# ------------------------------------------------------------------------------------------------------------ two hosts


TWO_HOSTS = ("bash", "ci/test_two_hosts.sh")


@pytest.mark.slow
def test_two_hosts_train_alike_and_a_cut_link_is_told():
    job = subprocess.Popen(
        TWO_HOSTS, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = job.communicate(timeout=400)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    if job.returncode == 77:
        pytest.skip(said.strip())
    assert job.returncode == 0, said + errors
    assert "first host, after" in said and "second host, after" in said


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("test_gpu.sh", "--share --cpu 2", "error: --cpu, --gpus and --share each say what the ranks run on; give one"),
        *(("test_two_hosts.sh", each, "error: ") for each in ("--timeout 0", "--timeout", "--keep", "--hosts 3")),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(script, arguments, said):
    job = run_program("bash", f"ci/{script}", *arguments.split())
    assert job.returncode == 2 and not job.stdout
    assert job.stderr.startswith(said) and job.stderr.count("\n") == 1


def test_the_help_says_what_happens_where_namespaces_cannot_be_made():
    job = run_program(*TWO_HOSTS, "--help")
    assert job.returncode == 0 and "--timeout 30" in job.stdout and "77" in job.stdout


def test_without_namespaces_it_is_skipped(tmp_path):
    """As a user who may not make them."""
    for tool in ("bash", "dirname", "id", "sed"):
        (tmp_path / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    (tmp_path / "python3").symlink_to("/bin/true")
    job = subprocess.run(
        [tmp_path / "bash", "ci/test_two_hosts.sh"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert job.returncode == 77 and job.stdout.startswith("skipped: there is no ") and not job.stderr
