"""Several pipelines or iterators of one shuffler: one after another they lose no row, at once they are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter
from commons.pipeline.look_ahead import LookAhead
from tests.helpers.models import torchrec_model as models
from tests.helpers.pipelines.named_batches import ids_of, own_batches
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, staged_pipeline, steps_of
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import of_all, on, on_two_ranks


@on_two_ranks
def test_the_error_of_a_replaced_iterator_ends_the_one_that_replaced_it():
    """The replaced one had read the failing batch ahead; the good batch of that step comes again."""
    with contextlib.closing(CubicShuffler(ShufflerOptions(mode="observe", timeout=30.0))) as shuffler:
        first = LookAhead(own_batches(3, fails_at=1 if dist.get_rank() == 1 else None), shuffler)
        firsts = [next(first).sample_id]
        second = LookAhead(own_batches(2, first=20), shuffler, previous=first)
        assert next(second, None) is None and second.ended
        assert str(second.take_error()) == "rank 1: Injected: in the loader" and second.take_error() is None
        rest = LookAhead(own_batches(2, first=40), shuffler, previous=second)
        rows = of_all(itertools.chain(*firsts, *(batch.sample_id for batch in rest)))
    assert sorted(map(int, rows)) == ids_of((0, 0), (1, 0), (0, 1), (0, 40), (0, 41), (1, 40), (1, 41))


@on_two_ranks
def test_a_staged_iterator_that_was_replaced_says_so():
    """A training goes on after an evaluation with the same shuffler, which has taken over its data."""
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=30.0))) as shuffler:
        training, source = staged_pipeline(shuffler), balanced_iter(own_batches(9), shuffler)
        training.progress(source)
        evaluation, others = staged_pipeline(shuffler), balanced_iter(own_batches(2, first=20), shuffler)
        while evaluation.progress(others) is not None:
            pass
        said = error_of(lambda: [training.progress(source) for _ in range(9)])
        balanced_iter(own_batches(2, first=40), shuffler)
        assert next(others, None) is None  # which had ended before
    assert said.startswith("ValueError: this iterator was replaced by a later balanced_iter of the same shuffler")


@on("two_ranks", timeout=60)
def test_a_shuffler_does_not_serve_a_loading_thread_beside_another_pipeline():
    """A training pipeline in the middle of its data, and an evaluation that reads on a thread; a third has ended."""
    model, optimizer = models.build_sharded()
    shuffler = CubicShuffler(ShufflerOptions(timeout=20.0))
    device = torch.device("cpu")
    trainer = balanced(TrainPipelineSparseDist)(model, optimizer, device, batch_shuffler=shuffler)
    evaluator = balanced(EvalPipelineSparseDist)(model, optimizer, device, batch_shuffler=shuffler)
    staged, source = staged_pipeline(shuffler), balanced_iter(own_batches(1, first=60), shuffler)
    while staged.progress(source) is not None:
        pass
    training = own_batches(6)
    trainer.progress(training)
    said = "ValueError: .* already drives a BalancedTrainPipelineSparseDist whose data has not ended"
    assert re.match(said, error_of(evaluator.progress, own_batches(3, first=20)))
    list(steps_of(trainer, training))  # the training is not disturbed
    trainer.detach()
    model.eval()
    evaluation = own_batches(5, first=20)
    evaluator.progress(evaluation)
    model.train()
    other = balanced(TrainPipelineBase)(model, optimizer, device, batch_shuffler=shuffler)
    iterator = own_batches(1, first=40)
    for text in (error_of(other.progress, iterator), error_of(balanced_iter, iterator, shuffler)):
        assert re.match("ValueError: .* already drives a BalancedEvalPipelineSparseDist", text)
    evaluator.reset()
    evaluator.detach()
    other.progress(iterator)
    shuffler.close()


@dataclasses.dataclass
class _Comparable(CubicShuffler):
    """A user's shuffler as a dataclass, which compares by value and so has no hash."""

    name: str = ""

    def __post_init__(self):
        super().__init__(ShufflerOptions(timeout=20.0))


@pytest.mark.parametrize("first, second", list(itertools.permutations([TrainPipelineBase, EvalPipelineSparseDist])))
@on("two_ranks", timeout=60)
def test_what_a_dropped_pipeline_leaves_behind_is_the_same_on_every_rank(first, second):
    """It is left half way; rank 0 happens to hold on to it."""
    model, optimizer = models.build_sharded()
    shuffler, device = _Comparable(), torch.device("cpu")
    kept = [balanced(first)(model, optimizer, device, batch_shuffler=shuffler)]
    model.train(first is not EvalPipelineSparseDist)
    kept[0].progress(own_batches(4))
    if dist.get_rank() == 1:
        kept.clear()
        gc.collect()
    following = balanced(second)(model, optimizer, device, batch_shuffler=shuffler)
    said = f"ValueError: .* already drives a Balanced{first.__name__} whose data has not ended"
    assert re.match(said, error_of(following.progress, own_batches(2, first=20)))
    shuffler.close()
