"""What the examples for Slurm and Kubernetes start: ranks that train, on arguments that are ours."""

from __future__ import annotations

import os

import pytest
import yaml
from torch.distributed.run import get_args_parser

from commons.trainer.config.load import load_config
from hstu.train_config import TrainConfig
from tests.helpers.jobs.programs import ROOT, run_program

SBATCH = ROOT / "examples/slurm.sbatch"
# srun on one machine: its options are shown, and the program is started once.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  echo "srun was given $1" >&2
  shift
done
exec "$@"
"""


@pytest.fixture
def sbatch(tmp_path):
    """Runs the script as a job of one machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {
        "srun": SRUN,
        "scontrol": '#!/bin/sh\necho "$3"\n',
        "torchrun": '#!/bin/sh\nprintf "%s\\n" "$@"\n',
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {"JOB_ID": str(os.getpid()), "JOB_NODELIST": "localhost", "NNODES": "1", "GPUS_ON_NODE": "2"}
    job["CPUS_PER_TASK"] = "3"

    def run(*arguments):
        env = {f"SLURM_{name}": value for name, value in job.items()}
        env |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        return run_program("bash", SBATCH, *arguments, env=env)

    return run


def test_torchrun_is_started_on_every_machine(sbatch):
    done = sbatch()
    assert done.returncode == 0, done.stderr
    assert "srun was given --cpus-per-task=3\n" in done.stderr
    told = get_args_parser().parse_args(done.stdout.splitlines())
    assert (told.nnodes, told.nproc_per_node, told.rdzv_endpoint) == ("1", "2", "localhost:29500")
    assert told.module and told.training_script == "hstu.train"
    config = load_config(TrainConfig, told.training_script_args)
    assert config.trainer.enable_balanced_shuffler and config.trainer.shuffler.ranks_per_node == 2


def test_the_trainjob_is_one_of_kubeflow_s():
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # takes seconds, in every worker of the suite

    written = yaml.safe_load((ROOT / "examples/trainjob.yaml").read_text())
    job = TrainerV1alpha1TrainJob.from_dict(written)
    assert job.to_dict() == written  # fields that Trainer does not know would be missing
    trainer = job.spec.trainer
    program, *arguments = [*trainer.command, *trainer.args]
    told = get_args_parser().parse_args(arguments)
    assert program == "torchrun" and told.module and told.training_script == "hstu.train"
    config = load_config(TrainConfig, told.training_script_args)
    assert config.trainer.shuffler.ranks_per_node == written["spec"]["trainer"]["numProcPerNode"]
