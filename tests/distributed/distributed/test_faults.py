"""What goes wrong ends, on every rank, with an error that names who."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from commons.perf_model.shuffle_plan import ShufflePlan
from tests.helpers.faults import my_batch
from tests.helpers.models import make_batch
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.rank_pool import RankFailure, RankPool


def _other_plan():
    """Rank 1 makes another plan than the rest: all stop before any row moves."""
    shuffler = CubicShuffler()
    payloads = []
    original = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: payloads.append(1) or original(*args, **kwargs)
    digest = ShufflePlan.digest
    if dist.get_rank() == 1:
        ShufflePlan.digest = lambda self: digest(self) ^ 1
    try:
        shuffler.shuffle(my_batch())
    except RuntimeError as error:
        first = str(error)
    else:
        first = "no error"
    finally:
        ShufflePlan.digest = digest
    sent_before = len(payloads)
    shuffler.shuffle(my_batch())  # the ranks are still in step
    moved = shuffler.last_stats.moved
    shuffler.close()
    dist.all_to_all_single = original
    return first, sent_before, len(payloads), moved


def test_ranks_with_different_plans_stop_before_any_row_moves(ranks):
    for text, sent_before, sent_after, moved in ranks.run(_other_plan):
        assert "ranks [1] made another plan than the rest" in text and "step 0" in text
        assert sent_before == 0 and sent_after == 1 and moved


def _die(folder):
    shuffler = CubicShuffler(ShufflerOptions(timeout=20.0))
    shuffler.shuffle(my_batch())
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        shuffler.shuffle(my_batch(1))
    except RuntimeError as error:
        Path(folder, str(dist.get_rank())).write_text(str(error))
        try:
            shuffler.shuffle(my_batch(2))
        except RuntimeError as again:
            assert str(again) == str(error)  # it stays broken, and says why


def test_survivors_name_the_rank_that_died(tmp_path):
    pool = RankPool(4)
    try:
        with pytest.raises(RankFailure, match="rank 1 died with exit code 3"):
            pool.run(_die, str(tmp_path), timeout=40)
    finally:
        pool.stop()
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts and all("rank 1 did not take part in the gather of step 1" in text for text in texts)


def _leave_a_gather_behind():
    """Rank 0 starts a shuffle that nobody else joins, and goes home."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=600.0))
    shuffler.shuffle(my_batch())
    if dist.get_rank() == 0:
        shuffler.start_shuffle(my_batch(1))
    return os.getpid()


def test_a_worker_that_still_waits_does_not_keep_the_process_alive():
    pool = RankPool(2)
    try:
        pool.run(_leave_a_gather_behind)
        process = pool._ranks[0].process
        pool._ranks[0].connection.close()  # the rank's loop ends, and with it the process
        process.join(30)
        assert not process.is_alive()
    finally:
        pool._ranks = pool._ranks[1:]
        pool.stop()


def _out_of_step():
    """Rank 1 skips the number of a step: everyone is told who is where."""
    shuffler = CubicShuffler()
    shuffler.shuffle(my_batch())
    if dist.get_rank() == 1:
        shuffler._session(None).next_step()
    try:
        shuffler.shuffle(my_batch(1))
    except RuntimeError as error:
        return str(error)
    finally:
        shuffler.close()
    return "no error"


def test_ranks_out_of_step_are_told(ranks):
    expected = [1] * ranks.world_size
    expected[1] = 2
    for text in ranks.run(_out_of_step):
        assert f"ranks are at steps {expected}" in text


def _later_difference():
    """The second batch of rank 1 has other keys than its first."""
    shuffler = CubicShuffler()
    shuffler.shuffle(my_batch())
    batch = my_batch(1)
    if dist.get_rank() == 1:
        batch = dataclasses.replace(batch, target=batch.target.double())
    try:
        shuffler.shuffle(batch)
    except ValueError as error:
        return str(error)
    finally:
        shuffler.close()
    return "no error"


