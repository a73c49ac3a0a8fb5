"""The short rings in which many ranks gather."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed.channel import groups
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.channel.groups import ring_members, ring_sizes
from commons.distributed.options import ShufflerOptions
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, rows_by_every_call
from tests.helpers.ranks.faults import my_batch, own_groups
from tests.helpers.ranks.on_ranks import on_four_ranks
from tests.helpers.ranks.rank_pool import RankPool
from tests.helpers.ranks.stopped_ranks import fault, run_with_fault

THREE_AND_TWO, TWO_AND_THREE = (3, 2), (2, 3)


def _least_sum(number, most):
    """The least sum of at most `most` factors of a number, by all its divisors."""
    if most == 1:
        return number
    divisors = [each for each in range(2, number + 1) if number % each == 0]
    return min([number, *(each + _least_sum(number // each, most - 1) for each in divisors if each < number)])


def test_rings_have_the_least_sum_that_their_number_allows():
    for world_size in (*range(1, 1100), 4096, 16384):
        sizes = ring_sizes(world_size)
        assert math.prod(sizes) == world_size and list(sizes) == sorted(sizes, reverse=True)
        assert len(sizes) == 1 or 8 ** len(sizes) <= world_size
        assert sum(sizes) == _least_sum(world_size, max(1, len(np.base_repr(world_size, 8)) - 1))
    assert ring_sizes(524) == (131, 4)  # (131, 2, 2) has the same sum, and one collective more


@given(st.integers(1, 700), st.integers(1, 5))
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
def rings_of(*sizes: int) -> Iterator[None]:
    """Ranks that gather in rings of these sizes, as many do. With groups of their own."""
    with own_groups(), mock.patch.object(groups, "ring_sizes", lambda world_size: sizes):
        yield


def _heard(*sizes):
    """What a rank hears in collectives of every kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with rings_of(*sizes):
        channel = ControlChannel(dist.group.WORLD, np.float32(30.0), moves_rows=False)
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


@pytest.mark.parametrize(
    "rings_of_4",
    [
        {THREE_AND_TWO: [[3, 4, 5], [1, 4]], TWO_AND_THREE: [[4, 5], [0, 2, 4]]},
        pytest.param({(2, 2, 2): [[4, 5], [4, 6], [0, 4]]}, marks=pytest.mark.slow),
    ],
    ids=["two", "three"],
)
def test_rings_tell_what_one_tells(rings_of_4):
    """By their sizes the rings that rank 4 is in."""
    world_size = math.prod(next(iter(rings_of_4)))
    with RankPool(world_size) as pool:
        expected = pool.run(_heard, world_size)
        for sizes, rings in rings_of_4.items():
            answers = pool.run(_heard, *sizes)
            assert answers[4][3] == rings
            for answer, of_ring in zip(answers, expected):
                assert answer[:3] == of_ring[:3] and not answer[4]
                assert of_ring[3] == [list(range(world_size))] and of_ring[4]


@pytest.mark.parametrize("subgroups", [False, True])
@on_four_ranks
def test_batches_windows_and_dispatch_are_those_of_a_ring(subgroups):
    """Over all ranks, or over halves that know different numbers of groups."""
    rank, group, rows = dist.get_rank(), None, []
    if subgroups:
        halves = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        group = halves[rank % 2]
        for _ in range(rank % 3):  # such as groups of node leaders
            dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    for sizes in ((2, 1), (2,)) if subgroups else ((2, 2), (4,)):
        with rings_of(*sizes):
            rows.append(rows_by_every_call(group))
    assert rows[0] == rows[1]


def _die(folder, victim, sizes):
    """A rank dies while the others wait for it, each in its own ring."""
    with rings_of(*sizes):
        shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
        shuffler.shuffle(my_batch())
        if dist.get_rank() == victim:
            fault(folder, signal.SIGKILL)
        shuffler.shuffle(my_batch(1))


@pytest.mark.parametrize(
    ("sizes", "victim"),
    [
        ((2, 2), 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((TWO_AND_THREE, 2), (THREE_AND_TWO, 1), ((2, 2, 2), 5))
        ),
    ],
)
def test_every_rank_names_the_one_that_died(tmp_path, sizes, victim):
    size = math.prod(sizes)
    others = [rank for rank in range(size) if rank != victim]
    ended = run_with_fault(tmp_path, _die, victim, sizes, waits_for=others, limit=60.0, world_size=size)
    for rank in others:
        assert ended[rank].error.startswith(
            f"RankMissingError: rank {victim} did not take part in the gather of step 1"
        )
