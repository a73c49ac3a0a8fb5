"""The loader of batches: torch's DataLoader over a data set whose items are batches, with a state to resume from.

A worker process sends a batch as one tensor in shared memory. torch would use a file descriptor and a connection for
every tensor of the batch, which takes longer than assembling a small batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from commons.datasets.samplers.epoch import EpochSampler, Place
from commons.sequence_batch.wire import UnsendableError, decode, encode

# The beginning of torch's message about an error that a batch caused in a worker process or in the pinning thread.
_WITH_A_BATCH = re.compile(r"Caught \w+ in (DataLoader worker process \d+|pin memory thread for device \S+)\.\n")


class ResumableLoader(DataLoader[Any]):
    """Loads batches, the items of a data set, in the order of a sampler; each iteration draws the sampler's next epoch.

    Worker processes are kept between epochs. ValueError if the sampler was made for other rows than the data set's.
    """

    sampler: EpochSampler[Any]

    def __init__(
        self, dataset: Dataset[Any], sampler: EpochSampler[Any], *, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        sampler.require_fits(dataset)
        super().__init__(
            dataset,
            batch_size=None,  # the items of the data set are batches
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=wrap if num_workers > 0 else None,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
        )
        self._given: _Given | None = None

    def with_sampler(self, sampler: EpochSampler[Any]) -> ResumableLoader:
        """A loader of the same data set with another sampler; ValueError if the sampler was made for other rows."""
        sampler.require_fits(self.dataset)
        sampler.yields_epochs = self.sampler.yields_epochs
        return ResumableLoader(self.dataset, sampler, num_workers=self.num_workers, pin_memory=self.pin_memory)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own type is private
        """Batches of the next epoch."""
        given = self._given = _Given(self.sampler.epoch, self.sampler.start)
        return _Batches(super().__iter__(), given, in_workers=self.num_workers > 0)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last returned batch, or after the batch that raised an error instead, JSON-ready.

        It has the epoch, the rows of the epoch before the place, over all ranks, and the steps of the window that
        begins at this row and are before the place.
        """
        given = self._given
        if given is None or given.has_ended:
            given = _Given(self.sampler.epoch, self.sampler.start)
        row, steps = self.sampler.place_after(given.num_batches, given.epoch, given.start)
        return {"epoch": given.epoch, "row": row, "steps": steps, "sampler": self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the place from which the next iteration continues; iterations after it draw the next epochs.

        ValueError for an invalid state, or the state of a loader of other data, another batch size or another rank.
        """
        if set(state_dict) != {"epoch", "row", "steps", "sampler"}:
            raise ValueError(
                f"the loader's state has {list(state_dict)}; it must have epoch, row, steps and sampler: give what "
                "state_dict() returned"
            )
        for name, value in self._identity().items():
            saved = state_dict["sampler"].get(name)
            # Another version of the planner matters only within a window, whose remaining rows would differ.
            if saved != value and (name != "plans" or state_dict["steps"] > 0):
                raise ValueError(
                    f"the loader's state has {name} {saved}, this loader has {value}; a state is valid for one order "
                    "of batches: make the loader as it was, or begin at a row with sampler.start_at"
                )
        self._given = None
        self.sampler.set_epoch(state_dict["epoch"])
        self.sampler.start_at(state_dict["row"], state_dict["steps"])

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a place to mean the same batches: of the sampler, and of the data set's rows."""
        return {**self.sampler.identity(), **stated_by(self.dataset, "row_order")}


# What data sets state about themselves; a data set that wraps another one states the same.
STATEMENTS = ("row_order", "vocabulary_digests", "row_contents")


def stated_by(dataset: Any, name: str) -> dict[str, Any]:
    """What a data set states about itself, such as `UserDataset.row_order`; empty if it has no mapping of this name."""
    stated = getattr(dataset, name, None)
    return dict(stated) if isinstance(stated, Mapping) else {}


@dataclass(frozen=True)
class WrappedBatch:
    """A batch on its way from a worker process."""

    message: torch.Tensor  # uint8 `(nbytes,)` in shared memory, see `commons.sequence_batch.wire`

    def unwrap(self) -> Any:
        """The batch, with every tensor in its own storage."""
        (batch,), _ = decode(self.message)
        return batch

    def pin_memory(self) -> Any:
        """The batch in pinned memory; called in the loader's pinning thread, so the main thread need not unwrap."""
        return pin_memory(self.unwrap())  # torch's function, which also pins lists and dictionaries


def wrap(batch: Any) -> Any:
    """A batch as one tensor in shared memory; a batch that cannot be encoded is returned unchanged.

    Raises:
        TypeError: a tensor computed with autograd, or a defaultdict whose factory has no importable name.
    """
    try:
        message = encode(batch)
        shared = torch.empty(message.nbytes, dtype=torch.uint8, device="cpu").share_memory_()
        message.write(shared)
    except UnsendableError:
        raise
    except Exception:  # an unusual kind of tensor: torch sends it, or raises its own error
        return batch
    return WrappedBatch(shared)


def unwrap(item: Any) -> Any:
    """The batch that `wrap` was called with."""
    return item.unwrap() if isinstance(item, WrappedBatch) else item


@dataclass
class _Given:
    """The progress of an iteration."""

    epoch: int  # its epoch
    start: Place  # the place where it began
    num_batches: int = 0  # batches that were returned or raised an error
    has_ended: bool = False  # whether it has no more batches


class _Batches(Iterator[Any]):
    """Counts the batches of one iteration; raises errors of worker processes with their original type and message."""

    def __init__(self, iterator: Iterator[Any], given: _Given, *, in_workers: bool) -> None:
        self._iterator = iterator
        self._given = given
        self._in_workers = in_workers

    def __next__(self) -> Any:
        try:
            batch = unwrap(next(self._iterator))
        except StopIteration:
            self._given.has_ended = True
            raise
        except Exception as error:
            # The next call returns the batch after this one, so this batch counts. If a worker has died, or the sampler
            # has failed with worker processes, no batch was lost.
            if not self._in_workers or _WITH_A_BATCH.match(str(error)):
                self._given.num_batches += 1
            message = _message_in_worker(error)
            if message is None or not isinstance(error, (ValueError, OSError)):
                raise
            raise type(error)(message) from error
        self._given.num_batches += 1
        return batch


def _message_in_worker(error: Exception) -> str | None:
    """The message of a worker's error without the traceback; None for other errors, and if it has several lines."""
    if not _WITH_A_BATCH.match(str(error)):
        return None
    name, _, message = str(error).rstrip().splitlines()[-1].partition(": ")
    return message if name == type(error).__name__ else None
