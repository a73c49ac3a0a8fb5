"""Balanced pipelines on real ranks: every sample is trained once, and the weights are those of the unshuffled run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelinePT2,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.pipeline import TrainPipelineFactory, balanced
from tests import models
from tests.models import head_of, rank_batches, weights_of

PIPELINES: dict[str, tuple[type, dict[str, Any]]] = {
    "base": (TrainPipelineBase, {}),
    "base in place": (TrainPipelineBase, {"enable_inplace_copy_batch": True}),
    "sparse": (TrainPipelineSparseDist, {}),
    "sparse in place": (TrainPipelineSparseDist, {"enable_inplace_copy_batch": True}),
    "sparse after forward": (TrainPipelineSparseDist, {"enqueue_batch_after_forward": True}),
    "sparse free early": (TrainPipelineSparseDist, {"free_features_storage_early": True}),
    "lite": (TrainPipelineSparseDistLite, {}),
}
SIZES = [6, 0, 3, 1, 6, 2]


class CubicShuffler(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch):
        return batch.features.lengths().view(2, batch.batch_size).sum(0).to(torch.int64) ** 2 + 5


def make_shuffler(kind):
    return IdentityBalancedBatchShuffler() if kind == "identity" else CubicShuffler(ShufflerOptions(mode=kind))


def _train(build, pipeline, kind, iterators, steps_of_first=None):
    """Train on one iterator after the other; returns what was seen, the weights and the stats."""
    model, optimizer = getattr(models, build[0])(*build[1:])
    model.train()
    shuffler = make_shuffler(kind)
    pipeline_class, options = PIPELINES[pipeline]
    trainer = balanced(pipeline_class)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler, **options)
    stats = []
    try:
        for index, (counts, first) in enumerate(iterators):
            source = itertools.islice(rank_batches(dist.get_rank() + first, counts[dist.get_rank()], SIZES), None)
            limit = steps_of_first if index == 0 and steps_of_first is not None else None
            for _ in itertools.count() if limit is None else range(limit):
                try:
                    trainer.progress(source)
                except StopIteration:
                    break
                stats.append(trainer.last_stats)
    finally:
        shuffler.close()
    return {
        "seen": head_of(model).seen,
        "weights": weights_of(model),
        "moved": sum(each is not None and each.moved for each in stats),
        "stats_steps": [each.step for each in stats if each is not None],
        "imbalance": [(each.imbalance_before, each.imbalance_after) for each in stats if each is not None],
    }


def expected_ids(counts, world_size, first=0):
    return sorted(
        int(sample)
        for rank in range(world_size)
        for batch in rank_batches(rank + first, counts[rank], SIZES)
        for sample in batch.sample_id[: batch.actual_batch_size]
    )


def largest_difference(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("pipeline", list(PIPELINES))
def test_every_sample_is_trained_once_and_the_weights_agree(ranks, pipeline):
    counts = [5, 3, 0, 7][: ranks.world_size]
    build = ("build_sharded",)
    balanced_run = ranks.run(_train, build, pipeline, "balance", [(counts, 0)])
    plain_run = ranks.run(_train, build, pipeline, "identity", [(counts, 0)])
    for run in (balanced_run, plain_run):
        assert sorted(i for rank in run for step in rank["seen"] for i in step) == expected_ids(
            counts, ranks.world_size
        )
        assert {len(rank["seen"]) for rank in run} == {max(counts)}  # the ranks stay in step to the end
    for rank in balanced_run:
        assert all(step == sorted(step) for step in rank["seen"])
        assert rank["stats_steps"] == list(range(max(counts)))  # each batch's stats arrive with its own step
        assert all(after <= before + 1e-12 for before, after in rank["imbalance"])
    assert balanced_run[0]["moved"] > 0
    assert largest_difference(balanced_run[0]["weights"], plain_run[0]["weights"]) < 1e-5
    # what differs between ranks is nothing
    assert largest_difference(balanced_run[0]["weights"], balanced_run[-1]["weights"]) < 1e-6


def _one_process(counts, world_size):
    """The global batch on one process, without any of evenrank's stage."""
    torch.manual_seed(0)
    model = models.PlainModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)
    streams = [list(rank_batches(rank, counts[rank], SIZES)) for rank in range(world_size)]
    for step in range(max(counts)):
        ids = [
            int(sample)
            for batches in streams
            if step < len(batches)
            for sample in batches[step].sample_id[: batches[step].actual_batch_size]
        ]
        if not ids:
            continue
        optimizer.zero_grad()
        loss, _ = model(models.make_batch(ids, len(ids)))
        loss.backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("pipeline", ["base", "base in place"])
