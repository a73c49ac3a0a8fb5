"""The examples run as their docstrings say; those for Slurm and Kubernetes start ranks that train, on our arguments."""

from __future__ import annotations

import os
import re
import runpy
import sys

import pytest
import yaml
from torch.distributed.run import get_args_parser

from benchmarks import window_learning
from commons.trainer.config.load import load_config
from hstu.train_config import TrainConfig
from tests.helpers.jobs.programs import ROOT, TWO_RANKS, run_program


def run(*arguments, folder=ROOT, paths=str(ROOT)):
    """What two ranks print."""
    done = run_program(*TWO_RANKS, *arguments, cwd=folder, env={"PYTHONPATH": paths, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensordict_chunks(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["tensordict_chunks.py", "--prompts", "24", "--chunks", "6"])
    runpy.run_path(str(ROOT / "examples/tensordict_chunks.py"))["main"]()
    shown = capsys.readouterr().out
    in_order, evenly = map(float, re.findall(r"largest chunk ([\d.]+) × the mean", shown))
    assert evenly < in_order
    assert "96 rows in 6 chunks" in shown and "16 to 16, whole prompts of 4" in shown
    assert float(re.search(r"difference to the whole batch ([\d.e+-]+)", shown).group(1)) < 1e-6


@pytest.mark.slow
def test_single_controller():
    shown = run("examples/single_controller.py", "--rows", "16", "--longest", "64", "--steps", "2")
    assert "step 2 of 2" in shown
    received, whole = map(float, re.findall(r"at most ([\d.]+) kB by a rank, of ([\d.]+) kB", shown)[0])
    assert 0 < received < 0.7 * whole
    logprobs = [float(value) for value in re.findall(r"mean log-probability │ (-[\d.]+)", shown)]
    assert len(logprobs) == 2 and all(-8 < value < -5 for value in logprobs)  # of 500 tokens by chance: -6.2


@pytest.mark.slow
def test_balance_per_module():
    shown = run("examples/balance_per_module.py", "--rows", "4", "--patches", "64", "--steps", "3")
    assert float(re.search(r"losses differ by at most\s+│ ([\d.e+-]+)", shown).group(1)) < 1e-5
    first, last = map(float, re.search(r"first and last\s+│ ([\d.]+), ([\d.]+)", shown).groups())
    assert first != last and 3 < first < 4.5  # ln 32 is 3.47


@pytest.mark.parametrize(
    ("example", "option", "value"),
    [
        ("balance_per_module", "steps", 1),  # the first step is not timed
        ("tensordict_chunks", "prompts", 0),
        ("single_controller", "longest", 0),
    ],
)
def test_sizes_that_are_too_small_are_named(monkeypatch, example, option, value):
    monkeypatch.setattr(sys, "argv", [f"{example}.py", f"--{option}", str(value)])
    with pytest.raises(ValueError, match=f"{option} is {value}; it must be an integer of at least {value + 1}"):
        runpy.run_path(str(ROOT / f"examples/{example}.py"))["main"]()


@pytest.mark.slow
def test_torchrec_dlrm_outside_the_checkout(tmp_path):
    script = tmp_path / "train.py"
    script.write_text((ROOT / "examples" / "torchrec_dlrm.py").read_text(encoding="utf-8"), encoding="utf-8")
    shown = run(script.name, folder=tmp_path, paths="")
    steps = re.findall(r"loss ([\d.]+), imbalance ([\d.]+)% → ([\d.]+)%", shown)
    losses, before, after = zip(*(map(float, step) for step in steps))
    assert len(steps) == 10 and losses[-1] < losses[0]
    assert sum(before) > 5 * sum(after) and max(after) <= 2


@pytest.mark.slow
def test_gradient_accumulation_with_one_plan_for_both_ranks():
    shown = run("examples/gradient_accumulation.py", "--joint", "--longest", "256", "--rows", "24")
    assert float(re.search(r"largest difference of gradients +│ ([\d.e+-]+)", shown).group(1)) <= 1e-12
    ratios = re.search(r"costliest rank ÷ mean, at each +│ ([\d., ]+\d)", shown).group(1).split(", ")
    assert max(map(float, ratios)) < 1.02


# ------------------------------------------------------------------------------------------------------------ launchers


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
    many_hosts = '#!/bin/sh\necho "$3"\nexec seq 100000\n'  # more than a pipe holds
    texts = {"srun": SRUN, "scontrol": many_hosts, "torchrun": '#!/bin/sh\nprintf "%s\\n" "$@"\n'}
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


@pytest.mark.parametrize("mode", ["as loaded", "window of 4", "budget"])
def test_the_benchmark_of_learning_trains_hstu(monkeypatch, tmp_path, mode):
    """It downloads its data, so that it is not run here."""
    commands = []
    monkeypatch.setattr(window_learning, "run_program", commands.append)
    with pytest.raises(FileNotFoundError, match="summary.json"):
        window_learning.measure_training("ranking", 1, mode, folder=tmp_path, data={1: tmp_path}, ranks=2, quick=True)
    read = get_args_parser().parse_args(commands[0][3:])
    assert (read.nproc_per_node, read.module, read.training_script) == ("2", True, "hstu.train")
    trainer = load_config(TrainConfig, read.training_script_args).trainer
    assert (trainer.shuffle_window, trainer.balance_sampler) == (1 + 3 * ("window" in mode), mode == "budget")


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
    # Without requests Trainer 2.0 and 2.1 start one rank per node.
    assert trainer.resources_per_node.requests == trainer.resources_per_node.limits is not None
