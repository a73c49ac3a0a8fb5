"""What goes wrong while a pipeline reads ahead ends, on every rank, with an error that names who."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist, TrainPipelineBase

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.channel.absence import RankMissingError
from commons.distributed.engine import engine
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, windowed_iter
from commons.pipeline.look_ahead import LookAhead
from tests.helpers.models import torchrec_model as models
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, steps_of
from tests.helpers.ranks.faults import error_of, limit_waits, meet
from tests.helpers.ranks.on_ranks import on


def _late_on_rank_1(batches):
    """Rank 1's data take longer than the others wait."""
    for index, batch in enumerate(batches):
        if index == 4 and dist.get_rank() == 1:
            meet("the others have given up")
        elif index == 4:
            limit_waits(0.5 if dist.get_world_size() == 2 else 2.0)
        yield batch


def _fails_on_rank_1(batches):
    for index, batch in enumerate(batches):
        if dist.get_rank() == 1 and index == 4:
            raise OSError("the disk is gone")
        yield batch


def _behind_a_pipeline(missing):
    """Rank 1 fails, or stays away, in the second window, which a balanced pipeline reads ahead."""
    source = (_late_on_rank_1 if missing else _fails_on_rank_1)(models.rank_batches(dist.get_rank(), 9, [6]))
    model, optimizer = models.build_plain()
    shuffler = CubicShuffler(ShufflerOptions(timeout=60.0))
    identity = IdentityBalancedBatchShuffler(ShufflerOptions(timeout=60.0))
    trainer = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=identity)
    windowed = windowed_iter(source, shuffler, 3)
    texts = []
    while not texts or not missing:
        try:
            trainer.progress(windowed)
        except StopIteration:
            break
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    if missing and dist.get_rank() != 1:
        meet("the others have given up")
    return texts, sum(map(len, models.head_of(model).seen))


def test_an_error_of_a_window_is_raised_once_by_the_pipeline_behind_it(ranks):
    answers = ranks.run(_behind_a_pipeline, missing=False)
    assert all(texts == ["RuntimeError: rank 1: OSError: the disk is gone"] for texts, _ in answers)
    # Python ends a generator that has raised: of rank 1 the four batches before are trained.
    assert sum(rows for _, rows in answers) == ((ranks.world_size - 1) * 9 + 4) * 6


@on("own_two_ranks", timeout=100)
def test_a_pipeline_does_not_wait_again_for_a_rank_that_a_window_misses():
    (text,), _ = _behind_a_pipeline(missing=True)
    assert dist.get_rank() == 1 or "rank 1 did not take part in the gather of step 1" in text


@pytest.mark.parametrize("reads", [LookAhead, functools.partial(windowed_iter, window=2)], ids=["one ahead", "window"])
def test_a_rank_that_a_source_with_collectives_misses_is_not_waited_for_again(reads):
    def source():
        raise RankMissingError("rank 1 did not take part in SingleRankLoader")
        yield

    with contextlib.closing(CubicShuffler()) as shuffler, pytest.raises(RankMissingError, match="^rank 1 did not take"):
        next(reads(source(), shuffler))


@pytest.mark.parametrize("call", ["close", "drain", "reset"])
def test_an_iterator_that_blocks_is_waited_for_until_the_timeout_and_is_named(call):
    """Of a window, or of a pipeline whose thread loads."""
    blocks, go_on = threading.Event(), threading.Event()

    def source():
        yield from models.rank_batches(0, 3, [6])
        blocks.set()
        go_on.wait(60)

    shuffler = CubicShuffler(ShufflerOptions(timeout=0.5))
    if call == "reset":
        model, optimizer = models.build_plain()
        reader = balanced(EvalPipelineSparseDist)(model.eval(), optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        reader.progress(source())
    else:
        reader = windowed_iter(source(), shuffler, 3)
        next(reader)  # and the next window is being read
    assert blocks.wait(60)
    stop = shuffler.drain if call == "drain" else getattr(reader, call)
    said = rf"^{call}\(\) has waited 1 s for the iterator of rank 0, whose next\(\) has not returned"
    try:
        with mock.patch.object(engine, "GRACE_SECONDS", 0.5), pytest.raises(RuntimeError, match=said):
            stop()
    finally:
        go_on.set()
    stop()
    shuffler.close()


def test_both_threads_are_drained_within_one_limit():
    now, limits = [0.0], []

    def just_in_time(worker, limit):
        limits.append(limit)
        now[0] += limit
        return True

    clock = mock.patch.object(engine, "time", mock.Mock(monotonic=lambda: now[0]))
    with clock, mock.patch.object(DaemonWorker, "drain", just_in_time):
        CubicShuffler(ShufflerOptions(timeout=50.0)).drain()
    assert limits == [60.0, 1.0]


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_wait_for_a_window_loses_no_row():
    """Ctrl-C in a notebook, whose next cell goes on with the same iterator."""
    main, go_on = threading.main_thread(), threading.Event()

    def source():
        for row in range(1, 8):
            if row == 4:
                while Path(sys._current_frames()[main.ident].f_code.co_filename).name != "threading.py":
                    time.sleep(0.01)  # until the main thread waits
                os.kill(os.getpid(), signal.SIGINT)
                go_on.wait(60)
            yield models.make_batch([row], 1)

    with contextlib.closing(CubicShuffler()) as shuffler:
        windowed = windowed_iter(source(), shuffler, 3)
        rows = [int(next(windowed).sample_id) for _ in range(3)]
        try:
            with pytest.raises(KeyboardInterrupt):
                next(windowed)
        finally:
            go_on.set()
        rows += [int(batch.sample_id) for batch in windowed]
    assert sorted(rows) == list(range(1, 8))


@on("own_two_ranks", timeout=100)
def test_a_rank_that_resets_alone_moves_no_rows():
    """They would arrive in another rank's exchange of an earlier step, where gloo ends the process.

    Rank 1 resets its pipeline in the middle of the data and goes on, as after an error of its model alone.
    """
    model, _ = models.build_plain()
    model.head.forward = lambda embeddings, batch: (embeddings["item"].values().sum(), batch.sample_id)  # no collective
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = models.rank_batches(dist.get_rank(), 9, [6])
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=3.0))) as shuffler:
        trainer = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        trainer.progress(source)
        if dist.get_rank() == 1:
            trainer.reset()
        said = error_of(lambda: list(steps_of(trainer, source)))
    alone = "ValueError: rank 0 calls gather and rank 1 calls gather after 1 reset(); all ranks make the same calls"
    waited = dist.get_rank() == 0 and "rank 1 did not take part in the exchange of" in said
    assert said.startswith(alone) or waited, said
