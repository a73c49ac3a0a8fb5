"""GROUPS: the process groups that a shuffler makes: gloo groups for metadata, and one of its group's backend for rows.

Many ranks gather metadata over several short rings instead of one long ring. gloo gathers in a ring: W ranks need W - 1
hops one after another, and gloo connects every rank of a group with all others. So the ranks form a grid, with eight or
more ranks in each dimension if their number allows it. They gather along the first dimension, then gather the result
along the second, and so on. Every rank ends with the same table as after one ring, in the same order; 4,096 ranks need
28 hops and 28 connections (Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice,
and experience", Concurrency and Computation 19, 2007, on meshes of several dimensions).

A closed shuffler's groups are kept in a pool for the next shuffler over the same ranks. They are not destroyed, because
up to torch 2.13 the name of a locally synchronised group is derived from the number of groups in the process: after a
destruction a new group could get an old group's name, and so find its old addresses in the store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import hashlib
import itertools
import math
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commons.distributed.channel.connections import connections_of, open_sockets
from commons.distributed.channel.store import attempt_of_store, break_off
from commons.distributed.channel.store_barrier import StoreBarrier
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.errors import name_ranks
from commons.distributed.process_group import all_gather_single, serves

# Ranks per ring that justify another ring: a shorter ring saves fewer hops than its collective costs.
_SHORT_RING = 8
# Thread blocks that NCCL may use for the exchange; each takes a multiprocessor from an earlier batch's compute. The
# exchange moves less than a megabyte; NCCL's own limit is 32 (maxCTAs, docs.nvidia.com/deeplearning/nccl/user-guide/
# docs/api/types.html). Its priority is that of the calling stream, where torch runs a synchronous collective.
_NCCL_BLOCKS = 4

# Seconds beyond a collective's timeout that making groups may take.
_GRACE_SECONDS = 2.0
# Whether torch derives the name of a locally synchronised group from the number of calls of new_group, as from 2.14 on,
# and not from the number of groups in the process. A TorchVersion compares as a version.
_NAMED_BY_CALLS = torch.__version__ >= "2.14"
# The first of evenrank's own numbers in place of torch's number of calls, which never gets as large.
_OWN_NUMBERS = 1 << 40
# Names of the groups in flight-recorder dumps.
_CONTROL, _PAYLOAD, _UNUSED = "evenrank/control", "evenrank/payload", "evenrank/unused"


class GroupPair(NamedTuple):
    """The groups of one shuffler, for metadata and for rows."""

    # Gloo, for metadata; gathers in all of them, one after another, make a gather over all ranks.
    rings: tuple[dist.ProcessGroup, ...]
    control: dist.ProcessGroup | None  # gloo, over all ranks; with several rings, None until a channel needs it
    # The given group's backend, for rows; None until a channel moves rows. Made late because torch, bound to a device,
    # connects NCCL and allocates its buffers when the group is made.
    payload: dist.ProcessGroup | None
    has_all_to_all: bool | None  # whether `payload` can send uneven splits; None until its collectives were tested
    number: int  # of pairs that were made over the same ranks before; equal on all ranks
    connections: frozenset[int]  # sockets of the gloo groups; see connections.py
    timeout: float  # of the collectives, in seconds


@dataclass
class RankSet:
    """The pool of groups over the same ranks, in one world, and what is counted there."""

    ordered: list[GroupPair] = field(default_factory=list)  # returned in the same order on all ranks
    unordered: dict[int, GroupPair] = field(default_factory=dict)  # by number, returned at different times on the ranks
    num_pairs: int = 0  # pairs that were made
    num_channels: int = 0  # channels that were made
    beside_store: list[int] | None = None  # the ranks on the default store's host; None until a channel has gathered it


class _World(defaultdict[tuple[int, ...], RankSet]):
    """The rank sets of one default group, by members."""

    def __init__(self) -> None:
        super().__init__(RankSet)
        # Number of groups after the last one was made here; names of new groups up to torch 2.13 are unique from it on.
        self.names_used = 0
        # The thread that makes all groups, in the order of the calls. Of this world alone: while it waits for a rank
        # that is missing, a program may begin again in a new world.
        self.maker = DaemonWorker("evenrank-groups", exit_seconds=1.0, break_off=break_off)
        weakref.finalize(self, self.maker.finish).atexit = False


# By default group; a weak reference, so that destroying the group still ends its threads.
_WORLDS: weakref.WeakKeyDictionary[dist.ProcessGroup, _World] = weakref.WeakKeyDictionary()
# By default group and ranks, how many of evenrank's own numbers were used for names of groups.
_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def _this_world() -> _World:
    default = dist.group.WORLD if dist.is_available() else None
    return _World() if default is None else _WORLDS.setdefault(default, _World())


def rank_set(members: Sequence[int]) -> RankSet:
    """The pool of the groups over some ranks."""
    return _this_world()[tuple(members)]


def key_of_channel(members: Sequence[int]) -> str:
    """Count a new channel over these ranks, and return the beginning of its keys in the store; equal on all ranks."""
    ranks, digest = rank_set(members), hashlib.blake2b(repr(list(members)).encode(), digest_size=8).hexdigest()
    attempt = attempt_of_store() if len(members) > 1 else "0"
    ranks.num_channels += 1
    return f"evenrank/attempt {attempt}/{digest}/{ranks.num_channels - 1}"


class MakingOfGroups:
    """Makes or connects groups on a thread of its own, because torch waits for its store's host without a limit.

    Has the methods of a collective's work that `absence.Awaited` needs. All ranks submit `make`, which calls functions
    of this module, in the same order. It may take a bit longer than `timeout`, so that torch's own error comes first.
    """

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        device = torch.device("cuda") if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        self._timeout, self._deadline = timeout, time.monotonic() + timeout + _GRACE_SECONDS
        self._made = _this_world().maker.submit(make, device)

    def is_completed(self) -> bool:
        """Whether the groups are made, or were not made in time."""
        return self._made.done() or time.monotonic() > self._deadline

    def wait(self, limit: datetime.timedelta = datetime.timedelta(0)) -> None:
        """Wait; RuntimeError if the groups are not made after `limit`, or the error of making them."""
        seconds = min(limit.total_seconds(), self._deadline - time.monotonic())
        if not concurrent.futures.wait([self._made], max(0.0, seconds)).done:
            if self.is_completed():
                self._made.cancel()
            raise RuntimeError(f"process groups were not connected within {self._timeout:g} s")
        self._made.result()

    @property
    def result(self) -> Any:
        """The result of `make`."""
        return self._made.result(0)


def acquire_groups(group: dist.ProcessGroup, barrier: StoreBarrier) -> GroupPair:
    """Take groups over the ranks of `group` from the pool, or make them; all ranks call this in the same order.

    Their collectives have the timeout of `barrier`.
    """
    members = dist.get_process_group_ranks(group)
    ranks = rank_set(members)
    fitting = [index for index, pair in enumerate(ranks.ordered) if _fits(pair, group, barrier.timeout)]
    pair = ranks.ordered.pop(fitting[-1]) if fitting else _free_on_all(ranks, group, barrier)
    if pair is not None:
        for each in (*pair.rings, pair.control, pair.payload):
            if each is not None and pair.timeout != barrier.timeout:
                dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=barrier.timeout), each)
        return pair._replace(timeout=barrier.timeout)
    ranks.num_pairs += 1
    # All ranks make their first ring before their second, so that no rank waits for one that waits in another ring.
    made = [
        _new_group(ring, barrier, backend="gloo", group_desc=_CONTROL)
        for ring in ring_members(members, dist.get_rank(group))
    ]
    rings = tuple(ring for ring, _ in made)
    connections = frozenset[int]().union(*(each for _, each in made))
    control, number = rings[0] if len(rings) == 1 else None, ranks.num_pairs - 1
    return GroupPair(rings, control, None, None, number, connections, barrier.timeout)


def with_control(pair: GroupPair, group: dist.ProcessGroup, barrier: StoreBarrier) -> GroupPair:
    """Add the gloo group over all ranks to a pair; all ranks call this together."""
    members = dist.get_process_group_ranks(group)
    control, connections = _new_group(members, barrier, backend="gloo", group_desc=_CONTROL)
    return pair._replace(control=control, connections=pair.connections | connections)


def with_payload(pair: GroupPair, group: dist.ProcessGroup, barrier: StoreBarrier) -> GroupPair:
    """Add a new payload group, whose collectives are not tested, to a pair; all ranks call this together."""
    members = dist.get_process_group_ranks(group)
    if len(members) < dist.get_world_size() and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # Bound to a device, torch would split WORLD's communicator, which needs all ranks of the world.
        return pair._replace(payload=group, has_all_to_all=None)
    backends, options = dist.get_backend_config(group), dict[str, Any]()
    if backends != dist.get_backend_config(dist.group.WORLD):  # such as a gloo group of ranks that train with NCCL
        options["backend"] = dist.get_backend(group)
    options["pg_options"] = _nccl_options(backends, barrier.timeout)
    payload, connections = _new_group(members, barrier, group_desc=_PAYLOAD, **options)
    return pair._replace(payload=payload, has_all_to_all=None, connections=pair.connections | connections)


def release_groups(
    members: list[int], pair: GroupPair, group: dist.ProcessGroup | None, *, ordered: bool = True
) -> None:
    """Return a pair to the pool; never a pair in which a collective has failed.

    The user's `group` is not put into the pool, because the user may destroy it. `ordered`: whether all ranks return
    their pairs in the same order.
    """
    # The groups of a destroyed world cannot be used again.
    if not dist.is_initialized() or pair.rings[0] not in dist.distributed_c10d._world.pg_names:
        return
    if pair.payload is group:
        pair = pair._replace(payload=None, has_all_to_all=None)
    if ordered:
        rank_set(members).ordered.append(pair)
    else:
        rank_set(members).unordered[pair.number] = pair


def _free_on_all(ranks: RankSet, group: dist.ProcessGroup, barrier: StoreBarrier) -> GroupPair | None:
    """A pair that every rank has returned, in any order; None for none.

    Ranks wait for each other even if there is no pair yet: if one does not join, no rank makes groups that others do
    not count.
    """
    returned = ranks.unordered.copy()  # garbage collection, which may return a pair, may run at any line
    fitting = sorted(number for number, pair in returned.items() if _fits(pair, group, barrier.timeout))
    free = barrier.named_by_all(fitting)
    return ranks.unordered.pop(free[0]) if free else None


def _fits(pair: GroupPair, group: dist.ProcessGroup, timeout: float) -> bool:
    """Whether a pair can have this timeout, and has no group for rows or one of the same backends as `group`."""
    if pair.timeout != timeout and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return False  # torch cannot change the timeout of groups that it checks
    payload = pair.payload
    return payload is None or dist.get_backend_config(payload) == dist.get_backend_config(group)


def only_device(group: dist.ProcessGroup | None) -> torch.device | None:
    """The device of all batches of a group; None if it depends on the batch.

    NCCL supports only CUDA. gloo, "cpu:gloo,cuda:nccl" and a single process support both: their ranks may train on the
    CPU of a machine that has GPUs, and must not touch the GPUs then.
    """
    if group is not None and not serves(group, "cpu"):
        return _gpu_of(group)
    if torch.cuda.is_available() and (group is None or serves(group, "cuda")):
        return None
    return torch.device("cpu")


def numbers_device(group: dist.ProcessGroup) -> torch.device:
    """The device for small tensors of numbers that are sent over a group: the host if its backend supports it."""
    return torch.device("cpu") if serves(group, "cpu") else _gpu_of(group)


def _gpu_of(group: dist.ProcessGroup) -> torch.device:
    """The device that the group or the world is bound to; else the current device, which a script may not have set."""
    for each in (group, dist.group.WORLD):
        if (bound := getattr(each, "bound_device_id", None)) is not None:
            return bound
    return torch.device("cuda", torch.cuda.current_device())


def ring_sizes(world_size: int) -> tuple[int, ...]:
    """Sizes of the rings of a gather: the factors of `world_size` with the least sum, and of these the fewest.

    The largest ring comes first: its ranks are neighbours, so that most of its hops stay within a node. There is one
    ring for fewer than 64 ranks or a prime number of them, at most two from 64 ranks on, three from 512, and so on.
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
    """The global ranks of each of the rings of `members[rank]`.

    The first ring consists of n neighbours, which often share a node, the second of every n-th rank, and so on, so that
    the gathered table is in the order of the ranks.
    """
    rings, stride = [], 1
    for size in ring_sizes(len(members)):
        first = rank - rank // stride % size * stride
        rings.append(list(members[first : first + size * stride : stride]))
        stride *= size
    return rings


