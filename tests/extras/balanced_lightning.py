"""One of several ranks of Lightning's Trainer with balanced rows; writes down what it trained.

Started by torchrun: `python -m torch.distributed.run … -m tests.extras.balanced_lightning FOLDER`.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.distributed import global_mean_loss
from commons.trainer.ranks.rank_info import RankInfo
from evenrank.integrations.lightning import BalancedBatches
from tests.helpers.ranks.faults import error_of

NUM_ROWS, EPOCHS, BATCH = 40, 3, 4
LENGTHS = np.random.default_rng(0).lognormal(3, 1, NUM_ROWS).astype(np.int64) + 1
SAMPLERS = {
    "balanced": functools.partial(BalancedBatchSampler, LENGTHS, BATCH, window=2),
    "budget": functools.partial(BudgetBatchSampler, LENGTHS, budget_per_rank=int(LENGTHS.sum()) // 8),
}


def make_sampler(kind: str, **options: Any) -> Any:
    """A sampler of one rank of one, unless the options say otherwise."""
    return SAMPLERS[kind](**{"num_ranks": 1, "rank": 0} | options)


class Rows(LightningModule):
    """Notes the rows of every batch, and has a loss by which their order can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[Any] = []

    def training_step(self, rows, index):
        """The loss of some rows."""
        self.seen.append(rows.tolist())
        losses = (self.weight * rows.double() / NUM_ROWS - 0.5).square()
        return global_mean_loss(losses.sum(), len(losses))

    def configure_model(self):
        """Nothing to shard."""

    def validation_step(self, rows, index):
        """Notes that there was one."""
        self.seen.append("validated")

    def configure_optimizers(self):
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


OPTIONS = {"accelerator": "cpu", "max_epochs": EPOCHS, "logger": False, "num_sanity_val_steps": 0}
OPTIONS |= {"enable_progress_bar": False, "enable_model_summary": False}


def saving(folder: Path, every_n_epochs: int | None = None) -> ModelCheckpoint:
    """A checkpoint after every step or epoch."""
    every = {"every_n_train_steps": None if every_n_epochs else 1, "every_n_epochs": every_n_epochs}
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **every)


def fit(
    folder: Path,
    sampler: Any,
    resume: str | Path | None = None,
    *,
    callback: BalancedBatches | None = None,
    workers: int = 0,
    validates: bool = False,
    every_n_epochs: int | None = None,
    **changes: Any,
) -> list[Any]:
    """What one process trains."""
    callbacks = [callback or BalancedBatches(sampler), saving(folder, every_n_epochs)]
    trainer = Trainer(callbacks=callbacks, use_distributed_sampler=False, **OPTIONS | changes)
    module, validation = Rows(), DataLoader([0]) if validates else None
    loader = DataLoader(range(NUM_ROWS), batch_sampler=sampler, num_workers=workers)
    trainer.fit(module, loader, validation, ckpt_path=None if resume is None else folder / resume)
    return module.seen


def train(folder: Path, kind: str, resume: str | None = None, **changes: Any) -> dict[str, Any]:
    """What this rank trains, as the documentation shows."""
    ranks = RankInfo.of_torchrun()
    sampler = make_sampler(kind, **{"num_ranks": ranks.world_size, "rank": ranks.rank, "seed": 5} | changes)
    module, rows, saved = Rows(), torch.arange(NUM_ROWS), saving(folder / kind)
    checkpoint, options = resume and folder / kind / resume, OPTIONS | {"devices": ranks.world_size, "strategy": "ddp"}
    trainer = Trainer(callbacks=[BalancedBatches(sampler), saved], use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(rows, batch_sampler=sampler), ckpt_path=checkpoint)
    return {"seen": module.seen, "weight": float(module.weight)}


def train_as_peers(num_ranks: int) -> list[Any]:
    """The rows that this rank trains if all ranks are tensor-parallel peers, with a sampler for so many ranks."""
    ranks = RankInfo.of_torchrun()
    sampler = make_sampler("balanced", num_ranks=num_ranks, rank=ranks.rank % num_ranks)
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks.world_size)
    options = OPTIONS | {"devices": ranks.world_size, "strategy": strategy, "enable_checkpointing": False}
    trainer = Trainer(callbacks=[BalancedBatches(sampler)], use_distributed_sampler=False, **options)
    module = Rows()
    trainer.fit(module, DataLoader(torch.arange(NUM_ROWS), batch_sampler=sampler))
    return module.seen


def main(folder: Path) -> None:
    """Train in every way, and write what this rank saw."""
    found: dict[str, Any] = {kind: train(folder, kind) for kind in SAMPLERS}
    steps = len(found["balanced"]["seen"])
    for step in (3, steps // EPOCHS, steps // EPOCHS + 1):  # within a window, at the end of an epoch, behind it
        found[f"balanced from {step}"] = train(folder, "balanced", f"step={step}.ckpt")
    found["budget from 2"] = train(folder, "budget", "step=2.ckpt")
    rank = torch.distributed.get_rank()
    mistakes: list[dict[str, Any]] = [{"rank": 1 - rank}, {"seed": rank}]
    found["refused"] = [error_of(train, folder, "balanced", **mistake) for mistake in mistakes]
    found["peers"] = [train_as_peers(1), error_of(train_as_peers, 2)]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
