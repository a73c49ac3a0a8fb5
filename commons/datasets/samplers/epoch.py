"""Samplers of an epoch: the rows or batches that a rank reads, and their order.

Every iteration draws the next epoch, unless `set_epoch` sets one. A place in an epoch is the number of rows before it,
over all ranks (`start_at`), so it is valid for any number of ranks and of worker processes. Within a window, whose
batches share their rows, a place also has the number of finished steps.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import Sampler

from commons.checks import as_boolean, as_count

T = TypeVar("T")


def require_not_dealt_again(sampler: object, rank: int | None, num_ranks: int, remedy: str) -> None:
    """Raise ValueError if a library is about to distribute the batches of one rank over the ranks again.

    Accelerate's `prepare` expects the batches of all W ranks and gives each rank every W-th batch; with the batches of
    one rank it would leave out the others.
    """
    if rank is not None and num_ranks > 1:
        raise ValueError(
            f"this {type(sampler).__name__} has only the batches of rank {rank} of {num_ranks}, and Accelerate's "
            "prepare() would distribute them over the ranks again (it reads drop_last), which leaves rows out: "
            f"{remedy}, or do not prepare the loader"
        )


class Place(NamedTuple):
    """A place in an epoch."""

    row: int = 0  # rows of the epoch before it, over all ranks; within a window, rows before the window
    # Steps of the window before it; valid only with the same number of ranks, batch size and window.
    steps: int = 0


EPOCH_START = Place()


class EpochSampler(Sampler[T]):
    """A sampler whose order is a pure function of seed and epoch.

    Attributes:
        IDENTITY: names of the attributes that `identity` returns.
        epoch: the epoch that the next iteration draws; incremented when an iteration yields its first item, or ends
            without one.
        epoch_of_len: the epoch whose batches `len` counts: the one of `set_epoch`, then that of the last iteration, so
            that a loop can recognise its last step.
        start: the place in that epoch where the next iteration begins.
        yields_epochs: whether to yield pairs of epoch and item, for a data set whose items depend on the epoch.
    """

    IDENTITY: ClassVar[tuple[str, ...]]

    def __init__(self, *, shuffle: bool, seed: int) -> None:
        self.epoch = self.epoch_of_len = 0
        self.start = EPOCH_START
        self.yields_epochs = False
        self._shuffle = as_boolean(shuffle, "shuffle")
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; ValueError for no integer, or below 0.

        The iteration begins at the epoch's first row. If it is the next epoch already, its place is kept, so that a
        loop that calls this in every epoch continues where `start_at` or a loader's `load_state_dict` has set it.
        """
        self.epoch_of_len = epoch = as_count(epoch, "epoch", 0)
        if epoch != self.epoch:
            self.epoch, self.start = epoch, EPOCH_START

    def start_at(self, row: int, steps: int = 0) -> None:
        """Begin the next iteration after the first `row` rows of the epoch.

        Args:
            row: number of rows to skip, over all ranks, whatever number of ranks read them; a window begins there.
            steps: number of steps of this window to skip too.

        Raises:
            ValueError: no integer from 0 on, or not fewer steps than the window has.
        """
        row, steps = as_count(row, "row", 0), as_count(steps, "steps", 0)
        if steps >= self.window:
            raise ValueError(
                f"steps is {steps}, the window of this {type(self).__name__} is {self.window}; a place is after 0 to "
                f"{self.window - 1} steps of a window: give the window's first row and fewer steps"
            )
        self.start = Place(row, steps)

    @property
    def window(self) -> int:
        """Number of batches whose rows are balanced together."""
        return 1

    def order(self, size: int, epoch: int) -> np.ndarray:
        """The numbers 0 … size − 1, int64 `(size,)`, permuted by seed and epoch if the sampler shuffles."""
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng([self._seed, epoch]).permutation(size)

    def __iter__(self) -> Iterator[T]:
        return self._draw(self.epoch, self.start)

    def _draw(self, epoch: int, start: Place) -> Iterator[T]:
        items: Iterator[Any] = self.items(epoch, start)
        if self.yields_epochs:
            items = ((epoch, item) for item in items)
        first = next(items, None)
        self.set_epoch(epoch + 1)
        self.epoch_of_len = epoch
        if first is not None:
            yield first
            yield from items

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def num_rows(self) -> int:
        """Rows that all ranks together read in an epoch."""
        return sum(self.step_rows(self.epoch, EPOCH_START))

    @abstractmethod
    def items(self, epoch: int, start: Place) -> Iterator[T]:
        """This rank's items of an epoch from a place on."""

    @abstractmethod
    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        """Rows of each step from a place on, over all ranks; equal on every rank."""

    @abstractmethod
    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        """The place `num_steps` steps of all ranks after `start`."""

    def identity(self) -> dict[str, Any]:
        """Settings that must be equal for a place to mean the same items, JSON-ready."""
        return {name: getattr(self, f"_{name}") for name in self.IDENTITY}

    def require_fits(self, dataset: Any) -> None:
        """Raise ValueError if the sampler was made for other rows than those of the data set."""


