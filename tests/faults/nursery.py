"""Processes in milliseconds: a server that has imported everything once, and forks itself.

`python -m tests.faults.nursery` reads a job per line, forks, and says when a process has ended. A forked process comes
back out of the server's loop and ends as any program does: with Python's own finalization, which a fork server of
multiprocessing leaves out.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.01
# linux/prctl.h
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36


@dataclass
class Process:
    """A forked process, and how it ended."""

    name: str  # in its job's folder
    pid: int = 0  # also of the session that it leads
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    status: int = 0  # exit status; negative, the signal that ended it
    at: float = 0.0  # when it ended, `time.monotonic()`

    def send(self, number: int) -> None:
        """Send a signal to the process and whatever it has started; nothing happens if they have ended."""
        signal_session(self.pid, number)


class Nursery:
    """The server, and what it has forked; safe to use from several threads."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.nursery"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._lock = threading.Lock()
        self._processes: list[Process] = []
        assert self._server.stdout is not None
        if self._server.stdout.readline().strip() != "ready":
            raise RuntimeError("the ranks' server did not start; what is above says why")
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, name: str, job: dict[str, Any]) -> Process:
        """Start a process; its job names a folder, where `<name>.log` takes what it prints."""
        assert self._server.stdin is not None
        process = Process(name)
        with self._lock:
            number = len(self._processes)
            self._processes.append(process)
            self._server.stdin.write(json.dumps({"number": number, "name": name} | job) + "\n")
            self._server.stdin.flush()
        if not process.started.wait(30):
            raise RuntimeError("the ranks' server does not answer")
        return process

    def close(self) -> None:
        """End the server, and with it all that still runs."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            said = json.loads(line)
            process = self._processes[said["number"]]
            if "pid" in said:
                process.pid = said["pid"]
                process.started.set()
            else:
                process.status, process.at = said["status"], said["at"]
                process.ended.set()


def session_members(leader: int) -> list[int]:
    """Living processes of the session that a process leads."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has just ended
        if int(session) == leader and state not in "ZX":
            members.append(int(entry.name))
    return members


def signal_session(leader: int, number: int) -> None:
    """Send a signal to a process and whatever it has started; nothing happens if they have ended."""
    for pid in session_members(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _serve() -> dict[str, Any] | None:
    """Fork for every line of stdin. In a forked process returns its job; in the server None, when the lines end."""
    living: dict[int, int] = {}
    buffered = b""
    while True:
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        while living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid in living:  # not an orphan of one of them
                ended = {"number": living.pop(pid), "status": os.waitstatus_to_exitcode(status), "at": time.monotonic()}
                _tell(ended)
        if not readable:
            continue
        read = os.read(0, 1 << 16)
        if not read:
            for pid in living:
                os.kill(pid, signal.SIGKILL)
            return None
        *lines, buffered = (buffered + read).split(b"\n")
        for line in lines:
            job = json.loads(line)
            pid = os.fork()
            if not pid:
                return job
            living[pid] = job["number"]
            _tell({"number": job["number"], "pid": pid})


def _tell(said: dict[str, Any]) -> None:
    os.write(1, (json.dumps(said) + "\n").encode())


def _leave(job: dict[str, Any]) -> None:
    """Become a process of its own: a session, standard streams and a folder for temporary files."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    log = os.open(Path(job["folder"], f"{job['name']}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


def main() -> None:
    """Serve; in a forked process, be what its job says."""
    from tests.faults import rank

    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which then ends this one
    os.write(1, b"ready\n")
    job = _serve()
    if job is not None:
        _leave(job)
        rank.main(job)


if __name__ == "__main__":
    main()
