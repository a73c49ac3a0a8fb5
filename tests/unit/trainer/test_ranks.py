"""Which rank a process is: Slurm's variables, numbers that do not fit, and what other libraries are told."""

from __future__ import annotations

import os

import pytest

from commons.trainer.launch import initialize_ranks
from commons.trainer.ranks import RankInfo

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
ONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, address="localhost:29500")


@pytest.fixture
def step(monkeypatch):
    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_task_of_srun(step):
    ranks = RankInfo.of_slurm()
    host, _, port = ranks.address.partition(":")
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size, host) == (5, 7, 1, 2, "gpu07")
    assert 15000 <= int(port) < 30000 and ranks.gpu is None


def test_all_tasks_of_a_step_meet_at_one_port_and_steps_at_others(step):
    first = RankInfo.of_slurm().address
    for name, value in {"PROCID": "6", "LOCALID": "0", "NODEID": "3"}.items():
        step.setenv(f"SLURM_{name}", value)
    assert (last := RankInfo.of_slurm()).address == first and last.local_world_size == 1
    step.setenv("SLURM_STEP_ID", "1")
    assert RankInfo.of_slurm().address != first


def test_a_task_with_a_gpu_of_its_own(step):
    step.setenv("SLURM_GPUS_PER_TASK", "1")
    assert RankInfo.of_slurm().gpu == 0


@pytest.mark.parametrize("name", STEP)
def test_what_srun_does_not_tell(step, name):
    step.delenv(name)
    with pytest.raises(ValueError, match=f"{name} is not set, launcher is 'slurm'; srun sets it .*: start the"):
        initialize_ranks(device_type="cpu", launcher="slurm")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PROCID", "x", "SLURM_PROCID is 'x'; it is a number from 0 on: start the ranks with `srun`"),
        ("PROCID", "-1", "SLURM_PROCID is '-1'; it is a number"),
        ("PROCID", "7", "rank is 7, world_size is 7; ranks count from 0 to world_size - 1: correct"),
        ("LOCALID", "2", "local_rank is 2, local_world_size is 2; ranks count"),
        ("NTASKS", "1", "rank is 5, world_size is 1; "),
        ("NODEID", "4", "SLURM_NODEID is 4, SLURM_STEP_TASKS_PER_NODE tells of 4 machines; "),
        ("STEP_TASKS_PER_NODE", "2x3", "SLURM_STEP_TASKS_PER_NODE is '2x3'; it is a list such as "),
        ("STEP_TASKS_PER_NODE", "", "SLURM_STEP_TASKS_PER_NODE is ''; "),
        ("STEP_NODELIST", "", "SLURM_STEP_NODELIST is ''; it is a list of machines"),
        ("STEP_NODELIST", "[]", r"SLURM_STEP_NODELIST is '\[\]'; "),
    ],
)
def test_what_srun_tells_wrong(step, name, value, message):
    step.setenv(f"SLURM_{name}", value)
    with pytest.raises(ValueError, match=message) as raised:
        initialize_ranks(device_type="cpu", launcher="slurm")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 1}, "rank is 1, world_size is 1; "),
        ({"local_rank": -1}, "local_rank is -1, local_world_size is 1; "),
        ({"local_world_size": 2}, "rank 0 of 1 is number 0 of 2 on its machine; a machine has some of the ranks"),
        ({"address": "localhost"}, "address is 'localhost'; it is `host:port` of a machine .*: give rank 0's host"),
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
    ranks.tell_libraries()
    assert os.environ["MASTER_ADDR"] == "::1" and os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert RankInfo.of_torchrun() == RankInfo(5, 7, 1, 2, "::1:29500")


def test_srun_without_the_flag_is_told(step):
    with pytest.raises(ValueError, match="not started by torchrun; .*; under Slurm's srun, add --trainer.launc"):
        initialize_ranks()
