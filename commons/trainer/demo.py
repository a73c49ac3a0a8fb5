"""A model's demo: two replicas train the same generated batches, one as loaded and one balanced, step by step in turn.

    generated ratings ─► ranks, which torchrun starts with the same command
    recipe ─┬► as loaded: TorchRec's pipeline        ─► <run_dir>/as-loaded  ─┐
            └► balanced: `balanced(...)` of the same ─► <run_dir>/balanced   ─┴► evenrank report

Each side writes a run folder with a line of the log for every measured step. A step is measured from barrier to
barrier; the balanced side also waits for its worker thread, so that none of its work runs in the other side's step.
The sides alternate in going first, so that a drift of the machine's speed affects both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tqdm import tqdm

from commons.checks import Count, Natural, require_field_types
from commons.console import make_console
from commons.datasets.public.generated_ratings import generate_ratings
from commons.datasets.sequences.file import SequenceFile, SequenceFileMetadata
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.perf_model.calibration import cpu_name
from commons.pipeline import balanced
from commons.run_log.files import LOG_FILE, LOG_SCHEMA, SUMMARY_FILE, write_summary
from commons.run_log.standard_error import shown_with_error, with_errors
from commons.trainer.config.load import load_config_file
from commons.trainer.evaluation import Evaluation
from commons.trainer.folder_lock import unlock_folder
from commons.trainer.observe.meter import StepMeter
from commons.trainer.observe.sinks import JsonLines
from commons.trainer.observe.train_log import TrainSummary
from commons.trainer.ranks.collectives import gather_numbers, on_rank_0
from commons.trainer.ranks.errors import log_to_file
from commons.trainer.ranks.launch import DeviceType, initialize_ranks
from commons.trainer.recipe import Recipe
from commons.trainer.run import open_run_folder, replace_run
from commons.trainer.torchrun import torchrun

# Folders of the two runs, within the folder of the demo.
_AS_LOADED, _BALANCED = "as-loaded", "balanced"


@dataclass
class DemoOptions:
    """Sizes and length of a demo, which trains every batch as loaded and balanced."""

    steps: Count = 80  # measured steps, each trained both as loaded and balanced; at most one epoch
    warmup_steps: Natural = 4  # steps before the measured steps, trained but not measured
    batch_size: Count = 16  # users per rank and step
    max_history_seqlen: Count = 1024  # maximum number of items of a user; older items are cut off
    num_layers: Count = 4  # layers of the model; its other dimensions are the defaults of ModelArgs
    num_users: Count = 6040  # users to generate; the default is the number in MovieLens-1M
    run_dir: Path = Path("runs/demo")  # folder for the data, the folders of both runs, report.html and report.png
    seed: Natural = 1234  # seed of the data, their order and the weights
    device: DeviceType = "auto"  # device of the ranks; "auto" uses GPUs if there are two or more, else two CPU ranks
    quick: bool = False  # a few steps on few users, as a test of the installation; the speed-up is not meaningful

    def __post_init__(self) -> None:
        require_field_types(self)
        if self.quick:
            self.steps, self.warmup_steps, self.num_users = min(self.steps, 7), 2, min(self.num_users, 400)

    @property
    def data_dir(self) -> Path:
        """Folder of the data."""
        return self.run_dir / "data"

    def training_config(self, config_class: type[Any], path: str) -> Any:
        """Load a training config from a file, with the demo's data, sizes, seed and folder."""
        config = load_config_file(config_class, path)
        trainer = replace(
            config.trainer,
            train_batch_size=self.batch_size,
            eval_batch_size=self.batch_size,
            max_eval_iters=None,  # both replicas are evaluated once, on all users outside the training data
            run_dir=str(self.run_dir),
            seed=self.seed,
        )
        sizes = {"max_history_seqlen": self.max_history_seqlen, "dataset_path": str(self.data_dir)}
        dataset = replace(config.dataset, **sizes, drop_last=True)
        return replace(
            config, trainer=trainer, dataset=dataset, model=replace(config.model, num_layers=self.num_layers)
        )


def start_ranks(module: str, options: DemoOptions, data: str) -> None:
    """Run `module` on ranks with this program's command line, wait for the ranks, and report; exits if a rank fails.

    `data` is a line about the demo's data, printed first.
    """
    console = make_console()
    console.print(data)
    num_ranks, where = choose_ranks(options.device)
    console.print(where)
    status = torchrun(["--standalone", f"--nproc_per_node={num_ranks}", "-m", module, *sys.argv[1:]])
    if status:
        sys.exit(status)
    # A subprocess, because no package imports commons.cli.
    report = [sys.executable, "-m", "commons.cli.main", "report"]
    runs = [str(options.run_dir / name) for name in (_AS_LOADED, _BALANCED)]
    outputs = [f"--html={options.run_dir / 'report.html'}", f"--figure={options.run_dir / 'report.png'}"]
    status = subprocess.run([*report, *runs, *outputs], check=False).returncode  # noqa: S603  our own program
    if options.quick:
        console.print("a quick run: too short to measure time")
    if status:
        sys.exit(status)


