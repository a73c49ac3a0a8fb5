"""One of several ranks of Lightning's Trainer with balanced rows; writes down what it trained.

Started by torchrun: `python -m torch.distributed.run … -m tests.extras.balanced_lightning FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.trainer.ranks.rank_info import RankInfo
from evenrank.integrations.lightning import BalancedBatches

NUM_ROWS, EPOCHS, BATCH = 40, 3, 4
LENGTHS = np.random.default_rng(0).lognormal(3, 1, NUM_ROWS).astype(np.int64) + 1


class Rows(LightningModule):
    """Notes the rows of every batch, and has a loss by which their order can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[list[int]] = []

    def training_step(self, rows, index):
        """The loss of some rows."""
        self.seen.append(rows.tolist())
        return (self.weight * rows.double() / NUM_ROWS - 0.5).square().mean()

    def configure_optimizers(self):
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, ranks: RankInfo, kind: str, resume: str | None = None, **changes) -> dict:
    """Train, and say what was trained."""
    options = {"num_ranks": ranks.world_size, "rank": ranks.rank, "seed": 5, **changes}
    if kind == "budget":
        sampler = BudgetBatchSampler(LENGTHS, budget_per_rank=int(LENGTHS.sum()) // 8, **options)
    else:
        sampler = BalancedBatchSampler(LENGTHS, BATCH, window=2, **options)
    module = Rows()
    rows, checkpoint = torch.arange(NUM_ROWS), None if resume is None else folder / kind / resume
    saved = ModelCheckpoint(folder / kind, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {
        "accelerator": "cpu",
        "devices": ranks.world_size,
        "strategy": "ddp",
        "max_epochs": EPOCHS,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }
    trainer = Trainer(callbacks=[BalancedBatches(sampler), saved], use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(rows, batch_sampler=sampler), ckpt_path=checkpoint)
    return {"seen": module.seen, "weight": float(module.weight)}


def main(folder: Path) -> None:
    """Train in every way, and write what this rank saw."""
    ranks = RankInfo.of_torchrun()
    found = {kind: train(folder, ranks, kind) for kind in ("balanced", "budget")}
    steps = len(found["balanced"]["seen"])
    for step in (3, steps // EPOCHS, steps // EPOCHS + 1):  # within a window, at the end of an epoch, behind it
        found[f"balanced from {step}"] = train(folder, ranks, "balanced", f"step={step}.ckpt")
    found["budget from 2"] = train(folder, ranks, "budget", "step=2.ckpt")
    try:
        train(folder, ranks, "refused", rank=1 - ranks.rank)
    except ValueError as error:
        found["refused"] = str(error)
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
