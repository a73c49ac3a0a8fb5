"""Epochs of a loader: opened at their beginning or at a checkpoint's place, always in the same order."""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.checks import kind_of
from commons.datasets.loader.resumable import stated_by
from commons.datasets.samplers.budget import BudgetBatchSampler
from commons.datasets.samplers.epoch import EPOCH_START, BatchOrderSampler, EpochSampler, Place
from commons.datasets.samplers.planned import PlannedSampler
from commons.dispatch import SingleRankLoader
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.distributed.stats import ShuffleStats
from commons.perf_model.partitioner.core import SOURCES
from commons.pipeline import windowed_iter
from commons.pipeline.windows import WindowedBatches
from commons.trainer.checkpoint.random_state import kept_random_state
from commons.trainer.config.args import TrainerArgs
from commons.trainer.data import RowsInTurn, balanced_loader
from commons.trainer.ranks.collectives import gather_numbers
from commons.trainer.ranks.launch import seed_all
from commons.trainer.recipe import Recipe

logger = logging.getLogger(__name__)

# Fields of a sampler's identity that may change between launches: they do not change the order of the rows.
_PER_LAUNCH = (
    *("rank", "world_size", "batch_size", "rows_per_step"),
    *("window", "workloads", "max_tokens", "budget_per_rank", "max_rows", "padded", "speeds", "plans"),
)


