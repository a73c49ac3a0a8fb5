"""BudgetBatchSampler: steps of constant cost, with as many rows as the budget of every rank allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from commons.checks import as_count
from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.datasets.samplers.planned import PlannedSampler, PlannedStep, logger
from commons.perf_model.loads import fill_empty, sum_by_rank
from commons.perf_model.partitioner import padded_groups, partition
from commons.perf_model.partitioner.inputs import INT64_MAX

# A step may lack 1/256 of its rows: the search for its end stops there.
_TOLERANCE = 256


class BudgetBatchSampler(PlannedSampler):
    """Rows of the batches of one rank, in steps of equal cost instead of equal numbers of rows.

    A step takes rows from the front of the epoch's order, as many as can be assigned to the ranks such that every rank
    keeps `budget_per_rank`, `max_tokens` and `max_rows`: the longest prefix that a bisection with the planner finds, to
    within 1/256 of its rows. Every rank has at least one row in every step, so a loop with collectives in every step
    ends on all ranks together. If fewer rows than ranks would be left at the end, earlier steps are shortened; if that
    is not possible, the last step exceeds the limits, with one warning. A row above the budget is the only row of its
    rank in its step; a warning names the first such row and their number.

    If a place (`start_at`) leaves fewer rows than ranks, the last rows before it are read again, with a warning.

    Steps are prefixes of the order, so a place is a number of rows, valid for any number of ranks. It yields lists of
    row numbers, as BalancedBatchSampler does. With the loss `commons.distributed.global_mean_loss` all rows of a step
    have the same weight, whatever their number.

    Args:
        workloads: workload of each row of the data set, int64 `(num_rows,)`, as for BalancedBatchSampler.
        budget_per_rank: maximum workload of a rank in a step, in the unit of `workloads`.
        num_ranks: number of ranks that share the data.
        rank: this rank; None yields the batches of all ranks in turn, as for BalancedBatchSampler.
        max_tokens: maximum tokens of a rank in a step; None for no cap.
        tokens: tokens of each row, `(num_rows,)`, a measure of memory; required with `max_tokens`.
        max_rows: maximum rows of a rank in a step; None for no cap.
        seed: seed of the order, equal on every rank.
        shuffle: whether every epoch has a new order.
        drop_last: leave out rows at the end of the order, fewer than ranks, instead of shortening earlier steps.
        padded: whether the model pads a batch to its longest row, so that it costs the number of rows times the
            heaviest row; the budget limits this cost. A batch then has rows of similar workload. Not with `max_tokens`.
        groups: integers `(num_rows,)`; rows with equal numbers are in one batch, and count as one row with the sum of
            their workloads and tokens. With `max_rows` all groups must have the same number of rows. Not with `padded`.
        speeds: positive integers `(num_ranks,)`, for ranks on different devices: the fastest rank has the whole budget,
            a rank of half its speed has half of it. Not with `padded`.

    Raises:
        ValueError: an argument of the wrong range or length, a budget below every row, a single row or group above
            `max_tokens`, groups of different sizes with `max_rows`, or, without `drop_last`, fewer groups than ranks.

    Examples:
        >>> work = [9, 1, 1, 8, 2, 2, 1, 8]
        >>> for rank in range(2):
        ...     print(list(BudgetBatchSampler(work, budget_per_rank=10, num_ranks=2, rank=rank, shuffle=False)))
        [[0, 2], [7]]
        [[1, 3], [4, 5, 6]]
    """

    def __init__(
        self,
        workloads: Any,
        *,
        budget_per_rank: int,
        num_ranks: int,
        rank: int | None,
        max_tokens: int | None = None,
        tokens: Any = None,
        max_rows: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
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
        # At most INT64_MAX, because it is compared with int64 values.
        self._budget = min(as_count(budget_per_rank, "budget_per_rank", 1), INT64_MAX)
        self._max_rows = None if max_rows is None else as_count(max_rows, "max_rows", 1)
        self._most_groups = None  # groups, or rows, of a rank in a step; None for no cap
        if self._max_rows is not None:
            self._require_room_for_groups(self._max_rows)
            self._max_rows = min(self._max_rows, max(1, self._num_rows))
            self._most_groups = self._max_rows // self._unit_size
        self._most_tokens = INT64_MAX if self._max_tokens is None else self._max_tokens
        speeds = np.ones(self._num_ranks, np.int64) if self._speeds is None else self._speeds
        self._fastest_first = np.argsort(-speeds, kind="stable")
        # Budget of each rank, int64 `(num_ranks,)`: proportional to its speed, all of it for the fastest.
        self._budgets = np.array([self._budget * speed // int(speeds.max()) for speed in speeds.tolist()], np.int64)
        self._require_budget()

    def _require_room_for_groups(self, max_rows: int) -> None:
        if not self._unit_size:
            raise ValueError(
                f"max_rows is {max_rows}, groups have different numbers of rows; max_rows needs groups of equal size: "
                "leave it out, or cap memory with tokens and max_tokens"
            )
        if max_rows < self._unit_size:
            raise ValueError(
                f"max_rows is {max_rows}, groups have {self._unit_size} rows, which stay together: raise it"
            )

    def _require_budget(self) -> None:
        budget, what, costs = self._budget, self._what, self._costs[0]
        alone = np.flatnonzero(costs > budget)
        if not len(alone):
            return
        if len(alone) == len(costs):
            raise ValueError(
                f"budget_per_rank is {budget}, the lightest {what} costs {int(costs.min())}; the budget must allow "
                f"several {what}s: raise it to several average {what}s, of {int(costs.mean())} each"
            )
        if self._own_ranks[0] == 0:
            row = self._rows_of(alone[:1])[0]
            logger.warning(
                "%s %d costs %d, budget_per_rank is %d; it is alone on a rank in its step, as are all %d %ss above the "
                "budget, and their steps take longer than others: truncate them, or raise the budget, at best to the "
                "heaviest, %d (%d average %ss)",
                what,
                row if self._groups is None else self._groups[row],
                costs[alone[0]],
                budget,
                len(alone),
                what,
                costs.max(),
                math.ceil(costs.max() / costs.mean()),  # the unit of trainer.budget_per_rank
                what,
            )

    def __len__(self) -> int:
        """Number of batches in the epoch of `set_epoch`, or else in the one that was read last; equal for every rank.

        Plans the whole epoch.
        """
        return sum(1 for _ in self.items(self.epoch_of_len, EPOCH_START))

    @property
    def num_rows(self) -> int:
        """See EpochSampler; plans the next epoch with drop_last."""
        return sum(self.step_rows(self.epoch, EPOCH_START)) if self._drop_last else self._num_rows

    def plan(self, epoch: int, start: Place = EPOCH_START) -> Iterator[PlannedStep]:
        order = self._unit_order(epoch)
        costs, ends = self._costs[:, order], self._ends(order)
        limits = (self._budget, self._most_tokens)
        # A row above the budget uses the whole budget of one rank, and no more.
        running = [np.append(0, np.cumsum(np.minimum(each, limit))) for each, limit in zip(costs, limits)]

        def deal(begin: int, end: int) -> np.ndarray:
            for sums, limit in zip(running, limits):
                most = min(int(sums[begin]) + limit * self._num_ranks, INT64_MAX)
                end = min(end, int(np.searchsorted(sums, most, side="right")) - 1)
            return self._deal_longest(with_tokens(begin, end))

        def with_tokens(begin: int, end: int) -> np.ndarray:
            """Workloads and tokens, int64 `(2, end − begin)`; tokens of 0 without a cap."""
            return np.pad(costs[:, begin:end], ((0, 2 - len(costs)), (0, 0)))

        begin = self._first_unit(start.row, ends)
        while len(order) - begin >= self._num_ranks:
            ranks = self._leave_enough(deal, begin, len(order))
            if ranks is None:
                self._warn_once(
                    "the last %d rows of an epoch make no steps in which each of %d ranks has a row and keeps "
                    "budget_per_rank, max_tokens and max_rows; they become one step, here and in later epochs: raise "
                    "the limits, or leave rows out with drop_last=True",
                    *(self._num_rows - ends[begin], self._num_ranks),
                )
                ranks = self._deal_above(with_tokens(begin, len(order)))
            yield self._step(order[begin : begin + len(ranks)], ranks)
            begin += len(ranks)

    def _leave_enough(self, deal: Callable[[int, int], np.ndarray], begin: int, end: int) -> np.ndarray | None:
        """The ranks of a step's rows, such that the rest has rows for all ranks; None if the rest must be one step.

        A rest of exactly `num_ranks` rows is one step; a rest of at least twice as many can always be divided.
        """
        ranks, least = deal(begin, end), self._num_ranks
        if self._drop_last:
            return ranks
        for rest in (0, least, 2 * least):  # leave no row or at least `rest` rows
            if end - begin - rest < least:
                break
            if end - begin - len(ranks) < rest:
                ranks = deal(begin, end - rest)
            left = end - begin - len(ranks)
            if left in (0, least) or left >= 2 * least:
                return ranks
            if left > least and len(deal(end - left, end)) == left:
                return ranks
        return None if end - begin < 2 * least else deal(begin, end - least)

    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        """See EpochSampler; plans the steps and the one after them, unless they have been planned."""
        steps = self.step_rows(epoch, start)
        row = start.row + sum(itertools.islice(steps, num_steps))
        # Rows that are too few for a step count as read after the last step.
        at_end = num_steps > 0 and next(steps, None) is None
        return Place(max(start.row, self._num_rows) if at_end else row)

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"budget_per_rank": self._budget, "max_rows": self._max_rows}

    def _deal_longest(self, costs: np.ndarray) -> np.ndarray:
        """The ranks, int64 `(m,)`, of the longest prefix of rows that the planner can assign within the limits.

        `costs` has workloads and tokens, int64 `(2, n)`, with n > 0. The prefix has a row for every rank, or all rows.
        """
        # One row per rank keeps all limits. More than `_most_rows` rows cannot.
        low, high = min(self._num_ranks, costs.shape[1]), self._most_rows(costs[0]) + 1
        size, gap = high - 1, max(1, high // 64)
        while (ranks := self._deal(costs[:, :size])) is None:
            high, size, gap = size, max(low, size - gap), 2 * gap
        low = size
        while high - low > max(1, high // _TOLERANCE):
            middle = (low + high) // 2
            found = self._deal(costs[:, :middle])
            if found is None:
                high = middle
            else:
                low, ranks = middle, found
        return ranks

    def _deal_above(self, costs: np.ndarray) -> np.ndarray:
        """The ranks, int64 `(n,)`, of rows that exceed the limits on any ranks; equal numbers of rows unless padded."""
        workloads, tokens = costs
        if self._padded:
            return padded_groups(workloads, num_groups=self._num_ranks)
        limits: dict[str, Any] = {"tokens": tokens, "max_tokens": self._max_tokens, "speeds": self._speeds}
        return partition(workloads, self._num_ranks, best_effort=True, **limits).assignment

    def _most_rows(self, workloads: np.ndarray) -> int:
        """Length of the longest prefix that `max_rows` allows if rows above the budget are alone on a rank."""
        size = np.arange(1, len(workloads) + 1)
        alone = np.cumsum(workloads > self._budget)
        fits = (alone < self._num_ranks) | ((alone == self._num_ranks) & (alone == size))
        if self._most_groups is not None:
            fits &= size - alone <= (self._num_ranks - alone) * self._most_groups
        return len(size) if fits.all() else int(fits.argmin())

    def _deal(self, costs: np.ndarray) -> np.ndarray | None:
        """The ranks of some units; None if the planner finds no assignment within the limits."""
        workloads = costs[0]
        if len(workloads) <= self._num_ranks:
            return self._one_each(workloads, self._fastest_first)
        alone = workloads > self._budget
        others = self._fastest_first[np.count_nonzero(alone) :]
        parts = self._deal_shared(costs[:, ~alone], others)
        if parts is None:
            return None
        ranks = np.empty(len(workloads), np.int64)
        ranks[alone], ranks[~alone] = self._one_each(workloads[alone], self._fastest_first), others[parts]
        return ranks

    def _one_each(self, workloads: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """One of `ranks`, sorted by speed, for every row: the fastest for the heaviest; without speeds in order."""
        found = np.empty(len(workloads), np.int64)
        heaviest = np.arange(len(workloads)) if self._speeds is None else np.argsort(-workloads, kind="stable")
        found[heaviest] = ranks[: len(workloads)]
        return found

    def _deal_shared(self, costs: np.ndarray, ranks: np.ndarray) -> np.ndarray | None:
        """The index in `ranks` of each row's rank; None if the planner finds no assignment within the limits."""
        (workloads, tokens), num_parts = costs, len(ranks)
        if len(workloads) <= num_parts:
            return self._one_each(workloads, np.arange(num_parts))
        if self._padded:
            return self._deal_padded(workloads, num_parts)
        sizes, cap = tokens, self._max_tokens
        if cap is None and self._most_groups is not None:  # without a cap on tokens, the planner's cap limits rows
            sizes, cap = np.ones_like(workloads), self._most_groups
        speeds = None if self._speeds is None else self._speeds[ranks]
        plan = partial(partition, workloads, num_parts, tokens=sizes, max_tokens=cap, best_effort=True, speeds=speeds)
        for equal_size in (False, True):  # parts of equal size keep the cap on rows
            parts = fill_empty(plan(equal_size=equal_size).assignment, workloads, num_parts)
            counts, loads = np.bincount(parts, minlength=num_parts), sum_by_rank(parts, workloads, num_parts)
            if ((loads > self._budgets[ranks]) & (counts > 1)).any():
                return None
            if sum_by_rank(parts, tokens, num_parts).max() > self._most_tokens:
                return None
            if self._most_groups is None or int(counts.max()) <= self._most_groups:
                return parts
        return None

    def _deal_padded(self, workloads: np.ndarray, num_parts: int) -> np.ndarray | None:
        parts = padded_groups(workloads, num_groups=num_parts, max_rows=self._most_groups)
        heaviest = np.zeros(num_parts, np.int64)
        np.maximum.at(heaviest, parts, workloads)
        return parts if int((np.bincount(parts) * heaviest).max()) <= self._budget else None
