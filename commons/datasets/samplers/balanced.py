"""BalancedBatchSampler: batches of equal size, with work balanced over ranks and over the steps of a window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from commons.checks import as_count
from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.datasets.samplers.planned import PlannedSampler, PlannedStep
from commons.perf_model.loads import members, sum_by_rank
from commons.perf_model.partitioner import padded_groups, partition_grid


class BalancedBatchSampler(PlannedSampler):
    """Rows of the batches of one rank, for a data set whose workloads are known before the epoch.

    The epoch's order of all rows is cut into windows of `window · num_ranks · batch_size` rows, and `partition_grid`
    assigns the rows of a window to its steps and ranks. Every rank computes the same plan, one window at a time, and
    reads its own rows, so no row is exchanged. Every row is read once per epoch. All ranks have the same number of
    batches, none of them empty, so a loop with collectives in every step ends on all ranks together. Every batch has
    `batch_size` rows, except in the last window: its rows are spread evenly over as few steps as possible (sizes differ
    by at most one). Fewer rows than ranks at the end cannot fill a step. With `batch_size` 1 they become second rows of
    earlier batches; otherwise the last window begins earlier, by the number of missing rows.

    If a place (`start_at`) leaves fewer rows than ranks, the last rows before it are read again, with a warning.

    It yields lists of row numbers: `DataLoader(dataset, batch_sampler=sampler)`, not `sampler=`, for any map-style data
    set, with or without worker processes. `set_epoch` sets the epoch, `start_at` a place in it.

    Args:
        workloads: workload of each row of the data set: list, array or CPU tensor `(num_rows,)` of non-negative
            integers, equal on every rank. A ResumableLoader checks the number of rows, torch's DataLoader does not.
        batch_size: rows per batch and rank.
        num_ranks: number of ranks that share the data.
        rank: this rank. None yields the batches of all ranks in turn, step by step, for a library that gives every W-th
            batch to each of W ranks, as Accelerate's `prepare` does; there a sampler for one rank raises an error.
        window: number of batches whose rows are balanced together. With 1, every global batch keeps its rows.
        seed: seed of the order of rows and of the steps of a window, equal on every rank.
        shuffle: whether every epoch has a new order.
        drop_last: leave out rows at the end of the order that do not fill a step of all ranks.
        tokens: tokens of each row, `(num_rows,)`, a measure of memory; required with `max_tokens`.
        max_tokens: maximum tokens of a batch; None for no cap. If no plan for a window keeps it, the plan that exceeds
            it least is used, with one warning.
        padded: whether the model pads a batch to its longest row, so that it costs the number of rows times the
            heaviest row. A batch then has any number of rows of similar workload, `batch_size` on average, such that
            the costliest batch of a window is as cheap as possible. Not with `max_tokens`.
        groups: integers `(num_rows,)`; rows with equal numbers are in one batch. All groups must have the same number
            of rows, and `batch_size` must be a multiple of it. Not with `padded`.
        speeds: positive integers `(num_ranks,)`, for ranks on different devices: a slow rank gets the same number of
            rows, but lighter ones. Only ratios matter, see `partition`. Not with `padded`.

    Raises:
        ValueError: an argument of the wrong range or length, a single row or group above `max_tokens`, groups that do
            not fit `batch_size`, or, without `drop_last`, fewer groups than ranks.

    Examples:
        >>> work = [9, 9, 8, 8, 2, 2, 1, 1]
        >>> samplers = [BalancedBatchSampler(work, 2, num_ranks=2, rank=rank, window=2) for rank in range(2)]
        >>> [[sum(work[row] for row in batch) for batch in sampler] for sampler in samplers]
        [[10, 10], [10, 10]]
    """

    def __init__(
        self,
        workloads: Any,
        batch_size: int,
        *,
        num_ranks: int,
        rank: int | None,
        window: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        tokens: Any = None,
        max_tokens: int | None = None,
        padded: bool = False,
        groups: Any = None,
        speeds: Any = None,
    ) -> None:
        super().__init__(
            workloads,
            num_ranks=num_ranks,
            rank=rank,
            tokens=tokens,
            max_tokens=max_tokens,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            padded=padded,
            groups=groups,
            speeds=speeds,
        )
        self._batch_size = as_count(batch_size, "batch_size", 1)
        self._window = as_count(window, "window", 1)
        if not self._unit_size:
            raise ValueError(
                "groups have different numbers of rows; batches of equal size need groups of equal size: use a "
                "BudgetBatchSampler, whose batches have any number of rows"
            )
        if self._batch_size % self._unit_size:
            raise ValueError(
                f"batch_size is {self._batch_size}, groups have {self._unit_size} rows; a batch has whole groups: "
                f"give a multiple of {self._unit_size}"
            )
        self._per_step = self._num_ranks * (self._batch_size // self._unit_size)  # units of a step

    def __len__(self) -> int:
        """Number of batches in a whole epoch, equal for every rank."""
        return self._num_steps(0) * len(self._own_ranks)

    @property
    def window(self) -> int:
        """Number of batches whose rows are balanced together."""
        return self._window

    @property
    def num_rows(self) -> int:
        return self._end(0) * self._unit_size

    def plan(self, epoch: int, start: Place = EPOCH_START) -> Iterator[PlannedStep]:
        return itertools.islice(self._plan_windows(epoch, start.row), start.steps, None)

    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        done, first = start.steps + num_steps, -(-start.row // self._unit_size)
        if done >= self._num_steps(first):
            return Place(max(start.row, self._num_rows))
        windows, steps = divmod(done, self._window)
        return Place(self._window_begin(first, windows) * self._unit_size, steps)

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"batch_size": self._batch_size, "window": self._window}

    def _end(self, first: int) -> int:
        """The end of the units that are read, if reading begins at the unit `first` of the order."""
        left = max(0, len(self._sizes) - first)
        return first + left - (left % self._per_step if self._drop_last else 0)

    def _num_steps(self, first: int) -> int:
        """Number of steps from a unit on; every step has a unit for every rank."""
        left = self._end(first) - first
        if self._per_step == self._num_ranks and left > self._num_ranks:
            return left // self._num_ranks
        return -(-left // self._per_step)

    def _window_begin(self, first: int, number: int) -> int:
        """First unit of window `number`, counted from the window at `first`; the end of the units after the last."""
        end = self._end(first)
        if number * self._window >= self._num_steps(first):
            return end
        begin = first + number * self._window * self._per_step
        return min(begin, max(first, end - self._num_ranks))  # the last window has a unit for every rank

    def _plan_windows(self, epoch: int, row: int) -> Iterator[PlannedStep]:
        order = self._unit_order(epoch)
        first = self._first_unit(row, self._ends(order))
        total = self._num_steps(first)
        seed = [self._seed, epoch if self._shuffle else 0]
        for number in range(-(-total // self._window)):
            begin, end = self._window_begin(first, number), self._window_begin(first, number + 1)
            steps = min(self._window, total - number * self._window)
            yield from self._plan_window(order[begin:end], steps, [*seed, begin * self._unit_size])

    def _plan_window(self, units: np.ndarray, steps: int, seed: list[int]) -> Iterator[PlannedStep]:
        if self._padded:
            yield from self._plan_padded(units, steps, seed)
            return
        tokens = None if self._max_tokens is None else self._costs[1, units]
        grid = partition_grid(
            self._costs[0, units],
            self._num_ranks,
            steps,
            tokens=tokens,
            max_tokens=self._max_tokens,
            home_step=np.arange(len(units)) * steps // len(units),  # in order, evenly over the steps
            best_effort=True,
            seed=int(np.random.SeedSequence(seed).generate_state(1)[0]),
            speeds=self._speeds,
        )
        if self._max_tokens is not None and tokens is not None:
            cells = grid.step * self._num_ranks + grid.assignment
            most = int(sum_by_rank(cells, tokens, steps * self._num_ranks).max())
            if most > self._max_tokens:
                self._warn_once(
                    "a batch has %d tokens more than max_tokens, which is %d; the plan that exceeds it least is used, "
                    "here and in later steps: raise max_tokens, or lower batch_size",
                    *(most - self._max_tokens, self._max_tokens),
                )
        for chosen in members(grid.step, steps):
            yield self._step(units[chosen], grid.assignment[chosen])

    def _plan_padded(self, rows: np.ndarray, steps: int, seed: list[int]) -> Iterator[PlannedStep]:
        """Steps with batches of similar cost, because ranks wait for the costliest; steps and ranks in random order."""
        batches = padded_groups(self._costs[0, rows], num_groups=steps * self._num_ranks, steps=steps)
        step_of_row, rank_of_row = np.divmod(batches, self._num_ranks)
        of_steps, draw = members(step_of_row, steps), np.random.default_rng(seed)
        for step in draw.permutation(steps):
            chosen = of_steps[step]
            yield PlannedStep(rows[chosen], draw.permutation(self._num_ranks)[rank_of_row[chosen]])
