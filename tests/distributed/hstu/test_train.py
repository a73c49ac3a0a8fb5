"""The commands as a user types them: torchrun starts ranks, they train, and what goes wrong is one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commons.run_log.reading import read_runs
from commons.run_log.report import RunReport
from tests.helpers.jobs.programs import ROOT, TWO_RANKS, run_program
from tests.helpers.jobs.training_configs import TINY

QUIET_TWO_RANKS = [*TWO_RANKS[:2], "commons.trainer.torchrun", *TWO_RANKS[3:]]
# A training script of a user's own: rank 1 fails while rank 0 is in a collective.
FAILING = """
import os, signal, sys, time, types
import torch, torch.distributed as dist
from commons.trainer.ranks.errors import log_to_file, run_main
from commons.trainer.ranks.launch import initialize_ranks
def main():
    if sys.argv[1] == "cannot connect" and os.environ["RANK"] == "0":
        raise RuntimeError("Gloo connectFullMesh failed with [/third_party/gloo/pair.cc:553] closed by peer")
    initialize_ranks(device_type="cpu")
    log_to_file(sys.argv[2])
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("connected", "1")
    store.wait(["connected"])
    if sys.argv[1] == "fails" and dist.get_rank() == 1:
        raise RuntimeError("out of order")
    if sys.argv[1] == "leaves" and dist.get_rank() == 1:
        return
    if sys.argv[1] == "killed" and dist.get_rank() == 1:
        time.sleep(1)  # the other one is in its collective
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "waits" and dist.get_rank() == 1:
        print("ready", flush=True)
        time.sleep(60)
    if sys.argv[1] == "leaves work":
        cycle = types.SimpleNamespace(group=dist.group.WORLD)
        cycle.itself = cycle
        for _ in range(200):
            dist.all_reduce(torch.ones(100_000), async_op=True)
        return
    dist.all_reduce(torch.zeros(1))
run_main(main)
"""


@pytest.mark.slow
def test_a_mistake_that_every_rank_makes_is_said_once(tmp_path):
    arguments = ["-m", "hstu.train", *TINY, "--trainer.run-dir", tmp_path, "--trainer.global-batch-size", "3"]
    done = run_program(*TWO_RANKS, *arguments, timeout=300)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert "global_batch_size is 3, and 2 ranks share the data; " in said[0]
    # What follows is torchrun's own report: its traceback, not the ranks', and this line as the root cause.
    ranks_part, _, report = done.stderr.partition("torch/distributed/elastic/")
    assert "Traceback" not in ranks_part
    assert f"traceback : {said[0]}" in report


@pytest.mark.slow
def test_the_quiet_torchrun_ends_with_that_line(tmp_path):
    (tmp_path / "summary.json").touch()  # of a run
    done = run_program(*QUIET_TWO_RANKS, "-m", "hstu.train", *TINY, "--trainer.run-dir", tmp_path, timeout=300)
    errors = done.stderr
    assert done.returncode == 2
    assert [line for line in errors.splitlines() if line.startswith("error:")] == [errors.splitlines()[-1]]
    assert f"run_dir {tmp_path} already contains a run; " in errors
    assert "Traceback" not in errors
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "summary.json"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status", "log", "begins", "ends"),
    [
        ("fails", 1, "rank1.log", "rank 1: RuntimeError: out of order (traceback in ", "rank1.log)"),
        ("leaves", 1, "rank0.log", "rank 0: a collective of the training failed (", "rank0.log)"),
        ("killed", 128 + signal.SIGKILL, None, "rank 1 was ended by SIGKILL", ""),
        (
            "cannot connect",
            1,
            None,
            "a collective of the training failed (Gloo connectFullMesh failed with closed by",
            "log",
        ),
    ],
)
def test_the_failing_rank_is_the_one_that_speaks(tmp_path, kind, status, log, begins, ends):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    done = run_program(*QUIET_TWO_RANKS, script, kind, tmp_path, timeout=300)
    errors = done.stderr
    assert done.returncode == status
    *others, said = [line for line in errors.splitlines() if "error" in line.lower()]
    assert said.startswith(f"error: {begins}") and said.endswith(ends)
    # A killed rank's peer may speak too, unless torchrun ends it first.
    assert kind == "killed" or not others
    assert all(line.startswith("error: rank 0: a collective of the training failed (") for line in others)
    assert "frame #" not in errors and "/gloo/" not in errors and "Traceback" not in errors
    assert log is None or "Traceback" in (tmp_path / log).read_text()
    assert kind != "leaves" or "; a rank exited or stalled: see its log (traceback in " in said


@pytest.mark.slow
def test_a_group_in_a_reference_cycle_ends_before_python_does(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    done = run_program(*QUIET_TWO_RANKS, script, "leaves work", tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    command, pipe = [*QUIET_TWO_RANKS, script, "waits", tmp_path], subprocess.PIPE
    # A group of its own, as that of a terminal.
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)  # returns when no rank holds the pipe any more
    assert process.returncode == 130
    assert "Traceback" not in errors and "error" not in errors.lower()


@pytest.mark.slow
def test_the_demo(tmp_path):
    command = ["bash", "ci/demo.sh", str(Path(sys.executable).parent), "cpu", "--quick"]
    options = ["--run-dir", str(tmp_path / "demo"), "--num-users", "200", "--batch-size", "8"]
    options += ["--max-history-seqlen", "100", "--num-layers", "2"]
    done = run_program(*command, *options, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "generated data" in done.stdout and "speed-up, median of the steps" in done.stdout
    base, other = read_runs([tmp_path / "demo/as-loaded", tmp_path / "demo/balanced"])
    assert base.step.tolist() == other.step.tolist() == list(range(3, 10))
    # Two replicas with the same weights see the same batches; rounding grows.
    losses = base.column("loss"), other.column("loss")
    assert abs(losses[0] - losses[1])[:3].max() < 1e-5 and losses[0][0] != losses[0][1]
    assert base.column("imbalance_before") == pytest.approx(other.column("imbalance_before"))
    assert other.mean("imbalance_after") < other.mean("imbalance_before")
    assert base.evaluations[0][1]["rows"] == other.evaluations[0][1]["rows"] > 5
    assert RunReport(base).balancing == "off" and RunReport(other).balancing == "balanced"
    assert (tmp_path / "demo/report.png").stat().st_size > 10_000 and (tmp_path / "demo/report.html").exists()
