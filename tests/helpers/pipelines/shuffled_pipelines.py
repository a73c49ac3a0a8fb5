"""Pipelines with a shuffler, and what they are expected to train on."""

from __future__ import annotations

import collections
import inspect
import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib import metadata
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import experimental_pipelines as experimental
from torchrec.distributed.train_pipeline import train_pipelines as stock

from commons.dispatch import SingleRankLoader, redistribute_balanced
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import resolve_process_group
from commons.pipeline import balanced, shuffle_stage, windowed_iter
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.cuda.pretended_streams import (
    DEFAULT_STREAM,
    PretendedStream,
    on_pretended_streams,
    on_stream,
    pretend_from_now_on,
)
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import head_of, rank_batches, weights_of
from tests.helpers.pipelines.pipeline_classes import CopiesOnWorker
from tests.helpers.ranks.faults import my_batch

_IN_PLACE = {"enable_inplace_copy_batch": True}
# TorchRec's pipeline classes and their options, by the names that tests show.
STOCK: dict[str, tuple[type, dict[str, Any]]] = {
    "base": (stock.TrainPipelineBase, {}),
    "base in place": (stock.TrainPipelineBase, _IN_PLACE),
    "sparse": (stock.TrainPipelineSparseDist, {}),
    "sparse in place": (stock.TrainPipelineSparseDist, _IN_PLACE),
    "sparse after forward": (stock.TrainPipelineSparseDist, {"enqueue_batch_after_forward": True}),
    "sparse free early": (stock.TrainPipelineSparseDist, {"free_features_storage_early": True}),
    "lite": (stock.TrainPipelineSparseDistLite, {}),
    "fused": (stock.TrainPipelineFusedSparseDist, {}),
    "semi-sync, before it starts": (stock.TrainPipelineSemiSync, {"start_batch": 1000}),
    "prefetch": (stock.PrefetchTrainPipelineSparseDist, {}),
    "pt2, before it compiles": (
        stock.TrainPipelinePT2,
        {"compile_configs": stock.TorchCompileConfig(compile_on_iter=1000)},
    ),
    "copies on a thread": (experimental.TrainPipelineSparseDistT, {}),
    "copies on a thread in place": (experimental.TrainPipelineSparseDistT, _IN_PLACE),
    "copies on a worker in place": (CopiesOnWorker, _IN_PLACE | {"async_inplace_copy": True}),
    "hybrid": (experimental.TrainEvalHybridPipelineBase, {}),
}
# Those that train otherwise than the others, or need streams.
STOCK_WITH_STREAMS: dict[str, tuple[type, dict[str, Any]]] = {
    "semi-sync": (stock.TrainPipelineSemiSync, {"start_batch": 0}),
    "semi-sync in place": (stock.TrainPipelineSemiSync, {"start_batch": 0} | _IN_PLACE),
    "optimizer stashed": (experimental.TrainPipelineSparseDistOptStash, {"site_fqn": "embedding"}),
    "embeddings stashed": (experimental.TrainPipelineSparseDistEmbStash, {"site_fqn": "head"}),
}
if hasattr(experimental, "TrainPipelinePrefetchEMS"):  # TorchRec 1.8
    STOCK_WITH_STREAMS["embeddings and caches stashed"] = (experimental.TrainPipelinePrefetchEMS, {"site_fqn": "head"})
STOCK_EVALUATIONS: dict[str, tuple[type, dict[str, Any]]] = {
    "eval": (stock.EvalPipelineSparseDist, {}),
    "eval fused": (stock.EvalPipelineFusedSparseDist, {}),
    "eval fused, lookups ahead": (stock.EvalPipelineFusedSparseDist, {"enable_embedding_lookup_prefetch": True}),
    "eval hybrid": (experimental.TrainEvalHybridPipelineBase, {}),
}
# Those that ask CUDA for streams.
ON_CPU = {
    kind: on_pretended_streams(kind)
    for kind in (
        stock.EvalPipelineFusedSparseDist,
        stock.TrainPipelineFusedSparseDist,
        stock.TrainPipelineSemiSync,
        stock.PrefetchTrainPipelineSparseDist,
    )
}
PIPELINES, EVALUATIONS = (
    {name: (ON_CPU.get(kind, kind), options) for name, (kind, options) in kinds.items()}
    for kinds in (STOCK, STOCK_EVALUATIONS)
)
SIZES = [6, 0, 3, 1, 6, 2]


