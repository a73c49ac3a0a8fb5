"""Ranks in processes of their own, the first of which hosts the store; one is killed, stopped or made to fail."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_START_SECONDS = 300.0


class Ended(NamedTuple):
    """How a rank ended: its status (None: it did not), and its stderr."""

    status: int | None
    stderr: str

    @property
    def error(self) -> str:
        """The last line, which says what went wrong, without the module of the error's type."""
        lines = [line for line in self.stderr.splitlines() if line.strip()] or [""]
        return re.sub(r"^[\w.]*\.(?=\w+: )", "", lines[-1])


def run_with_fault(
    folder: Path, work: Callable[..., None], *args: Any, waits_for: list[int], limit: float, world_size: int = 4
) -> list[Ended]:
    """Run `work(folder, *args)`, a function of a module, on every rank; one of them calls `fault(folder, ...)` in it.

    Args:
        folder: an empty one.
        work: raises on the survivors.
        *args: for `work`.
        waits_for: ranks that shall end by themselves.
        limit: seconds after the fault within which they must.
        world_size: ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.ranks.rank_preload"])
    ranks = [context.Process(target=_run, args=(rank, world_size, folder, work, args)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    try:
        at = wait_for(lambda: _content(folder / "fault"), _START_SECONDS)
        started = float(at) if at else time.monotonic()
        ended = [ranks[index] for index in waits_for]
        wait_for(lambda: all(rank.exitcode is not None for rank in ended), started + limit - time.monotonic())
        statuses = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [
        Ended(status, (folder / f"stderr{index}").read_text(errors="replace")) for index, status in enumerate(statuses)
    ]


def fault(folder: Path, number: int | None = None, back_when: Callable[[], object] | None = None) -> None:
    """Note the time of the fault, and send this process a signal.

    Args:
        folder: of the run.
        number: the signal; none where the caller fails in another way.
        back_when: a stopped process goes on when this returns.
    """
    if back_when is not None and os.fork() == 0:
        back_when()
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    (folder / "being written").write_text(str(time.monotonic()))
    (folder / "being written").rename(folder / "fault")
    if number is not None:
        os.kill(os.getpid(), number)


def _run(rank: int, world_size: int, folder: Path, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    output = os.open(folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, sys.stderr.fileno())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=connect_store(folder, rank == 0), rank=rank, world_size=world_size)
    work(folder, *args)


def connect_store(folder: Path, hosts: bool) -> dist.TCPStore:
    """The store of rank 0."""
    return host_store(folder) if hosts else dist.TCPStore("127.0.0.1", int(port_of(folder)), is_master=False)


def host_store(folder: Path) -> dist.TCPStore:
    """A store at a free port, which `port_of` reads from the folder."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "port being written").write_text(str(store.port))
    (folder / "port being written").rename(folder / "port")
    return store


def port_of(folder: Path) -> str:
    """The port of the store that another process hosts, when it does."""
    return wait_for(lambda: _content(folder / "port"), _START_SECONDS)


def _content(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    """What a condition says when it is true, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
