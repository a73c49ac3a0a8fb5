"""A comparison: two replicas of one model train the same batches, one as loaded and one balanced, step by step in turn.

    recipe ─► as loaded: TorchRec's pipeline        ─► <run_dir>/as-loaded  ─┐
           └► balanced: `balanced(...)` of the same ─► <run_dir>/balanced   ─┴► evenrank report

Each side writes a run folder with a line of the log for every measured step. A step is measured from barrier to
barrier; the balanced side also waits for its worker thread, so that none of its work runs in the other side's step.
The sides alternate in going first, so that a drift of the machine's speed affects both.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tqdm import tqdm

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.perf_model.calibration import cpu_name
from commons.pipeline import balanced
from commons.run_log.files import LOG_FILE, LOG_SCHEMA, SUMMARY_FILE, write_summary
from commons.trainer.evaluation import Evaluation
from commons.trainer.observe.meter import StepMeter
from commons.trainer.observe.sinks import JsonLines
from commons.trainer.observe.train_log import TrainSummary
from commons.trainer.ranks.collectives import gather_numbers
from commons.trainer.recipe import Recipe
from commons.trainer.run import open_run_folder

# Folders of the two runs, within the folder of the comparison.
AS_LOADED, BALANCED = "as-loaded", "balanced"


class Side:
    """One side of the comparison: a replica of the model, its pipeline, its batches, and its run folder.

    `shuffler` is None for TorchRec's own pipeline. An earlier comparison in `run_dir` is replaced.
    """

    def __init__(
        self, recipe: Recipe, num_steps: int, shuffler: BaseTaskBalancedBatchShuffler | None, run_dir: Path
    ) -> None:
        self._recipe, self._shuffler, self._run_dir = recipe, shuffler, run_dir
        args = replace(
            recipe.config.trainer,
            run_dir=str(run_dir),
            overwrite=True,
            log_interval=1,
            enable_balanced_shuffler=shuffler is not None,
        )
        open_run_folder(replace(recipe.config, trainer=args), recipe.device, logs_to_file=False)
        self._log = JsonLines(run_dir / LOG_FILE) if dist.get_rank() == 0 else None
        self._step = 0
        self._meter = StepMeter(recipe)
        train_loader, self._eval_loader = recipe.open_loaders()
        self._model = recipe.build_model()
        parts = self._model, recipe.build_optimizer(self._model), recipe.device
        self.pipeline: Any = (
            TrainPipelineSparseDist(*parts)
            if shuffler is None
            else balanced(TrainPipelineSparseDist)(*parts, batch_shuffler=shuffler)
        )
        self._batches = self._read(itertools.islice(iter(train_loader), num_steps))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._meter.loaded(batch)
            yield batch

    def train_step(self, *, is_measured: bool) -> dict[str, Any]:
        """Train one batch, wait for all ranks and until the shuffler is idle; returns the step's line of the log."""
        dist.barrier()
        self._meter.begin()
        output = self.pipeline.progress(self._batches)
        if self._shuffler is not None:
            self._shuffler.drain()
        if self._recipe.device.type == "cuda":
            torch.cuda.synchronize(self._recipe.device)
        dist.barrier()
        self._meter.step(output, None if self._shuffler is None else self.pipeline.last_stats)
        self._step += 1
        numbers, details = self._meter.take()
        if is_measured:
            self._write({**numbers, **details})
        return numbers

    def _write(self, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write({"schema": LOG_SCHEMA, "step": self._step, **record})

    def finish(self, shuffler: IdentityBalancedBatchShuffler) -> None:
        """End training, evaluate on the users outside the training data, and write the summary."""
        self.pipeline.detach()
        batches = tqdm(self._eval_loader, desc="evaluate", unit="batch", leave=False, disable=dist.get_rank() != 0)
        metrics = Evaluation(self._recipe, self._model, batches, shuffler).run()
        self._write({f"eval_{name}": value for name, value in metrics.items()})
        if self._log is not None:
            self._log.close()
            summary = TrainSummary(self._step, 1, metrics=metrics, **self._meter.totals())
            write_summary(self._run_dir / SUMMARY_FILE, summary.to_dict(), trained=True)


def compare(recipe: Recipe, run_dir: Path, *, steps: int, warmup_steps: int) -> None:
    """Train every batch on both sides and evaluate both replicas; a collective call.

    Args:
        recipe: the model's recipe, with full training batches only (drop_last).
        run_dir: folder for the folders of both runs.
        steps: number of steps to measure; at most one epoch.
        warmup_steps: number of steps before the measured steps, not logged.

    Raises:
        ValueError: too few batches to measure a step.
    """
    own_batches = torch.tensor([len(recipe.loaders[0])], device=recipe.device)
    shortest = int(gather_numbers(own_batches, "count of batches").min())
    num_steps = min(warmup_steps + steps, shortest)
    if num_steps <= warmup_steps:
        raise ValueError(
            f"the data have {shortest} full batches of {recipe.batch_size} users per rank, and warmup_steps is "
            f"{warmup_steps}; at least one step must be left to measure: lower batch_size or raise num_users"
        )
    shuffler, eval_shuffler = recipe.build_shuffler(balances=True), IdentityBalancedBatchShuffler()
    as_loaded = Side(recipe, num_steps, None, run_dir / AS_LOADED)
    balanced_side = Side(recipe, num_steps, shuffler, run_dir / BALANCED)
    order = [as_loaded, balanced_side]
    with tqdm(total=num_steps, desc="train both ways", unit="step", disable=dist.get_rank() != 0) as progress:
        for step in range(num_steps):
            lines = {side: side.train_step(is_measured=step >= warmup_steps) for side in order}
            order.reverse()
            progress.set_postfix(
                {
                    "unbalanced": f"{lines[as_loaded]['step_ms']:.0f} ms",
                    "balanced": f"{lines[balanced_side]['step_ms']:.0f} ms",
                    "loss": f"{lines[balanced_side]['loss']:.4f}",
                },
                refresh=False,
            )
            progress.update()
    for side in (as_loaded, balanced_side):
        side.finish(eval_shuffler)
    for used in (eval_shuffler, shuffler):
        used.close()


def describe_machine(device: torch.device) -> str:
    """One line about the hardware: device, cores, threads per rank, version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    threads = torch.get_num_threads()
    return f"{name}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)} per rank, torch {torch.__version__}"
