"""What a rank of a demo does: two replicas of one model train the same batches, step by step in turn.

One replica goes through TorchRec's own pipeline, the other through `balanced(...)` of it. A step is measured from a
barrier to a barrier, with everything the shuffler does: the balanced side also waits for its worker thread, so that
none of its work hides in the other side's step. The side that goes first changes with every step, and only steps of one
pair are compared, so that a machine that drifts changes both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tqdm import tqdm

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.pipeline import TrainPipelineFactory, balanced
from commons.trainer.comparison import ComparisonResults, SideResults
from commons.trainer.comparison_options import ComparisonOptions
from commons.trainer.evaluation import Metrics, evaluate
from commons.trainer.launch import seed_all
from commons.trainer.meter import StepSums

Replica = tuple[torch.nn.Module, torch.optim.Optimizer]


@dataclass
class Side:
    """One of the two ways to train.

    Attributes:
        model: its replica.
        pipeline: trains it.
        batches: host batches of this rank, the same on both sides.
        shuffler: of the balanced side.
        results: what it measured.
    """

    model: torch.nn.Module
    pipeline: Any
    batches: Iterator[Any]
    shuffler: BaseTaskBalancedBatchShuffler | None = None
    results: SideResults = field(default_factory=SideResults)

    def train_step(self, device: torch.device) -> float:
        """Train one batch; returns the milliseconds until all ranks have, and the shuffler is idle."""
        dist.barrier()
        started = time.perf_counter()
        output = self.pipeline.progress(self.batches)
        if self.shuffler is not None:
            self.shuffler.drain()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        elapsed = (time.perf_counter() - started) * 1e3
        sums = StepSums()
        sums.add(output.loss_sum, output.num_loss_tokens)
        self.results.losses.append(sums.all_reduce(device).mean_loss)
        return elapsed


def compare(
    options: ComparisonOptions,
    *,
    make_loaders: Callable[[], tuple[DataLoader[Any], DataLoader[Any]]],
    make_replica: Callable[[], Replica],
    shuffler: BaseTaskBalancedBatchShuffler,
    metrics: Metrics,
    device: torch.device,
) -> ComparisonResults:
    """Train every batch both ways and evaluate both replicas; a collective call.

    Args:
        options: how long, and on what.
        make_loaders: a loader of this rank's training batches, and one of its evaluation batches.
        make_replica: a model on all ranks and its optimizer; called twice, from the same random state.
        shuffler: balances; closed afterwards.
        metrics: what an evaluation measures.
        device: of this rank.

    Raises:
        ValueError: fewer batches than are needed to measure a step.
    """
    num_steps = available_steps(options, make_loaders()[0], device)
    sides = []
    for balancer in (None, shuffler):
        loader, eval_loader = make_loaders()
        seed_all(options.seed)
        model, optimizer = make_replica()
        batches = itertools.islice(iter(loader), num_steps)
        if balancer is None:
            sides.append(Side(model, TrainPipelineSparseDist(model, optimizer, device), batches))
        else:
            pipeline = balanced(TrainPipelineSparseDist)(model, optimizer, device, batch_shuffler=balancer)
            sides.append(Side(model, pipeline, batches, balancer))
    unbalanced, balanced_side = sides
    stats = train_both(unbalanced, balanced_side, options.warmup_steps, num_steps, device)
    eval_shuffler = IdentityBalancedBatchShuffler()
    for side in sides:
        side.results.evaluation = evaluate_side(side, eval_loader, eval_shuffler, metrics, device)
    for used in (eval_shuffler, shuffler):
        used.close()
    return ComparisonResults(
        machine=describe_machine(device),
        num_ranks=dist.get_world_size(),
        batch_size=options.batch_size,
        max_history_seqlen=options.max_history_seqlen,
        num_layers=options.num_layers,
        warmup_steps=options.warmup_steps,
        quick=options.quick,
        unbalanced=unbalanced.results,
        balanced=balanced_side.results,
        stats=stats,
    )


def available_steps(options: ComparisonOptions, loader: DataLoader[Any], device: torch.device) -> int:
    """Steps to train: as many as asked for, or as every rank has full batches in an epoch of its loader."""
    shortest = torch.tensor(len(loader), device=device)
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    num_steps = min(options.warmup_steps + options.steps, int(shortest))
    if num_steps <= options.warmup_steps:
        raise ValueError(
            f"the data have {int(shortest)} full batches of {options.batch_size} users per rank, warmup_steps is "
            f"{options.warmup_steps}; at least one step is measured: lower batch_size or raise num_users"
        )
    return num_steps


def train_both(
    unbalanced: Side, balanced_side: Side, warmup_steps: int, num_steps: int, device: torch.device
) -> list[dict[str, Any]]:
    """Train every batch both ways, in turn; returns the shuffler's stats of the measured steps."""
    stats = []
    order = [unbalanced, balanced_side]
    with tqdm(total=num_steps, desc="train both ways", unit="step", disable=dist.get_rank() != 0) as progress:
        for step in range(num_steps):
            elapsed = {id(side): side.train_step(device) for side in order}
            order.reverse()
            if step >= warmup_steps:
                for side in order:
                    side.results.step_ms.append(elapsed[id(side)])
                stats.append(balanced_side.pipeline.last_stats.to_dict())
            progress.set_postfix(
                {
                    "unbalanced": f"{elapsed[id(unbalanced)]:.0f} ms",
                    "balanced": f"{elapsed[id(balanced_side)]:.0f} ms",
                    "loss": f"{balanced_side.results.losses[-1]:.4f}",
                },
                refresh=False,
            )
            progress.update()
    return stats


def evaluate_side(
    side: Side, loader: DataLoader[Any], shuffler: BaseTaskBalancedBatchShuffler, metrics: Metrics, device: torch.device
) -> dict[str, Any]:
    """Loss, rows and metrics on the users that are not trained on."""
    side.pipeline.detach()
    pipeline = TrainPipelineFactory.create(
        "none",
        model=side.model,
        optimizer=None,  # type: ignore[arg-type]  # an evaluation takes no step
        device=device,
        batch_shuffler=shuffler,
    )
    batches = tqdm(loader, desc="evaluate", unit="batch", leave=False, disable=dist.get_rank() != 0)
    return evaluate(pipeline, side.model, iter(batches), metrics, device)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": _processor_name(),
        "cpu_count": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor_name() -> str:
    """Linux does not tell `platform` the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