class BatchOrderSampler(EpochSampler[int]):
    """Indices of a data set whose items are the finished batches of one rank.

    `rows_per_step` is the number of rows of one batch on every rank together, by which `start_at` counts.
    """

    IDENTITY = ("num_batches", "rows_per_step", "shuffle", "seed")

    def __init__(self, num_batches: int, *, rows_per_step: int = 1, shuffle: bool = False, seed: int = 0) -> None:
        super().__init__(shuffle=shuffle, seed=seed)
        self._num_batches = num_batches
        self._rows_per_step = rows_per_step

    def __len__(self) -> int:
        return self._num_batches

    def items(self, epoch: int, start: Place) -> Iterator[int]:
        yield from self.order(self._num_batches, epoch)[self._batches_before(start) :].tolist()

    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        return itertools.repeat(self._rows_per_step, max(0, self._num_batches - self._batches_before(start)))

    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        return Place(min(start.row + num_steps * self._rows_per_step, self._num_batches * self._rows_per_step))

    def _batches_before(self, place: Place) -> int:
        return -(-place.row // self._rows_per_step)


class ShardedBatchSampler(EpochSampler[list[int]]):
    """Rows of the batches of one rank.

    Row i of the epoch's order, which is equal on every rank, goes to rank i mod W: ranks differ by at most one row, and
    no row is repeated or left out. A rank may thus have one batch more than another, or no batch.

    `num_rows` is the number of rows of the data set. `drop_last` leaves out rows at the end of the order that do not
    fill a batch on every rank, as BalancedBatchSampler does: the steps are then the same for any number of ranks that
    share a global batch.

    >>> [list(ShardedBatchSampler(5, 2, rank=rank, world_size=2)) for rank in range(2)]
    [[[0, 2], [4]], [[1, 3]]]
    """

    IDENTITY = ("num_rows", "batch_size", "rank", "world_size", "shuffle", "seed", "drop_last")

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed)
        self._num_rows, self._batch_size = num_rows, batch_size
        self._drop_last = as_boolean(drop_last, "drop_last")
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return -(-len(range(self._rank, self._end(0), self._world_size)) // self._batch_size)

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last step is left out; ValueError as `require_not_dealt_again`."""
        require_not_dealt_again(self, self._rank, self._world_size, "use torch's BatchSampler")
        return self._drop_last

    def items(self, epoch: int, start: Place) -> Iterator[list[int]]:
        own_rows = self.order(self._num_rows, epoch)[start.row : self._end(start.row)][self._rank :: self._world_size]
        for first in range(0, len(own_rows), self._batch_size):
            yield own_rows[first : first + self._batch_size].tolist()

    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        rows, of_step = range(start.row, self._end(start.row)), self._batch_size * self._world_size
        return (len(rows[first : first + of_step]) for first in range(0, len(rows), of_step))

    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        return Place(min(start.row + num_steps * self._batch_size * self._world_size, self._num_rows))

    def _end(self, first: int) -> int:
        """The end of the rows that are read, if reading begins at the row `first` of the order."""
        left = max(0, self._num_rows - first)
        return first + left - (left % (self._batch_size * self._world_size) if self._drop_last else 0)
