"""What goes wrong while a window is made ends, on every rank, with an error that names who."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.distributed import batch_shuffler
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.pipeline import balanced, windowed_iter
from tests.helpers import models
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.rank_pool import RankFailure, RankPool

ROOT = Path(__file__).parents[3]


def run_once(world_size, function, *args, **kwargs):
    """On ranks of their own: the groups of a broken exchange are not used again."""
    pool = RankPool(world_size)
    try:
        return pool.run(function, *args, timeout=60, **kwargs)
    finally:
        pool.stop()


def own_batches(count, sizes=(6,)):
    return models.rank_batches(dist.get_rank(), count, list(sizes))


def _other_plan():
    digest = ShufflePlan.digest
    if dist.get_rank() == 1:
        ShufflePlan.digest = lambda self: digest(self) ^ 1
    with contextlib.closing(CubicShuffler()) as shuffler:
        windowed = windowed_iter(own_batches(8), shuffler, 4)
        try:
            next(windowed)
        except RuntimeError as error:
            first = str(error)
        finally:
            ShufflePlan.digest = digest
        return first, sum(batch.actual_batch_size for batch in windowed)  # the ranks are still in step


def test_ranks_with_different_plans_stop_before_any_row_of_a_window_moves(ranks):
    answers = ranks.run(_other_plan)
    assert all("ranks [1] made another plan than the rest" in text for text, _ in answers)
    assert sum(rows for _, rows in answers) == ranks.world_size * 8 * 6


def _die(folder):
    shuffler = CubicShuffler(ShufflerOptions(timeout=20.0))
    batches = own_batches(12)

    def source():
        for index, batch in enumerate(batches):
            if dist.get_rank() == 1 and index == 5:
                os._exit(3)  # in the middle of the second window, on the thread that reads it
            yield batch

    windowed = windowed_iter(source(), shuffler, 3)
    assert [next(windowed) for _ in range(3)]
    texts = []
    for _ in range(2):  # it stays broken, and says why
        try:
            next(windowed)
        except RuntimeError as error:
            texts.append(str(error))
    assert texts[0] == texts[1]
    Path(folder, str(dist.get_rank())).write_text(texts[0])


def test_survivors_name_the_rank_that_died_in_a_window(tmp_path):
    pool = RankPool(4)
    try:
        with pytest.raises(RankFailure, match="rank 1 died with exit code 3"):
            pool.run(_die, str(tmp_path), timeout=40)
    finally:
        pool.stop()
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts and all("rank 1 did not take part in the gather of step 1" in text for text in texts)


def _fails_in_the_exchange():
    """Rank 1 has too little memory for the second window."""
    from commons.distributed import row_exchange

    shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
    original, calls = row_exchange.permute_segments, [0]

    def fail(*args):
        calls[0] += 1
        if calls[0] > 4:  # what is sent, and three steps
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")
        return original(*args)

    if dist.get_rank() == 1:
        row_exchange.permute_segments = fail
    started = time.monotonic()
    windowed = windowed_iter(own_batches(9), shuffler, 3)
    trained = 0
    try:
        for _ in windowed:
            trained += 1
    except Exception as error:
        return f"{type(error).__name__}: {error}", trained, time.monotonic() - started
    finally:
        row_exchange.permute_segments = original
    return "no error", trained, 0.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_fails_alone_in_a_window_is_quoted_by_the_others(world_size):
    answers = run_once(world_size, _fails_in_the_exchange)
    for rank, (text, trained, seconds) in enumerate(answers):
        assert trained == 3 and seconds < 30
        if rank == 1:
            assert text == "OutOfMemoryError: tried to allocate 7 GiB"
        else:
            assert text.startswith("RankMissingError: rank 1 failed in the exchange of step 1")


def _stays_away():
    """Rank 1's data take longer than the others wait."""

    def source():
        for index, batch in enumerate(own_batches(9)):
            if dist.get_rank() == 1 and index == 4:
                time.sleep(8)
            yield batch

    shuffler = CubicShuffler(ShufflerOptions(timeout=2.0))
    trained, started = 0, time.monotonic()
    try:
        for _ in windowed_iter(source(), shuffler, 3):
            trained += 1
    except RuntimeError as error:
        return str(error), trained, time.monotonic() - started
    return "no error", trained, 0.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_stays_away_from_a_window_is_named(world_size):
    answers = run_once(world_size, _stays_away)
    for rank, (text, trained, seconds) in enumerate(answers):
        assert trained == 3 and seconds < 16
        if rank != 1:
            assert "rank 1 did not take part in the gather of step 1" in text and seconds < 8


