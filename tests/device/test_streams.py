"""Every balanced pipeline under the stream sanitizer, on two gloo ranks: no hazard, and planted mistakes are found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import train_pipelines as stock

from benchmarks import pipeline_overhead
from commons.distributed.exchange.row_exchange import RowExchange
from commons.pipeline import balanced, balanced_iter, shuffle_stage
from commons.pipeline.hooks import BalancedPipeline
from commons.pipeline.sparse_hooks import HookInSparseDist, HookWithEvents
from commons.sequence_batch.batch import BaseBatch
from tests.helpers.cuda.pretended_streams import (
    DEFAULT_STREAM,
    PretendedStream,
    current_stream,
    on_stream,
    replaced,
    with_streams,
)
from tests.helpers.cuda.stream_sanitizer import sanitized
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import rank_batches
from tests.helpers.pipelines.shuffled_pipelines import (
    SIZES,
    STOCK,
    STOCK_EVALUATIONS,
    STOCK_WITH_STREAMS,
    CubicShuffler,
    before_a_commit,
    require_pipeline,
    steps_of,
)

CPU = torch.device("cpu")
STEPS = 7
VARIANTS = {
    name: each
    for name, each in (STOCK | STOCK_WITH_STREAMS | STOCK_EVALUATIONS).items()
    if name not in ("pt2, before it compiles", "eval hybrid")
} | {"staged": (stock.StagedTrainPipeline, {})}


def hazards_of(name: str, balance: bool, mistake: str) -> tuple[int, int, dict[str, int]]:
    """Train on this rank's batches; returns the steps, the operations that were looked at, and the hazards."""
    plant = replaced(MISTAKES[mistake][0]) if mistake else contextlib.nullcontext()
    shuffler = CubicShuffler() if balance else None
    try:
        with plant, sanitized() as sanitizer:
            model, optimizer = models.build_sharded()
            model.train(not name.startswith("eval"))
            source = rank_batches(dist.get_rank(), STEPS, SIZES if balance else [6])
            train = _train_staged if name == "staged" else _train
            steps = train(name, model, optimizer, source, shuffler)
    finally:
        if shuffler is not None:
            shuffler.close()
    return steps, sanitizer.operations, dict(sanitizer.reports)


def _train(name: str, model: Any, optimizer: Any, source: Iterator[Any], shuffler: CubicShuffler | None) -> int:
    pipeline_class, options = VARIANTS[name]
    if shuffler is None:
        pipeline = pipeline_class(model, optimizer, CPU, **options)
    else:
        pipeline = balanced(pipeline_class)(model, optimizer, CPU, batch_shuffler=shuffler, **options)
    with_streams(pipeline)
    steps = sum(1 for _ in steps_of(pipeline, source))
    if name == "eval":
        pipeline.reset()
    return steps


def _train_staged(_: str, model: Any, optimizer: Any, source: Iterator[Any], shuffler: CubicShuffler | None) -> int:
    stream = PretendedStream(name="memcpy stream")
    stages = [stock.PipelineStage("copy", lambda batch: batch.to(CPU, non_blocking=True), stream)]
    if shuffler is not None:
        stages.append(shuffle_stage(shuffler, stream))
        source = balanced_iter(source, shuffler)
    pipeline = stock.StagedTrainPipeline(stages, compute_stream=DEFAULT_STREAM)
    pipeline._stream_context = on_stream
    steps = 0
    while (batch := pipeline.progress(source)) is not None:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        steps += 1
        del batch, loss
    return steps


def _finish_without(*, batch: bool = True, result: bool = True, stream: bool = True) -> Callable[..., Any]:
    """What a balanced pipeline does after the copy, less one of its precautions."""

    def finish(pipeline: Any, shuffling: Any) -> Any:
        with on_stream(pipeline._memcpy_stream if stream else None):
            balanced_batch = pipeline.batch_shuffler.finish_shuffle(shuffling.batch, shuffling.handle)
        if batch:
            shuffling.batch.record_stream(pipeline._memcpy_stream)
        if result:
            balanced_batch.record_stream(current_stream())
        pipeline._stats.append(shuffling.handle.read_stats)
        return balanced_batch

    return finish


