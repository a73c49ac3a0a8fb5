"""The loaders of a run: DatasetArgs and TrainerArgs in, one rank's batches out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.loader.resumable import ResumableLoader
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


def train_and_eval_loaders(
    dataset: DatasetArgs, trainer: TrainerArgs, device: torch.device, **options: Any
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of this rank's training and evaluation batches, on the host.

    Tensor-parallel peers load the same batches: the ranks that share the data are those of the data-parallel group.
    With single_rank_load the training loader has the batches of all these ranks together, for a SingleRankLoader.

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


def balanced_loader(
    train_loader: DataLoader[Any],
    dataset: DatasetArgs,
    trainer: TrainerArgs,
    shuffler: BaseTaskBalancedBatchShuffler,
) -> tuple[ResumableLoader, RowsInTurn]:
    """A loader of the same rows in batches, or steps of constant cost, that are balanced as they are read.

    Every rank computes the workloads of all rows by the shuffler, from the data set's outlines, and so plans the same.
    Beside the loader it returns the loads that the same rows would have, dealt to the ranks in turn.

    Raises:
        ValueError: data whose lengths are not known beforehand; a row above the shuffler's cap on tokens; without
            drop_last, fewer rows than ranks.
    """
    data: Any = train_loader.dataset
    if not hasattr(data, "outlines") or not isinstance(train_loader, ResumableLoader):
        raise ValueError(
            f"balance_sampler is True, and a {type(train_loader).__name__} of {type(data).__name__} does not know the "
            "lengths of its rows beforehand: give a ResumableLoader over a data set with outlines(), as "
            "SequenceDataset has them, or make a BalancedBatchSampler of its workloads"
        )
    costs, tokens = _costs(data.outlines(), shuffler)
    # The planner sums up to 2^62; in larger units the work of all rows stays below that.
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


def _costs(outlines: Iterable[Any], shuffler: BaseTaskBalancedBatchShuffler) -> tuple[np.ndarray, np.ndarray]:
    """Workload and tokens of every row, int64 `(num_rows,)` each."""
    workloads, tokens = [], []
    for outline in outlines:
        workloads.append(as_int64_workloads(shuffler.get_workloads(outline), num_rows=outline.batch_size))
        keys = outline.features.keys()
        lengths = outline.features.lengths().view(len(keys), -1)
        counted = [index for index, key in enumerate(keys) if key in (shuffler.token_feature_names or keys)]
        tokens.append(lengths[counted].sum(0).numpy())
    return np.concatenate(workloads), np.concatenate(tokens)


class RowsInTurn:
    """What a sampler by work gains: the loads of its rows, had a loader dealt row i of every step to rank i mod W.

    A sampler deals rows as they are read, so the shuffler sees ranks that are even already and cannot measure what
    that gained. The sampler knows what each row costs and the order it dealt from.

    A step has as many rows as the sampler's. With a window above 1 they are other rows than those that the sampler
    trains in that step; the rows of the whole window are the same, so that sums over the window compare.

    Args:
        sampler: deals the rows by their work.
        workloads: int64 `(num_rows,)`, what each row of the data set costs, in the shuffler's unit.
        num_ranks: ranks that share the data.
    """

    def __init__(self, sampler: PlannedSampler, workloads: np.ndarray, num_ranks: int) -> None:
        self._sampler, self._workloads, self._num_ranks = sampler, workloads, num_ranks
        self._steps: Iterator[np.ndarray] = iter(())

    def open(self, epoch: int, start: Place) -> None:
        """Begin an epoch at a place; the next `beside` is of the step there."""
        self._steps = self.loads(epoch, start)

    def loads(self, epoch: int, start: Place) -> Iterator[np.ndarray]:
        """int64 `(num_ranks,)` for each step of an epoch from a place on: the load of every rank, dealt in turn."""
        order = self._sampler.order(len(self._workloads), epoch)
        begin = self._sampler.first_row(start.row, self._sampler.first_rows(order))
        # The place may lie within a window, whose first steps have taken their share of its rows.
        for index, num_rows in enumerate(self._sampler.step_rows(epoch, Place(start.row))):
            rows = order[begin : begin + num_rows]
            begin += num_rows
            if index >= start.steps:
                ranks = np.arange(num_rows) % self._num_ranks
                yield sum_by_rank(ranks, self._workloads[rows], self._num_ranks)

    def beside(self, stats: ShuffleStats | None) -> ShuffleStats | None:
        """The stats of the next step, "before" being its rows dealt in turn and "after" its rows as they were read.

        `stats` are what a shuffler that moves nothing has observed; None where it has not looked.
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
            predicted_saving=(max(before) - after) / max(before) if max(before) else 0.0,
            predicted_saving_ms=None,  # it was of the plan that was not carried out
        )
