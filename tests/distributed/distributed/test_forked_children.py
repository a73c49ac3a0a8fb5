"""A process forked from a rank has neither the shuffler's thread nor connections of its own: it is told so at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from tests.helpers.batches import random_batch
from tests.helpers.rank_pool import PRELOAD
from tests.helpers.square_shuffler import SquareShuffler, closing, my_batch

_SECONDS = 20.0


def _in_child(action: Callable[[], Any]) -> str:
    """What a call raises in a forked process; "hangs" after some seconds."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on, of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            action()
            said = "no error"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with contextlib.closing(os.fdopen(read, "rb")) as pipe:
        said = pipe.read().decode() if select.select([pipe], [], [], _SECONDS)[0] else "hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said


def _calls_in_children() -> tuple[int, dict[str, str], int]:
    batch = my_batch(0, [4] * 4)
    with closing(SquareShuffler(ShufflerOptions(timeout=60.0))) as shuffler:
        shuffler.shuffle(batch)
        handle = shuffler.start_shuffle(batch)
        dist.barrier()
        windows = windowed_iter(iter([batch] * 6), shuffler, 2)
        next(windows), next(windows)  # the next one is under way
        calls: dict[str, Callable[[], Any]] = {
            "shuffle": lambda: shuffler.shuffle(batch),
            "start": lambda: shuffler.start_shuffle(batch),
            "finish": lambda: shuffler.finish_shuffle(batch, handle),
            "ended": lambda: handle.has_ended(),
            "drain handle": handle.drain,
            "drain": shuffler.drain,
            "realign": shuffler.engine.realign,
            "abort": shuffler.abort,
            "close": shuffler.close,
            "next window": lambda: next(windows),
        }
        said = {name: _in_child(call) for name, call in calls.items()}
        rows = shuffler.finish_shuffle(batch, handle).batch_size  # this process goes on
        rows += shuffler.shuffle(batch).batch_size
        rows += sum(each.batch_size for each in windows)
    return os.getpid(), said, rows


def test_a_forked_child_is_told_of_the_fork(two_ranks):
    for process, said, rows in two_ranks.run(_calls_in_children):
        expected = f"RuntimeError: the shuffler belongs to process {process}, and process "
        assert all(each.startswith(expected) and "was forked from it" in each for each in said.values()), said
        assert rows == 6 * 4


def _use_in_child(rows: Any) -> None:
    """Of a process without ranks."""
    shuffler = SquareShuffler()

    def shuffle() -> None:
        rows.value = shuffler.shuffle(random_batch(0, 4)).batch_size
        shuffler.close()

    assert _in_child(shuffle) == "no error"


def test_a_shuffler_that_was_not_used_yet_works_in_a_child():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    rows = context.Value("i", 0)
    process = context.Process(target=_use_in_child, args=(rows,))
    process.start()
    process.join(300)
    assert process.exitcode == 0 and rows.value == 4
