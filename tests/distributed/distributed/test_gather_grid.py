"""Many ranks gather in rows and columns of a grid: what they hear, and which ranks they miss, stays the same."""

from __future__ import annotations

import contextlib
import signal
import weakref
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed.channel import groups
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.channel.groups import grid_shape, ring_members
from commons.distributed.options import ShufflerOptions
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, rows_by_every_call
from tests.helpers.ranks.faults import my_batch
from tests.helpers.ranks.rank_pool import RankPool
from tests.helpers.ranks.stopped_ranks import fault, run_with_fault

TWO_BY_THREE, THREE_BY_TWO = (2, 3), (3, 2)


@given(st.integers(1, 20_000))
def test_a_grid_is_as_square_as_its_ranks_allow(world_size):
    shape = grid_shape(world_size)
    divisors = [each for each in range(2, world_size) if world_size % each == 0]
    if world_size < groups.FEWEST_RANKS or not divisors:
        assert shape is None
    else:
        rows, columns = shape
        assert rows * columns == world_size
        assert rows <= columns and rows + columns == min(each + world_size // each for each in divisors)


@given(st.integers(1, 400), st.integers(1, 5))
def test_rings_tell_every_rank_of_all_in_their_order(world_size, stride):
    """By what the ranks know after each ring: lists of ranks, in the order in which they hear of them."""
    members = range(7, 7 + stride * world_size, stride)
    told = {rank: [rank] for rank in members}
    rings = {rank: ring_members(members, number) for number, rank in enumerate(members)}
    for ring in range(len(rings[7])):
        told = {rank: [each for other in rings[rank][ring] for each in told[other]] for rank in members}
        assert all(rank in rings[rank][ring] for rank in members)
    assert all(each == list(members) for each in told.values())


@contextlib.contextmanager
def grid_of(shape: tuple[int, int] | None) -> Iterator[None]:
    """Ranks that gather in a grid of this shape, as many do; None for one ring. With groups of their own."""
    pools = mock.patch.object(groups, "_WORLDS", weakref.WeakKeyDictionary())
    with pools, mock.patch.object(groups, "grid_shape", lambda world_size: shape):
        yield


def _heard(shape):
    """What a rank hears in collectives of every kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with grid_of(shape):
        channel = ControlChannel(dist.group.WORLD, 30.0, moves_rows=False)
        heard = [
            channel.gather(np.arange(4)[::2] * 2**60 - rank, 0),
            channel.agree("call", {"same": 1}, None, [rank, rank**2], 1),
            channel.gather(np.zeros(0, np.int64), 2),
        ]
        texts = channel.gather_text("ä" * rank, 3)
        on_main = channel.gather(np.array([rank]), 4, on_main=True).tolist()
        rings = [dist.get_process_group_ranks(each) for each in channel._groups.rings]
        over_all = channel.control_group is not None
        channel.close()
        pairwise = ControlChannel(dist.group.WORLD, 30.0, pairwise=rank == size - 1)
        swapped = pairwise.swap(np.arange(2 * size).reshape(size, 2) + 100 * rank, 0, "swap")
        assert pairwise.control_group is not None
        pairwise.close()
    return [each.tolist() for each in (*heard, swapped)], texts, on_main, rings, over_all


@pytest.fixture(scope="module")
def six_ranks():
    with RankPool(6) as pool:
        yield pool


def test_a_grid_tells_what_a_ring_tells(six_ranks):
    expected = six_ranks.run(_heard, None)
    for shape, rings in ((TWO_BY_THREE, [[3, 4, 5], [1, 4]]), (THREE_BY_TWO, [[4, 5], [0, 2, 4]])):
        answers = six_ranks.run(_heard, shape)
        assert answers[4][3] == rings
        for answer, of_ring in zip(answers, expected):
            assert answer[:3] == of_ring[:3] and not answer[4]
            assert of_ring[3] == [list(range(6))] and of_ring[4]


def _shuffled(shape, subgroups):
    """Batches, windows and dispatched rows, over all ranks or over halves that know different numbers of groups."""
    group, rank = None, dist.get_rank()
    if subgroups:
        halves = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        group = halves[rank % 2]
        for _ in range(rank % 3):  # such as groups of node leaders
            dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    with grid_of(shape):
        return rows_by_every_call(group)


@pytest.mark.parametrize("subgroups", [False, True])
def test_batches_windows_and_dispatch_are_those_of_a_ring(rank_pools, subgroups):
    pool, shape = rank_pools[4], (1, 2) if subgroups else (2, 2)
    assert pool.run(_shuffled, shape, subgroups) == pool.run(_shuffled, None, subgroups)


def _die(folder, victim, shape):
    """A rank dies while the others wait for it, each in its own ring."""
    with grid_of(shape):
        shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
        shuffler.shuffle(my_batch())
        if dist.get_rank() == victim:
            fault(folder, signal.SIGKILL)
        shuffler.shuffle(my_batch(1))


@pytest.mark.parametrize(
    ("shape", "victim"),
    [((2, 2), 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((THREE_BY_TWO, 2), (TWO_BY_THREE, 1)))],
)
def test_every_rank_names_the_one_that_died(tmp_path, shape, victim):
    size = shape[0] * shape[1]
    others = [rank for rank in range(size) if rank != victim]
    ended = run_with_fault(tmp_path, _die, victim, shape, waits_for=others, limit=60.0, world_size=size)
    for rank in others:
        assert ended[rank].error.startswith(
            f"RankMissingError: rank {victim} did not take part in the gather of step 1"
        )
