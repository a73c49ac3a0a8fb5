"""What samplers of known workloads share: an epoch is planned step by step, the same on every rank.

A plan says which rows a step trains and on which ranks. Every rank computes it from the same workloads and seed and
reads its own rows: nothing is gathered and nothing is exchanged.
"""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from commons.checks import as_count
from commons.datasets.samplers.epoch import EPOCH_START, EpochSampler, Place, check_rank, require_not_dealt_again
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.arguments import refuse_above_cap
from commons.perf_model.partitioner.core import SOURCES
from commons.perf_model.partitioner.inputs import INT64_MAX, as_groups, as_speeds

logger = logging.getLogger(__name__)

# Epochs whose steps are kept while they are read: the one that is left behind, and the one that follows.
_KEPT = 2


class PlannedStep(NamedTuple):
    """What one step trains."""

    rows: np.ndarray  # int64 `(n,)`, rows of the data set
    ranks: np.ndarray  # int64 `(n,)`, the rank that trains each


class PlannedSampler(EpochSampler[list[int]]):
    """Rows of the batches of one rank, or of all ranks in turn, by a plan of known workloads.

    Args:
        workloads: what each row of the data set costs: list, array or CPU tensor `(num_rows,)` of non-negative
            integers; the same on every rank, and as many as the data set has rows (a ResumableLoader compares that,
            torch's DataLoader does not).
        num_ranks: ranks that share the data.
        rank: this one; None for the batches of all ranks: of rank 0, 1, … in the first step, then in the next one.
        tokens: memory that each row takes, `(num_rows,)`; needed with `max_tokens`.
        max_tokens: most tokens of a rank in a step.
        shuffle: a new order in every epoch.
        seed: of the order; the same on every rank.
        drop_last: leave rows at the end of the order out that do not make a step.
        padded: a batch costs its number of rows times its heaviest row, see `padded_groups`.
        groups: integers `(num_rows,)`; rows with equal numbers are in one batch; None: a row is a group.
        speeds: positive integers `(num_ranks,)`; None for ranks that are equally fast.

    Raises:
        ValueError: an argument out of its range or of another length, a row or group that breaks `max_tokens` alone,
            or, without `drop_last`, fewer groups than ranks.

    """

    def __init__(
        self,
        workloads: Any,
        *,
        num_ranks: int,
        rank: int | None,
        tokens: Any,
        max_tokens: int | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        padded: bool,
        groups: Any,
        speeds: Any,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=as_count(seed, "seed", 0))
        self._workloads = as_int64_workloads(workloads)
        self._num_ranks = as_count(num_ranks, "num_ranks", 1)
        self._rank = None if rank is None else as_count(rank, "rank", 0)
        if self._rank is not None:
            check_rank(self._rank, self._num_ranks, "num_ranks")
        self._own_ranks = range(self._num_ranks) if self._rank is None else range(self._rank, self._rank + 1)
        self._tokens = None if tokens is None else as_int64_workloads(tokens, "tokens", len(self._workloads))
        self._max_tokens = None if max_tokens is None else min(as_count(max_tokens, "max_tokens", 1), INT64_MAX)
        self._drop_last, self._padded = bool(drop_last), bool(padded)
        self._groups = None if groups is None else as_groups(groups, len(self._workloads))
        self._speeds = None if speeds is None else as_speeds(speeds, self._num_ranks, self._workloads[:0], "num_ranks")
        # Rows of every group; 0 where groups differ.
        self._group_size = 1 if self._groups is None else _size_of_all(self._groups)
        self._require_rows_below_cap()
        self._require_rows_for_ranks()
        digest = hashlib.blake2b(self._workloads.tobytes(), digest_size=8)
        if self._max_tokens is not None and self._tokens is not None:
            digest.update(self._tokens.tobytes())
        if self._groups is not None:
            digest.update(self._groups.tobytes())
        self._digest = digest.hexdigest()
        self._has_repeated = False
        self._kept: dict[tuple[int, Place], _OwnSteps] = {}

    def _require_rows_below_cap(self) -> None:
        if self._padded and self._groups is not None:
            raise ValueError(
                "groups are given, padded is True; padded batches are made of rows of like cost, which tears groups "
                "apart: leave out one of them"
            )
        if self._padded and self._speeds is not None:
            raise ValueError(
                "speeds are given, padded is True; padded batches are made equally costly: leave out one of them"
            )
        if self._max_tokens is None:
            return
        if self._padded:
            raise ValueError(
                f"max_tokens is {self._max_tokens}, padded is True; the tokens of a padded batch are its rows times "
                "its longest row: leave max_tokens out, and cap memory by a BudgetBatchSampler with tokens as workloads"
            )
        if self._tokens is None:
            raise ValueError(
                f"max_tokens is {self._max_tokens}, tokens is None; a cap needs the tokens of each row: pass tokens"
            )
        refuse_above_cap(self._tokens, self._groups, self._max_tokens, "row")

    def _require_rows_for_ranks(self) -> None:
        number, what = len(self._workloads), "row"
        if self._groups is not None:
            number, what = len(np.unique(self._groups)), "group"
        if 0 < number < self._num_ranks and not self._drop_last:
            raise ValueError(
                f"the data set has {number} {what}s, num_ranks is {self._num_ranks}; every rank trains a {what} in "
                f"every step: use fewer ranks or more {what}s, or leave them out with drop_last=True"
            )

    def order(self, size: int, epoch: int) -> np.ndarray:
        """See EpochSampler; groups in their order, each with its rows one after another."""
        if self._groups is None:
            return super().order(size, epoch)
        _, first, group_of = np.unique(self._groups, return_index=True, return_inverse=True)
        place = np.empty(len(first), np.int64)
        place[np.argsort(first)[super().order(len(first), epoch)]] = np.arange(len(first))
        return np.argsort(place[group_of], kind="stable")

    def first_rows(self, order: np.ndarray) -> np.ndarray:
        """int64 `(num_groups,)`, where the groups of an epoch's order begin in it."""
        if self._groups is None:
            return np.arange(len(order))
        groups = self._groups[order]
        return np.flatnonzero(np.concatenate([np.ones(len(groups[:1]), bool), groups[1:] != groups[:-1]]))

    def first_row(self, row: int, first_rows: np.ndarray) -> int:
        """Where the steps from a place on begin: at its row, or earlier where fewer groups than ranks are left.

        Args:
            row: of the place.
            first_rows: of the epoch's order.
        """
        left = len(first_rows) - int(np.searchsorted(first_rows, row))
        return row if self._drop_last or not 0 < left < self._num_ranks else int(first_rows[-self._num_ranks])

    def _enough_rows_from(self, row: int, first_rows: np.ndarray) -> int:
        """`first_row`; warns once where that is an earlier one."""
        missing = row - self.first_row(row, first_rows)
        if not missing:
            return row
        if self._own_ranks[0] == 0 and not self._has_repeated:
            self._has_repeated = True
            logger.warning(
                "row %d leaves %d %s for %d ranks, and every rank trains one; the %d rows before it come a second "
                "time: begin at row %d, or with the next epoch, if they must not",
                row,
                len(first_rows) - int(np.searchsorted(first_rows, row)),
                "rows" if self._groups is None else "groups",
                self._num_ranks,
                missing,
                len(self._workloads),
            )
        return row - missing

    @property
    def drop_last(self) -> bool:
        """Whether rows that do not make a step are left out, as of a torch BatchSampler.

        Raises:
            ValueError: the batches are those of one of several ranks, see `require_not_dealt_again`.

        """
        require_not_dealt_again(self, self._rank, self._num_ranks, "make it with rank=None")
        return self._drop_last

    @property
    def sampler(self) -> PlannedSampler:
        """Itself: a batch sampler's `sampler` is where Accelerate calls `set_epoch`."""
        return self

    @abstractmethod
    def plan(self, epoch: int, start: Place = EPOCH_START) -> Iterator[PlannedStep]:
        """The steps of an epoch from a place on, planned as they are asked for; the same on every rank."""

    def items(self, epoch: int, start: Place) -> Iterator[list[int]]:
        """See EpochSampler."""
        return (rows.tolist() for batches, _ in self._own_steps(epoch, start) for rows in batches)

    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        """See EpochSampler."""
        return (num_rows for _, num_rows in self._own_steps(epoch, start))

    def _own_steps(self, epoch: int, start: Place) -> _OwnSteps:
        """The own ranks' part of the plan; each step is planned once, whoever asks first."""
        if (epoch, start) not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[epoch, start] = _OwnSteps(self.plan(epoch, start), self._own_ranks)
        return self._kept[epoch, start]

    def identity(self) -> dict[str, Any]:
        """See EpochSampler."""
        return {
            "num_rows": len(self._workloads),
            "rank": self._rank,
            "world_size": self._num_ranks,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "workloads": self._digest,
            "max_tokens": self._max_tokens,
            "padded": self._padded,
            "speeds": None if self._speeds is None else self._speeds.tolist(),
            "plans": SOURCES,
        }

    def require_fits(self, dataset: Any) -> None:
        """See EpochSampler; a data set without a length is not looked at."""
        if self._rank is None and self._num_ranks > 1:
            raise ValueError(
                f"rank is None, num_ranks is {self._num_ranks}; this loader reads the batches of one rank, and nobody "
                "deals those of all ranks: give this rank's number"
            )
        if hasattr(dataset, "__len__") and len(dataset) != len(self._workloads):
            raise ValueError(
                f"workloads has {len(self._workloads)} entries, the data set has {len(dataset)} rows; every row costs "
                "something: give one workload per row of this data set"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}  # plans are made again where they are needed


class _OwnSteps:
    """Some ranks' rows of each step, and the number of rows of all ranks: a list that grows as it is read."""

    def __init__(self, plan: Iterator[PlannedStep], ranks: range) -> None:
        self._plan, self._ranks = plan, ranks
        self._known: list[tuple[list[np.ndarray], int]] = []

    def __iter__(self) -> Iterator[tuple[list[np.ndarray], int]]:
        index = 0
        while index < len(self._known) or self._grow():
            yield self._known[index]
            index += 1

    def _grow(self) -> bool:
        step = next(self._plan, None)
        if step is None:
            return False
        self._known.append(([step.rows[step.ranks == rank] for rank in self._ranks], len(step.rows)))
        return True


def _size_of_all(groups: np.ndarray) -> int:
    """Rows of each group; 0 where groups differ, or there are none."""
    sizes = np.unique(np.unique(groups, return_counts=True)[1])
    return int(sizes[0]) if len(sizes) == 1 else 0


def tokens_above(cap: int, tokens: np.ndarray, cells: np.ndarray, num_cells: int) -> int:
    """How far the fullest of some cells exceeds a cap on tokens; 0 if none does."""
    return max(0, int(sum_by_rank(cells, tokens, num_cells).max(initial=0)) - cap)
