"""What the examples for Slurm and Kubernetes start: ranks that train, on arguments that are ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from torch.distributed.run import get_args_parser

from commons.trainer.config import load_config
from hstu.train_config import TrainConfig
from tests.helpers import documented_names as given
from tests.helpers.hstu_jobs import ROOT, TINY

SBATCH = ROOT / "examples/slurm.sbatch"
# srun on one machine: its options are shown, and every task is told what Slurm tells it.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  echo "srun was given $1" >&2
  [[ $1 == --ntasks=* ]] && SLURM_NTASKS=${1#--ntasks=}
  shift
done
export SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_NTASKS SLURM_STEP_TASKS_PER_NODE=$SLURM_NTASKS
export SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
done
wait -n
status=$?
wait
exit $status
"""


def lines_of(run_dir):
    return (run_dir / "log.jsonl").read_text().splitlines()


@pytest.fixture
def sbatch(tmp_path):
    """Runs the script as a job of two tasks on this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {
        "srun": SRUN,
        "scontrol": '#!/bin/sh\necho "$3"\n',
        "torchrun": '#!/bin/sh\nprintf "%s\\n" "$@"\n',
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {"JOB_ID": str(os.getpid()), "JOB_NODELIST": "localhost", "NNODES": "1", "NTASKS": "2", "GPUS_ON_NODE": "2"}
    job["CPUS_PER_TASK"] = "3"

    def run(*arguments):
        return subprocess.run(
            ["bash", str(SBATCH), *map(str, arguments)],
            cwd=ROOT,
            env=os.environ
            | {f"SLURM_{name}": value for name, value in job.items()}
            | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def test_shellcheck_has_nothing_to_say():
    program = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([program, SBATCH], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_srun_starts_every_rank(two_ranks, sbatch, tmp_path):
    flags = [*TINY, "--trainer.enable-balanced-shuffler", "--trainer.run-dir"]
    done = sbatch("srun", *flags, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    # Since 22.05 srun takes it neither from sbatch nor from SLURM_CPUS_PER_TASK.
    assert "srun was given --cpus-per-task=3\n" in done.stderr
    assert done.stdout.count("2 ranks on the CPU, one thread each") == 1
    two_ranks.run(given.train_in, str(tmp_path), "hstu.train", [*flags, "joined"])
    started, joined = ([json.loads(line) for line in lines_of(tmp_path / name)] for name in ("run", "joined"))
    assert [line["step"] for line in started if "loss" in line] == [2, 4, 6]
    assert [line.get("loss") for line in started] == [line.get("loss") for line in joined]
    settings = json.loads((tmp_path / "run/config.json").read_text())["trainer"]
    assert (settings["launcher"], settings["shuffler"]["ranks_per_node"]) == ("slurm", 2)


def test_torchrun_is_started_on_every_machine(sbatch):
    done = sbatch("torchrun")
    assert done.returncode == 0, done.stderr
    assert "srun was given --cpus-per-task=6\n" in done.stderr
    told = get_args_parser().parse_args(done.stdout.splitlines())
    assert (told.nnodes, told.nproc_per_node, told.rdzv_endpoint) == ("1", "2", "localhost:29500")
    assert told.module and told.training_script == "hstu.train"
    config = load_config(TrainConfig, told.training_script_args)
    assert config.trainer.launcher == "torchrun" and config.trainer.enable_balanced_shuffler


def test_a_form_that_is_none(sbatch):
    done = sbatch("mpirun")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "error: the form is 'mpirun'; " in done.stderr


def test_the_trainjob_is_one_of_kubeflow_s():
    written = yaml.safe_load((ROOT / "examples/trainjob.yaml").read_text())
    job = TrainerV1alpha1TrainJob.from_dict(written)
    assert job.to_dict() == written  # fields that Trainer does not know would be missing
    trainer = job.spec.trainer
    program, *arguments = [*trainer.command, *trainer.args]
    told = get_args_parser().parse_args(arguments)
    assert program == "torchrun" and told.module and told.training_script == "hstu.train"
    config = load_config(TrainConfig, told.training_script_args)
    assert config.trainer.shuffler.ranks_per_node == written["spec"]["trainer"]["numProcPerNode"]
