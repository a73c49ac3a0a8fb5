"""A model's demo: train a recipe on generated data twice, as loaded and balanced, and compare the two runs.

generated ratings ─► ranks, which torchrun starts with the same command ─► two run folders ─► evenrank report
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commons.checks import require_at_least
from commons.console import make_console
from commons.datasets.public.generated_ratings import generate_ratings
from commons.datasets.sequences.file import SequenceFile, SequenceFileMetadata
from commons.run_log.standard_error import shown_with_error, with_errors
from commons.trainer.comparison import AS_LOADED, BALANCED, compare, describe_machine
from commons.trainer.config.load import load_config_file
from commons.trainer.ranks.errors import log_to_file
from commons.trainer.ranks.launch import DeviceType, initialize_ranks
from commons.trainer.recipe import Recipe
from commons.trainer.torchrun import torchrun


@dataclass
class DemoOptions:
    """Sizes and length of a demo, which trains every batch as loaded and balanced."""

    steps: int = 80  # measured steps, each trained both as loaded and balanced; at most one epoch
    warmup_steps: int = 4  # steps before the measured steps, trained but not measured
    batch_size: int = 16  # users per rank and step
    max_history_seqlen: int = 1024  # maximum number of items of a user; older items are cut off
    num_layers: int = 4  # layers of the model; its other dimensions are the defaults of ModelArgs
    num_users: int = 6040  # users to generate; the default is the number in MovieLens-1M
    run_dir: Path = Path("runs/demo")  # folder for the data, the folders of both runs, report.html and report.png
    seed: int = 1234  # seed of the data, their order and the weights
    device: DeviceType = "auto"  # device of the ranks; "auto" uses GPUs if there are two or more, else two CPU ranks
    quick: bool = False  # a few steps on few users, as a test of the installation; the speed-up is not meaningful

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "max_history_seqlen", "num_layers", "num_users"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "seed"):
            require_at_least(name, getattr(self, name), 0)
        if self.quick:
            self.steps, self.warmup_steps, self.num_users = min(self.steps, 6), 2, min(self.num_users, 400)

    @property
    def data_dir(self) -> Path:
        """Folder of the data."""
        return self.run_dir / "data"

    def training_config(self, config_class: type[Any], path: str) -> Any:
        """Load a training config from a file, with the demo's data, sizes, seed and folder."""
        config = load_config_file(config_class, path)
        size = self.batch_size
        trainer = {"train_batch_size": size, "eval_batch_size": size, "run_dir": str(self.run_dir), "seed": self.seed}
        trainer["max_eval_iters"] = None  # both replicas are evaluated once, on all users outside the training data
        dataset = {"max_history_seqlen": self.max_history_seqlen, "dataset_path": str(self.data_dir)}
        return replace(
            config,
            trainer=replace(config.trainer, **trainer),
            dataset=replace(config.dataset, **dataset, drop_last=True),
            model=replace(config.model, num_layers=self.num_layers),
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
    runs = [str(options.run_dir / name) for name in (AS_LOADED, BALANCED)]
    outputs = [
        f"--{kind}={options.run_dir / name}" for kind, name in (("html", "report.html"), ("figure", "report.png"))
    ]
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

    Args:
        recipe_class: the model.
        config: the training config.
        options: the demo's options.
        title: the model and its data, printed first.
        baselines: returns the metrics of each untrained baseline, by its name; called with the recipe on all ranks
            together. None for no baselines.
    """
    recipe = recipe_class(config, initialize_ranks(device_type=options.device))
    recipe.prepare_ranks()
    log_to_file(options.run_dir)
    console = make_console(highlight=False)
    if dist.get_rank() == 0:
        console.print(f"{title}\n{describe_machine(recipe.device)}")
    compare(recipe, options.run_dir, steps=options.steps, warmup_steps=options.warmup_steps)
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