def demo_as_rank(
    recipe_class: type[Recipe],
    config: Any,
    options: DemoOptions,
    title: str,
    baselines: Callable[[Any], dict[str, dict[str, float]]] | None = None,
) -> None:
    """Run one rank of a demo: train as loaded and balanced.

    `title`, the model and its data, is printed first. `baselines` returns the metrics of each untrained baseline, by
    its name; it is called with the recipe, on all ranks together.
    """
    recipe = recipe_class(config, initialize_ranks(device_type=options.device))
    recipe.prepare_ranks()
    log_to_file(options.run_dir)
    console = make_console(highlight=False)
    if dist.get_rank() == 0:
        console.print(f"{title}\n{_describe_machine(recipe.device)}")
    _compare(recipe, options)
    for name, metrics in ({} if baselines is None else baselines(recipe)).items():
        if dist.get_rank() == 0:
            shown = (f"{metric} {shown_with_error(value, error)}" for metric, value, error in with_errors(metrics))
            console.print(f"{name}: {', '.join(shown)}")


def prepare_data(options: DemoOptions) -> SequenceFileMetadata:
    """Generate data in the preprocessor's format, or reuse an earlier demo's data of the same size and seed."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = SequenceFile(options.data_dir, "ml-1m", []).metadata
        if not found.generated:
            raise FileExistsError(
                f"{options.data_dir} contains data that were not generated; the demo would replace them: choose "
                "another --run-dir"
            )
        if (found.num_users, found.options["seed"]) == (options.num_users, options.seed):
            return found
    path = generate_ratings(options.data_dir, num_users=options.num_users, seed=options.seed, show_progress=True)
    return SequenceFile(path, "ml-1m", []).metadata


def choose_ranks(device: DeviceType) -> tuple[int, str]:
    """The number of ranks, and a line that explains it; ValueError for "cuda" without a GPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus == 0:
        raise ValueError("device is 'cuda' and this machine has no GPU; choose 'auto' or 'cpu'")
    if device == "cuda" or (device == "auto" and num_gpus >= 2):
        return num_gpus, f"{num_gpus} GPUs: one rank per GPU (NCCL)"
    found = {"cpu": "device cpu"}.get(device, "one GPU only" if num_gpus else "no GPU")
    return 2, f"{found}: two ranks on the CPU (gloo, one thread each)"


def describe_data(metadata: SequenceFileMetadata) -> str:
    """One line about generated data."""
    return (
        f"generated data: {metadata.num_users:,} users, {metadata.num_interactions:,} ratings; mean history "
        f"{metadata.mean_length:.0f}, longest {metadata.max_length:,}"
    )


class _Side:
    """One side of the comparison: a replica of the model, its pipeline, its batches, and its run folder.

    `shuffler` is None for TorchRec's own pipeline. An earlier run in `run_dir` is replaced.
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
        config = replace(recipe.config, trainer=args)
        open_run_folder(config, recipe.device, logs_to_file=False)
        on_rank_0(lambda: replace_run(config), recipe.device)
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
        unlock_folder(self._run_dir)


def _compare(recipe: Recipe, options: DemoOptions) -> None:
    """Train every batch on both sides and evaluate both replicas; ValueError without a batch to measure."""
    own_batches = torch.tensor([len(recipe.loaders[0])], device=recipe.device)
    shortest = int(gather_numbers(own_batches, "count of batches").min())
    warmup_steps, num_steps = options.warmup_steps, min(options.warmup_steps + options.steps, shortest)
    if num_steps <= warmup_steps:
        raise ValueError(
            f"the data have {shortest} full batches of {recipe.batch_size} users per rank, and warmup_steps is "
            f"{warmup_steps}; at least one step must be left to measure: lower batch_size or raise num_users"
        )
    shuffler, eval_shuffler = recipe.build_shuffler(balances=True), IdentityBalancedBatchShuffler()
    as_loaded = _Side(recipe, num_steps, None, options.run_dir / _AS_LOADED)
    balanced_side = _Side(recipe, num_steps, shuffler, options.run_dir / _BALANCED)
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


def _describe_machine(device: torch.device) -> str:
    """One line about the hardware: device, cores, threads per rank, version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    threads = torch.get_num_threads()
    return f"{name}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)} per rank, torch {torch.__version__}"
