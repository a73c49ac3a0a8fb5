"""The process groups that shufflers make for themselves: gloo groups for metadata and, to move rows, a default one.

A closed shuffler's groups are kept for the next one over the same ranks. They are not destroyed, because torch derives
the name of a locally synchronised group from how many groups the process has: after a destruction a new group could get
an old name, and with it the old addresses in the store.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from commons.distributed.connections import connections_of, open_sockets
from commons.distributed.gather_grid import ring_members
from commons.distributed.process_group import all_gather_single
from commons.distributed.store import break_off, is_beside_host
from commons.distributed.worker import DaemonWorker

# Blocks of threads that NCCL may run for the exchange, each on a multiprocessor that an earlier batch's compute then
# lacks. NCCL's own limit is 32 (maxCTAs, docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html), and what
# moves is less than a megabyte. Priority is that of the stream on which the exchange is called: torch runs a collective
# there if it is not asynchronous.
_NCCL_BLOCKS = 4

T = TypeVar("T")

# Makes all groups, in the order in which they are asked for; and how much longer than a collective's timeout that may
# take.
_MAKER = DaemonWorker("evenrank-groups", exit_seconds=1.0, break_off=break_off)
_GRACE_SECONDS = 2.0
# What flight-recorder dumps call the groups.
_CONTROL, _PAYLOAD, _UNUSED = "evenrank/control", "evenrank/payload", "evenrank/unused"


class GroupPair(NamedTuple):
    """The groups of one shuffler, for metadata and for rows.

    Attributes:
        rings: gloo, for metadata; a gather in each of them, one after another, is one over all ranks. One group or,
            of many ranks, this one's row and column of a grid.
        control: gloo, over all ranks; None while they form a grid and nobody has asked for it.
        payload: the default backend, for rows; None while nobody has had rows to send. With a device bound, torch
            connects NCCL as soon as the group is made, and its buffers are for those who need them.
        has_all_to_all: whether `payload` can send uneven splits.
        number: pairs over the same ranks that were made before; the same on all of them.
        connections: of all that are gloo's; see connections.py.
    """

    rings: tuple[dist.ProcessGroup, ...]
    control: dist.ProcessGroup | None
    payload: dist.ProcessGroup | None
    has_all_to_all: bool
    number: int
    connections: frozenset[int]


class _Pool:
    """Pairs that are not in use, by members, valid for one default group.

    Attributes:
        closed: given back by close(), in the same order on all ranks.
        collected: given back when a shuffler was collected, by number; at another time on every rank.
        made: how many there are.
        channels: how many channels there have been over the same ranks.
        beside_store: of the members, those on the host of the default store.
    """

    def __init__(self) -> None:
        # Not kept: its threads end with it.
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self.reset()

    def reset(self) -> None:
        self.closed: defaultdict[tuple[int, ...], list[GroupPair]] = defaultdict(list)
        self.collected: defaultdict[tuple[int, ...], dict[int, GroupPair]] = defaultdict(dict)
        self.made: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.channels: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.beside_store: dict[tuple[int, ...], list[int]] = {}
        # Every group made here had fewer groups before it; names are unique from this count on.
        self.names_used = 0

    def of_this_world(self) -> _Pool:
        world = dist.group.WORLD if dist.is_available() else None
        if world is None or self._world is None or self._world() is not world:
            self._world = None if world is None else weakref.ref(world)
            self.reset()
        return self


_POOL = _Pool()


def number_channel(members: Sequence[int]) -> int:
    """How many channels over the same ranks this world has had before; a process that joins it later counts alike."""
    channels = _POOL.of_this_world().channels
    channels[tuple(members)] += 1
    return channels[tuple(members)] - 1


def ranks_beside_store(members: Sequence[int]) -> list[int]:
    """Those of the ranks that run on the host of the default store; none where their first groups were not made yet."""
    return _POOL.of_this_world().beside_store.get(tuple(members), [])


def make_in_time(make: Callable[[], T], timeout: float) -> T:
    """Make or connect groups on a thread of their own: torch waits for its store's host as long as that stands still.

    Args:
        make: calls functions of this file; called by all ranks in the same order.
        timeout: seconds that a collective may take; torch's own error about it comes first.

    Raises:
        RuntimeError: it takes longer, or a rank did not take part.
    """
    device = torch.device("cuda") if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    made = _MAKER.submit(make, device)
    try:
        return made.result(timeout + _GRACE_SECONDS)
    except concurrent.futures.TimeoutError:
        made.cancel()
        raise RuntimeError(f"process groups were not connected within {timeout:g} s") from None


def acquire_groups(
    group: dist.ProcessGroup, timeout: float, *, moves_rows: bool = True, pairwise: bool = False
) -> GroupPair:
    """A pair over the ranks of `group`; all of them call this in the same order, on the main thread.

    Args:
        group: the ranks.
        timeout: seconds after which a collective fails.
        moves_rows: whether this rank will send rows; the payload group is made if any does.
        pairwise: whether this rank will send host tensors to single ranks; the control group is made if any does.
    """
    members = dist.get_process_group_ranks(group)
    closed = _POOL.of_this_world().closed[tuple(members)]
    pair = closed.pop() if closed else _collected_on_all(tuple(members), group)
    if pair is None:
        number = _POOL.made[tuple(members)]
        _POOL.made[tuple(members)] += 1
        # All ranks make their first ring before their second: nobody waits for a rank that waits elsewhere.
        made = [
            _new_group(ring, group, timeout, backend="gloo", group_desc=_CONTROL)
            for ring in ring_members(members, dist.get_rank(group))
        ]
        rings = tuple(ring for ring, _ in made)
        connections = frozenset[int]().union(*(each for _, each in made))
        pair = GroupPair(rings, rings[0] if len(rings) == 1 else None, None, True, number, connections)
        if number == 0:
            _POOL.beside_store[tuple(members)] = _beside_store(members, rings)
    else:
        for each in (*pair.rings, pair.control, pair.payload):
            if each is not None and each is not group:  # which is the user's own, with a timeout of its own
                dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), each)
    if pair.payload is None or pair.control is None:
        moves_rows, pairwise = _any_needs(pair.rings, moves_rows, pairwise)
    if pair.control is None and pairwise:
        control, connections = _new_group(members, group, timeout, backend="gloo", group_desc=_CONTROL)
        pair = pair._replace(control=control, connections=pair.connections | connections)
    return with_payload(pair, group, timeout) if moves_rows else pair


def with_payload(pair: GroupPair, group: dist.ProcessGroup, timeout: float) -> GroupPair:
    """The pair with its payload group, made and connected if it is not there; called by all ranks together.

    Args:
        pair: of any shuffler over the ranks.
        group: the ranks, as they were given.
        timeout: seconds after which a collective fails.
    """
    if pair.payload is not None:
        return pair
    members = dist.get_process_group_ranks(group)
    if len(members) < dist.get_world_size() and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # Bound to a device, torch would split WORLD's communicator, in which all ranks would have to take part.
        payload, connections = group, frozenset[int]()
    else:
        payload, connections = _new_group(
            members, group, timeout, pg_options=_nccl_options(timeout), group_desc=_PAYLOAD
        )
    return pair._replace(payload=payload, has_all_to_all=_connect(payload), connections=pair.connections | connections)


def release_groups(members: list[int], pair: GroupPair, *, collected: bool = False) -> None:
    """Keep a pair for the next shuffler over the same ranks; not one in which a collective has failed.

    Args:
        members: the ranks.
        pair: what `acquire_groups` returned.
        collected: nobody closed its shuffler, so that other ranks may give it back later.
    """
    # Groups of a world that has been destroyed are gone with it.
    if not dist.is_initialized() or pair.rings[0] not in dist.distributed_c10d._world.pg_names:
        return
    pool = _POOL.of_this_world()
    if collected:
        pool.collected[tuple(members)][pair.number] = pair
    else:
        pool.closed[tuple(members)].append(pair)


def _collected_on_all(members: tuple[int, ...], group: dist.ProcessGroup) -> GroupPair | None:
    """A pair whose shuffler has been collected on all ranks, which are asked; None if there is none."""
    if not _POOL.made[members]:
        return None
    own = _POOL.collected[members]
    flags = [int(number in own) for number in range(_POOL.made[members])]
    free = torch.tensor(flags, dtype=torch.int32, device=numbers_device(group))
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=group)
    number = next((number for number, is_free in enumerate(free.tolist()) if is_free), None)
    return None if number is None else own.pop(number)


def only_device(group: dist.ProcessGroup | None) -> torch.device | None:
    """Where all batches of a group lie; None where only a batch can tell.

    NCCL serves CUDA alone. gloo serves the host and CUDA, and so do "cpu:gloo,cuda:nccl" and a single process: ranks of
    theirs may train on the CPU of a machine that has GPUs, and must not touch these.
    """
    if group is not None and not _serves(group, "cpu"):
        return torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.is_available() and (group is None or _serves(group, "cuda")):
        return None
    return torch.device("cpu")


def numbers_device(group: dist.ProcessGroup) -> torch.device:
    """Where a few numbers lie that cross the group: on the host unless its backend serves CUDA alone."""
    return torch.device("cpu") if _serves(group, "cpu") else torch.device("cuda", torch.cuda.current_device())


def sends_from_cuda(group: dist.ProcessGroup) -> bool:
    """Whether the group has a backend for tensors on CUDA."""
    return _serves(group, "cuda")


def _serves(group: dist.ProcessGroup, kind: str) -> bool:
    return any(device.type == kind for device in group._device_types)


def _new_group(
    members: list[int], group: dist.ProcessGroup, timeout: float, **options: Any
) -> tuple[dist.ProcessGroup, frozenset[int]]:
    """A group over members of one, who alone take part: ranks outside a subgroup do not know of its shuffler.

    Its connections come with it, as far as they are gloo's.

    Args:
        members: global ranks.
        group: all of its ranks make such a group at the same time, each with its own members.
        timeout: seconds after which a collective fails.
        options: of `new_group`.
    """
    subgroup = len(members) < dist.get_world_size()
    if subgroup:
        _align_group_names(group)
    limit, before = datetime.timedelta(seconds=timeout), open_sockets()
    made = dist.new_group(members, timeout=limit, use_local_synchronization=subgroup, **options)
    _POOL.names_used = _num_groups()
    return made, connections_of(made, before) if _serves(made, "cpu") else frozenset()


def _nccl_options(timeout: float) -> Any:
    """What NCCL is asked for a group of the default backend; None where that does not bring it."""
    backends = dist.get_backend_config(dist.group.WORLD).split(",")
    nccl = getattr(dist, "ProcessGroupNCCL", None)  # which a CPU build of torch lacks
    if nccl is None or "cuda:nccl" not in backends:
        return None
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=timeout)  # else torch warns that new_group's replaces it
    options.config.max_ctas = _NCCL_BLOCKS
    return options


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _align_group_names(group: dist.ProcessGroup) -> None:
    """Bring all members to the same number of groups, of which torch makes the next group's name.

    Members may know different numbers: groups of node leaders, of loggers, of pipeline stages. Those behind make groups
    of their own, with themselves as the only member.
    """
    mine = torch.tensor([max(_num_groups(), _POOL.names_used)], device=numbers_device(group))
    counts = mine.new_empty(dist.get_world_size(group))
    all_gather_single(counts, mine, group=group)
    target = int(counts.max())
    while _num_groups() < target:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True, group_desc=_UNUSED)


def _beside_store(members: Sequence[int], rings: Sequence[dist.ProcessGroup]) -> list[int]:
    """What `ranks_beside_store` tells: asked now, since nobody can be asked once the store is out of reach."""
    beside = torch.tensor([int(is_beside_host())])
    for ring in rings:
        of_ring = beside.new_empty(ring.size() * len(beside))
        all_gather_single(of_ring, beside, group=ring)
        beside = of_ring
    return [rank for rank, here in zip(members, beside.tolist()) if here]


def _any_needs(rings: Sequence[dist.ProcessGroup], *needs: bool) -> list[bool]:
    """Of each need, whether any rank has it: ranks whose settings differ are told so later, here they act alike."""
    said = torch.tensor([int(need) for need in needs])
    for ring in rings:
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=ring)
    return [bool(each) for each in said]


def _connect(payload: dist.ProcessGroup) -> bool:
    """Run the collectives of a step once, so that the first one does not pay for the connections.

    Returns:
        Whether the group has an all-to-all.
    """
    device = only_device(payload)
    if device is None or _serves(payload, "cpu"):
        # All ranks must use the same device, and some may see no GPU: CUDA if all of them have it in use already.
        # (Another connects at first use.)
        without_cuda = torch.tensor([int(device is not None or not torch.cuda.is_initialized())])
        dist.all_reduce(without_cuda, op=dist.ReduceOp.MAX, group=payload)
        device = torch.device("cpu" if without_cuda else "cuda")
    return _connect_payload(payload, device)


def _connect_payload(payload: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the payload group has an all-to-all; the same on all ranks, which share a backend."""
    world_size = dist.get_world_size(payload)
    words = torch.zeros(world_size, dtype=torch.int32, device=device)
    all_gather_single(torch.empty_like(words), words[:1], group=payload)
    try:
        dist.all_to_all_single(torch.empty_like(words), words, [1] * world_size, [1] * world_size, group=payload)
    except (RuntimeError, NotImplementedError):
        return False
    return True
