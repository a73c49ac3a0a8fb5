"""The loader of batches: torchdata's StatefulDataLoader over a data set whose items are batches.

A worker process hands a batch over as one tensor in shared memory. Sent as it is, a batch would take a file descriptor
and a connection for every tensor in it, which costs a worker more than to assemble a small batch.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory
from torchdata.stateful_dataloader import StatefulDataLoader

from commons.datasets.samplers import EpochSampler
from commons.sequence_batch.wire import decode, encode

# How torch begins the message of an error that a worker process met, before the worker's traceback.
_OF_A_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\n")


class ResumableLoader(StatefulDataLoader):
    """Batches in the order of a sampler, assembled by worker processes or by none.

    Args:
        dataset: its items are batches.
        sampler: what to ask the data set for; it draws the next epoch in every iteration.
        num_workers: processes that assemble batches; they stay from epoch to epoch. 0 for none.
        pin_memory: put batches in pinned host memory.

    """

    def __init__(
        self, dataset: Dataset[Any], sampler: EpochSampler[Any], *, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        with warnings.catch_warnings():
            # torchdata 0.11 sets one of torch's vitals, which newer versions of torch call deprecated and ignore.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            super().__init__(
                dataset,
                batch_size=None,  # the items of the data set are batches
                sampler=sampler,
                num_workers=num_workers,
                collate_fn=wrap if num_workers > 0 else None,
                pin_memory=pin_memory,
                persistent_workers=num_workers > 0,
            )

    def __iter__(self) -> Iterator[Any]:
        """Batches of the next epoch."""
        return map(unwrap, _WithPlainErrors(super().__iter__()))

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch given; what a loader of the same settings goes on from, JSON-ready."""
        return {"num_workers": self.num_workers, "iterator": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on from a place; those after it draw the next epochs.

        Raises:
            ValueError: no state of a loader, or that of one with another number of workers; when the iteration begins,
                also one of other data, another batch size or another rank.

        """
        if not state_dict.get("iterator") or "num_workers" not in state_dict:
            raise ValueError(
                f"the loader's state has {list(state_dict)}; it has num_workers and, not empty, iterator: give what "
                "state_dict() returned"
            )
        saved = state_dict["num_workers"]
        if saved != self.num_workers:
            raise ValueError(
                f"the loader's state has {saved} workers, this loader has {self.num_workers}; workers read ahead in "
                "turn: give the same num_workers, or begin at a row with sampler.start_at"
            )
        super().load_state_dict(state_dict["iterator"])


@dataclass(frozen=True)
class WrappedBatch:
    """A batch on its way from a worker process.

    Attributes:
        message: uint8 `(nbytes,)` in shared memory, see `commons.sequence_batch.wire`.

    """

    message: torch.Tensor

    def unwrap(self) -> Any:
        """The batch, every tensor in storage of its own."""
        (batch,), _ = decode(self.message)
        return batch

    def pin_memory(self) -> Any:
        """The batch in pinned memory; the loader's pinning thread calls it, so that the main thread need not unwrap."""
        return pin_memory(self.unwrap())  # torch's own, which knows what to do with lists and dictionaries


def wrap(batch: Any) -> Any:
    """A batch as one tensor in shared memory; one with something that a message cannot hold stays as it is."""
    try:
        message = encode(batch)
        shared = torch.empty(message.nbytes, dtype=torch.uint8).share_memory_()
        message.write(shared)
    except Exception:  # of whatever kind of tensor; torch sends it, or says why it cannot
        return batch
    return WrappedBatch(shared)


def unwrap(item: Any) -> Any:
    """What `wrap` was given."""
    return item.unwrap() if isinstance(item, WrappedBatch) else item


class _WithPlainErrors(Iterator[Any]):
    """Batches of an iterator, whose data's errors say the same from a worker process as from this one."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except (ValueError, OSError) as error:
            message = _message_in_worker(error)
            if message is None:
                raise
            raise type(error)(message) from error


def _message_in_worker(error: Exception) -> str | None:
    """What an error said in a worker, without the traceback; None for others, and for what has several lines."""
    if not _OF_A_WORKER.match(str(error)):
        return None
    name, _, message = str(error).rstrip().splitlines()[-1].partition(": ")
    return message if name == type(error).__name__ else None
