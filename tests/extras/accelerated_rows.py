"""One of several ranks that read a data set by loaders that Accelerate has prepared, and write down their rows.

Started by torchrun: `python -m torch.distributed.run … -m tests.extras.accelerated_rows FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from commons.datasets import BudgetBatchSampler
from commons.datasets.samplers.epoch import ShardedBatchSampler
from evenrank import BalancedBatchSampler
from tests.helpers.ranks.faults import error_of

NUM_ROWS = 257
EPOCHS = 2


def _epochs(loader: DataLoader) -> list[list[list[int]]]:
    return [[rows.tolist() for (rows,) in loader] for _ in range(EPOCHS)]


def _rows_of_epoch(loader: DataLoader, epoch: int) -> list[list[int]]:
    (loader if hasattr(loader, "set_epoch") else loader.batch_sampler).set_epoch(epoch)
    return [rows.tolist() for (rows,) in loader]


def _rows_from(accelerator: Accelerator, loader: DataLoader, epoch: int, steps: int) -> list[list[int]]:
    loader.set_epoch(epoch)
    return [rows.tolist() for (rows,) in accelerator.skip_first_batches(loader, steps)]


def _gathered(accelerator: Accelerator, loader: DataLoader) -> list[int]:
    """The rows of all ranks in an epoch, each batch filled with -1 to the longest of any rank."""
    padded = (accelerator.pad_across_processes(rows, pad_index=-1) for (rows,) in loader)
    return [row for rows in padded for row in accelerator.gather_for_metrics(rows).tolist()]


def _documented(workloads: np.ndarray, dataset: torch.utils.data.TensorDataset) -> tuple[Accelerator, DataLoader]:
    accelerator = Accelerator()
    sampler = BalancedBatchSampler(workloads, 4, num_ranks=accelerator.num_processes, rank=None, window=8)
    loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler))
    return accelerator, loader


def main(folder: Path) -> None:
    """Write what this rank has read of each sampler, and what it was told of those made for one rank."""
    dataset = torch.utils.data.TensorDataset(torch.arange(NUM_ROWS))
    workloads = np.random.default_rng(0).lognormal(5, 1.4, NUM_ROWS).astype(np.int64) + 1
    accelerator, documented = _documented(workloads, dataset)
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    budget = {"budget_per_rank": int(8 * workloads.mean()), "num_ranks": num_ranks}
    loaders = {"documented": documented}
    for name, sampler in {
        "no window": BalancedBatchSampler(workloads, 3, num_ranks=num_ranks, rank=None),
        "one row": BalancedBatchSampler(workloads, 1, num_ranks=num_ranks, rank=None),
        "budget": BudgetBatchSampler(workloads, rank=None, **budget),
    }.items():
        loaders[name] = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, num_workers=name == "budget"))
    own = BalancedBatchSampler(workloads, 4, num_ranks=num_ranks, rank=rank, window=8)
    read = {
        "length": len(documented),
        "own": _epochs(DataLoader(dataset, batch_sampler=own)),
        "read": {name: _epochs(loader) for name, loader in loaders.items()},
        "gathered": {name: _gathered(accelerator, loader) for name, loader in loaders.items()},
        "epoch 3": _rows_of_epoch(documented, 3),
        "epoch 4 from step 5": _rows_from(accelerator, documented, 4, 5),
        "own epoch 4": _rows_of_epoch(DataLoader(dataset, batch_sampler=own), 4),
        "own epoch 3": _rows_of_epoch(DataLoader(dataset, batch_sampler=own), 3),
        "refused": [
            error_of(lambda sampler=sampler: accelerator.prepare(DataLoader(dataset, batch_sampler=sampler)))
            for sampler in (
                own,
                BudgetBatchSampler(workloads, rank=rank, **budget),
                ShardedBatchSampler(NUM_ROWS, 4, rank=rank, world_size=num_ranks),
            )
        ],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(read))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
