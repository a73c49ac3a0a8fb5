"""Ranks that fail: batches for them, and what they and the others make of it."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from commons.distributed.channel import absence, groups
from tests.helpers.models.torchrec_model import SampleBatch, make_batch
from tests.helpers.ranks.rank_pool import RankPool

# Where the product keeps how many seconds a rank waits for the records of others.
NAMES_SECONDS = (absence, "_RECORDS_SECONDS")
# Numbers of the first channels within `own_groups`; equal on all ranks, which all use it.
_FIRST_CHANNELS = itertools.count(10**6, 10**3)


def my_batch(step: int = 0, rows: int = 6) -> SampleBatch:
    """A batch of this rank; rank 0's rows are long."""
    longest = 40 if dist.get_rank() == 0 else 2
    first = 1 + 1000 * dist.get_rank() + 100 * step
    return make_batch(list(range(first, first + rows)), rows, longest=longest)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Kind and text of what a call raises, "no error" if it returns; in `pool.run(error_of, ...)` the ranks go on."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What the product logs within the block: warnings, and what is worse."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commons").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("commons").removeHandler(handler)


def on_rank(rank: int, patch: contextlib.AbstractContextManager[Any]) -> contextlib.AbstractContextManager[Any]:
    """A patch that holds on one rank alone."""
    return patch if dist.get_rank() == rank else contextlib.nullcontext()


@contextlib.contextmanager
def own_groups() -> Iterator[None]:
    """Within the block, shufflers make process groups anew: none has been connected before, and none is kept.

    Their channels have numbers of their own, so that they do not read keys of earlier ones in the same store.
    """
    rank_set = partial(groups.RankSet, num_channels=next(_FIRST_CHANNELS))
    with mock.patch.multiple(groups, _WORLDS=weakref.WeakKeyDictionary(), RankSet=rank_set):
        yield


def limit_waits(seconds: float, names: float | None = None) -> None:
    """Collectives of groups other than WORLD, made already, fail after so many seconds from now on.

    What a test needs before its fault then has the long timeout that a busy machine may take. For ranks of the test's
    own.

    Args:
        seconds: the timeout.
        names: seconds that a rank waits for the records of others; of two, who has nobody to wait for, `seconds`.
    """
    for group in dist.distributed_c10d._world.pg_names:
        if group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)
    if dist.get_world_size() == 2:
        setattr(*NAMES_SECONDS, seconds if names is None else names)


def meet(place: str) -> None:
    """Return when every rank has come to this place, of which there is one of a name; needs no process group."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{place}/{dist.get_rank()}", "")
    places = [f"{place}/{rank}" for rank in range(dist.get_world_size())]
    store.wait(places, datetime.timedelta(seconds=120))


def missed(first: Callable[[], Any], then: Callable[[], Any]) -> str:
    """What rank 0 says of a call that rank 1 stays away from, after both have made the first one; for own ranks."""
    first()  # makes the groups, so that rank 0 gets as far as the collective
    text = ""
    if dist.get_rank() == 0:
        limit_waits(0.5)
        text = error_of(then)
    meet("rank 0 has given up")
    return text


def ends_by_itself(work: Callable[..., None], *args: Any) -> bool:
    """Whether the process of rank 0 ends once it gets no more calls, whatever `work` has left running there."""
    with RankPool(2) as pool:
        pool.run(work, *args, timeout=60)
        rank = pool._ranks.pop(0)
        rank.connection.close()  # the rank's loop ends, and with it the process
        rank.process.join(30)
        return not rank.process.is_alive()
