"""Lightning: a callback that sets a sampler's epoch, and resumes a run after the last trained batch.

sampler = BalancedBatchSampler(workloads, 8, num_ranks=trainer.world_size, rank=trainer.global_rank)
trainer = Trainer(callbacks=[BalancedBatches(sampler)], use_distributed_sampler=False)
trainer.fit(module, DataLoader(rows, batch_sampler=sampler))
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from commons.checks import kind_of
from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.datasets.samplers.planned import PlannedSampler
from commons.integrations.one_plan import require_one_plan

logger = logging.getLogger(__name__)


class BalancedBatches(Callback):
    """Saves and restores a sampler's place in the data; the sampler is the `batch_sampler` of the training loader.

    Without it, a run that is resumed within an epoch begins that epoch again. The place is a number of rows over all
    ranks, so it remains valid for another number of ranks, which train an unfinished window again from its beginning.

    Args:
        sampler: this rank's BalancedBatchSampler or BudgetBatchSampler.

    Raises:
        TypeError: the sampler cannot resume within an epoch.
        ValueError: when training begins: the loader has another sampler, or the sampler is for another rank, another
            number of rows, or has another plan on another rank, such as of another seed.
    """

    def __init__(self, sampler: PlannedSampler) -> None:
        if not isinstance(sampler, PlannedSampler):
            raise TypeError(
                f"sampler is {kind_of(sampler)}; it must be a BalancedBatchSampler or a BudgetBatchSampler: "
                "make one of these, and a DataLoader with it as batch_sampler"
            )
        self._sampler = sampler
        self._epoch, self._start, self._num_batches, self._has_ended = 0, EPOCH_START, 0, False
        self._overfits = False  # whether all epochs have the batches of the first one

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the sampler to the epoch of this fit, which Lightning reads from before the epoch starts."""
        if stage == "fit":
            self._overfits = trainer.overfit_batches > 0
            self._begin(self._epoch_of(trainer), EPOCH_START)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check on all ranks that the loader uses the sampler, and that the samplers have one plan."""
        _skip_to_validation(trainer)
        self._place()  # a loader with workers has drawn the epoch; Lightning may make it anew (reload_dataloaders_…)
        require_one_plan("BalancedBatches", lambda: self._fitting(trainer))

    def _fitting(self, trainer: Trainer) -> PlannedSampler:
        """The sampler; ValueError unless the loader uses it, and it is for this rank and this data set."""
        loader = trainer.train_dataloader
        if getattr(loader, "batch_sampler", None) is not self._sampler:
            raise ValueError(
                "the training loader has another batch_sampler than this callback; its place would be lost: pass "
                "DataLoader(rows, batch_sampler=sampler), and Trainer(use_distributed_sampler=False)"
            )
        identity = self._sampler.identity()
        own = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}  # equal on tensor-parallel peers
        if (identity["rank"], identity["world_size"]) != (own["rank"], own["num_replicas"]):
            raise ValueError(
                f"the sampler is for rank {identity['rank']} of {identity['world_size']}, this is data-parallel rank "
                f"{own['rank']} of {own['num_replicas']}; each rank has its own sampler: make it with this rank and "
                "number of ranks"
            )
        self._sampler.require_fits(loader.dataset)
        return self._sampler

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue within the epoch of a checkpoint, or begin an epoch."""
        epoch = self._epoch_of(trainer)
        is_resumed = epoch == self._epoch and self._num_batches == 0  # with overfit_batches the epoch is always 0
        self._begin(epoch, self._start if is_resumed else EPOCH_START)
        self._set_number(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the number of batches where Lightning calls no epoch start, as after a resume at the end of an epoch."""
        if self._num_batches == 0:
            self._set_number(trainer)
            fetcher, progress = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
            if fetcher is not None and fetcher.length is not None:
                progress.is_last_batch = fetcher.done = fetcher.fetched >= fetcher.length

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a trained batch; the loader may have read further."""
        self._num_batches += 1
        self._has_ended = batch_idx + 1 >= trainer.num_training_batches  # limit_train_batches may leave rows

    def state_dict(self) -> dict[str, Any]:
        """The place after the last trained batch; after the last batch of an epoch, the start of the next epoch."""
        epoch, place = self._epoch, self._sampler.place_after(self._num_batches, self._epoch, self._start)
        of_window = list(itertools.islice(self._sampler.step_rows(epoch, Place(place.row)), place.steps + 1))
        if self._has_ended or len(of_window) <= place.steps:
            epoch, place = epoch + 1, EPOCH_START
        return {
            "epoch": epoch,
            "row": place.row,
            "steps": place.steps,
            "counted": self._epoch,
            "window_rows": sum(of_window[: place.steps]),
            "plan": self._plan(),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adapt the checkpoint of another plan: its steps within a window, and Lightning's number of trained batches.

        Lightning would end the epoch after as many batches as on this run's ranks, counted with those of the other run.
        """
        state, loops = checkpoint["callbacks"].get(self.state_key), checkpoint.get("loops")
        if not state or not loops or self._overfits or state.get("plan", self._plan()) == self._plan():
            return
        if state["steps"] and trainer.state.fn == "fit" and self._sampler.identity()["rank"] == 0:
            logger.warning(
                "the checkpoint was saved %d steps into a window that was planned by another release, or for other "
                "ranks or settings: the window is read again, and %d rows are trained a second time",
                state["steps"],
                state["window_rows"],
            )
        self._sampler.epoch_of_len = state["counted"]
        number, left = len(self._sampler), 0
        if state["epoch"] == state["counted"]:
            left = sum(1 for _ in self._sampler.step_rows(state["epoch"], Place(state["row"])))
        has_ended = number - left >= _limited(number, trainer)
        if has_ended:
            state |= {"epoch": state["counted"] + 1, "row": 0}
        progress = loops["fit_loop"]["epoch_loop.batch_progress"]
        counts = progress["current"]
        # "completed" is lower than "ready" in a checkpoint that was saved at the end of a batch.
        counts |= {name: number - left + count - counts["ready"] for name, count in counts.items()}
        state["steps"], progress["is_last_batch"] = 0, has_ended

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the sampler to a checkpoint's place."""
        self._begin(0 if self._overfits else state_dict["epoch"], Place(state_dict["row"], state_dict["steps"]))
        # By this number Lightning finds whether the checkpoint's epoch has ended.
        self._sampler.epoch_of_len = state_dict.get("counted", self._epoch)

    def _plan(self) -> dict[str, Any]:
        """Settings that must be equal for a place within a window, and for a number of batches, to mean the same."""
        return {name: value for name, value in self._sampler.identity().items() if name != "rank"}

    def _epoch_of(self, trainer: Trainer) -> int:
        """The sampler's epoch."""
        return 0 if self._overfits else trainer.current_epoch

    def _set_number(self, trainer: Trainer) -> None:
        """Set the number of batches, which Lightning counts in the first epoch; a BudgetBatchSampler's varies."""
        self._sampler.epoch_of_len = self._epoch
        loop, number = trainer.fit_loop, _limited(len(self._sampler), trainer)
        if number != loop.max_batches and loop._combined_loader is not None and loop._data_fetcher is not None:
            loop.max_batches, loop._combined_loader.limits, loop._data_fetcher.length = number, [number], number
            if isinstance(trainer.val_check_interval, float):
                trainer.val_check_batch = max(1, int(number * trainer.val_check_interval))

    def _begin(self, epoch: int, start: Place) -> None:
        self._epoch, self._start, self._num_batches, self._has_ended = epoch, start, 0, False
        self._sampler.epoch_of_len = epoch
        self._place()

    def _place(self) -> None:
        self._sampler.set_epoch(self._epoch)
        self._sampler.start_at(*self._start)


def _limited(number: int, trainer: Trainer) -> int:
    """The batches of an epoch that Lightning trains, of `number`."""
    limit = trainer.limit_train_batches
    return min(number, limit) if isinstance(limit, int) else max(1, int(number * limit))


def _skip_to_validation(trainer: Trainer) -> None:
    """Let a checkpoint of the validation at an epoch's end be one, also if this run's epoch ends between validations.

    Lightning would train one batch more there. It counts the batches of the next epoch from 0.
    """
    loop = trainer.fit_loop.epoch_loop
    count, interval = loop.batch_progress.current, trainer.val_check_batch
    if loop.restarted_on_last and loop.batch_progress.is_last_batch and isinstance(interval, int):
        count.ready = count.started = count.processed = count.completed = -(-count.ready // interval) * interval