def _leave_a_window_behind():
    """Rank 0 begins a window that nobody else joins, and goes home."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=600.0))
    windowed = windowed_iter(own_batches(9), shuffler, 3)
    next(windowed)
    if dist.get_rank() == 0:
        windowed.close()
        windowed = windowed_iter(own_batches(9), shuffler, 3)
        windowed._start()
    return os.getpid()


def test_a_window_that_still_waits_does_not_keep_the_process_alive():
    pool = RankPool(2)
    try:
        pool.run(_leave_a_window_behind)
        process = pool._ranks[0].process
        pool._ranks[0].connection.close()  # the rank's loop ends, and with it the process
        process.join(30)
        assert not process.is_alive()
    finally:
        pool._ranks = pool._ranks[1:]
        pool.stop()


def _other_batch(number):
    """One batch of rank 1 has another dtype; what is said, and how many rows are trained after all."""

    def source():
        for index, batch in enumerate(own_batches(8)):
            other = dist.get_rank() == 1 and index == number
            yield dataclasses.replace(batch, target=batch.target.double()) if other else batch

    errors, rows = [], 0
    with contextlib.closing(CubicShuffler()) as shuffler:
        windowed = windowed_iter(source(), shuffler, 3)
        while True:
            try:
                rows += next(windowed).actual_batch_size
            except StopIteration:
                return errors, rows
            except ValueError as error:
                errors.append(str(error))


def test_a_batch_of_a_window_unlike_the_first_is_refused_on_every_rank(ranks):
    answers = ranks.run(_other_batch, 4)
    for (text,), _ in answers:
        assert "rank 1: this batch differs from the first: field 'target'" in text
    assert sum(rows for _, rows in answers) == (ranks.world_size * 8 - 1) * 6


def test_ranks_whose_first_batches_differ_go_on_with_the_second(ranks):
    """Nobody knows which of them is right: all leave theirs out."""
    answers = ranks.run(_other_batch, 0)
    for (text,), _ in answers:
        assert "the batches of ranks 0 and 1 differ: field 'target'" in text
    assert sum(rows for _, rows in answers) == ranks.world_size * 7 * 6


def _out_of_step():
    """Rank 1 skips the number of a window: everyone is told who is where."""
    with contextlib.closing(CubicShuffler()) as shuffler:
        windowed = windowed_iter(own_batches(9), shuffler, 3)
        if dist.get_rank() == 1:
            shuffler._session(None, 3).next_step()
        try:
            next(windowed)
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_ranks_at_different_windows_are_told(ranks):
    expected = [0] * ranks.world_size
    expected[1] = 1
    for text in ranks.run(_out_of_step):
        assert f"ranks are at steps {expected}" in text


def _behind_a_pipeline(missing):
    """Rank 1 fails, or stays away, in the second window, which a balanced pipeline reads ahead."""

    def source():
        for index, batch in enumerate(own_batches(9)):
            if dist.get_rank() == 1 and index == 4:
                if not missing:
                    raise OSError("the disk is gone")
                time.sleep(8)
            yield batch

    model, optimizer = models.build_plain()
    shuffler = CubicShuffler(ShufflerOptions(timeout=2.0 if missing else 60.0))
    identity = IdentityBalancedBatchShuffler(ShufflerOptions(timeout=60.0))
    trainer = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=identity)
    windowed = windowed_iter(source(), shuffler, 3)
    texts, started = [], time.monotonic()
    while not texts or not missing:
        try:
            trainer.progress(windowed)
        except StopIteration:
            break
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts, sum(map(len, models.head_of(model).seen)), time.monotonic() - started


def test_an_error_of_a_window_is_raised_once_by_the_pipeline_behind_it(ranks):
    answers = ranks.run(_behind_a_pipeline, missing=False)
    assert all(texts == ["RuntimeError: rank 1: OSError: the disk is gone"] for texts, _, _ in answers)
    # Python ends a generator that has raised: of rank 1 the four batches before are trained.
    assert sum(rows for _, rows, _ in answers) == ((ranks.world_size - 1) * 9 + 4) * 6


def test_a_pipeline_does_not_wait_again_for_a_rank_that_a_window_misses():
    answers = run_once(2, _behind_a_pipeline, missing=True)
    assert "rank 1 did not take part in the gather of step 1" in answers[0][0][0] and answers[0][2] < 10


PROGRAM = """
import itertools
import torch
from commons.pipeline import windowed_iter
from tests.helpers.models import make_batch
from tests.helpers.pipelines import CubicShuffler

def source():
    for row in itertools.count(1):
        torch.rand(500, 500) @ torch.rand(500, 500)
        yield make_batch([row], 1)

next(windowed_iter(source(), CubicShuffler(), 30))
"""


def test_a_program_that_ends_while_a_window_is_read_ends_well():
    for _ in range(3):  # a thread that came back from C++ when the interpreter had gone would abort it
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("call", ["close", "drain"])
def test_an_iterator_that_blocks_is_waited_for_until_the_timeout_and_is_named(call):
    go_on = threading.Event()

    def source():
        yield from models.rank_batches(0, 3, [6])
        go_on.wait(60)

    shuffler = CubicShuffler(ShufflerOptions(timeout=0.5))
    windowed = windowed_iter(source(), shuffler, 3)
    next(windowed)  # and the next window is being read
    try:
        with (
            mock.patch.object(batch_shuffler, "GRACE_SECONDS", 0.5),
            pytest.raises(
                RuntimeError, match=rf"^{call}\(\) has waited 1 s for the iterator of rank 0, whose next\(\)"
            ),
        ):
            windowed.close() if call == "close" else shuffler.drain()
    finally:
        go_on.set()
    windowed.close()
    shuffler.close()
