"""The loader of batches: torch's DataLoader over a data set whose items are batches, which tells its place in the data.

A worker process hands a batch over as one tensor in shared memory. Sent as it is, a batch would take a file descriptor
and a connection for every tensor in it, which costs a worker more than to assemble a small batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from commons.datasets.samplers.epoch import EpochSampler, Place
from commons.sequence_batch.wire import UnsendableError, decode, encode

# How torch begins the message of an error that a worker process, or the pinning thread, met with a batch.
_WITH_A_BATCH = re.compile(r"Caught \w+ in (DataLoader worker process \d+|pin memory thread for device \S+)\.\n")


class ResumableLoader(DataLoader[Any]):
    """Batches, which are the items of a data set, in the order of a sampler; each iteration draws its next epoch.

    Worker processes, if there are any, stay from epoch to epoch. ValueError for a sampler that was made for other rows
    than those of the data set.
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
        """A loader of the same data set, read in the order of another sampler; ValueError if that is of other rows."""
        sampler.require_fits(self.dataset)
        sampler.yields_epochs = self.sampler.yields_epochs
        return ResumableLoader(self.dataset, sampler, num_workers=self.num_workers, pin_memory=self.pin_memory)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own type is private
        """Batches of the next epoch."""
        given = self._given = _Given(self.sampler.epoch, self.sampler.start)
        return _Batches(super().__iter__(), given, in_workers=self.num_workers > 0)

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch given, or the one that raised instead, JSON-ready.

        Its epoch, the rows of the epoch before it, over all ranks, and, behind the first batches of a window, which
        begins at that row, how many these are.
        """
        given = self._given
        if given is None or given.has_ended:
            given = _Given(self.sampler.epoch, self.sampler.start)
        row, steps = self.sampler.place_after(given.num_batches, given.epoch, given.start)
        return {"epoch": given.epoch, "row": row, "steps": steps, "sampler": self.sampler.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on from a place; those after it draw the next epochs.

        ValueError for a state of no loader, or of one of other data, another batch size or another rank.
        """
        if set(state_dict) != {"epoch", "row", "steps", "sampler"}:
            raise ValueError(
                f"the loader's state has {list(state_dict)}; it has epoch, row, steps and sampler: give what "
                "state_dict() returned"
            )
        for name, value in self.sampler.identity().items():
            saved = state_dict["sampler"].get(name)
            # Another version of the planner reads other rows in the rest of a window, and the same in whole ones.
            if saved != value and (name != "plans" or state_dict["steps"] > 0):
                raise ValueError(
                    f"the loader's state has {name} {saved}, this loader has {value}; a state tells a place in one "
                    "order of batches: make the loader as it was, or begin at a row with sampler.start_at"
                )
        self._given = None
        self.sampler.set_epoch(state_dict["epoch"])
        self.sampler.start_at(state_dict["row"], state_dict["steps"])


@dataclass(frozen=True)
class WrappedBatch:
    """A batch on its way from a worker process."""

    message: torch.Tensor  # uint8 `(nbytes,)` in shared memory, see `commons.sequence_batch.wire`

    def unwrap(self) -> Any:
        """The batch, every tensor in storage of its own."""
        (batch,), _ = decode(self.message)
        return batch

    def pin_memory(self) -> Any:
        """The batch in pinned memory; the loader's pinning thread calls it, so that the main thread need not unwrap."""
        return pin_memory(self.unwrap())  # torch's own, which knows what to do with lists and dictionaries


def wrap(batch: Any) -> Any:
    """A batch as one tensor in shared memory; one with something that a message cannot hold stays as it is.

    Raises:
        TypeError: a tensor computed with gradients, or a defaultdict whose factory has no name of its own.
    """
    try:
        message = encode(batch)
        shared = torch.empty(message.nbytes, dtype=torch.uint8).share_memory_()
        message.write(shared)
    except UnsendableError:
        raise
    except Exception:  # of whatever kind of tensor; torch sends it, or says why it cannot
        return batch
    return WrappedBatch(shared)


def unwrap(item: Any) -> Any:
    """What `wrap` was given."""
    return item.unwrap() if isinstance(item, WrappedBatch) else item


@dataclass
class _Given:
    """What an iteration has given."""

    epoch: int  # that it draws
    start: Place  # where in the epoch it began
    num_batches: int = 0  # batches given, and those that raised
    has_ended: bool = False  # whether there are no more


class _Batches(Iterator[Any]):
    """Batches of one iteration, counted; the data's errors say the same from a worker process as from this one."""

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
            # The next call gives the batch after this one, so a place behind the error is behind this batch too. Where
            # a worker has died or the sampler has failed beside workers, no batch was lost.
            if not self._in_workers or _WITH_A_BATCH.match(str(error)):
                self._given.num_batches += 1
            message = _message_in_worker(error)
            if message is None or not isinstance(error, (ValueError, OSError)):
                raise
            raise type(error)(message) from error
        self._given.num_batches += 1
        return batch


def _message_in_worker(error: Exception) -> str | None:
    """What an error said in a worker, without the traceback; None for others, and for what has several lines."""
    if not _WITH_A_BATCH.match(str(error)):
        return None
    name, _, message = str(error).rstrip().splitlines()[-1].partition(": ")
    return message if name == type(error).__name__ else None
