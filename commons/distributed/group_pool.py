"""The process groups that shufflers make for themselves: a gloo group for metadata and a default one for rows.

A closed shuffler's groups are kept for the next one over the same ranks. They are not destroyed, because torch derives
the name of a locally synchronised group from how many groups there are: after a destruction the next group would get
the old name, and with it the old addresses in the store.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist


class GroupPair(NamedTuple):
    """Two groups over the same ranks."""

    control: dist.ProcessGroup
    payload: dist.ProcessGroup


class _Pool:
    """Free pairs by members, valid for one default group."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.free: dict[tuple[int, ...], list[GroupPair]] = {}

    def of_this_world(self) -> dict[tuple[int, ...], list[GroupPair]]:
        if self.world is not dist.group.WORLD:
            self.world, self.free = dist.group.WORLD, {}
        return self.free


_POOL = _Pool()


def acquire_groups(members: list[int], timeout: float) -> GroupPair:
    """A connected pair over `members`; all of them call this in the same order, on the main thread.

    Args:
        members: global ranks.
        timeout: seconds after which a collective fails.
    """
    limit = datetime.timedelta(seconds=timeout)
    free = _POOL.of_this_world().get(tuple(members))
    if free:
        pair = free.pop()
        for group in pair:
            dist.distributed_c10d._set_pg_timeout(limit, group)
        return pair
    # Ranks outside a subgroup do not know of its shuffler: only its members make the groups.
    subgroup = len(members) < dist.get_world_size()
    pair = GroupPair(
        dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=subgroup),
        dist.new_group(members, timeout=limit, use_local_synchronization=subgroup),
    )
    _connect(pair)
    return pair


def release_groups(members: list[int], pair: GroupPair) -> None:
    """Keep a pair for the next shuffler over the same ranks; not one in which a collective has failed."""
    if dist.is_initialized():
        _POOL.of_this_world().setdefault(tuple(members), []).append(pair)


def _connect(pair: GroupPair) -> None:
    """Run one collective in each group now, so that the first step does not pay for the connections."""
    dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=pair.control)
    dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=payload_device(pair.payload)), group=pair.payload)


def payload_device(group: dist.ProcessGroup) -> torch.device:
    """Where the rows of a payload group lie: on CUDA for a group that has NCCL, else on the host."""
    on_cuda = "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
