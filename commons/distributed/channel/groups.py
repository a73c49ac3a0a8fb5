"""The process groups that shufflers make for themselves: gloo groups for metadata and, to move rows, a default one.

Many ranks gather metadata over several short rings instead of a long one. gloo gathers in a ring: over W ranks W - 1
hops, each of which waits for the one before, and every rank of a group is connected with all others. So the ranks form
a grid, with eight or more in each dimension as far as their number divides, and gather along one dimension after
another, each time what the ring before has given. That gives every rank the same as one ring does, in the same order:
over 4,096 ranks in 28 hops and with 28 connections (Chan, Heimlich, Purkayastha and van de Geijn, "Collective
communication: theory, practice, and experience", Concurrency and Computation 19, 2007, on meshes of several
dimensions).

A closed shuffler's groups are kept for the next one over the same ranks. They are not destroyed, because torch derives
the name of a locally synchronised group from how many groups the process has: after a destruction a new group could get
an old name, and with it the old addresses in the store.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commons.distributed.channel.connections import connections_of, open_sockets
from commons.distributed.channel.store import break_off
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.process_group import all_gather_single

# One more ring is allowed for each factor of so many ranks: a shorter one is not worth its collective.
_SHORT_RING = 8
# Blocks of threads that NCCL may run for the exchange, each on a multiprocessor that an earlier batch's compute then
# lacks. NCCL's own limit is 32 (maxCTAs, docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html), and what
# moves is less than a megabyte. Priority is that of the stream on which the exchange is called: torch runs a collective
# there if it is not asynchronous.
_NCCL_BLOCKS = 4

# Makes all groups, in the order in which they are asked for; and how much longer than a collective's timeout that may
# take.
_MAKER = DaemonWorker("evenrank-groups", exit_seconds=1.0, break_off=break_off)
_GRACE_SECONDS = 2.0
# What flight-recorder dumps call the groups.
_CONTROL, _PAYLOAD, _UNUSED = "evenrank/control", "evenrank/payload", "evenrank/unused"


class GroupPair(NamedTuple):
    """The groups of one shuffler, for metadata and for rows."""

    # Gloo, for metadata; a gather in each of them, one after another, is one over all ranks.
    rings: tuple[dist.ProcessGroup, ...]
    control: dist.ProcessGroup | None  # gloo, over all ranks; None while rings are several and nobody asked for it
    # The default backend, for rows; None while nobody has had rows to send. With a device bound, torch connects NCCL as
    # soon as the group is made, and its buffers are for those who need them.
    payload: dist.ProcessGroup | None
    has_all_to_all: bool | None  # whether `payload` can send uneven splits; None until its collectives were tried
    number: int  # pairs over the same ranks that were made before; the same on all of them
    connections: frozenset[int]  # of all that are gloo's; see connections.py


@dataclass
class RankSet:
    """What is known of the channels over the same ranks, in one world."""

    closed: list[GroupPair] = field(default_factory=list)  # given back by close(), in the same order on all ranks
    # Given back when a shuffler was collected, by number; at another time on every rank.
    collected: dict[int, GroupPair] = field(default_factory=dict)
    num_pairs: int = 0  # that were made
    num_channels: int = 0
    beside_store: list[int] | None = None  # the ranks on the host of the default store; None before they are connected


class _World(defaultdict[tuple[int, ...], RankSet]):
    """The rank sets of one default group, by members."""

    def __init__(self) -> None:
        super().__init__(RankSet)
        # Every group made here had fewer groups before it; names are unique from this count on.
        self.names_used = 0


# Does not keep the default group, whose threads end with it.
_WORLDS: weakref.WeakKeyDictionary[dist.ProcessGroup, _World] = weakref.WeakKeyDictionary()


def _this_world() -> _World:
    default = dist.group.WORLD if dist.is_available() else None
    return _World() if default is None else _WORLDS.setdefault(default, _World())


def rank_set(members: Sequence[int]) -> RankSet:
    """What is known of the channels over these ranks."""
    return _this_world()[tuple(members)]


def number_channel(members: Sequence[int]) -> int:
    """How many channels over the same ranks this world has had before; a process that joins it later counts alike."""
    ranks = rank_set(members)
    ranks.num_channels += 1
    return ranks.num_channels - 1


class MakingOfGroups:
    """Groups that are made or connected on a thread of their own: torch waits for its store's host without a limit.

    It is waited for like the work of a collective.

    Args:
        make: calls functions of this file; all ranks submit it in the same order.
        timeout: seconds that a collective may take; torch's own error about it comes first.
    """

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        device = torch.device("cuda") if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        self._timeout, self._deadline = timeout, time.monotonic() + timeout + _GRACE_SECONDS
        self._made = _MAKER.submit(make, device)

    def is_completed(self) -> bool:
        """Whether the groups are there, or could not be made in time."""
        return self._made.done() or time.monotonic() > self._deadline

    def wait(self, limit: datetime.timedelta = datetime.timedelta(0)) -> None:
        """Raise RuntimeError if the groups are not there after `limit`, or could not be made."""
        seconds = min(limit.total_seconds(), self._deadline - time.monotonic())
        if not concurrent.futures.wait([self._made], max(0.0, seconds)).done:
            if self.is_completed():
                self._made.cancel()
            raise RuntimeError(f"process groups were not connected within {self._timeout:g} s")
        self._made.result()

    @property
    def result(self) -> Any:
        """What `make` returned."""
        return self._made.result(0)


def acquire_groups(group: dist.ProcessGroup, timeout: float) -> GroupPair:
    """Groups over the ranks of `group`, with their rings; all of them call this in the same order.

    Args:
        group: the ranks.
        timeout: seconds after which a collective fails.
    """
    members = dist.get_process_group_ranks(group)
    ranks = rank_set(members)
    pair = ranks.closed.pop() if ranks.closed else _collected_on_all(ranks, group)
    if pair is not None:
        for each in (*pair.rings, pair.control, pair.payload):
            if each is not None and each is not group:  # which is the user's own, with a timeout of its own
                dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), each)
        return pair
    ranks.num_pairs += 1
    # All ranks make their first ring before their second: nobody waits for a rank that waits elsewhere.
    made = [
        _new_group(ring, group, timeout, backend="gloo", group_desc=_CONTROL)
        for ring in ring_members(members, dist.get_rank(group))
    ]
    rings = tuple(ring for ring, _ in made)
    connections = frozenset[int]().union(*(each for _, each in made))
    return GroupPair(rings, rings[0] if len(rings) == 1 else None, None, None, ranks.num_pairs - 1, connections)


def with_control(pair: GroupPair, group: dist.ProcessGroup, timeout: float) -> GroupPair:
    """The pair with its gloo group over all ranks, who call this together; see `acquire_groups`."""
    members = dist.get_process_group_ranks(group)
    control, connections = _new_group(members, group, timeout, backend="gloo", group_desc=_CONTROL)
    return pair._replace(control=control, connections=pair.connections | connections)


def with_payload(pair: GroupPair, group: dist.ProcessGroup, timeout: float) -> GroupPair:
    """The pair with a new payload group, whose collectives nobody has tried yet; all ranks call this together.

    See `acquire_groups`.
    """
    members = dist.get_process_group_ranks(group)
    if len(members) < dist.get_world_size() and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # Bound to a device, torch would split WORLD's communicator, in which all ranks would have to take part.
        return pair._replace(payload=group, has_all_to_all=None)
    payload, connections = _new_group(members, group, timeout, pg_options=_nccl_options(timeout), group_desc=_PAYLOAD)
    return pair._replace(payload=payload, has_all_to_all=None, connections=pair.connections | connections)


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
    if collected:
        rank_set(members).collected[pair.number] = pair
    else:
        rank_set(members).closed.append(pair)


def _collected_on_all(ranks: RankSet, group: dist.ProcessGroup) -> GroupPair | None:
    """A pair whose shuffler has been collected on all ranks, by a reduction over `group`; None if there is none."""
    if not ranks.num_pairs:
        return None
    flags = [int(number in ranks.collected) for number in range(ranks.num_pairs)]
    free = torch.tensor(flags, dtype=torch.int32, device=numbers_device(group))
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=group)
    number = next((number for number, is_free in enumerate(free.tolist()) if is_free), None)
    return None if number is None else ranks.collected.pop(number)


def only_device(group: dist.ProcessGroup | None) -> torch.device | None:
    """Where all batches of a group lie; None where only a batch can tell.

    NCCL serves CUDA alone. gloo serves the host and CUDA, and so do "cpu:gloo,cuda:nccl" and a single process: ranks of
    theirs may train on the CPU of a machine that has GPUs, and must not touch these.
    """
    if group is not None and not serves(group, "cpu"):
        return _gpu_of(group)
    if torch.cuda.is_available() and (group is None or serves(group, "cuda")):
        return None
    return torch.device("cpu")


def numbers_device(group: dist.ProcessGroup) -> torch.device:
    """Where a few numbers lie that cross the group: on the host unless its backend serves CUDA alone."""
    return torch.device("cpu") if serves(group, "cpu") else _gpu_of(group)


def _gpu_of(group: dist.ProcessGroup) -> torch.device:
    """The device that the group or the world is bound to, else the current one, which a script may not have set."""
    for each in (group, dist.group.WORLD):
        if (bound := getattr(each, "bound_device_id", None)) is not None:
            return bound
    return torch.device("cuda", torch.cuda.current_device())


def serves(group: dist.ProcessGroup, kind: str) -> bool:
    """Whether the group has a backend for tensors on this kind of device, "cpu" or "cuda"."""
    return any(device.type == kind for device in group._device_types)


def ring_sizes(world_size: int) -> tuple[int, ...]:
    """Ranks of each of the rings in which many gather, one after another: those with the least sum, then the fewest.

    The largest comes first: its members are neighbours, so that most of its hops stay within a node.

    Args:
        world_size: ranks of the group, the product of the result.

    Returns:
        One ring for fewer than 64 ranks or a prime number of them; at most two from 64 on, three from 512, and so on.
    """
    most = next(rings for rings in itertools.count(1) if world_size < _SHORT_RING ** (rings + 1))
    return min(_products(world_size, most), key=lambda sizes: (sum(sizes), len(sizes)))[::-1]


def _products(number: int, most: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """All products of at most `most` factors that are `number`, none below `least`, in ascending order."""
    yield (number,)
    for factor in range(least, math.isqrt(number) + 1 if most > 1 else 0):
        if number % factor == 0:
            yield from ((factor, *others) for others in _products(number // factor, most - 1, factor))


def ring_members(members: Sequence[int], rank: int) -> list[list[int]]:
    """The ranks with whom one gathers, ring after ring.

    The first ring has neighbours, which often share a node, the next one every n-th rank, n being the size of the
    first; so that what is gathered is in the order of the ranks.

    Args:
        members: global ranks of the group.
        rank: this one's number in it.
    """
    rings, stride = [], 1
    for size in ring_sizes(len(members)):
        first = rank - rank // stride % size * stride
        rings.append(list(members[first : first + size * stride : stride]))
        stride *= size
    return rings


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
    _this_world().names_used = _num_groups()
    return made, connections_of(made, before) if serves(made, "cpu") else frozenset()


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
    mine = torch.tensor([max(_num_groups(), _this_world().names_used)], device=numbers_device(group))
    counts = mine.new_empty(dist.get_world_size(group))
    all_gather_single(counts, mine, group=group)
    target = int(counts.max())
    while _num_groups() < target:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True, group_desc=_UNUSED)


def try_collectives(payload: dist.ProcessGroup, device: torch.device, all_to_all: bool) -> list[dist.Work]:
    """Begin what a step may run over the payload group, so that the first one does not pay for the connections.

    Returns:
        An all-gather and, where the backend has one and it is wanted, an all-to-all.
    """
    world_size = dist.get_world_size(payload)
    words, ones = torch.zeros(world_size, dtype=torch.int32, device=device), [1] * world_size
    works = [all_gather_single(torch.empty_like(words), words[:1], group=payload, async_op=True)]
    try:
        if all_to_all:
            result = torch.empty_like(words)
            works.append(dist.all_to_all_single(result, words, ones, ones, group=payload, async_op=True))
    except (RuntimeError, NotImplementedError) as error:
        if not isinstance(error, NotImplementedError) and "does not support alltoall" not in str(error):
            raise
    return works
