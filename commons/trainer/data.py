"""The loaders of a run: DatasetArgs and TrainerArgs in, one rank's batches out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.data_loader import get_data_loader
from commons.trainer.args import DatasetArgs, TrainerArgs


def train_and_eval_loaders(
    dataset: DatasetArgs, trainer: TrainerArgs, device: torch.device
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of this rank's training and evaluation batches, on the host.

    Raises:
        KeyError: an unknown data set.
        FileNotFoundError: no file at dataset_path.
        ValueError: a damaged or foreign file.
    """
    options: dict[str, Any] = {
        "max_history_seqlen": dataset.max_history_seqlen,
        "dataset_path": dataset.dataset_path,
        "max_num_candidates": dataset.max_num_candidates,
        "num_tasks": dataset.num_tasks,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "seed": trainer.seed,
        "num_workers": dataset.num_workers,
        "pin_memory": device.type == "cuda",
    }
    if dataset.dataset_name == "random":
        options["num_batches"] = dataset.num_batches
    name = dataset.dataset_name
    train_loader = get_data_loader(
        name,
        "train",
        batch_size=trainer.train_batch_size,
        shuffle=dataset.shuffle,
        drop_last=dataset.drop_last,
        **options,
    )
    # Never shuffled and never cut: every user is evaluated once, in the same order every time.
    return train_loader, get_data_loader(name, "test", batch_size=trainer.eval_batch_size, **options)
