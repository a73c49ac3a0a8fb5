"""Epochs of a loader: opened at their beginning or where a checkpoint ended, in the same order every time."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.samplers.epoch import EPOCH_START, EpochSampler, Place
from commons.datasets.samplers.planned import PlannedSampler
from commons.dispatch import SingleRankLoader
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.distributed.stats import ShuffleStats
from commons.perf_model.partitioner.core import SOURCES
from commons.pipeline import windowed_iter
from commons.trainer.checkpoint.random_state import kept_random_state
from commons.trainer.config.args import TrainerArgs
from commons.trainer.ranks.collectives import all_reduce
from commons.trainer.ranks.launch import seed_all

# Which part of the order a rank reads, how much of it at a time, and in which batches.
_PER_LAUNCH = (
    *("rank", "world_size", "batch_size", "rows_per_step"),
    *("window", "workloads", "max_tokens", "budget_per_rank", "max_rows", "plans"),
)


class Epochs:
    """The epochs of a run: their batches, the rows of their steps, and the place behind each step.

    Args:
        loader: host batches of this rank; its sampler has `set_epoch` if epochs differ. One of commons.datasets knows
            the rows of every step beforehand; otherwise all steps are taken for full ones.
        args: settings; the loader draws the seed of its workers from `seed`.
        shuffler: balances `args.shuffle_window` batches at a time; None where batches are trained as they are loaded.
        device: of this rank.

    Raises:
        ValueError: ranks that would plan differently, a sampler made for another data set, or a schedule in rows with a
            sampler that does not know them.
    """

    def __init__(
        self,
        loader: DataLoader[Any] | SingleRankLoader,
        args: TrainerArgs,
        shuffler: BaseTaskBalancedBatchShuffler | None,
        device: torch.device,
    ) -> None:
        self._loader = loader
        self._args = args
        self._shuffler = shuffler
        batch_sampler = getattr(loader, "batch_sampler", None)
        self._sampler: Any = batch_sampler if isinstance(batch_sampler, EpochSampler) else loader.sampler
        # A user's own sampler may be anything that gives items.
        self._epoch_sampler = self._sampler if isinstance(self._sampler, EpochSampler) else None
        self._rows_per_step = args.train_batch_size * dist.get_world_size(resolve_process_group())
        self._windows: Any = None
        if self._epoch_sampler is not None and isinstance(loader, DataLoader):
            self._epoch_sampler.require_fits(loader.dataset)
        if self._epoch_sampler is None and args.schedule_in == "rows":
            raise ValueError(
                f"schedule_in is 'rows' and the sampler is a {type(self._sampler).__name__}, which does not tell the "
                "rows of each step beforehand: use one of commons.datasets.samplers, or set schedule_in to 'steps'"
            )
        if isinstance(self._epoch_sampler, PlannedSampler):
            _require_equal(self._identity(), device)

    def open(self, epoch: int, start: Place) -> Iterator[Any]:
        """The batches of an epoch, counted from 0, from a place on; called on all ranks together.

        Random states stay as they are: the loader draws more or less often where a run has just been resumed.

        Raises:
            ValueError: the sampler cannot begin within an epoch.
        """
        skipped = 0 if self._shuffler is None else start.steps
        self._set_place(epoch, Place(start.row) if skipped else start)
        with kept_random_state():
            entropy = np.random.SeedSequence([self._args.seed, epoch, dist.get_rank()])
            seed_all(int(entropy.generate_state(1)[0]))
            batches = iter(self._loader)
        if self._shuffler is None:
            return batches
        self._windows = windowed_iter(batches, self._shuffler, self._args.shuffle_window)
        for _ in range(skipped):  # the window is exchanged as a whole
            next(self._windows, None)
            self._windows.take_stats()
        return self._windows

    def take_stats(self) -> ShuffleStats | None:
        """Stats of the batch that was trained next in windows; once for each."""
        return self._windows.take_stats()

    @property
    def in_windows(self) -> bool:
        """Whether batches come out of windows that are exchanged."""
        return self._shuffler is not None

    def close(self) -> None:
        """End the epoch that is open; called on all ranks together."""
        if self._windows is not None:
            self._windows.close()
        self._windows = None

    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        """Rows of every step from a place on, over all ranks; without end where they are not known.

        An exchanged window has as many steps and rows as the loader; how many rows each of its steps has is known once
        the window is open.
        """
        if self._epoch_sampler is None:
            return itertools.repeat(self._rows_per_step)
        if self._shuffler is None:
            return self._epoch_sampler.step_rows(epoch, start)
        return self._exchanged_rows(self._epoch_sampler.step_rows(epoch, Place(start.row)), start.steps)

    def num_steps(self, epoch: int, start: Place) -> int | None:
        """Steps from a place to the end of an epoch; None where that is not known."""
        if self._epoch_sampler is None:
            return None
        if self._shuffler is None:
            return sum(1 for _ in self._epoch_sampler.step_rows(epoch, start))
        return sum(1 for _ in self._epoch_sampler.step_rows(epoch, Place(start.row))) - start.steps

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch, over all ranks; None where that is not known."""
        return None if self._epoch_sampler is None else self._epoch_sampler.num_rows

    def place_after(self, steps: int, epoch: int, start: Place) -> Place:
        """The place behind so many steps that were trained from `start` on."""
        if self._shuffler is None:
            return self._loader_place(steps, epoch, start)
        windows, steps = divmod(start.steps + steps, self._args.shuffle_window)
        row = self._loader_place(windows * self._args.shuffle_window, epoch, Place(start.row)).row
        end = self._loader_place(steps, epoch, Place(row))
        at_end = self._epoch_sampler is not None and next(self._epoch_sampler.step_rows(epoch, end), None) is None
        return end if at_end else Place(row, steps)

    def order(self) -> dict[str, Any]:
        """What decides the order in which all ranks together read the data, JSON-ready; empty where it is not known."""
        return {name: value for name, value in self._identity().items() if name not in _PER_LAUNCH}

    def window_of(self) -> dict[str, Any]:
        """What decides which rows of a window share a step, JSON-ready; empty without windows."""
        if self._shuffler is None:
            return self._identity() if self._epoch_sampler is not None and self._epoch_sampler.window > 1 else {}
        options = asdict(self._shuffler.options)
        names = ("mode", "partitioner", "equal_size", "slack", "ranks_per_node", "max_tokens_per_rank")
        calibration = options["calibration"]
        return {
            **self._identity(),
            "plans": SOURCES,  # another version may deal the same rows otherwise
            "world_size": dist.get_world_size(resolve_process_group()),
            "window": self._args.shuffle_window,
            "shuffler": type(self._shuffler).__name__,
            "calibration": None if calibration is None else zlib.crc32(Path(calibration).read_bytes()),
            **{name: options[name] for name in names},
        }

    def _exchanged_rows(self, of_loader: Iterator[int], first: int) -> Iterator[int]:
        """Rows of every step from the first on; those of the loader in mode "off", which moves none."""
        for step, rows in itertools.islice(enumerate(of_loader), first, None):
            exchanged = None if self._windows is None else self._windows.num_rows(step)
            yield rows if exchanged is None else exchanged

    def _loader_place(self, steps: int, epoch: int, start: Place) -> Place:
        if self._epoch_sampler is None:
            return Place(start.row + steps * self._rows_per_step)
        return self._epoch_sampler.place_after(steps, epoch, start)

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = getattr(self._sampler, "identity", dict)()
        return {name: value for name, value in identity.items() if name != "rank"}

    def _set_place(self, epoch: int, start: Place) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        if start == EPOCH_START:
            return
        if not hasattr(self._sampler, "start_at"):
            raise ValueError(
                f"the checkpoint ends within epoch {epoch}, and {type(self._sampler).__name__} cannot begin there; "
                "resuming needs a sampler with start_at(row): use one of commons.datasets.samplers.epoch"
            )
        self._sampler.start_at(*(start if start.steps else start[:1]))


def _require_equal(identity: dict[str, Any], device: torch.device) -> None:
    """Raise ValueError on all ranks unless all of them plan by the same."""
    digest = zlib.crc32(repr(sorted(identity.items())).encode())
    extremes = torch.tensor([digest, -digest], device=device)
    all_reduce(extremes, "comparison of plans of the epoch", op=dist.ReduceOp.MAX)
    if extremes[0] != -extremes[1]:
        raise ValueError(
            f"ranks plan by different settings or workloads, here by {identity}; each reads its own rows of one plan: "
            "give all ranks the same workloads, such as those of one calibration, and the same sizes and seed"
        )
