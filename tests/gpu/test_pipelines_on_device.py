"""Every pipeline on the job's devices: stock classes on CUDA, with pretended streams elsewhere."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.train_pipeline.train_pipelines import (
    PipelineStage,
    StagedTrainPipeline,
    TorchCompileConfig,
    TrainPipelinePT2,
    TrainPipelineSemiSync,
)

from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter, shuffle_stage, windowed_iter
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.cuda.pretended_streams import pretended_streams, with_streams
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import head_of, rank_batches, rank_device, weights_of
from tests.helpers.pipelines import shuffled_pipelines as pipelines
from tests.helpers.pipelines.shuffled_pipelines import (
    SIZES,
    CubicShuffler,
    largest_difference,
    make_shuffler,
    require_pipeline,
    steps_of,
)
from tests.helpers.ranks.on_ranks import of_all

# Not TrainPipelineSparseDistCompAutograd, which leaves collectives and compilers otherwise for the cases that follow:
# tests/distributed/pipeline/test_trains_like_stock.py gives it ranks of its own.
STOCK = pipelines.STOCK | pipelines.STOCK_WITH_STREAMS
STOCK |= {
    "semi-sync": (TrainPipelineSemiSync, {"start_batch": 2}),
    "pt2": (TrainPipelinePT2, {"compile_configs": TorchCompileConfig(backend="eager", compile_on_iter=5)}),
}
for left_out in ("sparse after forward", "pt2, before it compiles", "semi-sync in place"):
    del STOCK[left_out]
EVALUATIONS = {name: each for name, each in pipelines.STOCK_EVALUATIONS.items() if name != "eval hybrid"}


@contextlib.contextmanager
def settings_of(name, device):
    """What TorchRec keeps of one pipeline for the next is put back; streams, where there are none."""
    with contextlib.ExitStack() as stack:
        if name.endswith("stashed"):
            MemoryStashingManager.reset()
            stack.callback(MemoryStashingManager.reset)
            if device == "cpu":
                stack.enter_context(pretended_streams())
        yield


def make_pipeline(name, device, shuffler, model, optimizer):
    stock, options = (STOCK | EVALUATIONS)[name]
    pipeline_class = pipelines.ON_CPU.get(stock, stock) if device == "cpu" else stock
    made = balanced(pipeline_class)(model, optimizer, rank_device(device), batch_shuffler=shuffler, **options)
    return with_streams(made) if name.endswith("stashed") and device == "cpu" else made


def host_batches(rank, steps, device):
    for batch in rank_batches(rank, steps, SIZES):
        yield batch.pin_memory() if device == "cuda" else batch


def global_ids(seen):
    return sorted(of_all(itertools.chain.from_iterable(seen)))


def expected_ids(steps):
    return pipelines.expected_ids([steps] * dist.get_world_size(), dist.get_world_size())


def train(name, device, kind):
    with settings_of(name, device):
        model, optimizer = models.build_sharded(device=device)
        with contextlib.closing(make_shuffler(kind)) as shuffler:
            pipeline = make_pipeline(name, device, shuffler, model, optimizer)
            list(steps_of(pipeline, host_batches(dist.get_rank(), 6, device)))
        return head_of(model).seen, weights_of(model)


@pytest.mark.parametrize("name", list(STOCK))
def test_every_sample_once_and_the_unshuffled_weights(device, name):
    require_pipeline(*STOCK[name])
    if name == "optimizer stashed" and dist.get_world_size() == 1:
        pytest.skip("TorchRec hooks its stash into the all-to-all of embeddings, which a single rank has not")
    seen, weights = train(name, device, "balance")
    unshuffled, reference = train(name, device, "identity")
    assert global_ids(seen) == global_ids(unshuffled) == expected_ids(6)
    assert largest_difference(weights, reference) < 1e-5


def test_transports_are_bit_identical(device):
    results = []
    for transport in ("all_to_all", "all_gather"):
        shuffler = CubicShuffler(ShufflerOptions(transport=transport, slack=0.0, verify=True))
        results.append([])
        for batch in host_batches(dist.get_rank(), 4, device):
            results[-1] += rows_as_values(shuffler.shuffle(batch.to(rank_device(device))), padding=True)
        assert shuffler.last_stats.moved == (dist.get_world_size() > 1)
        shuffler.close()
    assert results[0] == results[1]


def test_staged_pipeline(device):
    model, optimizer = models.build_sharded(device=device)
    shuffler = CubicShuffler()
    target = rank_device(device)
    if device == "cuda":
        copy = PipelineStage("copy", lambda batch: batch.to(target, non_blocking=True), torch.cuda.Stream())
        pipeline = StagedTrainPipeline([copy, shuffle_stage(shuffler, copy.stream)])
    else:
        pipeline = pipelines.staged_pipeline(shuffler)
    source = balanced_iter(host_batches(dist.get_rank(), 5, device), shuffler)
    while (batch := pipeline.progress(source)) is not None:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
    shuffler.close()
    assert global_ids(head_of(model).seen) == expected_ids(5)


@pytest.mark.parametrize("name", ["base", "sparse", "sparse free early"])
def test_windows_in_front_of_stock_pipelines(device, name):
    require_pipeline(*STOCK[name])
    model, optimizer = models.build_sharded(device=device)
    shuffler = CubicShuffler(ShufflerOptions(slack=0.0, verify=True))
    pipeline_class, options = STOCK[name]
    pipeline = pipeline_class(model, optimizer, rank_device(device), **options)
    windowed = windowed_iter(host_batches(dist.get_rank(), 6, device), shuffler, 4)

    def watched():
        for batch in windowed:
            assert batch.sample_id.is_pinned() == (device == "cuda")  # as the loader's, so that copies need not wait
            yield batch

    with contextlib.closing(shuffler):
        list(steps_of(pipeline, watched()))
        assert global_ids(head_of(model).seen) == expected_ids(6)
        assert windowed.take_stats().moved == (dist.get_world_size() > 1)


@pytest.mark.parametrize("name", list(EVALUATIONS))
def test_evaluation_pipelines(device, name):
    require_pipeline(*EVALUATIONS[name])
    model, optimizer = models.build_sharded(device=device)
    model.eval()
    shuffler = CubicShuffler()
    pipeline = make_pipeline(name, device, shuffler, model, optimizer)
    try:
        list(steps_of(pipeline, host_batches(dist.get_rank(), 5, device)))
        assert global_ids(head_of(model).seen) == expected_ids(5)
    finally:
        pipeline.reset()
        shuffler.close()


def test_two_shufflers_take_turns(device):
    """Communicators side by side: two pipelines in lockstep, each with groups of its own."""
    first, second = CubicShuffler(), CubicShuffler()
    models_and_optimizers = [models.build_sharded(device=device) for _ in range(2)]
    trainers = [
        make_pipeline("sparse", device, shuffler, model, optimizer)
        for shuffler, (model, optimizer) in zip((first, second), models_and_optimizers)
    ]
    sources = [host_batches(dist.get_rank(), 8, device) for _ in range(2)]
    for _ in range(8):
        for pipeline, source in zip(trainers, sources):
            pipeline.progress(source)
    first.close()
    second.close()
    for model, _ in models_and_optimizers:
        assert global_ids(head_of(model).seen) == expected_ids(8)
