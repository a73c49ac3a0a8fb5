"""What a demo is told, where its ranks run, and the generated data that it trains on."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from commons.datasets.movielens import preprocess_movielens
from commons.datasets.movielens_generator import generate_movielens
from commons.datasets.sequence_file import SequenceFile, SequenceFileMetadata
from commons.trainer.args import require_at_least
from commons.trainer.launch import DeviceType


@dataclass
class ComparisonOptions:
    """What a demo trains both ways, and for how long."""

    steps: int = 80
    """Steps that are measured, each trained both ways; at most one epoch."""

    warmup_steps: int = 4
    """Steps before them, trained but not measured."""

    batch_size: int = 16
    """Users per rank and step."""

    max_history_seqlen: int = 1024
    """The most items of a user; older ones are cut off."""

    num_layers: int = 4
    """Layers of the model, whose other dimensions are those of ModelArgs."""

    num_users: int = 6040
    """Users to generate; the default is the number in MovieLens-1M."""

    run_dir: Path = Path("runs/demo")
    """Folder for the data, demo.json and balance.png."""

    seed: int = 1234
    """Seed of the data, their order and the weights."""

    device: DeviceType = "auto"
    """Where ranks run; "auto" takes GPUs if there are two or more, else two CPU ranks."""

    quick: bool = False
    """A few steps on few users, to see it work; such a speed-up says nothing."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "max_history_seqlen", "num_layers", "num_users"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "seed"):
            require_at_least(name, getattr(self, name), 0)
        if self.quick:
            self.steps, self.warmup_steps, self.num_users = min(self.steps, 6), 2, min(self.num_users, 400)

    @property
    def data_dir(self) -> Path:
        """Folder of the archive and of the file that it becomes."""
        return self.run_dir / "data"


def prepare_data(options: ComparisonOptions) -> SequenceFileMetadata:
    """Generate an archive and preprocess it as the published one; what an earlier run has made serves again."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = SequenceFile(options.data_dir, "ml-1m", []).metadata
        if not found.generated:
            raise FileExistsError(
                f"{options.data_dir} holds data that were not generated; the demo would replace them: choose another "
                "--run-dir"
            )
        if (found.num_users, found.options["seed"]) == (options.num_users, options.seed):
            return found
    archive = options.data_dir / "ml-1m.zip"
    archive.parent.mkdir(parents=True, exist_ok=True)
    generate_movielens(archive, num_users=options.num_users, seed=options.seed, show_progress=True)
    path = preprocess_movielens(archive, options.data_dir, seed=options.seed)
    return SequenceFile(path, "ml-1m", []).metadata


def choose_ranks(device: DeviceType) -> tuple[int, str]:
    """Number of ranks, and what to say about it.

    Raises:
        ValueError: "cuda" without a GPU.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus == 0:
        raise ValueError("device is 'cuda', this machine has no GPU; choose 'auto' or 'cpu'")
    if device == "cuda" or (device == "auto" and num_gpus >= 2):
        return num_gpus, f"{num_gpus} GPUs: one rank on each (NCCL)"
    found = {"cpu": "as asked"}.get(device, "one GPU only" if num_gpus else "no GPU")
    return 2, f"{found}: two ranks on the CPU (gloo, one thread each)"


def describe_data(metadata: SequenceFileMetadata) -> str:
    """One line about generated data."""
    return (
        f"generated data: {metadata.num_users:,} users, {metadata.num_interactions:,} ratings; mean history "
        f"{metadata.mean_length:.0f}, longest {metadata.max_length:,}"
    )
