"""What does the shuffle stage cost, and how much of it is hidden? What does `python -m evenrank.observe` cost?

Two gloo ranks, one thread each. Every variant has a replica of a small HSTU model and trains the same batches; the
variants alternate step by step, and a step is measured from a barrier to a barrier with the shuffler's worker idle at
its end, so that no work hides in another variant's step.

Variants: the stock TorchRec pipeline; the stock pipeline recorded by `evenrank.observe`; the identity shuffler, which
only agrees on the end of data; the synchronous stage, which waits for gather and plan as soon as they start; and the
two-phase stage. The recording of a step is also timed separately.

On CUDA every rank has its own GPU, and the pipelines that need CUDA streams are measured too.

Examples:
    python -m benchmarks.pipeline_overhead
    python -m benchmarks.pipeline_overhead --steps 30 --quick
    python -m benchmarks.pipeline_overhead --device cuda --ranks 8
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import CONTEXT, draw, make_batch
from benchmarks.shared.report import (
    Page,
    interleaved_on_ranks,
    median_with_interval,
    milliseconds,
    run_ranks,
    slowest_ms,
)
from benchmarks.shared.small_hstu import CPU, DESCRIPTION, NUM_IDS, SIZES, make_model
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.engine.shuffle_handle import ShuffleHandle
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced
from commons.pipeline.recording import Recorder
from hstu import HSTUBalancedBatchShuffler

PIPELINES = {"base": TrainPipelineBase, "native": TrainPipelineSparseDist, "lite": TrainPipelineSparseDistLite}
CUDA_PIPELINES = PIPELINES | {
    "fused": TrainPipelineFusedSparseDist,
    "semi_sync": TrainPipelineSemiSync,
    "prefetch": PrefetchTrainPipelineSparseDist,
}
STAGES = ("stock", "identity", "synchronous", "two-phase")
LONGEST, ROWS, WARMUP = 256, 32, 6  # most items; rows per rank; steps that are not counted


class _Synchronous(HSTUBalancedBatchShuffler):
    """A shuffler that waits for gather and plan as soon as they start."""

    def start_shuffle(self, *args: Any, **kwargs: Any) -> ShuffleHandle:
        handle = super().start_shuffle(*args, **kwargs)
        handle.prepared()
        return handle


def host_batch(lengths_name: str, rank: int, step: int, rows: int, device: str) -> Any:
    count = rows * dist.get_world_size()
    if lengths_name == "uniform":
        lengths = np.random.default_rng(step).integers(120, 136, count)
    else:
        lengths = np.minimum(draw(lengths_name, count, step), LONGEST)
    batch = make_batch(lengths[rank * rows : (rank + 1) * rows], num_ids=NUM_IDS)
    return batch.pin_memory() if torch.cuda.is_available() and device == "cuda" else batch


def make_variant(variant: str, pipeline: str, device: torch.device) -> tuple[Any, BaseTaskBalancedBatchShuffler | None]:
    """A replica of the model in its pipeline, and its shuffler."""
    model, optimizer = make_model(device, [*CONTEXT, "item", "action"], 2 * LONGEST + len(CONTEXT))
    stock = CUDA_PIPELINES[pipeline]
    arguments = (model, optimizer, device)
    if variant in ("stock", "observed"):
        return stock(*arguments), None
    if variant == "identity":
        identity = IdentityBalancedBatchShuffler()
        return balanced(stock)(*arguments, batch_shuffler=identity), identity
    kind = HSTUBalancedBatchShuffler if variant == "two-phase" else _Synchronous
    shuffler = kind(*SIZES, options=ShufflerOptions(min_gain=0.03))
    return balanced(stock)(*arguments, batch_shuffler=shuffler), shuffler


def observe(pipeline: Any, recorder: Recorder) -> None:
    """Record one pipeline as `evenrank.observe` records all pipelines of a process."""
    read, train = pipeline._next_batch, pipeline.progress
    pipeline._next_batch = lambda *arguments: recorder._reading(pipeline, partial(read, *arguments))
    pipeline.progress = lambda *arguments: recorder._training(pipeline, partial(train, *arguments))


def measure(
    rank: int,
    variants: tuple[str, ...],
    pipeline: str,
    lengths_name: str,
    steps: int,
    kind: str,
) -> dict[str, Any]:
    """Step times of variants, and the two-phase stage's own figures, on one rank."""
    device = torch.device(kind, rank) if kind == "cuda" else CPU
    total = WARMUP + steps
    sources = {
        variant: (host_batch(lengths_name, rank, step, ROWS, kind) for step in range(total + 4)) for variant in variants
    }
    stats = []
    recorder = Recorder()
    made = {variant: make_variant(variant, pipeline, device) for variant in variants}
    if "observed" in made:
        observe(made["observed"][0], recorder)

    def step(variant: str) -> None:
        trainer, shuffler = made[variant]
        trainer.progress(sources[variant])
        if shuffler is not None:
            shuffler.drain()
        if kind == "cuda":
            torch.cuda.synchronize()
        if variant == "two-phase":
            stats.append(trainer.last_stats)

    ms = interleaved_on_ranks({variant: partial(step, variant) for variant in variants}, steps, warmup=WARMUP)
    assert len(recorder.lengths) == (total if "observed" in variants else 0)
    for trainer, shuffler in made.values():
        if shuffler is not None:
            trainer.reset()
            shuffler.drain()
            shuffler.close()
    stats = stats[WARMUP:]
    return {
        "ms": ms,
        "wait": [each.wait_ms for each in stats],
        "work": [each.gather_ms + each.plan_ms for each in stats],
        "exchange": [each.exchange_ms for each in stats],
        "imbalance": [(each.imbalance_before, each.imbalance_after) for each in stats],
        "moved": float(np.mean([each.moved for each in stats] or [0])),
    }