def test_float64_weights_after_twenty_steps_equal_one_process(ranks, pipeline):
    counts = [20, 18, 20, 13][: ranks.world_size]
    runs = {
        kind: ranks.run(_train, ("build_plain",), pipeline, kind, [(counts, 0)]) for kind in ("balance", "identity")
    }
    assert runs["balance"][0]["moved"] > 5
    reference = _one_process(counts, ranks.world_size)
    for kind in runs:
        for rank in runs[kind]:
            assert largest_difference(rank["weights"], reference) < 1e-10
    assert largest_difference(runs["balance"][0]["weights"], runs["identity"][0]["weights"]) < 1e-10


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_sharded_weights_after_twenty_steps_agree(ranks, sharding):
    counts = [20, 20, 19, 20][: ranks.world_size]
    build = ("build_sharded", sharding)
    on, off = (ranks.run(_train, build, "sparse", kind, [(counts, 0)])[0] for kind in ("balance", "identity"))
    assert on["moved"] > 5
    for name, weight in on["weights"].items():
        torch.testing.assert_close(weight, off["weights"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pipeline", ["base", "sparse", "lite"])
def test_two_epochs_lose_nothing(ranks, pipeline):
    counts = [3, 2, 4, 0][: ranks.world_size]
    epochs = [(counts, 0), (counts, 10)]
    results = ranks.run(_train, ("build_sharded",), pipeline, "balance", epochs)
    seen = sorted(i for rank in results for step in rank["seen"] for i in step)
    assert seen == sorted(expected_ids(counts, ranks.world_size) + expected_ids(counts, ranks.world_size, 10))


@pytest.mark.parametrize("pipeline", ["base", "sparse", "lite"])
def test_an_iterator_left_half_way_trains_what_was_read_ahead(ranks, pipeline):
    """After two steps of five the user goes on to another iterator: what the stage had read is trained, no more."""
    counts = [5] * ranks.world_size
    results = ranks.run(_train, ("build_sharded",), pipeline, "balance", [(counts, 0), (counts, 10)], 2)
    seen = sorted(i for rank in results for step in rank["seen"] for i in step)
    second = expected_ids(counts, ranks.world_size, 10)
    first = sorted(set(seen) - set(second))
    read = max(steps for steps in range(6) if expected_ids([steps] * ranks.world_size, ranks.world_size) == first)
    assert 2 <= read <= 5 and seen == sorted(first + second)


@pytest.mark.parametrize("kind", ["balance", "identity"])
def test_no_rank_has_data(two_ranks, kind):
    results = two_ranks.run(_train, ("build_sharded",), "sparse", kind, [([0, 0], 0), ([2, 1], 0)])
    assert sorted(i for rank in results for step in rank["seen"] for i in step) == expected_ids([2, 1], 2)


def _fails_in_loader(pipeline):
    def source():
        yield from rank_batches(dist.get_rank(), 2, [6])
        if dist.get_rank() == 1:
            raise OSError("disk on fire")
        yield from rank_batches(dist.get_rank() + 10, 5, [6])

    model, optimizer = models.build_sharded()
    shuffler = CubicShuffler()
    trainer = balanced(PIPELINES[pipeline][0])(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    iterator = source()
    try:
        for _ in range(10):
            trainer.progress(iterator)
    except RuntimeError as error:
        trainer.reset()
        return str(error)
    finally:
        shuffler.close()
    return "no error"


@pytest.mark.parametrize("pipeline", ["base", "sparse"])
def test_a_dataloader_that_fails_stops_all_ranks(ranks, pipeline):
    for text in ranks.run(_fails_in_loader, pipeline):
        assert "rank 1: OSError: disk on fire" in text


def _reset_in_flight():
    model, optimizer = models.build_sharded()
    shuffler = CubicShuffler()
    trainer = balanced(TrainPipelineSparseDist)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    try:
        source = rank_batches(dist.get_rank(), 5, [6])
        trainer.progress(source)
        trainer.reset()
        seen = head_of(model).seen
        seen.clear()
        source = rank_batches(dist.get_rank() + 10, 3, [6])
        while True:
            try:
                trainer.progress(source)
            except StopIteration:
                return seen
    finally:
        shuffler.close()


def test_reset_drains_what_is_in_flight(ranks):
    seen = sorted(i for rank in ranks.run(_reset_in_flight) for step in rank for i in step)
    assert len(seen) == 3 * 6 * ranks.world_size


def test_what_cannot_be_hooked_is_refused():
    for pipeline_class in (TrainPipelinePT2, TrainPipelineFusedSparseDist, dict):
        with pytest.raises(TypeError, match="no known place for the shuffle.*TrainPipelineSparseDist"):
            balanced(pipeline_class)

    class Mine(TrainPipelineSparseDist):
        pass

    assert issubclass(balanced(Mine), Mine)
    assert balanced(Mine) is balanced(Mine)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = (model, optimizer, torch.device("cpu"))
    with pytest.raises(ValueError, match="execute_all_batches is False"):
        balanced(Mine)(*arguments, batch_shuffler=IdentityBalancedBatchShuffler(), execute_all_batches=False)
    with pytest.raises(TypeError, match="batch_shuffler is a str"):
        balanced(Mine)(*arguments, batch_shuffler="hstu")


def test_pipelines_by_name():
    model = torch.nn.Linear(1, 1)
    arguments = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": torch.device("cpu"),
        "batch_shuffler": IdentityBalancedBatchShuffler(),
    }
    assert isinstance(TrainPipelineFactory.create("none", **arguments), TrainPipelineBase)
    assert isinstance(TrainPipelineFactory.create("native", **arguments), TrainPipelineSparseDist)
    with pytest.raises(ValueError, match="'nativ' is not registered; valid names are 'native', 'none'"):
        TrainPipelineFactory.create("nativ", **arguments)
    with pytest.raises(ValueError, match="already registered"):
        TrainPipelineFactory.register("none", balanced(TrainPipelineBase))