def test_a_batch_unlike_the_first_is_refused_on_every_rank(ranks):
    for text in ranks.run(_later_difference):
        assert "rank 1: this batch differs from the first: field 'target'" in text
        assert "float32" in text and "float64" in text


def _versions(monkey):
    from commons.distributed import schema_agreement

    original = schema_agreement.__version__
    if dist.get_rank() == 1:
        schema_agreement.__version__ = "9.9.9"
    shuffler = CubicShuffler()
    try:
        shuffler.shuffle(my_batch())
    except ValueError as error:
        return str(error)
    finally:
        schema_agreement.__version__ = original
        shuffler.close()
    return "no error"


def test_different_versions_are_refused(two_ranks):
    for text in two_ranks.run(_versions, None):
        assert "versions differ: rank 0 has {'evenrank'" in text and "9.9.9" in text


def test_a_handle_of_an_ended_step_cannot_be_finished():
    shuffler = CubicShuffler()
    handle = shuffler.start_shuffle(None)
    assert handle.ended
    with pytest.raises(ValueError, match="no rank has a batch at step 0"):
        shuffler.finish_shuffle(make_batch([], 0), handle)
    shuffler.close()
    assert torch.equal(shuffler.get_workloads(make_batch([7], 1)), torch.tensor([5]))


def _attempt(work):
    """What a rank raises, and how long after the start."""
    started = time.monotonic()
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", time.monotonic() - started


def _fails_before_the_exchange():
    """Rank 1 has too little memory: it says so itself, and the others, who wait in the exchange, say it of rank 1."""
    from commons.distributed import row_exchange

    shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
    shuffler.shuffle(my_batch())
    original = row_exchange.permute_segments

    def fail(*args):
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    if dist.get_rank() == 1:
        row_exchange.permute_segments = fail
    try:
        return _attempt(lambda: shuffler.shuffle(my_batch(1)))
    finally:
        row_exchange.permute_segments = original


def _finishes_another_batch():
    """Rank 1 finishes a shuffle with a batch that it was not started with."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
    own = my_batch()
    handle = shuffler.start_shuffle(own)
    batch = my_batch(1, rows=5) if dist.get_rank() == 1 else own
    return _attempt(lambda: shuffler.finish_shuffle(batch, handle))


@pytest.mark.parametrize(
    "work, own, of_others",
    [
        (
            _fails_before_the_exchange,
            "OutOfMemoryError: tried to allocate 7 GiB",
            "OutOfMemoryError: tried to allocate",
        ),
        (
            _finishes_another_batch,
            "ValueError: the handle of step 0 was started with",
            "ValueError: the handle of step",
        ),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_fails_alone_is_quoted_by_the_others(world_size, work, own, of_others):
    pool = RankPool(world_size)  # of its own: the groups of a broken exchange are not used again
    try:
        answers = pool.run(work, timeout=60)
    finally:
        pool.stop()
    assert answers[1][0].startswith(own)
    for rank, (text, seconds) in enumerate(answers):
        assert seconds < 30  # the timeout is ten times that
        if rank != 1:
            assert text.startswith("RankMissingError: rank 1 failed in the exchange of step") and of_others in text


def _mistake_in_a_subgroup():
    """Ranks are named by their global number, also where they share batches with a few others."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = halves[dist.get_rank() % 2]
    shuffler = CubicShuffler(pg_group=group)
    batch = my_batch()
    if dist.get_rank() == 3:
        shuffler.get_workloads = lambda batch: torch.full((batch.batch_size,), -1)
    try:
        return _attempt(lambda: shuffler.shuffle(batch))[0]
    finally:
        shuffler.close()


def test_ranks_of_a_subgroup_are_named_by_their_global_number(rank_pools):
    texts = rank_pools[4].run(_mistake_in_a_subgroup)
    assert texts[0] == texts[2] == "no error"
    assert all("rank 3: workloads[0] is -1" in text for text in (texts[1], texts[3]))
