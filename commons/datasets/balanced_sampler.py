"""BalancedBatchSampler: batches of equal size whose work is even over ranks and over the steps of a window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from commons.checks import as_count
from commons.datasets.planned_sampler import PlannedSampler, PlannedStep, logger, tokens_above
from commons.datasets.samplers import EPOCH_START, Place
from commons.perf_model.partitioner import partition_grid


class BalancedBatchSampler(PlannedSampler):
    """Rows of the batches of one rank, for a data set whose lengths are known beforehand.

    The epoch's order of all rows is cut into windows of `window · num_ranks · batch_size` rows; `partition_grid` deals
    the rows of each to its steps and ranks. Every rank computes the same plan, a window at a time, and reads its own
    rows: no row is exchanged. Every row comes once per epoch, and every batch has `batch_size` rows, but for those of
    the last window: it has as many steps as its rows need, and they share its rows evenly (sizes differ by one at
    most). A rank without a row in the very last step has one batch less.

    It gives lists of row numbers: `DataLoader(dataset, batch_sampler=sampler)` for any map-style data set, with worker
    processes or without. `set_epoch` chooses an epoch, `start_at` a place in it.

    Args:
        workloads: what each row of the data set costs: list, array or CPU tensor `(num_rows,)` of non-negative
            integers; the same on every rank, and as many as the data set has rows (a ResumableLoader compares that,
            torch's DataLoader does not).
        batch_size: rows per batch and rank.
        num_ranks: ranks that share the data.
        rank: this one.
        window: batches that share their rows. With 1 each global batch has the rows that it would have anyway.
        seed: of the order, and of the order of a window's steps; the same on every rank.
        shuffle: a new order in every epoch.
        drop_last: leave out the rows at the end of the order that do not fill a step of all ranks.
        tokens: memory that each row takes, `(num_rows,)`; needed with `max_tokens`.
        max_tokens: most tokens of a batch. Where a window's rows cannot keep it, the plan that exceeds it least is
            taken, and a warning says so once.

    Raises:
        ValueError: an argument out of its range or of another length, or a row that breaks `max_tokens` alone.

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
        rank: int,
        window: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        tokens: Any = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(
            workloads,
            num_ranks=num_ranks,
            rank=rank,
            tokens=tokens,
            max_tokens=max_tokens,
            shuffle=shuffle,
            seed=seed,
        )
        self._batch_size = as_count(batch_size, "batch_size", 1)
        self._window = as_count(window, "window", 1)
        self._drop_last = bool(drop_last)
        self._per_step = self._num_ranks * self._batch_size
        self._has_warned = False

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        steps, last = self._num_steps(self.num_rows), self.num_rows % self._per_step
        # Only one step of fewer rows than ranks leaves ranks without.
        is_alone = steps % self._window == 1 or self._window == 1 or self._batch_size == 1
        return steps - (0 < last <= self._rank and is_alone)

    @property
    def window(self) -> int:
        """Batches that share their rows."""
        return self._window

    @property
    def num_rows(self) -> int:
        """See EpochSampler."""
        return self._end(0)

    def plan(self, epoch: int, start: Place = EPOCH_START) -> Iterator[PlannedStep]:
        """See PlannedSampler."""
        return itertools.islice(self._plan_windows(epoch, start.row), start.steps, None)

    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        """See EpochSampler."""
        done = start.steps + num_steps
        if done >= self._num_steps(self._end(start.row) - start.row):
            return Place(max(start.row, len(self._workloads)))
        windows, steps = divmod(done, self._window)
        return Place(start.row + windows * self._window * self._per_step, steps)

    def identity(self) -> dict[str, Any]:
        """See EpochSampler."""
        own = {"batch_size": self._batch_size, "window": self._window, "drop_last": self._drop_last}
        return super().identity() | own

    def _end(self, row: int) -> int:
        """Where the rows end that are read from a row on."""
        left = max(0, len(self._workloads) - row)
        return row + left - (left % self._per_step if self._drop_last else 0)

    def _num_steps(self, num_rows: int) -> int:
        return -(-num_rows // self._per_step)

    def _plan_windows(self, epoch: int, first: int) -> Iterator[PlannedStep]:
        order, end = self.order(len(self._workloads), epoch), self._end(first)
        for begin in range(first, end, self._window * self._per_step):
            rows = order[begin : min(begin + self._window * self._per_step, end)]
            yield from self._plan_window(rows, [self._seed, epoch, begin])

    def _plan_window(self, rows: np.ndarray, seed: list[int]) -> Iterator[PlannedStep]:
        """The steps of a window's rows; in none but the last one is a rank without a row."""
        steps = self._num_steps(len(rows))
        rest = rows[:0]
        if len(rows) < steps * self._num_ranks:  # fewer rows than batches: the last step has those that are too few
            rows, rest = np.split(rows, [(steps - 1) * self._num_ranks])
            steps -= 1
        if steps:
            grid = partition_grid(
                self._workloads[rows],
                self._num_ranks,
                steps,
                tokens=None if self._max_tokens is None or self._tokens is None else self._tokens[rows],
                max_tokens=self._max_tokens,
                home_step=np.arange(len(rows)) * steps // len(rows),  # in order, as many in every step
                best_effort=True,
                seed=int(np.random.SeedSequence(seed).generate_state(1)[0]),
            )
            self._warn_above_cap(rows, grid.step * self._num_ranks + grid.assignment, steps * self._num_ranks)
            for step in range(steps):
                chosen = np.flatnonzero(grid.step == step)
                yield PlannedStep(rows[chosen], grid.assignment[chosen])
        if len(rest):
            yield PlannedStep(rest, np.arange(len(rest)))

    def _warn_above_cap(self, rows: np.ndarray, cells: np.ndarray, num_cells: int) -> None:
        if self._max_tokens is None or self._tokens is None or self._has_warned:
            return
        excess = tokens_above(self._max_tokens, self._tokens[rows], cells, num_cells)
        if excess:
            self._has_warned = True
            logger.warning(
                "a batch has %d tokens more than max_tokens, which is %d; the plan that exceeds it least is taken, "
                "here and from now on: raise max_tokens, or lower batch_size",
                excess,
                self._max_tokens,
            )
