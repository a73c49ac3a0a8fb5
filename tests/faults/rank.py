"""The processes of a trial, a rank or the host of the store, forked in milliseconds with all that is imported here.

Each ends as any program does: multiprocessing ends what its fork server has started without Python's own finalization,
of which a fault may make a crash.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tests.helpers.ranks.rank_preload  # noqa: F401  what a rank imports, once for all of them

# isort: split
import torch
import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from tests.faults import kinds
from tests.faults.injector import Injector
from tests.faults.trials import Trial
from tests.faults.uses import USES, FaultyModel, FaultyShuffler
from tests.helpers.ranks.stopped_ranks import connect_store, host_store, port_of

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
        _prepare(folder / "tmp")
        work(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    ctypes.pythonapi.Py_Exit(status)


def _prepare(temporary: Path) -> None:
    """What each process needs: a folder for its files, and no more of the machine than a rank has."""
    os.chdir(temporary)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks a process that hangs where it is
    torch.set_num_threads(1)


def be_agent(folder: Path) -> None:
    """Host the store as torchrun's agent does, until the end of the trial."""
    store = host_store(folder)
    while store:
        time.sleep(3600)


def be_rank(trial: Trial, rank: int, folder: Path, store_pid: int) -> None:
    """Train, with the fault in the way; what happens is told to the supervisor."""
    injector = Injector(trial, rank, store_pid, folder / f"rank{rank}.jsonl")
    atexit.register(injector.say, "left")  # called after the product's own functions, which are registered later
    _join(trial, rank, folder)
    injector.install()
    shuffler, model = None, FaultyModel(injector)
    try:
        injector.at(kinds.CONSTRUCTION)
        options = injector.at(kinds.OPTIONS, ShufflerOptions(timeout=trial.timeout))
        FaultyShuffler.injector = injector
        shuffler = FaultyShuffler(options)
        injector.watch_worker(shuffler)
        USES[trial.use](shuffler, injector, model)
    except BaseException as error:
        injector.say("raised", text=f"{type(error).__name__}: {error}")
        raise
    else:
        injector.say("trained", rows=model.seen)
    finally:
        if shuffler is not None:
            shuffler.close()
        # Those that close() ends; the process has others, for all shufflers, which ask the store and make groups.
        names = [each.name for each in threading.enumerate() if each.name.startswith("evenrank")]
        injector.say("closed", threads=[name for name in names if "Shuffler" in name])
    dist.barrier()
    dist.destroy_process_group()


def _join(trial: Trial, rank: int, folder: Path) -> None:
    """Join the ranks as torchrun's processes do, or as those that rank 0 hosts the store for."""
    if trial.store == "agent":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port_of(folder), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(trial.world_size)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        dist.init_process_group("gloo")
    else:
        store = connect_store(folder, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.world_size)
    dist.barrier()  # a fault shall not meet a rank that is still in torch's own call


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
