"""The shuffler on real ranks: its modes and options, rows of any number and length, token caps, verification, and
groups of rows, which end on one rank, in one batch, whichever ranks brought them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.exchange.payload import Part
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from commons.sequence_batch.batch import BaseBatch
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, closing, my_batch
from tests.helpers.models.torchrec_model import make_batch
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.ranks.faults import error_of, logged, raised_by


def _mode(options):
    batch = my_batch(9, [8] * 4, max_length=60 if dist.get_rank() == 0 else 1)
    with closing(SquareShuffler(ShufflerOptions(**options))) as shuffler:
        result, indices = shuffler.shuffle(batch, return_indices=True)
        stats = shuffler.last_stats
    return result is batch, indices.tolist(), None if stats is None else dataclasses.asdict(stats)


def test_what_moves_nothing(ranks):
    for rank, (same, indices, stats) in enumerate(ranks.run(_mode, {"mode": "observe"})):
        assert same and indices == list(range(rank * 8, rank * 8 + 8))
        assert stats["imbalance_after"] < stats["imbalance_before"] and not stats["moved"] and stats["bytes_sent"] == 0
    assert all(same and stats is None for same, _, stats in ranks.run(_mode, {"mode": "off"}))
    for same, _, stats in ranks.run(_mode, {"min_gain": 0.99}):
        assert same and stats["gated"] and not stats["moved"]


def _growing():
    """Rows of this rank, batch by batch and in windows, of which any batch may be the largest so far."""
    rows_of_ranks, sizes = ([2, 2, 2, 2], [2, 30, 2, 2], [9, 9, 9, 9]), []
    with closing(SquareShuffler()) as shuffler:
        for step, rows in enumerate(rows_of_ranks):
            sizes.append(shuffler.shuffle(my_batch(step, rows)).actual_batch_size)
        source = (my_batch(step, rows) for rows in rows_of_ranks for step in range(3))
        sizes += [batch.actual_batch_size for batch in windowed_iter(source, shuffler, 3)]
    return sizes


def test_a_rank_may_outgrow_the_first_batch_and_window(ranks):
    expected = [2 * ranks.world_size, 30 + 2 * (ranks.world_size - 1), 9 * ranks.world_size]
    sums = [sum(sizes) for sizes in zip(*ranks.run(_growing))]
    assert sums[:3] == expected
    assert [sum(sums[first : first + 3]) for first in (3, 6, 9)] == [3 * rows for rows in expected]


def _identity():
    batch = my_batch(9, [3, 0, 2, 5])
    with closing(IdentityBalancedBatchShuffler()) as shuffler:
        result, indices, workloads = shuffler.shuffle(batch, return_indices=True, return_workloads=True)
    return rows_as_values(result) == rows_as_values(batch), result.batch_size, indices.tolist(), workloads.tolist()


def test_identity_moves_nothing_and_gives_an_empty_rank_one_row_of_padding(ranks):
    rows, first = [3, 0, 2, 5], 0
    for rank, (same, size, indices, workloads) in enumerate(ranks.run(_identity)):
        assert same and size == max(1, rows[rank]) and workloads == [1] * rows[rank]
        assert indices == list(range(first, first + rows[rank]))
        first += rows[rank]


def _empty_rows(transport):
    """Rows of no elements: they move, and there is nothing to send."""
    rows = 4
    features = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.zeros(0), lengths=torch.zeros(2 * rows, dtype=torch.int64)
    )
    batch = BaseBatch(features, rows, {"a": 1, "b": 1})
    weight = 1000 if dist.get_rank() == 0 else 1
    with closing(SquareShuffler(ShufflerOptions(transport=transport, slack=0.0))) as shuffler:
        with mock.patch.object(shuffler, "get_workloads", lambda batch: torch.arange(1, rows + 1) * weight):
            results = [shuffler.shuffle(batch, return_indices=True) for _ in range(2)]
        stats = shuffler.last_stats
    return [(result.actual_batch_size, indices.tolist()) for result, indices in results], stats.moved, stats.bytes_sent


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_rows_without_elements_move(ranks, transport):
    answers = ranks.run(_empty_rows, transport)
    assert all(moved and not sent for _, moved, sent in answers)
    for step in range(2):
        ids = [row for results, _, _ in answers for row in results[step][1]]
        assert sorted(ids) == list(range(4 * ranks.world_size)) and answers[0][0][step][1] != [0, 1, 2, 3]


def _verified(damage):
    original = Part.read

    def damaged(part, words, rows):
        tensor = original(part, words, rows)
        if damage == "nothing" or dist.get_rank() != 1:
            return tensor
        if damage == "weights" and part.weights:
            tensor[0] += 1
        if damage == "rows" and part.path == ("image",):
            tensor[[0, 1]] = tensor[[1, 0]]
        return tensor

    batch = my_batch(3, [16] * 4, max_length=60 if dist.get_rank() == 0 else 1)
    with mock.patch.object(Part, "read", damaged), closing(SquareShuffler(ShufflerOptions(verify=True))) as shuffler:

        def move_rows():
            assert shuffler.shuffle(batch) is not batch

        return raised_by(move_rows)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing", "no error"),
        ("weights", "changed the content of features (weights)"),
        ("rows", "put fields of different rows together"),
    ],
)
def test_verify_notices_damage_on_any_rank(ranks, damage, message):
    assert all(message in text for text in ranks.run(_verified, damage))


@dataclasses.dataclass
class Views(BaseBatch):
    """Fields whose memory is not what they say: conjugates with a gap between them, and negatives."""

    waves: torch.Tensor = dataclasses.field(kw_only=True)
    signs: torch.Tensor = dataclasses.field(kw_only=True)


def _verified_views():
    """The numbers of rows before and after; the fields are made of them."""
    rank = dist.get_rank()
    rows = 6 if rank else 1  # one row: its conjugate lies in memory with a stride of two
    number = torch.arange(rows, dtype=torch.float64) + 100 * rank + 1
    waves = torch.complex(number, 2 * number)[:, None].expand(rows, 2).contiguous()[:, ::2].conj()
    signs = torch._neg_view(number.to(torch.bfloat16))
    assert waves.is_conj() and signs.is_neg()
    length = 51 if rank == 1 else 1
    features = KeyedJaggedTensor(["item"], torch.arange(rows * length), lengths=torch.full((rows,), length))
    batch = Views(features, rows, {}, labels=number, waves=waves, signs=signs)
    with closing(SquareShuffler(ShufflerOptions(verify=True, slack=0.0, equal_size=False))) as shuffler:
        result = shuffler.shuffle(batch)
        assert shuffler.last_stats.moved
    real = result.labels[: result.actual_batch_size]
    assert torch.equal(result.waves[: len(real), 0], torch.complex(real, -2 * real))
    assert torch.equal(result.signs[: len(real)], -real.to(torch.bfloat16))
    return number.tolist(), real.tolist()


def test_verify_takes_views_of_any_kind(ranks):
    brought, trained = zip(*ranks.run(_verified_views))
    assert sorted(chain.from_iterable(brought)) == sorted(chain.from_iterable(trained))


def _named_tokens(names):
    """Excess over a cap of one token, of key "b" alone: rows bring 3 values of key "a" and 1 of key "b"."""
    lengths = torch.tensor([3, 3, 1, 1])
    features = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(8), lengths=lengths, stride=2)
    batch = BaseBatch(features, 2, {"a": 3, "b": 1})
    with closing(SquareShuffler(ShufflerOptions(max_tokens_per_rank=1))) as shuffler:
        shuffler.token_feature_names = names
        try:
            shuffler.shuffle(batch)
        except KeyError as error:
            return error.args[0]
        return shuffler.last_stats.excess_tokens


def test_what_counts_as_a_token_can_be_said(two_ranks):
    excess = [two_ranks.run(_named_tokens, names)[0] for names in (None, ["a", "b"], ["b"])]
    assert excess == [7, 7, 1]
    for said in two_ranks.run(_named_tokens, ["b", "c"]):
        assert "features ['c'] are not among the batch's keys ['a', 'b']: correct token_feature_names" in said


def _observed_cap(windows):
    """What is said of a cap that a plan keeps, of 9 tokens on each rank, but no row moves to keep."""
    lengths = torch.tensor([8, 8] if dist.get_rank() == 0 else [1, 1])
    batch = BaseBatch(KeyedJaggedTensor(keys=["a"], values=torch.arange(int(lengths.sum())), lengths=lengths), 2)
    options = ShufflerOptions(mode="observe", max_tokens_per_rank=12)
    with closing(SquareShuffler(options)) as shuffler, logged() as warnings:
        next(windowed_iter(iter([batch]), shuffler, 2)) if windows else shuffler.shuffle(batch)
        return warnings, shuffler.num_cap_exceeded, shuffler.last_stats.excess_tokens


@pytest.mark.parametrize("windows", [False, True])
def test_a_cap_that_is_only_observed_is_not_called_unattainable(two_ranks, windows):
    assert two_ranks.run(_observed_cap, windows) == [([], 0, 4)] * 2


# ------------------------------------------------------------------------------------------------------- groups of rows


ROWS = 8


class GroupShuffler(CubicShuffler):
    """Rows whose sample ids agree up to the last digit are a group."""

    def get_groups(self, batch):
        return batch.sample_id // 10 - 7


def batch_of(rank, step, group_size):
    """Groups of that size, whose rows lie on all ranks in turn; the last rows are padding."""
    world, count = dist.get_world_size(), ROWS - 2
    first = step * world * count
    places = range(first + rank, first + world * count, world)
    return make_batch([10 * (1 + place // group_size) + place % group_size for place in places], ROWS)


def _shuffle(options, group_size):
    with contextlib.closing(GroupShuffler(ShufflerOptions(**options))) as shuffler:
        results = []
        for step in range(2):
            batch = batch_of(dist.get_rank(), step, group_size)
            result = shuffler.shuffle(batch)
            results.append((rows_of(batch), rows_of(result), shuffler.last_stats.loads_after))
        return results


def _shuffle_windows(options, group_size):
    with contextlib.closing(GroupShuffler(ShufflerOptions(**options))) as shuffler:
        batches = [batch_of(dist.get_rank(), step, group_size) for step in range(4)]
        trained = list(windowed_iter(iter(batches), shuffler, 2))
        return [list(map(rows_of, each)) for each in (batches, trained)]


def rows_of(batch):
    """The id of every real row, and all of its values."""
    return list(zip(batch.sample_id.tolist(), map(repr, rows_as_values(batch))))


def check_groups(before, after, group_size):
    """All rows are there as they were, and every group is in one of the batches of `after`."""
    assert sorted(chain.from_iterable(before)) == sorted(chain.from_iterable(after))
    homes = [Counter(sample // 10 for sample, _ in rows) for rows in after]
    assert all(set(home.values()) == {group_size} for home in homes if home)


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("options", [{"equal_size": False}, {}, {"equal_size": False, "min_gain": 1.0}])
def test_groups_come_together(ranks, world_size, options, transport):
    group_size = 3
    answers = ranks.run(_shuffle, {**options, "transport": transport, "verify": True}, group_size)
    for step in zip(*answers):
        before, after, loads = zip(*step)
        check_groups(before, after, group_size)
        assert len(set(loads)) == 1
        if options.get("equal_size", True):
            assert max(map(len, after)) - min(map(len, after)) in (0, group_size)


def test_groups_of_a_window_end_in_one_step_of_one_rank(ranks, world_size):
    answers = ranks.run(_shuffle_windows, {"equal_size": False}, 3)
    before, after = ([rows for answer in answers for rows in answer[at]] for at in (0, 1))
    check_groups(before, after, 3)


class WrongGroups(CubicShuffler):
    def get_groups(self, batch):
        return self.wrong if dist.get_rank() else torch.zeros(batch.batch_size, dtype=torch.int64)


def _wrong_groups(on_last):
    with contextlib.closing(WrongGroups()) as shuffler:
        shuffler.wrong = on_last
        shuffler.shuffle(make_batch([10, 11, 20], 4))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (torch.zeros(3), "groups has shape (3,), there are 4 rows; each has the number of its group"),
        (None, "rank 1: get_groups returned None; it returns an integer per row"),
    ],
    ids=str,
)
def test_wrong_groups_of_one_rank_are_named_on_all(two_ranks, wrong, said):
    answers = two_ranks.run(error_of, _wrong_groups, wrong)
    assert len(set(answers)) == 1 and said in answers[0], answers