class Epochs:
    """The epochs of a run: their batches, the rows of their steps, and the place after each step.

    Called on all ranks together. A sampler of commons.datasets computes the rows of every step before the epoch; with
    another sampler every step counts as a full step. `loader` has host batches of this rank, or with single_rank_load
    of all ranks; it has a length and, if epochs differ, a sampler with `set_epoch`.

    Attributes:
        loader: the loader of this rank; its sampler balances the rows with balance_sampler.
        in_windows: whether the rows of a window of batches are exchanged together.
        rows_per_step: rows of a full step, over all ranks.
        most_batches: batches per epoch of the rank with the most batches.

    Raises:
        TypeError: the loader has no length.
        ValueError: the ranks would compute different plans, the sampler was made for another data set or has windows
            that end within those of the shuffler, the schedule is in rows and the sampler does not state them, the
            sampler cannot balance the data, rows are balanced when they are loaded and the shuffler has groups, or with
            single_rank_load the sampler reads one rank's rows.
    """

    def __init__(self, loader: DataLoader[Any], recipe: Recipe, shuffler: BaseTaskBalancedBatchShuffler) -> None:
        self._args: TrainerArgs = recipe.config.trainer
        self._shuffler = shuffler
        self._in_turn: RowsInTurn | None = None
        if self._args.balances_at_loading:
            _require_no_groups(self._args, shuffler)
        if self._args.balancing in ("sampler", "budget"):
            loader, in_turn = balanced_loader(loader, recipe.config.dataset, self._args, shuffler)
            # In mode "off" no stats have loads, and the log has only the imbalance of the rows as read.
            self._in_turn = None if shuffler.options.mode == "off" else in_turn
        self.loader = loader
        self._row_order = stated_by(getattr(loader, "dataset", None), "row_order")
        batch_sampler = getattr(loader, "batch_sampler", None)
        self._sampler: Any = batch_sampler if isinstance(batch_sampler, EpochSampler) else loader.sampler
        self._source: DataLoader[Any] | SingleRankLoader = loader
        if self._args.single_rank_load:
            _require_all_rows(self._sampler)
            # Without workloads row i goes to rank i mod W, as if every rank loaded its own rows.
            get_workloads = shuffler.get_workloads if self._args.balancing == "rank 0" else None
            options = self._args.shuffler
            self._source = SingleRankLoader(
                loader,
                get_workloads,
                equal_size=options.equal_size,
                pin_memory=recipe.device.type == "cuda",
                timeout=options.timeout,
            )
        self.in_windows = self._args.balancing == "windows"
        # The digest of the calibration by which windows are planned; its file may be replaced during the run.
        calibration = shuffler.options.calibration if self.in_windows else None
        self._calibration = None if calibration is None else zlib.crc32(Path(calibration).read_bytes())
        self.rows_per_step = self._args.train_batch_size * dist.get_world_size(resolve_process_group())
        own_batches = torch.tensor([_length(loader)], device=recipe.device)
        self.most_batches = int(gather_numbers(own_batches, "count of batches").max())
        # The open epoch and the place where it was opened.
        self._epoch, self._start = 0, EPOCH_START
        self._windows: WindowedBatches[Any] | None = None
        # A user's own sampler may yield any items; its steps count as full steps.
        self._steps: EpochSampler[Any] = BatchOrderSampler(self.most_batches, rows_per_step=self.rows_per_step)
        if isinstance(self._sampler, EpochSampler):
            self._steps = self._sampler
            if isinstance(loader, DataLoader):
                self._steps.require_fits(loader.dataset)
            if self.in_windows and self._args.shuffle_window % self._steps.window:
                raise ValueError(
                    f"shuffle_window is {self._args.shuffle_window}, and the loader's {type(self._sampler).__name__} "
                    f"has a window of {self._steps.window}; no checkpoint can be within both windows: give a "
                    "multiple of the sampler's as shuffle_window"
                )
        elif self._args.schedule_in == "rows":
            raise ValueError(
                f"schedule_in is 'rows' and the sampler is {kind_of(self._sampler)}, which does not state the "
                "rows of each step: use a sampler of commons.datasets.samplers, or set schedule_in to 'steps'"
            )
        within = self._args.ckpt_save_interval > 0 and self._args.ckpt_save_interval % max(1, self.most_batches)
        if within and not hasattr(self._sampler, "start_at"):
            logger.warning(
                "no run can continue from a checkpoint within an epoch: %s has no start_at(row); use a sampler of "
                "commons.datasets.samplers.epoch, or save at the ends of epochs",
                type(self._sampler).__name__,
            )
        if isinstance(self._sampler, PlannedSampler):
            _require_equal(self._identity(), recipe.device)

    def open(self, epoch: int, start: Place) -> Iterator[Any]:
        """The batches of an epoch, counted from 0, from a place to its end.

        Restores the random states, because a resumed run's loader draws another number of random values.

        Raises:
            ValueError: the sampler cannot begin within an epoch.
        """
        self._epoch, self._start = epoch, start
        skipped = start.steps if self.in_windows else 0
        self._set_place(Place(start.row) if skipped else start)
        with kept_random_state():
            # Tensor-parallel peers load the same batches.
            entropy = np.random.SeedSequence([self._args.seed, epoch, dist.get_rank(resolve_process_group())])
            seed_all(int(entropy.generate_state(1)[0]))
            batches: Iterator[Any] = iter(self._source)
        if self._in_turn is not None:
            self._in_turn.open(epoch, start)
        if not self.in_windows:
            return batches
        self._windows = windowed_iter(batches, self._shuffler, self._args.shuffle_window)
        for _ in range(skipped):  # the whole window is exchanged again; its trained steps are dropped
            next(self._windows, None)
            self._windows.take_stats()
        return self._windows

    def leave(self) -> None:
        """End the open epoch."""
        if self._windows is not None:
            self._windows.close()
        self._windows = None

    def close(self) -> None:
        """Close the single-rank loader, after a run."""
        if isinstance(self._source, SingleRankLoader):
            self._source.close()

    def stats_of_step(self, pipeline_stats: ShuffleStats | None) -> ShuffleStats | None:
        """Stats of the next trained step; called once per step with the stats of its pipeline."""
        if self._windows is not None:
            return self._windows.take_stats()
        return pipeline_stats if self._in_turn is None else self._in_turn.with_loads_before(pipeline_stats)

    @property
    def is_before_in_turn(self) -> bool:
        """Whether the loads before balancing are of rows assigned to ranks in turn."""
        return self._in_turn is not None

    def step_rows(self) -> Iterator[int]:
        """Rows of every step of the open epoch, over all ranks.

        An exchanged window has the loader's number of steps and of rows; the rows of each step are known after the
        window's exchange.
        """
        loaded = self._loaded_rows(self._epoch, self._start)
        return itertools.starmap(self._exchanged_rows, enumerate(loaded, self._start.steps))

    def num_steps(self, epoch: int, start: Place) -> int:
        """Steps from a place to the end of an epoch."""
        return sum(1 for _ in self._loaded_rows(epoch, start))

    def steps_of_epoch(self, epoch: int) -> int:
        """Steps of a whole epoch; only the epochs of a budget differ, and are planned to count them."""
        return self.num_steps(epoch, EPOCH_START) if isinstance(self._steps, BudgetBatchSampler) else self.most_batches

    def has_steps(self, epoch: int, start: Place) -> bool:
        """Whether an epoch has a step from a place on."""
        return next(self._loaded_rows(epoch, start), None) is not None

    def rows_of_epoch(self, epoch: int) -> int:
        """Rows of a whole epoch, over all ranks; only the epochs of a budget with drop_last differ, and are planned."""
        self._steps.set_epoch(epoch)  # no place is lost: an epoch is opened at its place
        return self._steps.num_rows

    def place_after(self, steps: int) -> Place:
        """The place after a number of steps of the open epoch, counted from the place where it was opened."""
        if not self.in_windows:
            return self._steps.place_after(steps, self._epoch, self._start)
        windows, steps = divmod(self._start.steps + steps, self._args.shuffle_window)
        whole = windows * self._args.shuffle_window
        row = self._steps.place_after(whole, self._epoch, Place(self._start.row)).row
        end = self._steps.place_after(steps, self._epoch, Place(row))
        return Place(row, steps) if self.has_steps(self._epoch, end) else end

    def order(self) -> dict[str, Any]:
        """What determines the order of the rows over all ranks, JSON-ready, as far as sampler and data set state it."""
        identity = {**self._identity(), **self._row_order}
        # None is a setting that other samplers do not have, such as groups.
        return {name: value for name, value in identity.items() if name not in _PER_LAUNCH and value is not None}

    def window_of(self) -> dict[str, Any]:
        """Settings that determine which rows of a window share a step, JSON-ready; empty without windows."""
        if not self.in_windows:
            return self._identity() if self._steps.window > 1 else {}
        options = asdict(self._shuffler.options)
        names = ("mode", "partitioner", "equal_size", "slack", "min_gain", "ranks_per_node", "max_tokens_per_rank")
        return {
            **self._identity(),
            "plans": SOURCES,  # another version of the planner may compute another plan
            "world_size": dist.get_world_size(resolve_process_group()),
            "window": self._args.shuffle_window,
            "shuffler": type(self._shuffler).__name__,
            "calibration": self._calibration,
            # Measured speeds of the current window; a resumed run plans its first window with equal ones.
            "measured_speeds": None if self._windows is None or options["mode"] != "balance" else self._windows.speeds,
            **{name: options[name] for name in names},
        }

    def _loaded_rows(self, epoch: int, start: Place) -> Iterator[int]:
        """Rows of every step from a place on, as the loader reads them; it begins at the first row of a window."""
        if not self.in_windows:
            return self._steps.step_rows(epoch, start)
        return itertools.islice(self._steps.step_rows(epoch, Place(start.row)), start.steps, None)

    def _exchanged_rows(self, step: int, loaded: int) -> int:
        """Rows of a step, counted from the first window; the loaded rows in mode "off", which moves no row."""
        exchanged = None if self._windows is None else self._windows.num_rows(step)
        return loaded if exchanged is None else exchanged

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = getattr(self._sampler, "identity", dict)()
        return {name: value for name, value in identity.items() if name != "rank"}

    def _set_place(self, start: Place) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._epoch)
        if hasattr(self._sampler, "start_at"):
            self._sampler.start_at(*(start if start.steps else start[:1]))
        elif start != EPOCH_START:
            raise ValueError(
                f"the checkpoint ends within epoch {self._epoch}, and {type(self._sampler).__name__} cannot begin "
                "there; resuming needs a sampler with start_at(row): use a sampler of commons.datasets.samplers.epoch"
            )