def _new_group(members: list[int], barrier: StoreBarrier, **options: Any) -> tuple[dist.ProcessGroup, frozenset[int]]:
    """Make a group over some ranks of a channel, and return it with its connections if it is a gloo group.

    All ranks of the channel make such a group at the same time, each with its own members; other ranks have no part in
    its shuffler.
    """
    subgroup = len(members) < dist.get_world_size()
    limit, before = datetime.timedelta(seconds=barrier.timeout), open_sockets()
    if _NAMED_BY_CALLS:
        with _own_number(members, barrier if subgroup else None):
            made = dist.new_group(members, timeout=limit, use_local_synchronization=True, **options)
    else:
        if subgroup:
            _align_group_names(barrier)
        made = dist.new_group(members, timeout=limit, use_local_synchronization=subgroup, **options)
        _this_world().names_used = _num_groups()
    return made, connections_of(made, before) if serves(made, "cpu") else frozenset()


def _nccl_options(backends: str, timeout: float) -> Any:
    """NCCL's options for a group of these backends, as `get_backend_config` gives them; None without NCCL."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)  # which a CPU build of torch lacks
    if nccl is None or "cuda:nccl" not in backends.split(","):
        return None
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=timeout)  # else torch warns that new_group's timeout replaces it
    options.config.max_ctas = _NCCL_BLOCKS
    return options


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _align_group_names(barrier: StoreBarrier) -> None:
    """Bring all members to the same number of groups, from which torch derives the next group's name.

    The numbers may differ, for example where only some ranks have groups of node leaders, loggers or pipeline stages.
    Ranks with fewer groups make further ones, each with itself as the only member.
    """
    target = barrier.largest(max(_num_groups(), _this_world().names_used))
    while _num_groups() < target:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True, group_desc=_UNUSED)


@contextlib.contextmanager
def _own_number(members: Sequence[int], barrier: StoreBarrier | None) -> Iterator[None]:
    """Let torch name a new group by evenrank's own count, and restore torch's number of calls.

    That number may differ between the members. Afterwards it must not differ because of evenrank, whose groups only
    some ranks make: groups that all ranks make would have different names. Ranks agree on the count at the `barrier`;
    None for all ranks, which make the same groups.
    """
    world, ranks, default = dist.distributed_c10d._world, tuple(members), dist.distributed_c10d._get_default_group()
    numbers = _NUMBERS.setdefault(default, Counter())
    number = numbers[ranks] if barrier is None else barrier.largest(numbers[ranks])
    numbers[ranks] = number + 1
    calls, world.group_count = world.group_count, _OWN_NUMBERS + number
    try:
        yield
    finally:
        if dist.group.WORLD is default:  # else the program has begun again meanwhile
            world.group_count = calls


def try_collectives(payload: dist.ProcessGroup, device: torch.device, all_to_all: bool) -> list[dist.Work]:
    """Start the collectives of a step over the payload group, so that the first step does not wait for connections.

    These are an all-gather and, if `all_to_all` is set and the backend has one, an all-to-all.
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


def out_of_reach(members: Sequence[int]) -> str:
    """A clause that names the ranks on the host of a store that does not answer; "" on that host."""
    there = rank_set(members).beside_store
    if not there or dist.get_rank() in there:
        return ""
    return f"; {name_ranks(there)} {'runs' if len(there) == 1 else 'run'} on that host, which may be out of reach"
