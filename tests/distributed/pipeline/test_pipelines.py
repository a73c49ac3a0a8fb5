"""Balanced pipelines on real ranks: every sample is trained once, and the weights are those of the unshuffled run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter, hooks, windowed_iter
from commons.pipeline.look_ahead import LookAhead
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import head_of, rank_batches, weights_of
from tests.helpers.pipelines.shuffled_pipelines import (
    EVALUATIONS,
    PIPELINES,
    SIZES,
    CubicShuffler,
    Source,
    before_a_commit,
    evaluate,
    expected_ids,
    largest_difference,
    make_shuffler,
    staged_pipeline,
    steps_of,
    train,
)
from tests.helpers.ranks.on_ranks import of_all, on, on_ranks, on_two_ranks


@pytest.mark.parametrize(
    "pipeline", before_a_commit(["base", "sparse", "prefetch"], ["lite", "fused", "semi-sync, before it starts"])
)
@on_two_ranks
def test_an_iterator_left_with_its_last_batches_in_flight(pipeline):
    """The user goes on to another iterator when all batches but one or two have been trained, or long before."""

    def seen_of(count, steps):
        iterators = [([count] * 2, 0), ([count] * 2, 10)]
        return of_all(itertools.chain(*train(("build_sharded",), pipeline, "balance", iterators, steps)["seen"]))

    for count, steps in ((2, 1), (3, 1), (3, 2)):
        seen = seen_of(count, steps)
        read = count if pipeline not in ("base", "lite") else min(count, steps + 2)  # these read less far ahead
        assert sorted(seen) == sorted(expected_ids([read] * 2, 2) + expected_ids([count] * 2, 2, 10))
    seen, first, second = (set(each) for each in (seen_of(9, 1), *(expected_ids([9] * 2, 2, at) for at in (0, 10))))
    assert second <= seen and not first <= seen


def test_an_iterator_that_is_replaced_while_a_thread_reads_it_ends_with_that_batch():
    """As when the iterator of an EvalPipelineSparseDist changes, whose loading thread waits for the old one."""

    def source():
        for row in range(1, 9):
            if row == 3:
                look_ahead.abandon()  # what the main thread does meanwhile
            yield models.make_batch([row], 1)

    with contextlib.closing(CubicShuffler()) as shuffler:
        look_ahead = LookAhead(source(), shuffler)
        assert [int(batch.sample_id) for batch in look_ahead] == [1, 2, 3]


def test_the_batch_that_was_read_ahead_comes_before_those_of_the_next_iterator():
    first, second = (Source(models.make_batch([row], 1) for row in rows) for rows in ([1, 2, 3, 4], [11, 12]))
    with contextlib.closing(CubicShuffler()) as shuffler:
        next(replaced := LookAhead(first, shuffler))
        following = LookAhead(second, shuffler, previous=replaced)
        assert [int(batch.sample_id) for batch in following] == [2, 11, 12]
        following.has_failed = True  # by an error of another rank
        assert not list(LookAhead(second, shuffler, previous=following))
        shuffler.drain()
    assert (first.read, second.read) == (2, 3)  # the end was reached once


def _filling_one_batch():
    batch = models.make_batch([], 1)
    for row in range(1, 5):
        vars(batch).update(vars(models.make_batch([row], 1)))
        yield batch


@pytest.mark.parametrize("reads", [LookAhead, functools.partial(windowed_iter, window=2)], ids=["one ahead", "window"])
def test_a_loader_may_fill_one_batch_again_and_again(reads):
    with contextlib.closing(CubicShuffler()) as shuffler:
        assert sorted(int(batch.sample_id) for batch in reads(_filling_one_batch(), shuffler)) == [1, 2, 3, 4]
        shuffler.drain()


class _SameForEveryEpoch(Iterator):
    """Starts again when `iter` is called, like the iterator of a DataLoader with persistent_workers=True."""

    def __iter__(self):
        self.batches = iter([models.make_batch([row], 1) for row in (1, 2)])
        return self

    def __next__(self):
        return next(self.batches)


def test_an_iterator_that_starts_again_with_the_next_epoch(caplog):
    loader, (model, optimizer) = _SameForEveryEpoch(), models.build_plain()
    with contextlib.closing(CubicShuffler()) as shuffler:
        pipeline = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        steps = [sum(1 for _ in steps_of(pipeline, iter(loader))) for _ in range(3)]  # as with TorchRec's own
        assert steps == [2, 0, 0] and caplog.text.count("pass (batch for batch in dataloader)") == 1
        assert [sum(1 for _ in steps_of(pipeline, (batch for batch in loader))) for _ in range(2)] == [2, 2]
        pipeline.reset()
        assert sum(1 for _ in steps_of(pipeline, iter(loader))) == 2
        assert [len(list(balanced_iter(iter(loader), shuffler))) for _ in range(2)] == [2, 2]
        shuffler.drain()


def _returning_at_the_end(stock):
    class NoneAtTheEnd(stock):
        """Returns None where TorchRec raises StopIteration."""

        def progress(self, dataloader_iter):
            with contextlib.suppress(StopIteration):
                return super().progress(dataloader_iter)

    return balanced(NoneAtTheEnd)


def test_an_iterator_that_starts_again_for_a_subclass_that_returns_at_the_end(caplog):
    loader, (model, optimizer) = _SameForEveryEpoch(), models.build_plain()
    with contextlib.closing(CubicShuffler()) as shuffler:
        pipeline = _returning_at_the_end(TrainPipelineBase)(
            model, optimizer, torch.device("cpu"), batch_shuffler=shuffler
        )
        for warnings in (0, 1, 1):
            source = iter(loader)
            while pipeline.progress(source) is not None:
                pass
            assert caplog.text.count("pass (batch for batch in dataloader)") == warnings


@pytest.mark.parametrize("raises_at_end", [False, True])
@pytest.mark.parametrize("name", ["base", "pt2, before it compiles", "sparse"])
@on_two_ranks
def test_a_subclass_that_trains_two_batches_in_a_call_trains_every_epoch(name, raises_at_end):
    """With an odd number of batches: its last call returns one, or trains one and raises StopIteration."""
    stock, options = PIPELINES[name]

    class TwoAtATime(stock):
        def progress(self, dataloader_iter):
            first = super().progress(dataloader_iter)
            try:
                return super().progress(dataloader_iter)
            except StopIteration:
                if raises_at_end:
                    raise
                return first

    (model, optimizer), last = models.build_sharded(), []
    with contextlib.closing(CubicShuffler()) as shuffler:
        arguments = model, optimizer, torch.device("cpu")
        pipeline = balanced(TwoAtATime)(*arguments, batch_shuffler=shuffler, **options)
        for epoch in range(3):
            for _ in steps_of(pipeline, rank_batches(dist.get_rank() + 10 * epoch, 3, [6])):
                last.append(pipeline.last_stats.step)
    assert last == ([1, 4, 7] if raises_at_end else [1, 2, 4, 5, 7, 8])
    rows = [row for epoch in range(3) for row in expected_ids([3] * 2, 2, 10 * epoch, [6])]
    assert sorted(of_all(itertools.chain(*head_of(model).seen))) == rows


@on_two_ranks
def test_a_subclass_that_returns_at_the_end_goes_on_and_raises_errors_of_the_data():
    rank, (model, optimizer) = dist.get_rank(), models.build_sharded()
    with contextlib.closing(CubicShuffler()) as shuffler:
        pipeline = _returning_at_the_end(TrainPipelineSparseDist)(
            model, optimizer, torch.device("cpu"), batch_shuffler=shuffler
        )
        for epoch in range(3):
            fails_at = 3 if epoch == 1 and rank == 1 else None
            source = Source(rank_batches(rank + 10 * epoch, 3, [6]), fails_at, ValueError("broken disk"))
            said = pytest.raises(ValueError, match="broken disk") if epoch == 1 else contextlib.nullcontext()
            with said:
                while pipeline.progress(source) is not None:
                    pass
    rows = [row for epoch in range(3) for row in expected_ids([3] * 2, 2, 10 * epoch, [6])]
    assert sorted(of_all(itertools.chain(*head_of(model).seen))) == rows


def test_a_subclass_of_pt2_keeps_a_method_named_transform():
    stock, options = PIPELINES["pt2, before it compiles"]

    class Own(stock):
        def _transform(self, batch):
            return "own"

    with contextlib.closing(CubicShuffler()) as shuffler:
        pipeline = balanced(Own)(*models.build_plain(), torch.device("cpu"), batch_shuffler=shuffler, **options)
        assert pipeline._transform(None) == "own"


def test_no_rank_has_data(two_ranks):
    results = two_ranks.run(train, ("build_sharded",), "sparse", "balance", [([0, 0], 0), ([2, 1], 0)])
    assert sorted(i for rank in results for step in rank["seen"] for i in step) == expected_ids([2, 1], 2)


@on_ranks
def test_the_staged_pipeline_trains_everything_to_the_end_and_the_same():
    rank, size, counts, seen, weights = dist.get_rank(), dist.get_world_size(), [5, 3, 0, 7], {}, {}
    for kind in ("balance", "identity"):
        model, optimizer = models.build_sharded()
        with contextlib.closing(make_shuffler(kind)) as shuffler:
            for epoch in range(2):  # a Staged pipeline ends with its iterator: a new one for every epoch
                pipeline = staged_pipeline(shuffler)
                source = balanced_iter(rank_batches(rank + 10 * epoch, counts[rank], SIZES), shuffler)
                while (batch := pipeline.progress(source)) is not None:
                    optimizer.zero_grad()
                    loss, _ = model(batch)
                    loss.backward()
                    optimizer.step()
        seen[kind], weights[kind] = head_of(model).seen, weights_of(model)
        rows = expected_ids(counts[:size], size) + expected_ids(counts[:size], size, 10)
        assert sorted(of_all(itertools.chain(*seen[kind]))) == sorted(rows)
        assert len(set(of_all([len(seen[kind])]))) == 1
    assert seen["balance"] != seen["identity"]
    assert largest_difference(weights["balance"], weights["identity"]) < 1e-5


def _load_one_more_except_on_rank_1(pipeline, source):
    """Train a step, where the thread of rank 1 loads no batch instead of the trained one."""
    loader = pipeline._batch_loader
    loader._buffer_filled_event.wait(60)
    if dist.get_rank() == 1:
        loader.stop()
    pipeline.progress(source)
    if dist.get_rank() != 1:
        loader._buffer_filled_event.wait(60)


@pytest.mark.parametrize(
    "pipeline_class", [TrainPipelineSparseDist, EvalPipelineSparseDist]
)  # the latter's thread loads
@on("ranks", timeout=60)
def test_reset_drains_what_is_in_flight_on_every_rank(pipeline_class):
    """With batches in flight, three times, at a different pace on every rank; then a whole epoch."""
    model, optimizer = models.build_sharded()
    model.train(pipeline_class is not EvalPipelineSparseDist)
    with contextlib.closing(CubicShuffler()) as shuffler:
        pipeline = balanced(pipeline_class)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        for attempt in range(3):
            source = rank_batches(dist.get_rank() + 10 * attempt, [5, 5, 3][attempt], [6])  # at last only rank 0 ends
            pipeline.progress(source)
            if pipeline.starts_on_thread:
                _load_one_more_except_on_rank_1(pipeline, source)
            time.sleep(0.05 * dist.get_rank())
            pipeline.reset()
        head_of(model).trained.clear()
        list(steps_of(pipeline, rank_batches(dist.get_rank() + 50, 3, [6])))
        assert pipeline.last_stats == shuffler.last_stats  # of the last batch, not of one that was dropped
        pipeline.reset()
    size = dist.get_world_size()
    assert sorted(of_all(itertools.chain(*head_of(model).seen))) == expected_ids([3] * size, size, 50, [6])


def _train_and_evaluate(pipeline, kind, detach_every):
    """Training steps with evaluations in between, on one model: detach, evaluate, attach."""
    model, optimizer = models.build_sharded()
    shuffler, evaluation = make_shuffler(kind), IdentityBalancedBatchShuffler()
    device = torch.device("cpu")
    pipeline_class, options = PIPELINES[pipeline]
    trainer = balanced(pipeline_class)(model, optimizer, device, batch_shuffler=shuffler, **options)
    source = rank_batches(dist.get_rank(), 7, SIZES)
    errors = []
    try:
        for step in itertools.count():
            if step and step % detach_every == 0:
                trainer.detach()
                model.eval()
                evaluator = balanced(TrainPipelineBase)(model, optimizer, device, batch_shuffler=evaluation)
                held_out = rank_batches(dist.get_rank() + 20, 1 + dist.get_rank(), [4])
                errors += map(float, steps_of(evaluator, held_out))
                model.train()
                trainer.attach()
            try:
                trainer.progress(source)
            except StopIteration:
                return weights_of(model), errors, head_of(model).seen
    finally:
        shuffler.close()
        evaluation.close()


# Base and PT2 have no detach: they leave the model as it is.
DETACHED = [name for name, (each, _) in PIPELINES.items() if hasattr(each, "detach")]
DETACHED_FIRST = ["sparse in place", "semi-sync, before it starts", "copies on a thread", "prefetch"]


@functools.cache
def _never_detached(ranks):
    return ranks.run(_train_and_evaluate, "sparse", "identity", 1000)[0][0]


@pytest.mark.parametrize("pipeline", before_a_commit(DETACHED_FIRST, DETACHED))
def test_detach_evaluate_and_attach_change_nothing(ranks, pipeline):
    on = ranks.run(_train_and_evaluate, pipeline, "balance", 1 + DETACHED.index(pipeline) % 2)
    assert largest_difference(on[0][0], _never_detached(ranks)) < 1e-5
    seen = [i for _, _, steps in on for step in steps for i in step]
    trained, evaluated = [i for i in seen if i < 2_000_000], [i for i in seen if i >= 2_000_000]
    assert sorted(trained) == expected_ids([7] * ranks.world_size, ranks.world_size)
    assert evaluated and on[0][1]


@pytest.mark.parametrize("pipeline", before_a_commit(["eval", "eval fused, lookups ahead"], EVALUATIONS))
def test_evaluations_see_every_sample_once_and_give_the_same_number(ranks, pipeline):
    counts = [5, 3, 0, 7][: ranks.world_size]
    on, off = (ranks.run(evaluate, counts, kind, 2, pipeline) for kind in ("balance", "identity"))
    expected = sorted(expected_ids(counts, ranks.world_size) + expected_ids(counts, ranks.world_size, 10))
    for results in (on, off):
        assert sorted(i for seen, _, _ in results for step in seen for i in step) == expected
    assert sum(error for _, error, _ in on) == pytest.approx(sum(error for _, error, _ in off), rel=1e-5)
    assert on[0][2] == sorted(on[0][2]) and len(on[0][2]) == 2 * max(counts)


def _train_evaluate_train(kind):
    """One hybrid pipeline: train to the end, evaluate to the end, train on; its weights, rows and errors."""
    model, optimizer = models.build_sharded()
    with contextlib.closing(make_shuffler(kind)) as shuffler:
        pipeline_class, _ = EVALUATIONS["eval hybrid"]
        pipeline = balanced(pipeline_class)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        errors = 0.0
        for first, training in ((0, True), (10, False), (20, True)):
            model.train(training)
            source = rank_batches(dist.get_rank() + first, 3 - dist.get_rank(), [6, 2])
            errors += (not training) * sum(map(float, steps_of(pipeline, source)))
    return weights_of(model), sorted(of_all(itertools.chain(*head_of(model).seen))), sum(of_all([errors]))


@pytest.mark.slow
@on_two_ranks
def test_a_hybrid_pipeline_trains_and_evaluates_in_turn():
    (weights, rows, errors), (expected, same, all_errors) = map(_train_evaluate_train, ("balance", "identity"))
    assert largest_difference(weights, expected) < 1e-5
    assert rows == same and len(rows) > 40
    assert errors == pytest.approx(all_errors, rel=1e-5)


class _SlowThread(LookAhead):
    """A loading thread that is scheduled late, on rank 1, where the first iterator ends."""

    def _read_ahead(self):
        if dist.get_rank() == 1 and not self._exhausted:
            time.sleep(0.05)
        return super()._read_ahead()


@pytest.mark.parametrize("leave_after", before_a_commit([1, 4], [3, 5]))
@on("ranks", timeout=60)
def test_an_evaluation_may_change_its_iterator_at_any_step(leave_after):
    model, optimizer = models.build_sharded()
    shuffler, size = CubicShuffler(ShufflerOptions(timeout=20.0)), dist.get_world_size()
    with mock.patch.object(hooks, "LookAhead", _SlowThread), contextlib.closing(shuffler):
        pipeline_class = balanced(EvalPipelineSparseDist)
        evaluator = pipeline_class(model.eval(), optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        first = rank_batches(dist.get_rank(), 5, [6])
        for _ in range(leave_after):
            evaluator.progress(first)
        for epoch in (1, 2):
            list(steps_of(evaluator, rank_batches(dist.get_rank() + 10 * epoch, 3, [6])))
        evaluator.reset()
    seen = of_all(itertools.chain(*head_of(model).seen))
    assert len(seen) == len(set(seen))
    assert all(set(expected_ids([3] * size, size, 10 * epoch, [6])) <= set(seen) for epoch in (1, 2))


@on_two_ranks
def test_a_source_that_has_ended_is_not_asked_again():
    steps = 1 if dist.get_rank() else 5
    source = Source(rank_batches(dist.get_rank(), steps, [6]))
    with contextlib.closing(CubicShuffler()) as shuffler:
        assert len(list(LookAhead(source, shuffler))) == 5
        shuffler.drain()
    assert source.read == steps + 1
