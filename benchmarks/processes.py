"""Programs under a time limit: what they print goes to files, and all that they have started ends with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

# A process by number, and when it began in ticks since the machine started: numbers are used again.
Process = tuple[int, int]


def run_limited(
    command: Sequence[str], seconds: float, *, output: Path, complaints: Path, cwd: Path, grace: float = 10.0
) -> int | None:
    """Run a program; the exit status, or None where it was ended.

    Args:
        command: the program and its arguments.
        seconds: after which it is ended.
        output: file for its standard output.
        complaints: file for its standard error.
        cwd: folder to run in.
        grace: seconds between SIGTERM, at which torchrun ends its ranks, and SIGKILL.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as out, complaints.open("w") as err:
        process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=err, start_new_session=True)
        try:
            return process.wait(seconds)
        except BaseException as error:  # an interrupt too
            _end(process, grace)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return None


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End a program and what it has started: torchrun gives every rank a session of its own."""
    started = _with_descendants({each for each in _parents() if each[0] == process.pid})
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and started & set(_parents()):
        process.poll()
        started = _with_descendants(started)
        time.sleep(0.1)
    while alive := (started := _with_descendants(started)) & set(_parents()):
        for number, _ in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.poll()
        time.sleep(0.1)


def _with_descendants(processes: set[Process]) -> set[Process]:
    """These and all whose parents are among them; those whose parent has ended are known from before."""
    parents, found = _parents(), set(processes)
    while more := {each for each, parent in parents.items() if parent in {number for number, _ in found}} - found:
        found |= more
    return found


def _parents() -> dict[Process, int]:
    """The number of the parent of every running process."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is no process
            state, parent, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                found[int(folder.name), int(rest[17])] = int(parent)
    return found