def recorded_step(keys: int) -> float:
    """Least microseconds of CPU to record a step with a batch of 32 rows of `keys` keys."""
    batch = make_batch(draw("lognormal", 32, 0), [f"context_{key}" for key in range(keys - 2)])
    recorder, pipeline, steps = Recorder(), Recorder, 500  # any object can stand for the pipeline

    def record() -> None:
        for _ in range(steps):
            recorder._reading(pipeline, lambda: batch)
            recorder._training(pipeline, lambda: None)

    return milliseconds(record, 20, clock=time.process_time, of=min) / steps * 1e3


def measure_observing(page: Page, ranks: int, sizes: tuple[Any, ...]) -> None:
    """The cost of `evenrank.observe`: of a recording, and of whole steps alternating with stock steps."""
    device = sizes[-1]
    measured = run_ranks(
        measure, ranks, ("stock", "observed"), "native", "uniform", *sizes, timeout=1800, device=device
    )
    times = slowest_ms(measured)
    _, ratio = median_with_interval(times["observed"] / times["stock"])
    recorded = [{"keys": keys, "µs per step": recorded_step(keys)} for keys in (3, 20, 102)]
    slowest, fastest_ms = max(row["µs per step"] for row in recorded), float(times["stock"].min())
    part = slowest / 1e3 / fastest_ms
    page.target("recording by evenrank.observe", "≤ 1 % of a step", f"{part:.3%} ({slowest:.0f} µs)", part <= 0.01)
    page.section(
        "What evenrank.observe takes",
        "Microseconds of CPU to record a batch of 32 rows, by its number of keys, the least of 20 runs; the target "
        f"compares them with the fastest stock step, {fastest_ms:.0f} ms.",
        recorded,
        f"Whole steps of the native pipeline, uniform lengths, run alternately, observed ÷ stock: {ratio}.",
    )


def main(
    steps: int = 40,
    quick: Quick = False,
    device: Literal["cpu", "cuda"] = "cpu",
    ranks: int = 2,
) -> None:
    """Measure and write benchmarks/results/pipeline_overhead.md, or pipeline_overhead_cuda.md.

    Args:
        steps: measured steps per case.
        device: where ranks run.
        ranks: number of ranks; on CUDA a GPU each.
    """
    torch.set_num_threads(1)
    pipelines = ["native"] if quick else list(CUDA_PIPELINES if device == "cuda" else PIPELINES)
    step_rows, hidden_rows = [], []
    for pipeline, lengths_name in itertools.product(pipelines, ("uniform", "zipf")):
        arguments = (pipeline, lengths_name, 8 if quick else steps, device)
        measured = run_ranks(measure, ranks, STAGES, *arguments, timeout=1800, device=device)
        times = slowest_ms(measured)
        case = {"pipeline": pipeline, "lengths": lengths_name}
        step_rows.append(
            case
            | {"stock ms": float(np.median(times["stock"]))}
            | {variant: median_with_interval(times[variant] / times["stock"])[1] for variant in STAGES[1:]}
        )
        wait, work, exchange = (
            np.concatenate([each[name] for each in measured]) for name in ("wait", "work", "exchange")
        )
        before, after = np.mean(measured[0]["imbalance"], axis=0) + 1
        hidden_rows.append(
            case
            | {
                "gather + plan ms": float(np.median(work)),
                "wait ms, median": float(np.median(wait)),
                "wait ms, 95th": float(np.percentile(wait, 95)),
                "hidden": f"{1 - wait.sum() / work.sum():.1%}",
                "exchange ms": float(np.median(exchange)),
                "largest ÷ mean load": f"{before:.3f} → {after:.3f}",
                "steps that move rows": f"{measured[0]['moved']:.0%}",
            }
        )
    on_cuda = device == "cuda"
    hardware = f"{torch.cuda.get_device_name()}, one per rank (NCCL)." if on_cuda else "Ranks on the CPU (gloo)."
    page = Page(
        "Pipelines: what the stage costs",
        f"{hardware} {DESCRIPTION}; {ROWS} users per rank, {ranks} ranks, {steps} steps; "
        "`min_gain` 3 %. Uniform: 120 to 135 items. Zipf: 1.2, to 256 items.",
        suffix="_cuda" if on_cuda else "",
    )
    page.section(
        "Step time, as a ratio to the stock pipeline",
        "Median of the ratio step by step, and its 95 % bootstrap interval. Below 1: faster than stock.",
        step_rows,
    )
    page.section(
        "How much of gather and plan is hidden (two-phase)",
        hidden_rows,
        "A step ends when the worker is idle, so on the CPU the two-phase column includes the worker's time even if it "
        "is hidden from the main thread.",
    )
    measure_observing(page, ranks, (8 if quick else 2 * steps, device))
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
