"""Which rows or batches a rank reads in an epoch, and in what order.

Every iteration draws the next epoch, unless `set_epoch` chooses one. A place in an epoch is the number of rows before
it, over all ranks (`start_at`): it means the same to another number of ranks, and to any number of worker processes.
Where several batches share their rows (a window), a place between them also says how many of them are done.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import Sampler

T = TypeVar("T")


def require_not_dealt_again(sampler: object, rank: int | None, num_ranks: int, remedy: str) -> None:
    """Raise ValueError where a library is about to deal one rank's batches to the ranks once more.

    Accelerate's `prepare` gives every rank each W-th batch of what it takes for the batches of all W ranks; of the
    batches of one rank it would leave the others out.
    """
    if rank is not None and num_ranks > 1:
        raise ValueError(
            f"this {type(sampler).__name__} has the batches of rank {rank} of {num_ranks} alone, and its drop_last is "
            "read, as Accelerate's prepare() does to deal the batches to the ranks once more, which leaves rows out: "
            f"{remedy}, or do not prepare the loader"
        )


class Place(NamedTuple):
    """A place in an epoch."""

    row: int = 0  # rows of the epoch before it, over all ranks; where it lies within a window, before that window
    # Steps of that window before it. They mean something with the same ranks, batch size and window alone.
    steps: int = 0


EPOCH_START = Place()


class EpochSampler(Sampler[T]):
    """A sampler whose order is a pure function of seed and epoch.

    Attributes:
        IDENTITY: what `identity` has of a class of samplers, its attributes by their names.
        epoch: the epoch that the next iteration draws; it rises by one when an iteration has given its first item, or
            has none to give.
        start: where in that epoch it begins.
        yields_epochs: precede every item by its epoch, for a data set that draws by it, in worker processes too.

    """

    IDENTITY: ClassVar[tuple[str, ...]]

    def __init__(self, *, shuffle: bool, seed: int) -> None:
        self.epoch = 0
        self.start = EPOCH_START
        self.yields_epochs = False
        self._shuffle = shuffle
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its first row; ValueError for a negative one."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; epochs are counted from 0: give 0 or more")
        self.epoch = epoch
        self.start = EPOCH_START

    def start_at(self, row: int, steps: int = 0) -> None:
        """Begin this epoch behind its first `row` rows, counted over all ranks, however many ranks read those.

        Args:
            row: those rows; the first window begins here.
            steps: steps of that window to leave out too.

        Raises:
            ValueError: a negative row, or steps that are no part of a window.

        """
        if row < 0:
            raise ValueError(f"row is {row}; rows are counted from 0: give 0 or more")
        if not 0 <= steps < self.window:
            raise ValueError(
                f"steps is {steps}, the window of this {type(self).__name__} is {self.window}; a place is behind 0 to "
                f"{self.window - 1} steps of a window: give the window's first row and fewer steps"
            )
        self.start = Place(row, steps)

    @property
    def window(self) -> int:
        """Batches that share their rows."""
        return 1

    def order(self, size: int, epoch: int) -> np.ndarray:
        """int64 `(size,)`: 0 … size − 1, permuted for this seed and epoch if the sampler shuffles."""
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
        """Rows of each step from a place on, over all ranks; the same on every rank."""

    @abstractmethod
    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        """The place `num_steps` steps of all ranks behind `start`."""

    def identity(self) -> dict[str, Any]:
        """What has to be equal for a place to mean the same items, JSON-ready."""
        return {name: getattr(self, f"_{name}") for name in self.IDENTITY}

    def require_fits(self, dataset: Any) -> None:
        """Raise ValueError where the rows that the sampler knows are not those of the data set that it is to read."""


class BatchOrderSampler(EpochSampler[int]):
    """Indices of a data set whose items are ready batches, each rank's own.

    `rows_per_step` are those of one batch of every rank together, by which `start_at` counts.
    """

    IDENTITY = ("num_batches", "rows_per_step", "shuffle", "seed")

    def __init__(self, num_batches: int, *, rows_per_step: int = 1, shuffle: bool = False, seed: int = 0) -> None:
        super().__init__(shuffle=shuffle, seed=seed)
        self._num_batches = num_batches
        self._rows_per_step = rows_per_step

    def __len__(self) -> int:
        return self._num_batches

    def items(self, epoch: int, start: Place) -> Iterator[int]:
        """See EpochSampler."""
        yield from self.order(self._num_batches, epoch)[self._batches_before(start) :].tolist()

    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        """See EpochSampler."""
        return itertools.repeat(self._rows_per_step, max(0, self._num_batches - self._batches_before(start)))

    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        """See EpochSampler."""
        return Place(min(start.row + num_steps * self._rows_per_step, self._num_batches * self._rows_per_step))

    def _batches_before(self, place: Place) -> int:
        return -(-place.row // self._rows_per_step)


class ShardedBatchSampler(EpochSampler[list[int]]):
    """Rows of the batches of one rank.

    The epoch's order of all rows, the same on every rank, is dealt out one row per rank in turn: ranks differ by at
    most one row, and no row is repeated or left out. A rank may thus have one batch more than another, or none.

    `num_rows` are those of the whole data set; an incomplete last batch is left out with `drop_last`.

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
        self._num_rows, self._batch_size, self._drop_last = num_rows, batch_size, drop_last
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        num_own_rows = len(range(self._rank, self._num_rows, self._world_size))
        full, rest = divmod(num_own_rows, self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out; ValueError as `require_not_dealt_again`."""
        require_not_dealt_again(self, self._rank, self._world_size, "use torch's BatchSampler")
        return self._drop_last

    def items(self, epoch: int, start: Place) -> Iterator[list[int]]:
        """See EpochSampler."""
        own_rows = self.order(self._num_rows, epoch)[start.row :][self._rank :: self._world_size]
        for first in range(0, len(own_rows), self._batch_size):
            batch = own_rows[first : first + self._batch_size]
            if len(batch) == self._batch_size or not self._drop_last:
                yield batch.tolist()

    def step_rows(self, epoch: int, start: Place) -> Iterator[int]:
        """See EpochSampler."""
        full, rest = divmod(max(0, self._num_rows - start.row), self._batch_size * self._world_size)
        yield from itertools.repeat(self._batch_size * self._world_size, full)
        if self._drop_last:  # ranks that are dealt one row more may still fill a batch
            rest = rest % self._world_size * self._batch_size if rest // self._world_size == self._batch_size - 1 else 0
        if rest:
            yield rest

    def place_after(self, num_steps: int, epoch: int, start: Place) -> Place:
        """See EpochSampler."""
        # Behind the last step there is nothing left, also where rows were left out.
        return Place(min(start.row + num_steps * self._batch_size * self._world_size, self._num_rows))
