"""Every balanced pipeline under the stream sanitizer, on two gloo ranks: no hazard, and planted ones are found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import train_pipelines as stock

from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter
from commons.pipeline.hooks import HookInSparseDist, HookWithEvents
from tests.helpers.cuda.pretended_streams import PretendedStream, on_stream, replaced, with_streams
from tests.helpers.cuda.stream_sanitizer import sanitized
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import SampleBatch, rank_batches
from tests.helpers.pipelines.shuffled_pipelines import (
    SIZES,
    STOCK,
    STOCK_EVALUATIONS,
    STOCK_WITH_STREAMS,
    CubicShuffler,
    before_a_commit,
    require_pipeline,
    staged_pipeline,
    steps_of,
)

CPU = torch.device("cpu")
STEPS = 7
VARIANTS = {
    name: each
    for name, each in (STOCK | STOCK_WITH_STREAMS | STOCK_EVALUATIONS).items()
    if name not in ("pt2, before it compiles", "eval hybrid")
} | {"staged": (stock.StagedTrainPipeline, {})}


def hazards_of(name: str, hazard: str, transport: str = "all_to_all") -> tuple[int, int, dict[str, int]]:
    """Train on this rank's batches; returns the steps, the operations that were looked at, and the hazards."""
    plant = replaced(PLANTED[hazard][0]) if hazard else contextlib.nullcontext()
    options = ShufflerOptions(transport=transport)
    with plant, contextlib.closing(CubicShuffler(options)) as shuffler, sanitized() as sanitizer:
        model, optimizer = models.build_sharded()
        model.train(not name.startswith("eval"))
        source = rank_batches(dist.get_rank(), STEPS, SIZES)
        steps = (_train_staged if name == "staged" else _train)(name, model, optimizer, source, shuffler)
    return steps, sanitizer.operations, dict(sanitizer.reports)


def _train(name: str, model: Any, optimizer: Any, source: Iterator[Any], shuffler: CubicShuffler) -> int:
    pipeline_class, options = VARIANTS[name]
    pipeline = with_streams(balanced(pipeline_class)(model, optimizer, CPU, batch_shuffler=shuffler, **options))
    steps = sum(1 for _ in steps_of(pipeline, source))
    if name == "eval":
        pipeline.reset()
    return steps


def _train_staged(_: str, model: Any, optimizer: Any, source: Iterator[Any], shuffler: CubicShuffler) -> int:
    pipeline = staged_pipeline(shuffler)
    steps, balanced_source = 0, balanced_iter(source, shuffler)
    while (batch := pipeline.progress(balanced_source)) is not None:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        steps += 1
        del batch, loss
    return steps


def _send_elsewhere(*args: Any, send: Any = RowExchange.send_rows, **options: Any) -> Any:
    """Send rows on a stream for which nothing waits."""
    with on_stream(PretendedStream()):
        return send(*args, **options)


# By hazard, a mistake that has it, and a pipeline in which it shows.
PLANTED: dict[str, tuple[tuple[Any, str, Any], str]] = {
    "freed": ((SampleBatch, "record_stream", lambda batch, stream: None), "base in place"),
    "race": ((HookWithEvents, "_after_copy", HookInSparseDist._after_copy), "semi-sync"),
    "race: all_to_all_single": ((RowExchange, "send_rows", _send_elsewhere), "base"),
    "race: all_gather": ((RowExchange, "send_rows", _send_elsewhere), "base"),
}


# One of each way to copy a batch and to wait for it.
FIRST = ["base", "sparse in place", "semi-sync in place", "prefetch", "copies on a thread in place", "eval", "staged"]


@pytest.mark.parametrize("name", before_a_commit(FIRST, VARIANTS))
def test_no_pipeline_has_a_hazard(two_ranks, name):
    if name != "staged":  # which takes the shuffle as a stage
        require_pipeline(*VARIANTS[name])
    for steps, operations, hazards in two_ranks.run(hazards_of, name, ""):
        assert steps == STEPS and operations > 30 * STEPS
        assert not hazards


@pytest.mark.parametrize("name", ["base in place", "sparse"])
def test_no_pipeline_has_a_hazard_with_an_all_gather(two_ranks, name):
    for steps, _, hazards in two_ranks.run(hazards_of, name, "", "all_gather"):
        assert steps == STEPS and not hazards


@pytest.mark.parametrize("hazard", PLANTED)
def test_a_planted_hazard_is_found(two_ranks, hazard):
    transport = "all_gather" if "all_gather" in hazard else "all_to_all"
    for steps, _, found in two_ranks.run(hazards_of, PLANTED[hazard][1], hazard, transport):
        assert steps == STEPS and any(each.startswith(hazard) for each in found)
