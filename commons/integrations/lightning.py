"""Lightning: a callback that gives a sampler its epoch, and lets a resumed run go on behind the last trained batch.

sampler = BalancedBatchSampler(workloads, 8, num_ranks=trainer.world_size, rank=trainer.global_rank)
trainer = Trainer(callbacks=[BalancedBatches(sampler)], use_distributed_sampler=False)
trainer.fit(module, DataLoader(rows, batch_sampler=sampler))
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.datasets.samplers.planned import PlannedSampler


class BalancedBatches(Callback):
    """Keeps the place in the data of a sampler, which is the `batch_sampler` of the training loader.

    Lightning chooses the epoch of a sampler, but a run that is resumed within an epoch would begin that epoch again.
    The place is a number of rows over all ranks, so that it also holds for another number of them.

    Args:
        sampler: of this rank, a BalancedBatchSampler or BudgetBatchSampler.

    Raises:
        TypeError: a sampler that cannot go on within an epoch.
        ValueError: when training begins: a loader with another sampler, or a sampler of other ranks.
    """

    def __init__(self, sampler: PlannedSampler) -> None:
        if not isinstance(sampler, PlannedSampler):
            raise TypeError(
                f"sampler is a {type(sampler).__name__}; the place is that of a BalancedBatchSampler or a "
                "BudgetBatchSampler: make one of them, and a DataLoader with it as batch_sampler"
            )
        self._sampler = sampler
        self._epoch, self._start, self._num_batches = -1, EPOCH_START, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the sampler with the run."""
        loader = trainer.train_dataloader
        if getattr(loader, "batch_sampler", None) is not self._sampler:
            raise ValueError(
                "the training loader has another batch_sampler than this callback; its place would be lost: pass "
                "DataLoader(rows, batch_sampler=sampler), and Trainer(use_distributed_sampler=False)"
            )
        known = self._sampler.identity()
        if (known["rank"], known["world_size"]) != (trainer.global_rank, trainer.world_size):
            raise ValueError(
                f"the sampler deals rows to rank {known['rank']} of {known['world_size']}, this is rank "
                f"{trainer.global_rank} of {trainer.world_size}; each rank reads its own: make the sampler with these"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on within the epoch of a checkpoint, or begin one."""
        if trainer.current_epoch != self._epoch:
            self._epoch, self._start = trainer.current_epoch, EPOCH_START
        self._num_batches = 0
        self._begin()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Count a batch that was trained; the loader may have read further."""
        self._num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch that was trained, the next epoch behind the last one of an epoch."""
        epoch = max(0, self._epoch)
        place = self._sampler.place_after(self._num_batches, epoch, self._start)
        if next(self._sampler.step_rows(epoch, place), None) is None:
            epoch, place = epoch + 1, EPOCH_START
        return {"epoch": epoch, "row": place.row, "steps": place.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the place of a checkpoint; Lightning may begin to read before the epoch starts."""
        self._epoch, self._start = state_dict["epoch"], Place(state_dict["row"], state_dict["steps"])
        self._begin()

    def _begin(self) -> None:
        self._sampler.set_epoch(self._epoch)
        self._sampler.start_at(*self._start)
