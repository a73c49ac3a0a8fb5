"""The base class of samplers with known workloads: an epoch is planned step by step, equally on every rank.

A plan has the rows of a step and their ranks. Every rank computes it from the same workloads and seed and reads its own
rows: nothing is gathered or exchanged.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from commons.checks import as_boolean, as_count
from commons.datasets.samplers.epoch import EPOCH_START, EpochSampler, Place, require_not_dealt_again
from commons.perf_model.loads import numbered, sum_by_rank
from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.arguments import refuse_above_cap
from commons.perf_model.partitioner.core import SOURCES
from commons.perf_model.partitioner.inputs import INT64_MAX, as_groups, as_speeds

logger = logging.getLogger(__name__)

# Number of places from which the steps are kept: those used last, such as an epoch's start and a checkpoint.
_KEPT = 2


class PlannedStep(NamedTuple):
    """The rows of one step, and their ranks."""

    rows: np.ndarray  # int64 `(n,)`, rows of the data set
    ranks: np.ndarray  # int64 `(n,)`, the rank that trains each row


# The own ranks' rows of a step, and the number of the step's rows.
_OwnStep: TypeAlias = tuple[list[np.ndarray], int]


class _KeptSteps:
    """The steps of a plan, planned once, by the first of its iterators to need them; on any threads.

    Planning that was interrupted begins again at the same step.
    """

    def __init__(self, plan: Callable[[], Iterator[_OwnStep]]) -> None:
        self._plan = plan
        self._steps: list[_OwnStep] = []
        self._others: Iterator[_OwnStep] | None = None  # the steps not planned yet; None after an interrupt
        self._lock = threading.RLock()  # a signal handler may need the steps too

    def __iter__(self) -> Iterator[_OwnStep]:
        number = 0
        while number < len(self._steps) or self._plan_one(number):
            yield self._steps[number]
            number += 1

    def _plan_one(self, number: int) -> bool:
        """Plan a step, unless it is planned; False if there is none."""
        with self._lock:
            if number == len(self._steps):
                others, self._others = self._others or itertools.islice(self._plan(), number, None), None
                step = next(others, None)
                if number == len(self._steps):  # a signal handler may have planned it meanwhile
                    self._steps[number:] = [] if step is None else [step]
                    self._others = others
            return number < len(self._steps)


class PlannedSampler(EpochSampler[list[int]]):
    """Rows of the batches of one rank, or of all ranks in turn, from a plan of known workloads.

    Arguments and errors as for BalancedBatchSampler. The unit of a plan is a group of rows, or a row without groups;
    units are numbered in the order of their first rows.
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
        workloads = as_int64_workloads(workloads)
        self._num_rows = len(workloads)
        self._num_ranks = as_count(num_ranks, "num_ranks", 1)
        self._rank = None if rank is None else as_count(rank, "rank", 0)
        if self._rank is not None and self._rank >= self._num_ranks:
            raise ValueError(
                f"rank is {self._rank}, num_ranks is {self._num_ranks}; ranks are counted from 0: give 0 <= rank < "
                "num_ranks"
            )
        self._own_ranks = range(self._num_ranks) if self._rank is None else range(self._rank, self._rank + 1)
        tokens = None if tokens is None else as_int64_workloads(tokens, "tokens", self._num_rows)
        self._max_tokens = None if max_tokens is None else min(as_count(max_tokens, "max_tokens", 1), INT64_MAX)
        self._drop_last, self._padded = as_boolean(drop_last, "drop_last"), as_boolean(padded, "padded")
        self._groups = None if groups is None else as_groups(groups, self._num_rows)
        self._speeds = None if speeds is None else as_speeds(speeds, self._num_ranks, workloads[:0], "num_ranks")
        self._require_rows_below_cap(tokens)
        if self._max_tokens is None:
            tokens = None  # only used for the cap
        self._digest = _digest_of(workloads, tokens, self._groups)
        self._groups_digest = None if self._groups is None else _digest_of(self._groups)
        # Workloads and, with a cap, tokens of the units, int64 `(1 or 2, num_units)`; rows of each unit.
        self._costs = np.stack([workloads] if tokens is None else [workloads, tokens])
        self._what, self._sizes, self._unit_size = "row", np.broadcast_to(np.int64(1), workloads.shape), 1
        if self._groups is not None:
            unit_of_row = numbered(self._groups)
            self._what, self._sizes = "group", np.bincount(unit_of_row)
            num_units = len(self._sizes)
            self._costs = np.stack([sum_by_rank(unit_of_row, of_rows, num_units) for of_rows in self._costs])
            # The rows, unit after unit, and where each unit begins.
            self._rows, self._begins = np.argsort(unit_of_row, kind="stable"), np.cumsum(self._sizes) - self._sizes
            if num_units:  # rows of every unit; 0 if units differ
                self._unit_size = int(self._sizes[0]) if self._sizes.min() == self._sizes.max() else 0
        if 0 < len(self._sizes) < self._num_ranks and not self._drop_last:
            raise ValueError(
                f"the data set has {len(self._sizes)} {self._what}s, num_ranks is {self._num_ranks}; every rank needs "
                f"a {self._what} in every step: use fewer ranks or more {self._what}s, or leave them out with "
                "drop_last=True"
            )
        self._warned: set[str] = set()
        self._kept: dict[tuple[int, Place], _KeptSteps] = {}

    def _require_rows_below_cap(self, tokens: np.ndarray | None) -> None:
        for name, given, why in (
            ("groups", self._groups, "made of rows of similar cost, which separates groups"),
            ("speeds", self._speeds, "made equally costly"),
        ):
            if self._padded and given is not None:
                raise ValueError(f"{name} are given, padded is True; padded batches are {why}: leave out one of them")
        if self._max_tokens is None:
            return
        if self._padded:
            raise ValueError(
                f"max_tokens is {self._max_tokens}, padded is True; the tokens of a padded batch are its rows times "
                "its longest row: leave max_tokens out, and cap memory by a BudgetBatchSampler with tokens as workloads"
            )
        if tokens is None:
            raise ValueError(
                f"max_tokens is {self._max_tokens}, tokens is None; a cap needs the tokens of each row: pass tokens"
            )
        refuse_above_cap(tokens, self._groups, self._max_tokens, "row")

    def _warn_once(self, text: str, *values: Any) -> None:
        """Log a warning once, on the first rank only, because all ranks compute the same plan."""
        if self._own_ranks[0] == 0 and text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *values)

    def order(self, size: int, epoch: int) -> np.ndarray:
        """See EpochSampler; orders groups, and keeps the rows of a group together."""
        return self._rows_of(self._unit_order(epoch))

    def rows_from(self, row: int, epoch: int) -> np.ndarray:
        """Rows of an epoch's steps from `row` on, int64; from an earlier one, with a warning, if too few are left."""
        order = self._unit_order(epoch)
        return self._rows_of(order[self._first_unit(row, self._ends(order)) :])

    def _unit_order(self, epoch: int) -> np.ndarray:
        return super().order(len(self._sizes), epoch)

    def _ends(self, order: np.ndarray) -> np.ndarray:
        """The places where the units of an order end, in rows, int64 `(num_units + 1,)`, the first 0."""
        if self._groups is None:
            return np.arange(len(order) + 1)
        return np.concatenate([[0], np.cumsum(self._sizes[order])])

    def _first_unit(self, row: int, ends: np.ndarray) -> int:
        """The place in the order of the unit with which steps from `row` on begin; `ends` as from `_ends`.

        It is earlier, with a warning, if fewer units than ranks are left.
        """
        num_units = len(self._sizes)
        unit = min(int(np.searchsorted(ends, row)), num_units)
        if self._drop_last or not 0 < num_units - unit < self._num_ranks:
            return unit
        begin = num_units - self._num_ranks
        self._warn_once(
            "row %d leaves %d %ss for %d ranks, and every rank needs one; the %d rows before it are read a second "
            "time: to avoid it, begin at row %d, or with the next epoch",
            *(row, num_units - unit, self._what, self._num_ranks, row - int(ends[begin]), self._num_rows),
        )
        return begin

    def _rows_of(self, units: np.ndarray) -> np.ndarray:
        """The rows of some units, unit after unit."""
        if self._groups is None:
            return units
        sizes = self._sizes[units]
        shifts = self._begins[units] - (np.cumsum(sizes) - sizes)
        return self._rows[np.repeat(shifts, sizes) + np.arange(sizes.sum())]

    def _step(self, units: np.ndarray, ranks: np.ndarray) -> PlannedStep:
        return PlannedStep(self._rows_of(units), np.repeat(ranks, self._sizes[units]))

    @property
    def drop_last(self) -> bool:
        """Whether rows that do not fill a step are left out; ValueError as `require_not_dealt_again`."""
        require_not_dealt_again(self, self._rank, self._num_ranks, "make it with rank=None")
        return self._drop_last

    @property
    def sampler(self) -> PlannedSampler:
        """This sampler: Accelerate calls `set_epoch` on a batch sampler's `sampler`."""
        return self

    @abstractmethod
    def plan(self, epoch: int, start: Place = EPOCH_START) -> Iterator[PlannedStep]:
        """The steps of an epoch from a place on, planned during the iteration; equal on every rank."""

    def items(self, epoch: int, start: Place) -> Iterator[list[int]]:
        return (rows.tolist() for batches, _ in self._own_steps(epoch, start) for rows in batches)

    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        return (num_rows for _, num_rows in self._own_steps(epoch, start))

    def _own_steps(self, epoch: int, start: Place) -> Iterator[_OwnStep]:
        """The own ranks' rows of each step, and the number of the step's rows; each step is planned once."""
        key = epoch, start
        steps = self._kept.pop(key, None) or _KeptSteps(lambda: self._plan_own(epoch, start))
        self._kept[key] = steps
        for least_recently_used in list(self._kept)[:-_KEPT]:
            self._kept.pop(least_recently_used, None)
        return iter(steps)

    def _plan_own(self, epoch: int, start: Place) -> Iterator[_OwnStep]:
        for rows, ranks in self.plan(epoch, start):
            yield [rows[ranks == rank] for rank in self._own_ranks], len(rows)

    def identity(self) -> dict[str, Any]:
        return {
            "num_rows": self._num_rows,
            "rank": self._rank,
            "world_size": self._num_ranks,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "workloads": self._digest,
            "groups": self._groups_digest,
            "max_tokens": self._max_tokens,
            "padded": self._padded,
            "speeds": None if self._speeds is None else self._speeds.tolist(),
            "plans": SOURCES,
        }

    def require_fits(self, dataset: Any) -> None:
        """See EpochSampler; a data set without a length is not checked."""
        if self._rank is None and self._num_ranks > 1:
            raise ValueError(
                f"rank is None, num_ranks is {self._num_ranks}; this loader reads the batches of one rank, and does "
                "not distribute batches of all ranks: give this rank's number"
            )
        if hasattr(dataset, "__len__") and len(dataset) != self._num_rows:
            raise ValueError(
                f"workloads has {self._num_rows} entries, the data set has {len(dataset)} rows; every row has "
                "one workload: give the workloads of this data set"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}  # iterators cannot be pickled; the copy plans again


def _digest_of(*arrays: np.ndarray | None) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for values in arrays:
        if values is not None:
            digest.update(np.ascontiguousarray(values).data)  # without a copy of millions of rows
    return digest.hexdigest()
