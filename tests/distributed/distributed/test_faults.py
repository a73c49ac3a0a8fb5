"""What goes wrong ends, on every rank, with an error that names who."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.distributed import row_exchange, schema_agreement
from commons.distributed.options import ShufflerOptions
from tests.helpers.faults import ends_by_itself, errors_of_survivors, limit_waits, my_batch, on_rank, raised_by
from tests.helpers.models import make_batch
from tests.helpers.pipelines import CubicShuffler


def _die(folder, in_the_exchange):
    shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
    shuffler.shuffle(my_batch())
    limit_waits(300.0, names=0.5)
    if dist.get_rank() == 1 and not in_the_exchange:
        os._exit(3)
    with on_rank(1, mock.patch.object(row_exchange.RowExchange, "send_rows", lambda *_, **__: os._exit(3))):
        text, again = (raised_by(lambda: shuffler.shuffle(my_batch(step))) for step in (1, 2))
    assert text == again  # it stays broken, and says why
    Path(folder, str(dist.get_rank())).write_text(text)


@pytest.mark.parametrize(("in_the_exchange", "what"), [(False, "gather"), (True, "exchange")])
def test_survivors_name_the_rank_that_died(tmp_path, in_the_exchange, what):
    (text,) = errors_of_survivors(tmp_path, _die, in_the_exchange, world_size=2)
    assert f"rank 1 did not take part in the {what} of step 1" in text


def _leave_a_gather_behind():
    """Rank 0 starts a shuffle that nobody else joins, and goes home."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=600.0))
    shuffler.shuffle(my_batch())
    if dist.get_rank() == 0:
        shuffler.start_shuffle(my_batch(1))


def test_a_worker_that_still_waits_does_not_keep_the_process_alive():
    assert ends_by_itself(_leave_a_gather_behind)


def _out_of_step():
    """Rank 1 skips the number of a step: everyone is told who is where."""
    with contextlib.closing(CubicShuffler()) as shuffler:
        shuffler.shuffle(my_batch())
        if dist.get_rank() == 1:
            shuffler.engine._session(None).next_step()
        return raised_by(lambda: shuffler.shuffle(my_batch(1)))


def test_ranks_out_of_step_are_told(ranks):
    expected = [1] * ranks.world_size
    expected[1] = 2
    for text in ranks.run(_out_of_step):
        assert f"ranks are at steps {expected}" in text


def _versions():
    other = on_rank(1, mock.patch.object(schema_agreement, "__version__", "9.9.9"))
    with contextlib.closing(CubicShuffler()) as shuffler, other:
        return raised_by(lambda: shuffler.shuffle(my_batch()))


def test_different_versions_are_refused(two_ranks):
    for text in two_ranks.run(_versions):
        assert "versions differ: rank 0 has {'evenrank'" in text and "9.9.9" in text


def test_a_handle_of_an_ended_step_cannot_be_finished():
    shuffler = CubicShuffler()
    handle = shuffler.start_shuffle(None)
    assert handle.has_ended()
    with pytest.raises(ValueError, match="no rank has a batch at step 0"):
        shuffler.finish_shuffle(make_batch([], 0), handle)
    shuffler.close()
    assert torch.equal(shuffler.get_workloads(make_batch([7], 1)), torch.tensor([5]))


def _fails_before_the_exchange():
    """Rank 1 has too little memory: it says so itself, and the others, who wait in the exchange, say it of rank 1."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
    shuffler.shuffle(my_batch())
    error = torch.OutOfMemoryError("tried to allocate 7 GiB")
    with on_rank(1, mock.patch.object(row_exchange.RowExchange, "_select", side_effect=error)):
        return raised_by(lambda: shuffler.shuffle(my_batch(1)))


def _finishes_another_batch():
    """Rank 1 finishes a shuffle with a batch that it was not started with."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
    own = my_batch()
    handle = shuffler.start_shuffle(own)
    batch = my_batch(1, rows=5) if dist.get_rank() == 1 else own
    return raised_by(lambda: shuffler.finish_shuffle(batch, handle))


@pytest.mark.parametrize(
    "work, own",
    [
        (_fails_before_the_exchange, "OutOfMemoryError: tried to allocate 7 GiB"),
        (_finishes_another_batch, "ValueError: the handle of step 0 was started with"),
    ],
)
def test_a_rank_that_fails_alone_is_quoted_by_the_others(own_ranks, work, own):
    answers = own_ranks.run(work, timeout=100)  # a third of the shuffler's
    assert answers[1].startswith(own)
    for rank, text in enumerate(answers):
        if rank != 1:
            assert text.startswith("RankMissingError: rank 1 failed in the exchange of step") and own[:20] in text


def _mistake_in_a_subgroup():
    """Ranks are named by their global number, also where they share batches with a few others."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = halves[dist.get_rank() % 2]
    shuffler = CubicShuffler(pg_group=group)
    batch = my_batch()
    if dist.get_rank() == 3:
        shuffler.get_workloads = lambda batch: torch.full((batch.batch_size,), -1)
    with contextlib.closing(shuffler):
        return raised_by(lambda: shuffler.shuffle(batch))


def test_ranks_of_a_subgroup_are_named_by_their_global_number(rank_pools):
    texts = rank_pools[4].run(_mistake_in_a_subgroup)
    assert texts[0] == texts[2] == "no error"
    assert all("rank 3: workloads[0] is -1" in text for text in (texts[1], texts[3]))
