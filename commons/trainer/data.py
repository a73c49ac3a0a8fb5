"""The loaders of a run: from DatasetArgs and TrainerArgs to the batches of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.checks import kind_of
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.loader.resumable import STATEMENTS, ResumableLoader, stated_by
from commons.datasets.samplers.balanced import BalancedBatchSampler
from commons.datasets.samplers.budget import BudgetBatchSampler
from commons.datasets.samplers.epoch import Place
from commons.datasets.samplers.planned import PlannedSampler
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.distributed.stats import ShuffleStats
from commons.perf_model.loads import imbalance, sum_by_rank
from commons.perf_model.partitioner import as_int64_workloads
from commons.trainer.config.args import DatasetArgs, TrainerArgs
from commons.trainer.ranks.collectives import gather_values


def train_and_eval_loaders(
    dataset: DatasetArgs, trainer: TrainerArgs, device: torch.device, **options: Any
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Create loaders of this rank's training and evaluation batches, on the host.

    The data are shared by the ranks of the data-parallel group, so tensor-parallel peers load the same batches. With
    single_rank_load the training loader has the batches of all ranks of the group, for a SingleRankLoader.

    Raises:
        KeyError: an unknown data set.
        FileNotFoundError: no file at dataset_path.
        ValueError: a damaged file, or a file that evenrank did not write.
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
        # The SingleRankLoader pins this rank's rows after it has distributed them.
        train_options = options | {"rank": 0, "world_size": 1, "pin_memory": False}
        batch_size *= dist.get_world_size(group)
    train_loader = open_loader(
        "train", dataset, trainer, batch_size, shuffle=dataset.shuffle, drop_last=dataset.drop_last, **train_options
    )
    # Never shuffled, and no drop_last: every user is evaluated once, always in the same order.
    return train_loader, open_loader("test", dataset, trainer, trainer.eval_batch_size, **options)


def require_equal_data(loader: DataLoader[Any], device: torch.device) -> None:
    """Raise ValueError on all ranks if their loaders read differently preprocessed data; called on all ranks together.

    Every host may have a copy of the data. With another copy, rows would be trained twice or not at all, ids would
    stand for other values, or some ranks would train older events than others.
    """
    stated = {name: stated_by(getattr(loader, "dataset", None), name) for name in STATEMENTS}
    first, *others = gather_values(stated, device)
    for rank, other in enumerate(others, 1):
        for name in STATEMENTS:
            if other[name] != first[name]:
                raise ValueError(
                    f"the data of rank 0 have the {name} {first[name]}, those of rank {rank} {other[name]}; ranks "
                    "share the rows of one data set: preprocess it once, and copy the folder to all hosts"
                )


def open_loader(
    split: str, dataset: DatasetArgs, trainer: TrainerArgs, batch_size: int, **options: Any
) -> DataLoader[Any]:
    """Open a split of the data, by default for a single rank; errors as `train_and_eval_loaders`."""
    return get_data_loader(split=split, batch_size=batch_size, seed=trainer.seed, **dataset.loader_options(), **options)


def balanced_loader(
    train_loader: DataLoader[Any],
    dataset: DatasetArgs,
    trainer: TrainerArgs,
    shuffler: BaseTaskBalancedBatchShuffler,
) -> tuple[ResumableLoader, RowsInTurn]:
    """Replace a loader's sampler by a sampler that reads balanced batches, or balanced steps of constant cost.

    Every rank computes the workloads of all rows with the shuffler, from the data set's `length_only_batches`, so all
    ranks compute the same plan. Also returns the loads that the rows would have, assigned to the ranks in turn.

    Raises:
        ValueError: the data set does not provide its lengths; a row exceeds the shuffler's cap on tokens; without
            drop_last, fewer rows than ranks.
    """
    data: Any = train_loader.dataset
    if not hasattr(data, "length_only_batches") or not isinstance(train_loader, ResumableLoader):
        raise ValueError(
            f"balance_sampler is True, and {kind_of(train_loader)} over {type(data).__name__} does not provide "
            "the lengths of its rows: give a ResumableLoader over a data set with length_only_batches(), such as "
            "SequenceDataset, or make a BalancedBatchSampler from the workloads"
        )
    costs, tokens = _costs(data.length_only_batches(), shuffler)
    # The planner's sums end at 2^62: divide the workloads until their sum is lower.
    workloads = costs >> max(0, int(costs.sum(dtype=np.float64)).bit_length() - 61)
    group, cap = resolve_process_group(), trainer.shuffler.max_tokens_per_rank
    num_ranks = dist.get_world_size(group)
    options: dict[str, Any] = {
        "num_ranks": num_ranks,
        "rank": dist.get_rank(group),
        "seed": trainer.seed,
        "shuffle": dataset.shuffle,
        "drop_last": dataset.drop_last,
        "tokens": None if cap is None else tokens,
        "max_tokens": cap,
    }
    sampler: PlannedSampler
    if trainer.budget_per_rank is None:
        sampler = BalancedBatchSampler(workloads, trainer.train_batch_size, window=trainer.shuffle_window, **options)
    else:
        budget = max(1, round(trainer.budget_per_rank * float(workloads.mean())))
        sampler = BudgetBatchSampler(workloads, budget_per_rank=budget, max_rows=trainer.train_batch_size, **options)
    return train_loader.with_sampler(sampler), RowsInTurn(sampler, costs, num_ranks)


def _costs(batches: Iterable[Any], shuffler: BaseTaskBalancedBatchShuffler) -> tuple[np.ndarray, np.ndarray]:
    """Workload and tokens of every row, int64 `(num_rows,)` each."""
    workloads, tokens = [], []
    for batch in batches:
        workloads.append(as_int64_workloads(shuffler.get_workloads(batch), num_rows=batch.batch_size))
        tokens.append(shuffler.engine.costs.tokens_of(batch))
    return np.concatenate(workloads), np.concatenate(tokens)


class RowsInTurn:
    """The baseline of a balancing sampler: the loads if row i of every step went to rank i mod W.

    With such a sampler the shuffler sees ranks that are balanced already, so it cannot measure the gain.

    A step has the same number of rows as the sampler's step. With a window above 1 the rows of a step differ from the
    sampler's, but the rows of a whole window are the same: compare sums over the window.

    `workloads`, int64 `(num_rows,)`, are those of the rows of the data set, in the shuffler's unit.
    """

    def __init__(self, sampler: PlannedSampler, workloads: np.ndarray, num_ranks: int) -> None:
        self._sampler, self._workloads, self._num_ranks = sampler, workloads, num_ranks
        self._steps: Iterator[np.ndarray] = iter(())

    def open(self, epoch: int, start: Place) -> None:
        """Begin an epoch at a place; the next `with_loads_before` is for the first step from there."""
        self._steps = self.loads(epoch, start)

    def loads(self, epoch: int, start: Place) -> Iterator[np.ndarray]:
        """Loads of the ranks, int64 `(num_ranks,)`, with rows in turn, for each step of an epoch from a place on."""
        left = self._sampler.rows_from(start.row, epoch)
        # The place may lie within a window: skip the rows of the window's first steps.
        for index, num_rows in enumerate(self._sampler.step_rows(epoch, Place(start.row))):
            rows, left = left[:num_rows], left[num_rows:]
            if index >= start.steps:
                ranks = np.arange(num_rows) % self._num_ranks
                yield sum_by_rank(ranks, self._workloads[rows], self._num_ranks)

    def with_loads_before(self, stats: ShuffleStats | None) -> ShuffleStats | None:
        """The stats of the next step: "before" with the rows assigned in turn, "after" with the sampler's rows.

        `stats` are those of a shuffler in mode "observe"; None in mode "off".
        """
        loads = next(self._steps, None)
        if stats is None or loads is None:
            return stats
        before, after = loads.tolist(), max(stats.loads_after, default=0)
        return dataclasses.replace(
            stats,
            window=self._sampler.window,
            loads_before=tuple(before),
            imbalance_before=imbalance(before),
            imbalance_after=imbalance(list(stats.loads_after)),
            largest_load_before=max(before),
            largest_load_after=after,
            optimality_gap=after / stats.lower_bound - 1.0 if stats.lower_bound else 0.0,
            # Before and after, a step of a window has different rows.
            predicted_saving=None if self._sampler.window > 1 else (max(before) - after) / max(1, *before),
            predicted_saving_ms=None,  # the shuffler predicted it for its own plan, which moved no row
        )
