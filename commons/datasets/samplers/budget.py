"""BudgetBatchSampler: steps of constant cost, with as many rows as fit every rank's budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from commons.checks import as_count
from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.datasets.samplers.planned import PlannedSampler, PlannedStep, logger
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner import padded_groups, partition
from commons.perf_model.partitioner.inputs import INT64_MAX

# A step ends within this part of its rows of the longest one that the planner can deal.
_TOLERANCE = 256


class BudgetBatchSampler(PlannedSampler):
    """Rows of the batches of one rank, in steps that cost the same instead of having the same number of rows.

    Each step has the first rows of what is left of the epoch's order, as many as can be dealt so that every rank keeps
    `budget_per_rank`, `max_tokens` and `max_rows`: the longest prefix that a bisection with the planner finds, to
    within 1/256 of its rows. Every rank has at least one row in every step, so that a loop that meets the other ranks
    in every step ends with them. Where fewer rows than ranks would be left over, the steps before are shorter; where
    that does not do, the last step exceeds the limits, with one warning. A row that exceeds the budget alone is the
    only row of its rank in its step; a warning names the first and their number.

    Where a place (`start_at`) leaves fewer rows than ranks, the last rows before it come a second time, with a warning.

    Steps are prefixes of the order, so a place is a number of rows to any number of ranks. It gives lists of row
    numbers, as BalancedBatchSampler does. Every row weighs the same where the loss is
    `commons.distributed.global_mean_loss`, however many rows a step has.

    Args:
        workloads: what each row of the data set costs, int64 `(num_rows,)`, as for BalancedBatchSampler.
        budget_per_rank: most that a rank's rows of a step cost, in the same unit.
        num_ranks: ranks that share the data.
        rank: this one; None gives the batches of all ranks in turn, as for BalancedBatchSampler.
        max_tokens: most tokens of a rank in a step.
        tokens: memory that each row takes, `(num_rows,)`; needed with `max_tokens`.
        max_rows: most rows of a rank in a step; None for any number.
        seed: of the order; the same on every rank.
        shuffle: a new order in every epoch.
        drop_last: leave out rows at the end of the order, fewer than ranks, instead of making the steps before shorter.
        padded: the model pads a batch to its longest row, so that it costs its number of rows times its heaviest row;
            the budget is for that. Rows of like cost of a step then come together. Not with `max_tokens`.
        groups: integers `(num_rows,)`; rows with equal numbers come in one batch, and count as one row with the sum of
            their workloads and tokens. With `max_rows` all groups have the same number of rows. Not with `padded`.
        speeds: positive integers `(num_ranks,)`, for ranks on devices of different kinds: the budget is that of the
            fastest, and a rank of half its speed has half of it. Not with `padded`.

    Raises:
        ValueError: an argument out of its range or of another length, a budget below every row, a row or group that
            breaks `max_tokens` alone, groups that `max_rows` cannot count, or, without `drop_last`, fewer groups than
            ranks.

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
        # What it is compared with is int64.
        self._budget = min(as_count(budget_per_rank, "budget_per_rank", 1), INT64_MAX)
        self._most_groups = self._as_groups(max_rows)
        self._most_tokens = INT64_MAX if self._max_tokens is None else self._max_tokens
        speeds = np.ones(self._num_ranks, np.int64) if self._speeds is None else self._speeds
        self._fastest_first = np.argsort(-speeds, kind="stable")
        # int64 `(num_ranks,)`, by rank: all of the budget, or the part that its speed is of the largest.
        self._budgets = np.array([self._budget * speed // int(speeds.max()) for speed in speeds.tolist()], np.int64)
        # int64 `(2, num_rows)`, workloads and tokens of each row; 0 tokens where there is no cap.
        tokens = np.zeros_like(self._workloads) if self._tokens is None else self._tokens
        self._costs = np.stack([self._workloads, tokens])
        self._require_budget()

    def _as_groups(self, max_rows: int | None) -> int | None:
        """`max_rows`, which the identity names, in groups; None for any number."""
        self._max_rows = None if max_rows is None else as_count(max_rows, "max_rows", 1)
        if self._max_rows is None:
            return None
        if self._groups is not None and len(self._groups):
            if not self._group_size:
                raise ValueError(
                    f"max_rows is {max_rows}, groups have different numbers of rows; max_rows counts groups of one "
                    "size: leave it out, or cap memory by tokens and max_tokens"
                )
            if self._max_rows < self._group_size:
                raise ValueError(
                    f"max_rows is {max_rows}, groups have {self._group_size} rows, which stay together: raise it"
                )
        self._max_rows = min(self._max_rows, max(1, len(self._workloads)))
        return self._max_rows // max(1, self._group_size)

    def _require_budget(self) -> None:
        budget, what, order = self._budget, self._what, np.arange(len(self._workloads))
        if self._groups is not None:
            order = np.argsort(self._groups, kind="stable")
        first = self.first_rows(order)
        costs, _ = self._sums(order, first)
        alone = np.flatnonzero(costs > budget)
        if not len(alone):
            return
        if len(alone) == len(costs):
            raise ValueError(
                f"budget_per_rank is {budget}, the lightest {what} costs {int(costs.min())}; a step has "
                f"room for some {what}s: raise it, to several {what}s of the mean, {int(costs.mean())}"
            )
        if self._own_ranks[0] == 0:
            row = order[first[alone[0]]]
            logger.warning(
                "%s %d costs %d, budget_per_rank is %d; it gets a rank's step to itself, as do all %d %ss above the "
                "budget, which make their steps longer than the others: truncate them, or raise the budget, at best to "
                "the heaviest, %d",
                what,
                row if self._groups is None else self._groups[row],
                costs[alone[0]],
                budget,
                len(alone),
                what,
                costs.max(),
            )

    def _sums(self, order: np.ndarray, first: np.ndarray) -> np.ndarray:
        """int64 `(2, num_groups)`, workloads and tokens of the groups, or rows, of an order."""
        costs = self._costs[:, order]
        return costs if self._groups is None or not len(first) else np.add.reduceat(costs, first, axis=1)

    def __len__(self) -> int:
        """Batches in the next epoch, as many for every rank; plans all of it."""
        return sum(1 for _ in self.items(self.epoch, EPOCH_START))

    @property
    def num_rows(self) -> int:
        """See EpochSampler; plans the next epoch with drop_last."""
        return sum(self.step_rows(self.epoch, EPOCH_START)) if self._drop_last else len(self._workloads)

    def plan(self, epoch: int, start: Place = EPOCH_START) -> Iterator[PlannedStep]:
        """See PlannedSampler."""
        order = self.order(len(self._workloads), epoch)
        first = self.first_rows(order)
        costs = self._sums(order, first)
        limits = (self._budget, self._most_tokens)
        # Above the budget a row takes all of a rank's, and no more than that.
        running = np.pad(np.cumsum(np.minimum(costs, np.array([limits]).T), axis=1), ((0, 0), (1, 0)))

        def deal(begin: int, end: int) -> np.ndarray:
            for sums, limit in zip(running, limits):
                most = min(int(sums[begin]) + limit * self._num_ranks, INT64_MAX)
                end = min(end, int(np.searchsorted(sums, most, side="right")) - 1)
            return self._deal_longest(costs[:, begin:end])

        begin = int(np.searchsorted(first, self.first_row(start.row, first)))
        ends = np.append(first, len(order))
        while len(first) - begin >= self._num_ranks:
            ranks = self._leave_enough(deal, begin, len(first))
            if ranks is None:
                self._warn_once(
                    "the last %d rows of an epoch make no steps in which each of %d ranks has a row and keeps "
                    "budget_per_rank, max_tokens and max_rows; one step has them all, here and from now on: raise the "
                    "limits, or leave rows out with drop_last=True",
                    *(len(order) - ends[begin], self._num_ranks),
                )
                ranks = self._deal_above(costs[:, begin:])
            until = begin + len(ranks)
            sizes = np.diff(ends[begin : until + 1])
            yield PlannedStep(order[ends[begin] : ends[until]], np.repeat(ranks, sizes))
            begin = until

    def _leave_enough(self, deal: Callable[[int, int], np.ndarray], begin: int, end: int) -> np.ndarray | None:
        """The ranks of a step's rows, such that all ranks get rows of the rest too; None where the rest is one step.

        A rest of twice the ranks or more makes steps by itself, and one of as many rows as ranks makes one.
        """
        ranks, least = deal(begin, end), self._num_ranks
        if self._drop_last:
            return ranks
        for rest in (0, least, 2 * least):  # the least to leave, unless it is nothing
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
        """See EpochSampler; plans these steps, unless they have been read."""
        row = start.row + sum(itertools.islice(self.step_rows(epoch, start), num_steps))
        # What does not make a step is behind the last one.
        first = self.first_rows(self.order(len(self._workloads), epoch))
        at_end = num_steps > 0 and len(first) - int(np.searchsorted(first, row)) < self._num_ranks
        return Place(max(start.row, len(self._workloads)) if at_end else row)

    def identity(self) -> dict[str, Any]:
        """See EpochSampler."""
        return super().identity() | {"budget_per_rank": self._budget, "max_rows": self._max_rows}

    def _deal_longest(self, costs: np.ndarray) -> np.ndarray:
        """The ranks of the first rows, as many as the planner can deal: all, or at least one for every rank.

        `costs` are int64 `(2, n)`, as those of `_sums`, of at least one row; the result is int64 `(m,)`.
        """
        # One row on every rank keeps all limits. Beyond what they allow in number, there is nothing to plan.
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
        """The ranks of rows that no dealing keeps within the limits: int64 `(n,)`; without padding, as many on each."""
        workloads, tokens = costs
        if self._padded:
            return padded_groups(workloads, num_groups=self._num_ranks)
        limits: dict[str, Any] = {"tokens": tokens, "max_tokens": self._max_tokens, "speeds": self._speeds}
        return partition(workloads, self._num_ranks, best_effort=True, **limits).assignment

    def _most_rows(self, workloads: np.ndarray) -> int:
        """Rows at the front that leave every rank at most `max_rows`, and rows above the budget alone."""
        size = np.arange(1, len(workloads) + 1)
        alone = np.cumsum(workloads > self._budget)
        fits = (alone < self._num_ranks) | ((alone == self._num_ranks) & (alone == size))
        if self._most_groups is not None:
            fits &= size - alone <= (self._num_ranks - alone) * self._most_groups
        return len(size) if fits.all() else int(fits.argmin())

    def _deal(self, costs: np.ndarray) -> np.ndarray | None:
        """The ranks of some rows; None if the planner finds no way to keep the limits."""
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
        """Of these ranks, one for every row: the fastest for the heaviest; without speeds, in order."""
        found = np.empty(len(workloads), np.int64)
        heaviest = np.arange(len(workloads)) if self._speeds is None else np.argsort(-workloads, kind="stable")
        found[heaviest] = ranks[: len(workloads)]
        return found

    def _deal_shared(self, costs: np.ndarray, ranks: np.ndarray) -> np.ndarray | None:
        """Which of these ranks each row goes to, by its index among them."""
        (workloads, tokens), num_parts = costs, len(ranks)
        if len(workloads) <= num_parts:
            return self._one_each(workloads, np.arange(num_parts))
        if self._padded:
            return self._deal_padded(workloads, num_parts)
        sizes, cap = tokens, self._max_tokens
        if cap is None and self._most_groups is not None:  # the planner's one cap is free for that on rows
            sizes, cap = np.ones_like(workloads), self._most_groups
        speeds = None if self._speeds is None else self._speeds[ranks]
        plan = partial(partition, workloads, num_parts, tokens=sizes, max_tokens=cap, best_effort=True, speeds=speeds)
        for equal_size in (False, True):  # of equal sizes none is above the cap on rows
            parts = plan(equal_size=equal_size).assignment
            _fill_empty(parts, workloads, num_parts)
            counts, loads = np.bincount(parts, minlength=num_parts), sum_by_rank(parts, workloads, num_parts)
            if ((loads > self._budgets[ranks]) & (counts > 1)).any():
                return None
            if sum_by_rank(parts, tokens, num_parts).max() > self._most_tokens:
                return None
            if self._most_groups is None or int(counts.max()) <= self._most_groups:
                return parts
        return None

    def _deal_padded(self, workloads: np.ndarray, num_parts: int) -> np.ndarray | None:
        if self._most_groups is not None and len(workloads) > num_parts * self._most_groups:
            return None
        parts = padded_groups(workloads, num_groups=num_parts, max_rows=self._most_groups)
        heaviest = np.zeros(num_parts, np.int64)
        np.maximum.at(heaviest, parts, workloads)
        return parts if int((np.bincount(parts) * heaviest).max()) <= self._budget else None


def _fill_empty(parts: np.ndarray, workloads: np.ndarray, num_parts: int) -> None:
    """Give each empty partition the lightest row of one that has several; there are at least as many rows."""
    counts = np.bincount(parts, minlength=num_parts)
    for part in np.flatnonzero(counts == 0):
        others = np.flatnonzero(counts[parts] > 1)
        row = others[workloads[others].argmin()]
        counts[parts[row]] -= 1
        parts[row], counts[part] = part, 1