def _unpack_with_a_read(exchange: RowExchange, batch: Any, buffer: Any, *beside: Any) -> Any:
    buffer[0][:1].tolist()
    return _unpack(exchange, batch, buffer, *beside)


_unpack = RowExchange.unpack


def _to_behind_device_0(batch: BaseBatch, *args: Any, **kwargs: Any) -> BaseBatch:
    """The copy of a batch behind the stream that a thread is on, of whatever device."""
    with replaced((torch.cpu, "current_stream", lambda device=None: current_stream())):
        return _to(batch, *args, **kwargs)


_to = BaseBatch.to

# A mistake: where it is made, the pipelines in which it shows, and as what.
MISTAKES: dict[str, tuple[tuple[Any, str, Any], tuple[str, ...], str]] = {
    "the batch is not recorded": (
        (BalancedPipeline, "_finish", _finish_without(batch=False)),
        ("base in place", "sparse in place", "semi-sync in place"),
        "freed",
    ),
    "the result is not recorded": (
        (BalancedPipeline, "_finish", _finish_without(result=False)),
        ("base in place",),  # elsewhere TorchRec or an event does as well
        "freed",
    ),
    "the exchange is on the main stream": (
        (BalancedPipeline, "_finish", _finish_without(stream=False)),
        ("base", "sparse", "fused", "semi-sync", "eval"),
        "race",
    ),
    "no event follows the exchange": (
        (HookWithEvents, "_after_copy", HookInSparseDist._after_copy),
        ("semi-sync, before it starts", "semi-sync", "semi-sync in place"),
        "race",
    ),
    "the copy waits for device 0": (
        (BaseBatch, "to", _to_behind_device_0),
        ("copies on a thread in place",),
        "race",
    ),
    "the exchange reads from the device": ((RowExchange, "unpack", _unpack_with_a_read), ("base", "eval"), "read"),
}


# One of each way to copy a batch and to wait for it.
FIRST = ["base", "sparse in place", "semi-sync in place", "prefetch", "copies on a thread in place", "eval", "staged"]


@pytest.mark.parametrize("name", before_a_commit(FIRST, VARIANTS))
def test_no_pipeline_has_a_hazard(two_ranks, name):
    if name != "staged":  # which takes the shuffle as a stage
        require_pipeline(*VARIANTS[name])
    for steps, operations, hazards in two_ranks.run(hazards_of, name, True, ""):
        assert steps == STEPS and operations > 30 * STEPS
        assert not hazards


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        pytest.param(each, name, marks=[pytest.mark.slow] * (name != MISTAKES[each][1][0]))
        for each in MISTAKES
        for name in MISTAKES[each][1]
    ],
)
def test_a_planted_mistake_is_found(two_ranks, mistake, name):
    found = two_ranks.run(hazards_of, name, True, mistake)
    for steps, _, hazards in found:
        assert steps == STEPS and any(hazard.startswith(MISTAKES[mistake][2]) for hazard in hazards)


def test_a_mistake_of_torchrec_is_found(two_ranks):
    """Its semi-synchronous pipeline records the event of an in-place copy on a stream that does not copy."""
    for _, _, hazards in two_ranks.run(hazards_of, "semi-sync in place", False, ""):
        assert any(hazard.startswith("race") for hazard in hazards)


def _hazards_of_benchmark(pipeline: str) -> dict[str, int]:
    """The variant of the benchmark of pipelines that waits for gather and plan."""
    with sanitized() as sanitizer:
        trainer, shuffler = pipeline_overhead.make_variant("synchronous", pipeline, CPU)
        with_streams(trainer)
        batches = (pipeline_overhead.host_batch("zipf", dist.get_rank(), step, 4, "cpu") for step in range(STEPS))
        list(steps_of(trainer, batches))
    shuffler.close()
    assert sanitizer.operations > 30 * STEPS
    return dict(sanitizer.reports)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["base", "native", "semi_sync"])
def test_the_benchmark_has_no_hazard(two_ranks, pipeline):
    assert two_ranks.run(_hazards_of_benchmark, pipeline) == [{}, {}]
