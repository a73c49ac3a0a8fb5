"""One rank of many in a single process: the other ranks' messages come from a list, their rows from nowhere.

With torch's fake process group, one rank's whole start and finish run; what it receives has the right size and no
values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commons.distributed import shuffle_session
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.local_rows import LocalRows


class _HeardError(Exception):
    """A rank's message is in the list: what the rank would do with the others' is left out."""


class ListedMessages:
    """In the place of ControlChannel: keeps what each rank says, and answers with what all have said so far."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, *, moves_rows: bool = True, pairwise: bool = False
    ) -> None:
        assert group is not None
        self.world_size, self.rank, self.generation = dist.get_world_size(group), dist.get_rank(group), 0
        self.members = list(range(self.world_size))
        self.description, self.control_group, self.payload_group = "all ranks", group, group
        self.has_all_to_all = True
        self.most_words = 0
        self.listens = False
        self.message_bytes = 0
        self._gathered = np.empty((self.world_size, 0), dtype=np.int64)

    def agree(self, call: str, options: Any, error: Exception | None, numbers: Any = (), step: int = 0) -> np.ndarray:
        if error is not None:
            raise error
        own = np.array([self.most_words] if call == "shuffle" else numbers, dtype=np.int64)
        if call != "gather":
            return np.repeat(own[None], self.world_size, axis=0)
        # Ready before: the other ranks' messages come to a real channel without the interpreter lock.
        known = self._gathered.shape[1]
        if known == 0:
            self._gathered = np.repeat(own[None], self.world_size, axis=0)
        elif known < len(own):  # a rank had more to say than those before
            self._gathered = np.pad(self._gathered, ((0, 0), (0, len(own) - known)))
        self._gathered[self.rank] = own
        if self.listens:
            raise _HeardError
        self._gathered[:, 0] = step
        self.message_bytes = own.nbytes
        return self._gathered

    def gather_text(self, text: str, step: int) -> list[str]:
        """As if every rank said the same."""
        return [text] * self.world_size

    @contextlib.contextmanager
    def collective(self, step: int, what: str) -> Iterator[None]:
        yield

    def post_failure(self, step: int, what: str, error: Exception) -> None: ...

    def close(self, *, collected: bool = False) -> None: ...


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """torch.distributed as one rank of a fake group sees it, and shufflers that hear of the others from a list."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(shuffle_session, "ControlChannel", ListedMessages):
            yield
    finally:
        dist.destroy_process_group()


def tell_of_all_ranks(
    shuffler: BaseTaskBalancedBatchShuffler, batches: Iterable[Any], window: int | None = None
) -> None:
    """Let a shuffler know what every rank brings, with whatever crosses the ranks; within `fake_ranks`.

    Args:
        shuffler: of the one rank.
        batches: of every rank, in order; with a window, a list of them for each rank.
        window: most batches of a rank that are planned together; None for batch by batch.
    """
    session = shuffler._session(None) if window is None else shuffler._session(None, window)
    channel: Any = session.channel
    own, channel.listens = channel.rank, True
    for rank, brought in enumerate(batches):
        channel.rank = rank
        local = [shuffler._describe(batch, None) for batch in (brought if window is not None else [brought])]
        channel.most_words = 0
        for each in local:
            assert isinstance(each, LocalRows) and each.error is None and each.schema is not None, each.error
            channel.most_words += len(session._own_table(each.schema, each, None))
        session._capacity = max(session._capacity, channel.most_words + channel.most_words // 4)
        with contextlib.suppress(_HeardError):
            session.prepare(0, local)
    channel.rank, channel.listens = own, False
