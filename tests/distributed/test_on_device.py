"""`benchmarks.on_device` runs from end to end on the CPU, tells what failed, and reads traces rightly."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import on_device
from benchmarks.on_device import PartFailedError, describe_trace, run_limited
from tests.helpers.jobs.programs import ROOT, run_program
from tests.helpers.ranks.stopped_ranks import wait_for

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute on a machine with nothing else to do
def test_a_rehearsal_fills_the_page(tmp_path):
    # That of the cases runs tests/gpu, which tests/distributed/test_ci_scripts.py does too.
    parts = ["warm_up", "layers", "sanitizer", "exchange", "attention", "step", "balance"]
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "benchmarks.on_device", "--rehearse", "--output", str(page), "--only", *parts]
    job = run_program(*command, timeout=800)
    assert job.returncode == 0, job.stdout + job.stderr
    text = page.read_text()
    assert text in job.stdout and "A rehearsal on the CPU" in text and "failed" not in text
    for part in parts:
        assert f"## {on_device.PARTS[part].title}" in text
    assert "| zipf | 2 | 64 | position |" in text and "R² " in text
    assert "speed-up by operations" in text and "forward pass on the host" in text


@pytest.mark.slow
def test_a_part_that_does_not_end_is_told_and_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(on_device.PARTS, "exchange", dataclasses.replace(on_device.PARTS["exchange"], seconds=0.01))
    assert on_device.main(("exchange", "attention"), rehearse=True, output=tmp_path / "page.md") == 1
    text = (tmp_path / "page.md").read_text()
    assert "**Failed: exchange.**" in text and "It was ended after 0 s." in text
    assert f"## {on_device.PARTS['attention'].title}" in text


def test_cases_that_fail_are_told(monkeypatch, capsys):
    monkeypatch.setattr(
        on_device, "_launch", lambda device: [sys.executable, "-c", "print('2 failed, 3 passed'); 1 / 0"]
    )
    with pytest.raises(PartFailedError, match="(?s)2 failed, 3 passed.*status 1.*ZeroDivisionError"):
        on_device.cases_under_sanitizer(CPU)
    assert on_device.print_part("sanitizer", "cpu") == 1
    assert "2 failed, 3 passed" in capsys.readouterr().out


def cases_of(command):
    """Names of the cases that a part runs; those of the exchange run on three kinds of process groups."""
    at = max(index for index, each in enumerate(command) if each.endswith(("test_gpu.sh", "_on_device.py")))
    path = command[at] if command[at].endswith(".py") else "tests/gpu"
    chosen = command[command.index("-k") :] if "-k" in command else []
    options = ["--device", "cuda", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    job = run_program(sys.executable, "-m", "pytest", path, *options, *chosen)
    return set(re.findall(r"^tests/gpu/\S+?::\w+", job.stdout, re.MULTILINE))


@pytest.mark.slow
def test_every_case_of_a_gpu_is_in_one_part(monkeypatch):
    monkeypatch.setattr(on_device, "_run_cases", lambda command: command)
    device = torch.device("cuda")
    cases, of_layers = (cases_of(part(device)) for part in (on_device.cases_on_device, on_device.cases_of_layers))
    assert cases | of_layers == cases_of(["ci/test_gpu.sh"]) and not cases & of_layers and len(of_layers) > 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    page = ROOT / "benchmarks" / "results" / "on_device.md"
    before = page.read_text()
    assert on_device.main() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("evenrank: no CUDA device is visible;") and said.err.count("\n") == 1
    assert page.read_text() == before


def test_all_parts_fit_in_half_an_hour():
    assert sum(part.seconds for part in on_device.PARTS.values()) < 30 * 60


RANK = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank", os.environ["RANK"], "is process", os.getpid(), flush=True)
time.sleep(600)
"""


def has_ended(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_end_with_their_part_and_its_output_is_kept(monkeypatch, tmp_path):
    """A part whose output is that of torchrun, which gives each of its ranks a session."""
    (tmp_path / "rank.py").write_text(RANK)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "rank.py"]
    part = f"import subprocess, sys; subprocess.run([sys.executable, *{launch}])"
    output = tmp_path / "output"
    monkeypatch.setattr(on_device, "ROOT", tmp_path)
    status = run_limited([sys.executable, "-c", part], 20, output, tmp_path / "log")
    found = re.findall(r"rank (\d) is process (\d+)", output.read_text())
    assert status is None and sorted(rank for rank, _ in found) == ["0", "1"]
    # A process dies some time after it is killed, on a machine with other work.
    assert wait_for(lambda: all(has_ended(number) for _, number in found), 20), found


def test_a_trace_is_read_rightly():
    """Two forward passes of 10 ms: the device idles for 2 and 4 ms, and is busy for 5 ms, part of which overlaps."""

    def event(cat, name, begin, duration):
        return {"ph": "X", "cat": cat, "name": name, "ts": 1e3 * begin, "dur": 1e3 * duration}

    events = [
        event("kernel", "late", 105, 4),
        event("kernel", "overlapping", 106, 4),
        event("kernel", "earlier", 90, 11),
        event("user_annotation", "## forward 0 ##", 0, 10),
        event("user_annotation", "## forward 1 ##", 100, 10),
        event("gpu_user_annotation", "## forward 1 ##", 100, 30),
        event("kernel", "first", 2, 3),
        event("kernel", "second", 7, 2),
        {"ph": "i", "cat": "kernel", "name": "no span", "ts": 0},
    ]
    assert describe_trace(events) == {
        "forward pass on the host": "10.00 ms",
        "gap before the first layer, the device idle": "3.000 ms",
        "device busy during it": "55%",
        "kernels in a step": "2",
    }
    assert "gap before the first layer" in describe_trace(events[3:5])
    busy = [event("kernel", "long", -1, 20), event("kernel", "next", 1, 1), events[3]]
    assert describe_trace(busy)["gap before the first layer, the device idle"] == "0.000 ms"