def before_a_commit(first: list[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases of a test: those that `make test` runs, one of each kind, and the others, which `make test-slow` does."""
    others = (case if isinstance(case, tuple) else (case,) for case in cases if case not in first)
    return first + [pytest.param(*case, marks=pytest.mark.slow) for case in others]


class CubicShuffler(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch):
        return batch.features.lengths().view(2, batch.batch_size).sum(0).to(torch.int64) ** 2 + 5


def make_shuffler(kind):
    return IdentityBalancedBatchShuffler() if kind == "identity" else CubicShuffler(ShufflerOptions(mode=kind))


def staged_pipeline(shuffler):
    """TorchRec's StagedTrainPipeline, which copies and shuffles batches of `balanced_iter`."""
    pretend_from_now_on()
    stream, cpu = PretendedStream(name="memcpy stream"), torch.device("cpu")
    copy = stock.PipelineStage("copy", lambda batch: batch.to(cpu, non_blocking=True), stream)
    stages = [copy, shuffle_stage(shuffler, stream)]
    pipeline = stock.StagedTrainPipeline(stages, compute_stream=DEFAULT_STREAM)
    pipeline._stream_context = on_stream
    return pipeline


def expected_ids(counts, world_size, first=0, sizes=SIZES):
    return sorted(
        int(sample)
        for rank in range(world_size)
        for batch in rank_batches(rank + first, counts[rank], sizes)
        for sample in batch.sample_id[: batch.actual_batch_size]
    )


class Source(Iterator[Any]):
    """Batches, counted as they are read; where `fails_at` comes, an error, after which it goes on, as a DataLoader."""

    def __init__(self, batches: Iterable[Any], fails_at: int | None = None, error: Exception | None = None) -> None:
        self.batches, self.fails_at, self.error, self.read = iter(batches), fails_at, error, 0

    def __next__(self) -> Any:
        self.read += 1
        if self.error is not None and self.read - 1 == self.fails_at:
            raise self.error
        return next(self.batches)


def steps_of(pipeline: Any, source: Iterator[Any], steps: int | None = None) -> Iterator[Any]:
    """What each step of a pipeline returns, up to the end of the data or so many steps."""
    for _ in itertools.count() if steps is None else range(steps):
        try:
            yield pipeline.progress(source)
        except StopIteration:
            return


def shuffled_ahead(shuffler: Any, source: Iterator[Any], ahead: int) -> Iterator[tuple[Any, Any]]:
    """Results and stats of shuffles, so many of which are in flight, to the end of the data of all ranks."""
    in_flight = collections.deque[tuple[Any, Any]]()
    while True:
        while len(in_flight) < ahead:
            batch = next(source, None)
            in_flight.append((batch, shuffler.start_shuffle(batch)))
        batch, handle = in_flight.popleft()
        if handle.has_ended():
            assert all(other.has_ended() for _, other in in_flight)
            return
        yield shuffler.finish_shuffle(handle.empty_batch() if batch is None else batch, handle), handle.stats


def train_steps(
    pipeline: Any, shuffler: BaseTaskBalancedBatchShuffler, source: Iterator[Any], steps: int
) -> tuple[list[float], int]:
    """The mean loss of every step over all ranks, and the number of steps that moved rows; closes the shuffler."""
    losses, moved = [], 0
    with closing(shuffler):
        for _ in range(steps):
            output = pipeline.progress(source)
            terms = torch.tensor([float(output.loss_sum), output.num_loss_tokens], dtype=torch.float64)
            dist.all_reduce(terms, group=resolve_process_group())
            losses.append(float(terms[0] / terms[1]))
            moved += pipeline.last_stats is not None and pipeline.last_stats.moved
    return losses, moved


def largest_difference(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def train(build, pipeline, kind, iterators, steps_of_first=None):
    """Train, or evaluate, on one iterator after the other; returns what was seen, the weights and the stats."""
    model, optimizer = getattr(models, build[0])(*build[1:])
    model.train(pipeline not in EVALUATIONS)
    shuffler = make_shuffler(kind)
    pipeline_class, options = (PIPELINES | EVALUATIONS)[pipeline]
    trainer = balanced(pipeline_class)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler, **options)
    outputs, stats = [], []
    try:
        for index, (counts, first) in enumerate(iterators):
            source = itertools.islice(rank_batches(dist.get_rank() + first, counts[dist.get_rank()], SIZES), None)
            for output in steps_of(trainer, source, None if index else steps_of_first):
                outputs.append(output)
                stats.append(trainer.last_stats)
    finally:
        if pipeline in EVALUATIONS:
            trainer.reset()
        shuffler.close()
    return {
        "seen": head_of(model).seen,
        "weights": weights_of(model),
        "moved": sum(each is not None and each.moved for each in stats),
        "error": sum(map(float, outputs)),
        "steps": [each.step for each in stats if each is not None],
    }


def evaluate(counts, kind, epochs, pipeline="eval"):
    """Evaluate so many epochs; returns what was seen, the sum of the errors and the numbers of the steps."""
    answer = train(("build_sharded",), pipeline, kind, [(counts, 10 * epoch) for epoch in range(epochs)])
    return answer["seen"], answer["error"], answer["steps"]


def one_process(counts, world_size, sizes=SIZES, accumulated=1):
    """So many global batches at a time on one process, without any of evenrank's stage."""
    streams = [list(rank_batches(rank, counts[rank], sizes)) for rank in range(world_size)]
    return one_process_of(
        [
            int(sample)
            for batches in streams
            for batch in batches[step : step + accumulated]
            for sample in batch.sample_id[: batch.actual_batch_size]
        ]
        for step in range(0, max(counts), accumulated)
    )


def one_process_of(steps):
    """Weights of one process that trains the plain mean over these rows, a list of ids for each step."""
    torch.manual_seed(0)
    model = models.PlainModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)
    for ids in filter(None, steps):
        optimizer.zero_grad()
        with mock.patch.object(models, "global_mean_loss", torch.div):
            loss, _ = model(models.make_batch(ids, len(ids)))
        loss.backward()
        optimizer.step()
    return weights_of(model)


def lacking(pipeline_class: type, options: dict[str, Any]) -> str | None:
    """What the installed TorchRec's class lacks to be balanced with these options; None for nothing."""
    unknown = sorted(options.keys() - inspect.signature(pipeline_class).parameters.keys())
    if unknown:
        return f"{pipeline_class.__name__} of TorchRec {metadata.version('torchrec')} has no {', '.join(unknown)}"
    try:
        balanced(pipeline_class)
    except TypeError as error:
        return str(error)
    return None


def require_pipeline(pipeline_class: type, options: dict[str, Any]) -> None:
    """Skip the test where the installed TorchRec's class cannot be balanced or lacks an option, saying why."""
    if (why := lacking(pipeline_class, options)) is not None:
        pytest.skip(why)


def rows_by_every_call(group: dist.ProcessGroup | None = None) -> list[Any]:
    """Rows of this rank by batches, windows, dispatch and its loader, with nothing kept between calls."""
    rank = dist.get_rank(group)
    with closing(CubicShuffler(ShufflerOptions(timeout=30.0), group)) as shuffler:
        results = [rows_as_values(shuffler.shuffle(my_batch(step))) for step in range(3)]
        source = windowed_iter(rank_batches(dist.get_rank(), 4, [6, 3]), shuffler, 2, group)
        results += [rows_as_values(batch) for batch in itertools.islice(source, 5)]
    rows = {"ids": torch.arange(8) + 100 * dist.get_rank()}
    work = torch.arange(8) * (100 if rank == 0 else 1)
    moved = redistribute_balanced(rows, work, group=group)
    results.append(moved.send_home(moved.batch)["ids"].tolist() + moved.batch["ids"].tolist())
    with closing(SingleRankLoader([rows, rows], lambda each: work, group=group)) as loader:
        results += [batch["ids"].tolist() for batch in loader]
    return results
