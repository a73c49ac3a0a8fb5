"""What does the shuffle stage cost, and how much of it is hidden? What does `python -m evenrank.observe` cost?

Two gloo ranks, one thread each. Every variant has a replica of a small HSTU model and trains the same batches; the
variants alternate step by step, and a step is measured from a barrier to a barrier with the shuffler's worker idle at
its end, so that no work hides in another variant's step.

Variants: the stock TorchRec pipeline; the stock pipeline recorded by `evenrank.observe`; the identity shuffler, which
only agrees on the end of data; and the shuffle stage. The recording of a step is also timed separately.

On CUDA every rank has its own GPU, and the pipelines that need CUDA streams are measured too.

Examples:
    python -m benchmarks.pipeline_overhead
    python -m benchmarks.pipeline_overhead --steps 100
    python -m benchmarks.pipeline_overhead --device cuda --ranks 8
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
    every,
    interleaved_on_ranks,
    measured,
    median_with_interval,
    milliseconds,
    run_ranks,
    slowest_ms,
)
from benchmarks.shared.small_hstu import CPU, DESCRIPTION, NUM_IDS, SIZES, Replica
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.pipeline.recording import Recorder
from hstu import HSTUBalancedBatchShuffler

PIPELINES = {"base": TrainPipelineBase, "native": TrainPipelineSparseDist, "lite": TrainPipelineSparseDistLite}
CUDA_PIPELINES = PIPELINES | {
    "fused": TrainPipelineFusedSparseDist,
    "semi_sync": TrainPipelineSemiSync,
    "prefetch": PrefetchTrainPipelineSparseDist,
}
VARIANTS = ("stock", "observed", "identity", "balanced")
LONGEST, ROWS, WARMUP = 256, 32, 6  # most items; rows per rank; steps that are not counted


def host_batch(lengths_name: str, rank: int, step: int, rows: int, device: str) -> Any:
    count = rows * dist.get_world_size()
    if lengths_name == "uniform":
        lengths = np.random.default_rng(step).integers(120, 136, count)
    else:
        lengths = np.minimum(draw(lengths_name, count, step), LONGEST)
    batch = make_batch(lengths[rank * rows : (rank + 1) * rows], num_ids=NUM_IDS)
    return batch.pin_memory() if torch.cuda.is_available() and device == "cuda" else batch


class Variant(Replica):
    """One of `VARIANTS`; a step ends when the device is idle."""

    def __init__(self, name: str, pipeline: str, batches: Iterator[Any], device: torch.device) -> None:
        shufflers: dict[str, Callable[[], BaseTaskBalancedBatchShuffler]] = {
            "identity": IdentityBalancedBatchShuffler,
            "balanced": partial(HSTUBalancedBatchShuffler, *SIZES, options=ShufflerOptions(min_gain=0.03)),
        }
        model = {"features": [*CONTEXT, "item", "action"], "longest": 2 * LONGEST + len(CONTEXT)}
        of_pipeline: dict[str, Any] = {"pipeline": CUDA_PIPELINES[pipeline], "device": device} | model
        super().__init__(batches, shufflers[name]() if name in shufflers else None, **of_pipeline)
        self.stats: list[Any] = []
        self.recorder = Recorder()
        if name == "observed":
            observe(self.pipeline, self.recorder)

    def settle(self) -> None:
        super().settle()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self.shuffler is not None:
            self.stats.append(self.pipeline.last_stats)


def observe(pipeline: Any, recorder: Recorder) -> None:
    """Record one pipeline as `evenrank.observe` records all pipelines of a process."""
    read, train = pipeline._next_batch, pipeline.progress
    pipeline._next_batch = lambda *arguments: recorder._reading(pipeline, partial(read, *arguments))
    pipeline.progress = lambda *arguments: recorder._training(pipeline, partial(train, *arguments))


def train(rank: int, pipeline: str, lengths_name: str, steps: int, kind: str) -> dict[str, Any]:
    """Step times of the variants, and the stage's own figures, on one rank."""
    device = torch.device(kind, rank) if kind == "cuda" else CPU
    total = WARMUP + steps + 4
    variants = {
        name: Variant(
            name, pipeline, (host_batch(lengths_name, rank, step, ROWS, kind) for step in range(total)), device
        )
        for name in VARIANTS
    }
    ms = interleaved_on_ranks({name: variant.step for name, variant in variants.items()}, steps, warmup=WARMUP)
    assert len(variants["observed"].recorder.lengths) == WARMUP + steps
    for variant in variants.values():
        variant.close()
    return {
        "ms": ms,
        "stats": [
            [
                *(each.wait_ms, each.gather_ms + each.plan_ms, each.exchange_ms),
                *(each.imbalance_before, each.imbalance_after, each.moved),
            ]
            for each in variants["balanced"].stats[WARMUP:]
        ],
    }


def measure_pipeline(pipeline: str, lengths: str, *, ranks: int, steps: int, device: str) -> dict[str, Any]:
    """Ratios of step times to the stock pipeline, and how much of the worker's time is hidden."""
    found = run_ranks(train, ranks, pipeline, lengths, steps, device, timeout=1800, device=device)
    times = slowest_ms(found)
    wait, work, exchange, before, after, moved = np.concatenate([each["stats"] for each in found]).T
    return {
        "stock ms": float(np.median(times["stock"])),
        "fastest stock ms": float(times["stock"].min()),
        **{name: median_with_interval(times[name] / times["stock"])[1] for name in VARIANTS[1:]},
        "gather + plan ms": np.median(work),
        "wait ms, median": np.median(wait),
        "wait ms, 95th": np.percentile(wait, 95),
        "hidden": f"{1 - wait.sum() / work.sum():.1%}",
        "exchange ms": np.median(exchange),
        "largest ÷ mean load": f"{1 + before.mean():.3f} → {1 + after.mean():.3f}",
        "steps that move rows": f"{moved.mean():.0%}",
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
    on_cuda = device == "cuda"
    pipelines = list(CUDA_PIPELINES if on_cuda else PIPELINES)
    if quick:
        pipelines, steps = ["native"], min(steps, 8)
    cases = every(pipeline=pipelines, lengths=("uniform", "zipf"))
    found = measured(measure_pipeline, cases, ranks=ranks, steps=steps, device=device)
    hardware = f"{torch.cuda.get_device_name()}, one per rank (NCCL)." if on_cuda else "Ranks on the CPU (gloo)."
    page = Page(
        "Pipelines: what the stage costs",
        f"{hardware} {DESCRIPTION}; {ROWS} users per rank, {ranks} ranks, {steps} steps; "
        "`min_gain` 3 %. Uniform: 120 to 135 items. Zipf: 1.2, to 256 items.",
        suffix="_cuda" if on_cuda else "",
    )
    recorded = [{"keys": keys, "µs per step": recorded_step(keys)} for keys in (3, 20, 102)]
    fastest_ms = min(row["fastest stock ms"] for row in found)
    part = max(row["µs per step"] for row in recorded) / 1e3 / fastest_ms
    page.at_most("recording by evenrank.observe ÷ the fastest stock step", 0.01, [part])
    page.section(
        "Step time, and how much of gather and plan is hidden",
        "Step times as ratios to the stock pipeline: the median of the ratio step by step, and its 95 % bootstrap "
        "interval; below 1: faster than stock. A step ends when the worker is idle, so on the CPU the column of the "
        "stage includes the worker's time even if it is hidden from the main thread.",
        found,
    )
    page.section(
        "What evenrank.observe takes",
        "Microseconds of CPU to record a batch of 32 rows, by its number of keys, the least of 20 runs.",
        recorded,
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
