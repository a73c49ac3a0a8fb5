"""The loaders of a run: DatasetArgs and TrainerArgs in, one rank's batches out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.data_loader import get_data_loader
from commons.dispatch import SingleRankLoader
from commons.distributed.process_group import resolve_process_group
from commons.trainer.args import DatasetArgs, TrainerArgs


def train_and_eval_loaders(
    dataset: DatasetArgs, trainer: TrainerArgs, device: torch.device, **options: Any
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of this rank's training and evaluation batches, on the host.

    Tensor-parallel peers load the same batches: the ranks that share the data are those of the data-parallel group.
    With single_rank_load the training loader has the batches of all these ranks together, for `deal_out`.

    Args:
        dataset: what is loaded.
        trainer: batch sizes and seed.
        device: of this rank.
        options: further arguments of the data set.

    Raises:
        KeyError: an unknown data set.
        FileNotFoundError: no file at dataset_path.
        ValueError: a damaged or foreign file.
    """
    group = resolve_process_group()
    options |= {
        "rank": dist.get_rank(group),
        "world_size": dist.get_world_size(group),
        "num_workers": dataset.num_workers,
        "pin_memory": device.type == "cuda",
    }
    train_options, batch_size = options, trainer.train_batch_size
    if trainer.single_rank_load:
        # Only what has been dealt out is pinned.
        train_options = options | {"rank": 0, "world_size": 1, "pin_memory": False}
        batch_size *= dist.get_world_size(group)
    train_loader = _open(
        "train", dataset, trainer, batch_size, shuffle=dataset.shuffle, drop_last=dataset.drop_last, **train_options
    )
    # Never shuffled and never cut: every user is evaluated once, in the same order every time.
    return train_loader, _open("test", dataset, trainer, trainer.eval_batch_size, **options)


def single_process_loader(dataset: DatasetArgs, trainer: TrainerArgs, **options: Any) -> DataLoader[Any]:
    """The training batches as a single rank would read them; arguments and errors as `train_and_eval_loaders`."""
    return _open("train", dataset, trainer, trainer.train_batch_size, shuffle=dataset.shuffle, **options)


def _open(split: str, dataset: DatasetArgs, trainer: TrainerArgs, batch_size: int, **options: Any) -> DataLoader[Any]:
    return get_data_loader(
        dataset.dataset_name,
        split,
        batch_size=batch_size,
        max_history_seqlen=dataset.max_history_seqlen,
        dataset_path=dataset.dataset_path,
        max_num_candidates=dataset.max_num_candidates,
        num_tasks=dataset.num_tasks,
        seed=trainer.seed,
        **dataset.loader_options(),
        **options,
    )


def deal_out(
    train_loader: DataLoader[Any],
    trainer: TrainerArgs,
    device: torch.device,
    get_workloads: Callable[[Any], torch.Tensor],
) -> SingleRankLoader:
    """This rank's batches out of those that the first rank loads for all; a collective call.

    Row i goes to rank `i mod ranks`, as where every rank loads its own rows, or with balance_batch where it evens the
    work.

    Args:
        train_loader: batches of all ranks together; read on the first rank, asked for its length and sampler on all.
        trainer: settings.
        device: of this rank.
        get_workloads: what the rows of a batch cost, such as a shuffler's.
    """
    return SingleRankLoader(
        train_loader, get_workloads if trainer.balance_batch else None, pin_memory=device.type == "cuda"
    )
