"""Gloo ranks that stay up while tests run: start them once, send each test's function to all of them.

`RankPool(2).run(function, *args)` calls `function(*args)` on every rank at once and returns the results by rank. Ranks
are joined with a timeout; a failure says which rank hung, died or raised. The process group of a failed call may be
out of step, so its ranks are ended and the next call starts fresh ones. `with RankPool(2) as pool:` ends them too.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Imported once by the fork server, so that a rank starts in milliseconds rather than in TorchRec's import time.
PRELOAD = ["tests.helpers.ranks.rank_preload"]
# Ranks with more process groups than this are replaced before the next call: every gloo group has a thread that wakes a
# hundred times a second, and what TorchRec makes for a sharded model stays.
_MOST_GROUPS = 16
# Until all ranks are there: imports alone take ten seconds of a processor, once.
_START_SECONDS = 300.0


class RankFailure(AssertionError):
    """At least one rank hung, died or raised; the message says which, and how."""


@dataclass
class _Rank:
    process: Any
    connection: multiprocessing.connection.Connection


def _serve(rank: int, world_size: int, store: str, connection: multiprocessing.connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60)
    )
    connection.send_bytes(b"ready")
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        if call is None:
            dist.destroy_process_group()
            return
        function, args, kwargs = call
        try:
            torch.manual_seed(0)
            result = function(*args, **kwargs)
            reply = ("ok", (result, dist.is_initialized() and len(dist.distributed_c10d._world.pg_names)))
        except BaseException as error:
            reply = ("error", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        try:
            payload = pickle.dumps(reply)
        except Exception as error:
            payload = pickle.dumps(("error", (f"result cannot be sent back: {error}", "")))
        connection.send_bytes(payload)


class RankPool:
    """`world_size` processes in one gloo group, started on first use."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank and return what each returned.

        All must return within `timeout` seconds, once they have started; after a failure the others have five.

        Raises:
            RankFailure: a rank raised, died or did not answer in time.
        """
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                with contextlib.suppress(BrokenPipeError):  # it has died since its last reply: `_collect` says how
                    rank.connection.send((function, args, kwargs))
            replies, problems = self._collect(timeout)
            if problems:
                raise RankFailure("\n".join(problems))
        except BaseException:
            self.stop()  # what the ranks still send is no reply to the next call
            raise
        if any(num_groups > _MOST_GROUPS for _, num_groups in replies.values()):
            self.stop()
        return [replies[rank][0] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="evenrank-ranks-", ignore_cleanup_errors=True)
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world_size):
            parent, child = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, child), daemon=True)
            process.start()
            child.close()
            self._ranks.append(_Rank(process, parent))
        deadline = time.monotonic() + _START_SECONDS
        for index, rank in enumerate(self._ranks):
            if not rank.connection.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailure(f"rank {index} has not started within {_START_SECONDS:.0f} s")
            rank.connection.recv_bytes()

    def _collect(self, timeout: float) -> tuple[dict[int, Any], list[str]]:
        replies: dict[int, Any] = {}
        problems: list[str] = []
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self._ranks))
        while waiting:
            ready = multiprocessing.connection.wait(
                [rank.connection for rank in waiting.values()], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                problems += [f"rank {index} hung: no answer within {timeout:.0f} s" for index in waiting]
                break
            for index, rank in list(waiting.items()):
                if rank.connection not in ready:
                    continue
                del waiting[index]
                try:
                    status, value = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    rank.process.join(5)
                    problems.append(f"rank {index} died with exit code {rank.process.exitcode}")
                    continue
                if status == "ok":
                    replies[index] = value
                else:
                    problems.append(f"rank {index} raised {value[0]}\n{value[1]}")
            if problems and waiting:
                # Its peers are probably stuck in a collective with the failed rank: give them a moment only.
                deadline = min(deadline, time.monotonic() + 5.0)
        return replies, problems

    def stop(self) -> None:
        """End the ranks: asked first, then terminated."""
        for rank in self._ranks:
            try:
                rank.connection.send(None)
            except (BrokenPipeError, OSError):
                pass
        deadline = time.monotonic() + 3.0
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join(5)
            rank.connection.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
