"""A process forked from a rank has neither the shuffler's thread nor connections: a shuffle there fails at once.

Groups that are destroyed and made again in one process know nothing of the world before.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import global_mean_loss
from commons.distributed.channel import absence, agree, groups
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from tests.helpers.batches.random_batches import random_batch, rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, closing, my_batch
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, rows_by_every_call
from tests.helpers.ranks.faults import my_batch as my_rows
from tests.helpers.ranks.on_ranks import on, on_two_ranks
from tests.helpers.ranks.rank_pool import PRELOAD, RankPool

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


@on_two_ranks
def test_a_forked_child_is_told_of_the_fork():
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
    expected = f"RuntimeError: the shuffler belongs to process {os.getpid()}, and process "
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


# ------------------------------------------------------------------------------------------------- again in one process


@pytest.fixture(scope="module")
def own_ranks():
    """Two ranks of their own, whose groups are destroyed."""
    with RankPool(2) as pool:
        yield pool


def _begin_again(store, *, ranks_change_places=False):
    """A new world over the same processes, with a store of its own."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    gc.collect()
    rank = 1 - rank if ranks_change_places else rank
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def _shuffled(shuffler):
    shuffled = [shuffler.shuffle(my_rows(step), return_indices=True) for step in range(3)]
    moved = shuffler.last_stats.moved
    return [(rows_as_values(batch), indices.tolist(), moved) for batch, indices in shuffled]


def _shuffles(stores):
    """The ranks change places in every new world; by every call too."""
    kept, closed = CubicShuffler(), CubicShuffler()
    answers = [(dist.get_rank(), _shuffled(kept), _shuffled(closed), rows_by_every_call())]
    closed.close()
    collected = CubicShuffler()
    collected.shuffle(my_rows())
    del collected
    for store in stores:
        _begin_again(store, ranks_change_places=True)
        fresh = CubicShuffler()
        answers.append((dist.get_rank(), _shuffled(kept), _shuffled(fresh), rows_by_every_call()))
        fresh.close()
    kept.close()
    return answers


@pytest.mark.slow
def test_shufflers_old_and_new_work_in_every_world(own_ranks, tmp_path):
    per_process = own_ranks.run(_shuffles, [str(tmp_path / f"store{n}") for n in range(3)])
    expected = {rank: (shuffled, rows) for rank, shuffled, _, rows in (answers[0] for answers in per_process)}
    assert any(moved for _, _, moved in expected[0][0])
    for process, answers in enumerate(per_process):
        assert len(answers) == 4
        for number, (rank, old, new, rows) in enumerate(answers):
            assert rank == (process + number) % 2
            assert (old, rows) == (new, rows) == expected[rank]


class _Mean(torch.nn.Module):
    def forward(self, total):
        return global_mean_loss(total, 2)


@on("own_ranks")
def test_a_traced_loss_finds_the_new_group(tmp_path):
    model = torch.fx.symbolic_trace(_Mean())
    first = float(model(torch.tensor(6.0)))
    _begin_again(tmp_path / "store")
    assert first == float(model(torch.tensor(6.0))) == 6.0 * 2 / 4


@on("own_ranks")
def test_ranks_of_different_age_understand_one_another(tmp_path):
    """Rank 1 has been in an earlier world, with channels of its own; rank 0 is new. Then rank 0 fails by itself."""
    if dist.get_rank() == 1:
        for _ in range(3):
            groups.key_of_channel([0, 1])
    _begin_again(tmp_path / "store")
    with closing(agree.ControlChannel(None, 10.0, moves_rows=False)) as channel:
        if dist.get_rank() == 0:
            channel.post_failure(0, "gather", ValueError("no rows"))
            return
        said = "^rank 0 failed in the gather of step 0: ValueError: no rows$"
        with pytest.raises(absence.RankMissingError, match=said):
            channel.gather(np.array([1]), 0)
