"""Training both ways: two replicas of one model train the same batches, as loaded and balanced, step by step in turn.

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
from collections.abc import Iterator
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
from commons.trainer.collectives import all_reduce
from commons.trainer.evaluation import evaluate
from commons.trainer.meter import StepSums
from commons.trainer.recipe import Recipe


@dataclass
class SideResults:
    """What one side measured.

    Attributes:
        step_ms: milliseconds of every measured step.
        losses: mean loss of every step's global batch, those of the warm-up too.
        evaluation: loss, rows and metrics on held-out users.
    """

    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass
class ComparisonResults:
    """What training both ways measured.

    Attributes:
        machine: what it ran on.
        num_ranks: ranks.
        batch_size: users per rank and step.
        max_history_seqlen: the most items of a user.
        num_layers: layers of the model.
        warmup_steps: steps that were not measured.
        quick: whether it was too short to say anything about time.
        unbalanced: batches as they are loaded.
        balanced: balanced batches.
        stats: the shuffler's stats of every measured step.
        baselines: metrics of what needs no training, by its name.
    """

    machine: dict[str, Any]
    num_ranks: int
    batch_size: int
    max_history_seqlen: int
    num_layers: int
    warmup_steps: int
    quick: bool
    unbalanced: SideResults
    balanced: SideResults
    stats: list[dict[str, Any]]
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)


class Side:
    """One of the two ways to train: a replica of the model, its pipeline and its batches, the same on both sides.

    Args:
        recipe: of the model.
        num_steps: batches to train.
        shuffler: balances; None for TorchRec's own pipeline.
    """

    def __init__(self, recipe: Recipe, num_steps: int, shuffler: BaseTaskBalancedBatchShuffler | None) -> None:
        self.results = SideResults()
        self._recipe = recipe
        self._shuffler = shuffler
        train_loader, self._eval_loader = recipe.open_loaders()
        self._model = recipe.build_model()
        parts = self._model, recipe.build_optimizer(self._model), recipe.device
        self.pipeline: Any = (
            TrainPipelineSparseDist(*parts)
            if shuffler is None
            else balanced(TrainPipelineSparseDist)(*parts, batch_shuffler=shuffler)
        )
        self._batches: Iterator[Any] = itertools.islice(iter(train_loader), num_steps)

    def train_step(self) -> float:
        """Train one batch; returns the milliseconds until all ranks have, and the shuffler is idle."""
        device = self._recipe.device
        dist.barrier()
        started = time.perf_counter()
        output = self.pipeline.progress(self._batches)
        if self._shuffler is not None:
            self._shuffler.drain()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        elapsed = (time.perf_counter() - started) * 1e3
        sums = StepSums()
        sums.add(output.loss_sum, output.num_loss_tokens)
        self.results.losses.append(sums.all_reduce(device).mean_loss)
        return elapsed

    def evaluate(self, shuffler: IdentityBalancedBatchShuffler) -> None:
        """Note loss, rows and metrics on the users that are not trained on; training is over then."""
        self.pipeline.detach()
        pipeline = TrainPipelineFactory.create(
            "none",
            model=self._model,
            optimizer=None,  # type: ignore[arg-type]  # an evaluation takes no step
            device=self._recipe.device,
            batch_shuffler=shuffler,
        )
        batches = tqdm(self._eval_loader, desc="evaluate", unit="batch", leave=False, disable=dist.get_rank() != 0)
        metrics = self._recipe.metrics(self._model)
        self.results.evaluation = evaluate(pipeline, self._model, iter(batches), metrics, self._recipe.device)


def compare(recipe: Recipe, *, steps: int, warmup_steps: int, quick: bool = False) -> ComparisonResults:
    """Train every batch both ways and evaluate both replicas; a collective call.

    Args:
        recipe: of the model, whose training batches are full ones (drop_last).
        steps: to measure; at most one epoch.
        warmup_steps: before them.
        quick: whether that is too short to say anything about time.

    Raises:
        ValueError: fewer batches than are needed to measure a step.
    """
    num_steps = available_steps(recipe.loaders[0], warmup_steps, steps, recipe)
    shuffler, eval_shuffler = recipe.build_shuffler(balances=True), IdentityBalancedBatchShuffler()
    sides = Side(recipe, num_steps, None), Side(recipe, num_steps, shuffler)
    stats = train_both(*sides, warmup_steps, num_steps)
    for side in sides:
        side.evaluate(eval_shuffler)
    for used in (eval_shuffler, shuffler):
        used.close()
    return ComparisonResults(
        machine=describe_machine(recipe.device),
        num_ranks=dist.get_world_size(),
        batch_size=recipe.batch_size,
        max_history_seqlen=recipe.max_length,
        num_layers=recipe.task.num_layers,
        warmup_steps=warmup_steps,
        quick=quick,
        unbalanced=sides[0].results,
        balanced=sides[1].results,
        stats=stats,
    )


def available_steps(loader: DataLoader[Any], warmup_steps: int, steps: int, recipe: Recipe) -> int:
    """Steps to train: as many as asked for, or as every rank has full batches in an epoch of its loader."""
    shortest = torch.tensor(len(loader), device=recipe.device)
    all_reduce(shortest, "count of batches", op=dist.ReduceOp.MIN)
    num_steps = min(warmup_steps + steps, int(shortest))
    if num_steps <= warmup_steps:
        raise ValueError(
            f"the data have {int(shortest)} full batches of {recipe.batch_size} users per rank, warmup_steps is "
            f"{warmup_steps}; at least one step is measured: lower batch_size or raise num_users"
        )
    return num_steps


def train_both(unbalanced: Side, balanced_side: Side, warmup_steps: int, num_steps: int) -> list[dict[str, Any]]:
    """Train every batch both ways, in turn; returns the shuffler's stats of the measured steps."""
    stats = []
    order = [unbalanced, balanced_side]
    with tqdm(total=num_steps, desc="train both ways", unit="step", disable=dist.get_rank() != 0) as progress:
        for step in range(num_steps):
            elapsed = {side: side.train_step() for side in order}
            order.reverse()
            if step >= warmup_steps:
                for side, ms in elapsed.items():
                    side.results.step_ms.append(ms)
                stats.append(balanced_side.pipeline.last_stats.to_dict())
            progress.set_postfix(
                {
                    "unbalanced": f"{elapsed[unbalanced]:.0f} ms",
                    "balanced": f"{elapsed[balanced_side]:.0f} ms",
                    "loss": f"{balanced_side.results.losses[-1]:.4f}",
                },
                refresh=False,
            )
            progress.update()
    return stats


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