def _length(loader: DataLoader[Any]) -> int:
    """The number of batches of a loader."""
    try:
        return len(loader)
    except TypeError as error:  # torch's message names the type of the data set
        raise TypeError(
            f"the training loader has no length ({error}); the trainer counts an epoch's batches before it begins: "
            "define __len__ of the data set"
        ) from None


def _require_no_groups(args: TrainerArgs, shuffler: BaseTaskBalancedBatchShuffler) -> None:
    if shuffler.engine.costs.has_groups:
        name = "balance_sampler" if args.balance_sampler else "balance_batch"
        raise ValueError(
            f"{name} is True and {type(shuffler).__name__} has get_groups; {name} assigns rows separately, so rows of "
            "a group would not stay together: set enable_balanced_shuffler instead, which keeps groups together"
        )


def _require_all_rows(sampler: Any) -> None:
    """Raise ValueError if a sampler of commons.datasets or torch's DistributedSampler reads the rows of one rank."""
    identity: dict[str, Any] = getattr(sampler, "identity", dict)()
    num_ranks = identity.get("world_size", getattr(sampler, "num_replicas", 1))
    if num_ranks > 1:
        raise ValueError(
            f"single_rank_load is True and the training loader's {type(sampler).__name__} reads the rows of one of "
            f"{num_ranks} ranks; only rank 0 loads, so the other ranks' rows would not be trained: let open_loaders "
            "read all rows, with train_batch_size rows for every rank, or leave single_rank_load out"
        )


def _require_equal(identity: dict[str, Any], device: torch.device) -> None:
    """Raise ValueError on all ranks unless their samplers are equal."""
    digest = torch.tensor([zlib.crc32(repr(sorted(identity.items())).encode())], device=device)
    if len(gather_numbers(digest, "comparison of plans of the epoch").unique()) > 1:
        raise ValueError(
            f"ranks plan with different settings or workloads, here with {identity}; every rank reads its rows of the "
            "same plan: give all ranks the same workloads, for example from one calibration, and the same sizes and "
            "seed"
        )
