"""Edges at which one rank sees something that the others do not."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist, PipelineStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import engine
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter, shuffle_stage
from commons.pipeline.look_ahead import LookAhead
from commons.sequence_batch import schema
from tests.helpers import models
from tests.helpers.cpu_pipelines import CpuStaged, HostStream
from tests.helpers.faults import my_batch, on_rank, raised_by
from tests.helpers.models import head_of, rank_batches
from tests.helpers.pipelines import SIZES, CubicShuffler, expected_ids, host_count, steps_of
from tests.helpers.rank_pool import RankPool


def _uneven_groups():
    """Only some ranks know further groups, as those of node leaders; the halves still get shufflers."""
    rank = dist.get_rank()
    if rank in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    if rank == 3:
        dist.new_group([3], use_local_synchronization=True)
    half = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group([0, 1]), dist.new_group([2, 3])
    shuffler = CubicShuffler(pg_group=group[rank // 2])
    batch = my_batch()
    result, indices = shuffler.shuffle(batch, return_indices=True)
    shuffler.close()
    return half, indices.tolist(), result.sample_id.tolist()


def test_members_may_know_different_numbers_of_groups():
    with RankPool(4) as pool:
        answers = pool.run(_uneven_groups, timeout=60)
    for first in (0, 2):
        ids = sorted(answers[first][1] + answers[first + 1][1])
        assert ids == list(range(12))


class _SlowThread(LookAhead):
    """A loading thread that is scheduled late, on rank 1, where the first iterator ends."""

    def _read_ahead(self):
        if dist.get_rank() == 1 and not self._exhausted:
            time.sleep(0.05)
        return super()._read_ahead()


def _change_before_the_end(leave_after):
    from commons.pipeline import hooks

    original, hooks.LookAhead = hooks.LookAhead, _SlowThread
    model, optimizer = models.build_sharded()
    model.eval()
    shuffler = CubicShuffler(ShufflerOptions(timeout=20.0))
    evaluator = balanced(EvalPipelineSparseDist)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    try:
        first = rank_batches(dist.get_rank(), 5, [6])
        for _ in range(leave_after):
            evaluator.progress(first)
        for epoch in (1, 2):
            list(steps_of(evaluator, rank_batches(dist.get_rank() + 10 * epoch, 3, [6])))
        return head_of(model).seen
    finally:
        hooks.LookAhead = original
        evaluator.reset()
        shuffler.close()


@pytest.mark.parametrize("leave_after", [1, 3, 4, 5])
def test_an_evaluation_may_change_its_iterator_at_any_step(ranks, leave_after):
    seen = [i for rank in ranks.run(_change_before_the_end, leave_after, timeout=60) for step in rank for i in step]
    assert len(seen) == len(set(seen))
    for epoch in (1, 2):
        assert {
            10 * epoch * 100_000 + rank * 100_000 + 100 * step + row + 1
            for rank in range(ranks.world_size)
            for step in range(3)
            for row in range(6)
        } <= set(seen)


def _unknown_type():
    """Rank 1 has no data and has never heard of the batch's class."""
    batch = None if dist.get_rank() == 1 else my_batch()
    unknown = mock.patch.object(schema, "_find_batch_type", side_effect=KeyError("batch type 'Unknown' is unknown"))
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=20.0))) as shuffler, on_rank(1, unknown):
        return raised_by(lambda: shuffler.start_shuffle(batch).prepared())


def test_a_batch_type_unknown_on_one_rank_is_raised_on_all(ranks):
    for text in ranks.run(_unknown_type):
        assert text.startswith("KeyError: \"rank 1: batch type 'Unknown' is unknown")


@dataclass
class Loose:
    """A batch without BaseBatch's checks."""

    features: KeyedJaggedTensor
    batch_size: int
    actual_batch_size: int


def _loose(kind):
    wrong = dist.get_rank() == 1
    keys, values, lengths = ["a", "b"], torch.arange(7), torch.tensor([2, 1, 1, 1, 1, 1])

    def features(**changes):
        return KeyedJaggedTensor(**{"keys": keys, "values": values, "lengths": lengths, **(changes if wrong else {})})

    batch = {
        "padding": lambda: Loose(features(), 3, 2 if wrong else 3),
        "too many": lambda: Loose(features(), 3, 5 if wrong else 3),
        "offsets": lambda: Loose(features(lengths=None, offsets=1 + torch.arange(7)), 3, 3),
        "inverse": lambda: Loose(features(inverse_indices=(keys, torch.zeros(2, 3, dtype=torch.int64))), 3, 3),
    }[kind]()
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=20.0))) as shuffler:
        shuffler.get_workloads = lambda batch: torch.ones(3, dtype=torch.int64)
        return raised_by(lambda: shuffler.shuffle(batch))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("padding", "rank 1: field 'features' has values in padding rows [2, 3)"),
        ("too many", "rank 1: actual_batch_size is 5, batch_size is 3"),
        ("offsets", "rank 1: field 'features' has offsets that begin at 1; those of a KeyedJaggedTensor begin at 0"),
        ("inverse", "field 'features' has inverse_indices"),
    ],
)
def test_batches_that_cannot_travel_are_refused_on_every_rank(ranks, kind, message):
    for text in ranks.run(_loose, kind):
        assert message in text


def _staged_again():
    """Two of five steps, then a new pipeline with the same shuffler."""
    shuffler = CubicShuffler()
    seen = []
    for attempt, steps in enumerate((2, 100)):
        copy = PipelineStage("copy", lambda batch: batch.to(torch.device("cpu")), HostStream())
        pipeline = CpuStaged([copy, shuffle_stage(shuffler, copy.stream)], compute_stream=HostStream())
        source = balanced_iter(rank_batches(dist.get_rank() + 10 * attempt, 5, SIZES), shuffler)
        for _ in range(steps):
            batch = pipeline.progress(source)
            if batch is None:
                break
            seen.append(batch.sample_id[: batch.actual_batch_size].tolist())
    shuffler.close()
    return seen


def test_a_staged_pipeline_left_half_way_does_not_disturb_the_next(ranks):
    seen = [i for rank in ranks.run(_staged_again) for step in rank for i in step]
    assert len(seen) == len(set(seen))
    assert set(expected_ids([5] * ranks.world_size, ranks.world_size, 10)) <= set(seen)


def _asked_after_the_end():
    calls = []

    class Source:
        def __init__(self):
            self.items = deque(rank_batches(dist.get_rank(), 1 if dist.get_rank() else 5, [6]))

        def __iter__(self):
            return self

        def __next__(self):
            calls.append(1)
            if not self.items:
                raise StopIteration
            return self.items.popleft()

    shuffler = CubicShuffler()
    count = host_count(LookAhead(Source(), shuffler))
    shuffler.drain()
    shuffler.close()
    return len(calls), count


def test_a_source_that_has_ended_is_not_asked_again(two_ranks):
    assert two_ranks.run(_asked_after_the_end) == [(6, 5), (2, 5)]


def _close_beside_a_gather():
    shuffler = CubicShuffler(ShufflerOptions(timeout=600.0))
    shuffler.shuffle(my_batch())
    if dist.get_rank() == 0:
        shuffler.start_shuffle(my_batch(1))
    with mock.patch.object(engine, "_CLOSE_SECONDS", 0.5):
        shuffler.close()
    return True


def test_close_does_not_sit_out_the_timeout():
    with RankPool(2) as pool:
        assert pool.run(_close_beside_a_gather, timeout=60) == [True, True]
