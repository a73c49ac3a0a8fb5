"""What a run counts and averages, and how a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from commons.distributed.stats import ShuffleStats
from commons.trainer.observe import meter as meters
from commons.trainer.observe import times
from commons.trainer.observe.meter import SNAPSHOTS, StatsMean, StepMeter, StepSums
from commons.trainer.observe.times import StepClock
from commons.trainer.ranks import errors
from commons.trainer.ranks.launch import initialize_ranks


def make_stats(**changes):
    numbers = dict.fromkeys(ShuffleStats.__dataclass_fields__, 0)
    return ShuffleStats(**(numbers | {"loads_before": (1, 2), "loads_after": (1, 2)} | changes))


def test_stats_are_averaged_over_steps():
    mean = StatsMean()
    assert mean.means() == {}
    mean.add(make_stats(imbalance_before=0.5, rows_moved=2))
    mean.add(make_stats(imbalance_before=0.1, rows_moved=1))
    assert mean.means()["imbalance_before"] == pytest.approx(0.3)
    assert mean.means()["rows_moved"] == 1.5
    mean.add(make_stats(measured_saving_ms=4.0, gated=True))
    mean.add(make_stats(measured_saving_ms=None, gated=False))
    assert mean.means()["measured_saving_ms"] == pytest.approx(4 / 3)  # 0, 0 and 4: one step does not know
    assert mean.means()["gated"] == 0.25


@pytest.mark.parametrize(("ranks", "lines"), [(256, list(range(12))), (257, [0, 10])])
def test_of_many_ranks_every_tenth_line_has_each(monkeypatch, ranks, lines):
    monkeypatch.setattr(meters, "resolve_process_group", lambda: None)
    monkeypatch.setattr(meters.dist, "get_world_size", lambda group=None: ranks)
    meter = StepMeter(torch.device("cpu"), len, len)
    meter._stats = [make_stats(lookups_before=(3, 4), lookups_after=(3, 4))]
    told = [meter._describe([1.0]) for _ in range(12)]
    assert [line for line, details in enumerate(told) if set(SNAPSHOTS) <= details.keys()] == lines
    assert all(details["ranks"] == ranks and details["steps"] == 1 for details in told)


def test_the_mean_loss_weighs_every_term_alike():
    sums = StepSums()
    assert sums.mean_loss == 0.0
    sums.add(torch.tensor(6.0), 3)
    sums.add(torch.tensor(0.0), 0)
    sums.add(torch.tensor(1.0), 1)
    assert sums.mean_loss == 7.0 / 4


def test_the_clock_leaves_out_what_lies_between_steps(monkeypatch):
    moments = iter([1.0, 1.5, 9.0, 9.25])  # seconds; an evaluation lies between the steps
    monkeypatch.setattr(times, "_now", lambda device: next(moments))
    clock = StepClock(torch.device("cpu"))
    for _ in range(2):
        clock.begin()
        clock.end()
    assert clock.take() == [500.0, 250.0] and clock.take() == []


def test_a_device_that_is_none():
    with pytest.raises(ValueError, match="device_type is 4; it must be one of 'auto', 'cpu', 'cuda': choose one"):
        initialize_ranks(4)


def test_ranks_without_torchrun():
    with pytest.raises(ValueError, match="not started by torchrun; .*: run `torchrun --standalone --nproc_per_node=2 "):
        initialize_ranks()


PROGRAM = """
import os, signal, sys, time
from commons.trainer.ranks.errors import log_to_file, run_main
def main():
    if sys.argv[1] == "mistake":
        raise KeyError("x is 3, the rule is\\nanother: correct it")
    log_to_file(sys.argv[2])
    if sys.argv[1] == "bug":
        raise RuntimeError("out of order")
    if sys.argv[1] == "goes on":
        os.kill(os.getpid(), signal.SIGINT)
    print("ready", flush=True)
    if sys.argv[1] == "wait":
        time.sleep(60)
run_main(main)
"""


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("kind", "status", "shown"),
    [
        ("mistake", 2, "error: x is 3, the rule is another: correct it\n"),
        ("bug", 1, "error: RuntimeError: out of order (traceback in {})\n"),
    ],
)
def test_a_failure_is_one_line(tmp_path, kind, status, shown):
    process, log = start(kind, tmp_path), tmp_path / "rank0.log"
    assert process.communicate(timeout=60) == ("", shown.format(log))
    assert process.returncode == status
    assert kind == "mistake" or "Traceback" in log.read_text()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_says_nothing(tmp_path):
    process = start("wait", tmp_path)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == -signal.SIGINT  # a shell says 130


@pytest.mark.parametrize(
    "at_start, status, shown", [(signal.SIG_IGN, 0, "ready\n"), (signal.default_int_handler, -signal.SIGINT, "")]
)
def test_a_program_started_with_sigint_ignored_goes_on(tmp_path, ctrl_c, at_start, status, shown):
    signal.signal(signal.SIGINT, at_start)
    process = start("goes on", tmp_path)
    assert process.communicate(timeout=60) == (shown, "")
    assert process.returncode == status


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("seed is -1", "rank 1: seed is -1"),
        ("rank 0: seed is -1 (and on rank 1)", "rank 0: seed is -1 (and on rank 1)"),
    ],
)
def test_a_mistake_that_has_travelled_names_its_rank_alone(monkeypatch, capsys, text, shown):
    monkeypatch.setattr(errors, "_claim_report", lambda: True)
    monkeypatch.setattr(errors, "_hosts_store", lambda: False)
    monkeypatch.setattr(errors.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(errors.dist, "get_rank", lambda: 1)
    before = signal.getsignal(signal.SIGTERM)
    assert errors._report(ValueError(text)) == 2
    signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == f"error: {shown}\n"


def test_a_run_dir_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run_dir is '.*/file/run', which cannot be written \(Not a directory\)"):
        errors.log_to_file(tmp_path / "file" / "run")
