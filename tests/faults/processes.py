"""Processes in milliseconds, forked with all that is imported here; each ends as any program does.

multiprocessing ends what its fork server has started without Python's own finalization, of which a fault may make a
crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.rank import prepare

_SET_DEATH_SIGNAL = 1  # linux/prctl.h


def start_process(folder: Path, name: str, work: Callable[..., None], *args: Any) -> Any:
    """Start a function of a module in a process, which prints to `<name>.log` in the folder."""
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(folder, name, work, args), name=name)
    process.start()
    return process


def _run(folder: Path, name: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """In a session of its own, which the death of the fork server ends."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    status = 0
    try:
        prepare(folder / "tmp")
        work(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    ctypes.pythonapi.Py_Exit(status)


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
    """Send a signal to a process and to all processes that it has started; nothing happens if they have ended."""
    for pid in session_members(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
