"""The process groups that shufflers make for themselves: a gloo group for metadata and a default one for rows.

A closed shuffler's groups are kept for the next one over the same ranks. They are not destroyed, because torch derives
the name of a locally synchronised group from how many groups the process has: after a destruction a new group could get
an old name, and with it the old addresses in the store.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist

from commons.distributed.process_group import all_gather_single


class GroupPair(NamedTuple):
    """Two groups over the same ranks.

    Attributes:
        control: gloo, for metadata.
        payload: the default backend, for rows.
        has_all_to_all: whether `payload` can send uneven splits; None while it is not connected, since nobody has had
            rows to send: connections, and NCCL's buffers, are for those who need them.
        number: pairs over the same ranks that were made before; the same on all of them.
    """

    control: dist.ProcessGroup
    payload: dist.ProcessGroup
    has_all_to_all: bool | None
    number: int


class _Pool:
    """Pairs by members and number, None for those in use; valid for one default group."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.pairs: dict[tuple[int, ...], list[GroupPair | None]] = {}
        # Every group made here had fewer groups before it; names are unique from this count on.
        self.names_used = 0

    def over(self, members: list[int]) -> list[GroupPair | None]:
        """The pairs over these ranks in the present world."""
        if self.world is not dist.group.WORLD:
            self.world, self.pairs, self.names_used = dist.group.WORLD, {}, 0
        return self.pairs.setdefault(tuple(members), [])


_POOL = _Pool()


def acquire_groups(group: dist.ProcessGroup, timeout: float, *, moves_rows: bool = True) -> GroupPair:
    """A pair over the ranks of `group`; all of them call this in the same order, on the main thread.

    Args:
        group: the ranks.
        timeout: seconds after which a collective fails.
        moves_rows: whether this rank will send rows; the payload group is connected if any does.
    """
    members = dist.get_process_group_ranks(group)
    limit = datetime.timedelta(seconds=timeout)
    pairs = _POOL.over(members)
    number = _free_on_all(pairs, group)
    if number is not None:
        pair, pairs[number] = pairs[number], None
        assert pair is not None  # noqa: S101  it is free on this rank too
        for each in (pair.control, pair.payload):
            if each is not group:  # which is the user's own, with a timeout of its own
                dist.distributed_c10d._set_pg_timeout(limit, each)
        return pair if pair.has_all_to_all is not None else _connect(pair, moves_rows)
    # Ranks outside a subgroup do not know of its shuffler: only its members make the groups.
    subgroup = len(members) < dist.get_world_size()
    if subgroup:
        _align_group_names(group)
    control = dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=subgroup)
    if subgroup and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # Bound to a device, torch would split WORLD's communicator, in which all ranks would have to take part.
        payload = group
    else:
        payload = dist.new_group(members, timeout=limit, use_local_synchronization=subgroup)
    _POOL.names_used = _num_groups()
    pairs.append(None)
    return _connect(GroupPair(control, payload, None, len(pairs) - 1), moves_rows)


def release_groups(members: list[int], pair: GroupPair) -> None:
    """Keep a pair for the next shuffler over the same ranks; not one in which a collective has failed."""
    # Groups of a world that has been destroyed are gone with it.
    if dist.is_initialized() and pair.control in dist.distributed_c10d._world.pg_names:
        _POOL.over(members)[pair.number] = pair


def _free_on_all(pairs: list[GroupPair | None], group: dist.ProcessGroup) -> int | None:
    """The first pair that is free on all ranks; None if there is none.

    Ranks are asked, since a shuffler that nobody closes is collected at another time on every rank.
    """
    if not pairs:
        return None
    free = torch.tensor([pair is not None for pair in pairs], dtype=torch.int32, device=payload_device(group))
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=group)
    return next((number for number, is_free in enumerate(free.tolist()) if is_free), None)


def payload_device(group: dist.ProcessGroup) -> torch.device:
    """Where the rows of a group lie: on CUDA for a group that has a backend there, else on the host."""
    if torch.cuda.is_available() and any(device.type == "cuda" for device in group._device_types):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _align_group_names(group: dist.ProcessGroup) -> None:
    """Bring all members to the same number of groups, of which torch makes the next group's name.

    Members may know different numbers: groups of node leaders, of loggers, of pipeline stages. Those behind make groups
    of their own, with themselves as the only member.
    """
    mine = torch.tensor([max(_num_groups(), _POOL.names_used)], device=payload_device(group))
    counts = mine.new_empty(dist.get_world_size(group))
    all_gather_single(counts, mine, group=group)
    target = int(counts.max())
    while _num_groups() < target:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _connect(pair: GroupPair, moves_rows: bool) -> GroupPair:
    """Run the collectives of a step once, so that the first one does not pay for the connections."""
    # Ranks whose settings differ are told so later; here they must agree on what they run.
    any_moves = torch.tensor(int(moves_rows))
    dist.all_reduce(any_moves, op=dist.ReduceOp.MAX, group=pair.control)
    return pair._replace(has_all_to_all=_connect_payload(pair.payload) if any_moves else None)


def _connect_payload(payload: dist.ProcessGroup) -> bool:
    """Whether the payload group has an all-to-all; the same on all ranks, which share a backend."""
    device, world_size = payload_device(payload), dist.get_world_size(payload)
    words = torch.zeros(world_size, dtype=torch.int32, device=device)
    all_gather_single(words.new_empty(world_size * world_size), words, group=payload)
    try:
        dist.all_to_all_single(torch.empty_like(words), words, [1] * world_size, [1] * world_size, group=payload)
    except (RuntimeError, NotImplementedError):
        return False
    return True
