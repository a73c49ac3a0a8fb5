"""Iterators that are left before their end, change, or have ended: nothing is lost, and nobody hangs."""

from __future__ import annotations

import time
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist

from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced
from commons.pipeline.look_ahead import LookAhead
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import head_of, rank_batches
from tests.helpers.pipelines.shuffled_pipelines import (
    CubicShuffler,
    before_a_commit,
    host_count,
    steps_of,
)


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


@pytest.mark.parametrize("leave_after", before_a_commit([1, 4], [3, 5]))
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
