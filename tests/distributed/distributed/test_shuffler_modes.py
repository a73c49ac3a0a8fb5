"""The shuffler on real ranks: its modes and options, rows of any number and length, token caps, verification, and
groups of rows, which end on one rank, in one batch, whichever ranks brought them.
"""

from __future__ import annotations

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
from commons.sequence_batch.schema import register_batch_type
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, closing, my_batch
from tests.helpers.models.hstu_models import random_batch as random_hstu_batch
from tests.helpers.models.torchrec_model import make_batch
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.ranks.faults import error_of, logged, on_rank
from tests.helpers.ranks.on_ranks import of_all, on_ranks, on_two_ranks


@pytest.mark.parametrize(
    "kind, options",
    [
        (SquareShuffler, {"mode": "observe"}),
        (SquareShuffler, {"min_gain": 0.99}),
        (SquareShuffler, {"mode": "off"}),
        (IdentityBalancedBatchShuffler, {}),
    ],
    ids=str,
)
@on_ranks
def test_what_moves_nothing(kind, options):
    """Ranks have rows of padding, which count in the indices of the ranks after them."""
    rank, rows, real = dist.get_rank(), [10, 7, 12, 9], [8, 5, 12, 0]
    batch = my_batch(9, rows, real, max_length=60 if rank == 0 else 1)
    with closing(kind(ShufflerOptions(**options))) as shuffler:
        costs = shuffler.get_workloads(batch)[: real[rank]]
        result, indices, workloads = shuffler.shuffle(batch, return_indices=True, return_workloads=True)
        stats, is_off = shuffler.last_stats, shuffler.options.mode == "off"
        if is_off:
            with mock.patch.object(shuffler, "get_workloads", side_effect=AssertionError("nobody needs them")):
                assert shuffler.shuffle(batch) is batch
    assert result is batch and torch.equal(workloads, costs)
    assert indices.tolist() == list(range(sum(rows[:rank]), sum(rows[:rank]) + real[rank]))
    assert is_off == (stats is None)
    if not is_off:
        assert not stats.moved and stats.bytes_sent == 0 and stats.gated == (shuffler.options.min_gain > 0)
        assert stats.gated or stats.imbalance_after < stats.imbalance_before
        assert stats.largest_load_trained == max(stats.loads_before) == stats.largest_load_before


@on_ranks
def test_a_rank_may_outgrow_the_first_batch_and_window():
    """Batch by batch and in windows, of which any batch may be the largest so far."""
    others = dist.get_world_size() - 1
    expected = [2 * (others + 1), 30 + 2 * others, 9 * (others + 1)]
    rows_of_ranks = ([2, 2, 2, 2], [2, 30, 2, 2], [9, 9, 9, 9])
    with closing(SquareShuffler()) as shuffler:
        batches = [shuffler.shuffle(my_batch(step, rows)) for step, rows in enumerate(rows_of_ranks)]
        assert [sum(of_all([batch.actual_batch_size])) for batch in batches] == expected
        source = (my_batch(step, rows) for rows in rows_of_ranks for step in range(3))
        sums = [sum(of_all([batch.actual_batch_size])) for batch in windowed_iter(source, shuffler, 3)]
    assert [sum(sums[first : first + 3]) for first in (0, 3, 6)] == [3 * rows for rows in expected]


@register_batch_type(per_rank=("stamp",))
@dataclasses.dataclass
class StampedBatch(BaseBatch):
    """Has a value of its rank."""

    stamp: int = 0


@pytest.mark.parametrize("mode", ["balance", "observe", "off"])
@on_two_ranks
def test_a_batch_without_rows_keeps_the_values_of_its_rank(mode):
    nothing, stamp = torch.zeros(0, dtype=torch.int32), 7 + dist.get_rank()
    batch = StampedBatch(KeyedJaggedTensor(keys=["a"], values=nothing, lengths=nothing, stride=0), 0, stamp=stamp)
    with closing(SquareShuffler(ShufflerOptions(mode=mode))) as shuffler:
        results = [shuffler.shuffle(batch), *windowed_iter(iter([batch]), shuffler, 2)]
    assert [(each.stamp, each.batch_size, each.actual_batch_size) for each in results] == [(stamp, 1, 0)] * 2


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
@on_ranks
def test_rows_without_elements_move(transport):
    """And there is nothing to send."""
    rows, rank = 4, dist.get_rank()
    lengths = torch.zeros(2 * rows, dtype=torch.int64)
    features = KeyedJaggedTensor(keys=["a", "b"], values=torch.zeros(0), lengths=lengths)
    batch = BaseBatch(features, rows, {"a": 1, "b": 1})
    with closing(SquareShuffler(ShufflerOptions(transport=transport, slack=0.0))) as shuffler:
        shuffler.get_workloads = lambda batch: torch.arange(1, rows + 1) * (1 if rank else 1000)
        for _ in range(2):
            _, indices = shuffler.shuffle(batch, return_indices=True)
            assert sorted(of_all(indices.tolist())) == list(range(rows * dist.get_world_size()))
            assert rank or indices.tolist() != [0, 1, 2, 3]
        assert shuffler.last_stats.moved and not shuffler.last_stats.bytes_sent


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("weights", "changed the content of features (weights)"),
        ("rows", "put fields of different rows together"),
    ],
)
@on_ranks
def test_verify_notices_damage_on_any_rank(damage, message):
    original = Part.read

    def damaged(part, words, rows):
        tensor = original(part, words, rows)
        if damage == "weights" and part.weights:
            tensor[0] += 1
        if damage == "rows" and part.path == ("image",):
            tensor[[0, 1]] = tensor[[1, 0]]
        return tensor

    batch = my_batch(3, [16] * 4, max_length=60 if dist.get_rank() == 0 else 1)
    spoilt = on_rank(1, mock.patch.object(Part, "read", damaged))
    with spoilt, closing(SquareShuffler(ShufflerOptions(verify=True))) as shuffler:
        assert message in error_of(shuffler.shuffle, batch)


@on_two_ranks
def test_verify_says_what_not_to_do_if_a_copy_has_reordered_rows():
    """Its rows would get the lengths of others."""
    batch = my_batch(3, [16] * 2, max_length=60 if dist.get_rank() == 0 else 1)
    with closing(SquareShuffler(ShufflerOptions(verify=True))) as shuffler:
        handle = shuffler.start_shuffle(batch)
        handle.follow(reversed_rows := batch.index_select(list(range(16))[::-1]))
        said = error_of(shuffler.finish_shuffle, reversed_rows, handle)
    assert "changed the content of" in said and "do not reorder rows while a batch is copied; if you do not" in said


class CachingShuffler(SquareShuffler):
    """Keeps its costs in the batch, as properties that cache do: in a field of the class, and in attributes."""

    def get_workloads(self, batch):
        batch.kept = batch.costs = batch.known = super().get_workloads(batch)
        return batch.costs


@dataclasses.dataclass
class CachingBatch(BaseBatch):
    kept: torch.Tensor | None = None

    def __post_init__(self):
        super().__post_init__()
        self.known = None

    def to(self, device, non_blocking=False):
        """A copy of the fields, as users write it."""
        return CachingBatch(self.features.to(device), labels=self.labels.to(device), kept=self.kept.to(device))


@on_two_ranks
def test_what_get_workloads_keeps_in_a_field_moves_with_the_rows_and_other_attributes_are_dropped():
    own = [my_batch(seed, [6, 6], max_length=60 if dist.get_rank() == 0 else 1) for seed in range(5)]
    batches = [CachingBatch(batch.features, labels=batch.sample_id) for batch in own]
    with closing(CachingShuffler()) as shuffler:
        results = [shuffler.shuffle(batch) for batch in batches[:2]]
        assert shuffler.last_stats.moved
        handle = shuffler.start_shuffle(batches[2])
        results.append(shuffler.finish_shuffle(batches[2].to("cpu"), handle))
        results += windowed_iter(iter(batches[3:]), shuffler, 2)
        for result in results:
            assert torch.equal(result.kept, SquareShuffler.get_workloads(shuffler, result))
            assert result.known is None and not hasattr(result, "costs")


def left_out(weight):
    return None


@dataclasses.dataclass
class Weighted(BaseBatch):
    """Its own copy converts a field, or leaves it out."""

    weight: torch.Tensor | None = None
    change = torch.Tensor.int

    def to(self, device, non_blocking=False):
        copied = super().to(device, non_blocking)
        copied.weight = self.change(self.weight)
        return copied


@pytest.mark.parametrize("change, found", [(torch.Tensor.int, "tensor int32 []"), (left_out, "absent")])
@on_two_ranks
def test_a_copy_of_other_fields_is_refused_in_every_step_if_rows_may_move(change, found):
    batch = Weighted(my_batch(1, [6, 6]).features, weight=torch.ones(6))
    said = {}
    for mode in ("balance", "observe"):
        with closing(SquareShuffler(ShufflerOptions(mode=mode))) as shuffler:
            handle = shuffler.start_shuffle(batch)
            with mock.patch.object(Weighted, "change", staticmethod(change)):
                said[mode] = error_of(shuffler.finish_shuffle, batch.to(torch.device("cpu")), handle)
    refused = f"ValueError: field 'weight' is {found}, and was tensor float32 [] when the shuffle was started; rows"
    assert said["balance"].startswith(refused) and not said["observe"].startswith(refused)
    assert found == "absent" or said["observe"] == "no error"


@dataclasses.dataclass
class Views(BaseBatch):
    """Fields whose memory is not what they say: conjugates with a gap between them, and negatives."""

    waves: torch.Tensor = dataclasses.field(kw_only=True)
    signs: torch.Tensor = dataclasses.field(kw_only=True)


@on_ranks
def test_verify_takes_views_of_any_kind():
    """Fields are made of the numbers of rows."""
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
    assert sorted(of_all(number.tolist())) == sorted(of_all(real.tolist()))


@on_two_ranks
def test_what_counts_as_a_token_can_be_said():
    """Excess over a cap of one token; a row has 3 values of key "a", 1 of key "b", and 2 of the labels' key "c"."""
    lengths = torch.tensor([3, 3, 1, 1])
    features = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(8), lengths=lengths, stride=2)
    labels = KeyedJaggedTensor(keys=["c"], values=torch.arange(4), lengths=torch.tensor([2, 2]))
    batch = BaseBatch(features, 2, {"a": 3, "b": 1}, labels=labels)
    for names, excess in ((None, 7), (["a", "b"], 7), (["b"], 1), (["b", "c"], None)):
        with closing(SquareShuffler(ShufflerOptions(max_tokens_per_rank=1))) as shuffler:
            shuffler.token_feature_names = names
            said = error_of(shuffler.shuffle, batch)
            assert excess is None or shuffler.last_stats.excess_tokens == excess
    assert said.startswith("KeyError: ")
    assert (
        "features ['c'] are not among the batch's keys ['a', 'b']: correct token_feature_names, which a tokens" in said
    )


@pytest.mark.parametrize("windows", [False, True])
@on_two_ranks
def test_a_cap_that_is_only_observed_is_not_called_unattainable(windows):
    """The plan, 9 tokens on each rank, keeps the cap; the rows as loaded exceed it."""
    lengths = torch.tensor([8, 8] if dist.get_rank() == 0 else [1, 1])
    batch = BaseBatch(KeyedJaggedTensor(keys=["a"], values=torch.arange(int(lengths.sum())), lengths=lengths), 2)
    options = ShufflerOptions(mode="observe", max_tokens_per_rank=12)
    with closing(SquareShuffler(options)) as shuffler, logged() as warnings:
        next(windowed_iter(iter([batch]), shuffler, 2)) if windows else shuffler.shuffle(batch)
    assert (warnings, shuffler.num_cap_exceeded, shuffler.last_stats.excess_tokens) == ([], 0, 4)


# ------------------------------------------------------------------------------------------------------- groups of rows


ROWS = 8


class GroupShuffler(CubicShuffler):
    """Rows whose sample ids agree up to the last digit are a group. Workloads of padding rows are negative."""

    dtype = torch.int64

    def get_workloads(self, batch):
        workloads = super().get_workloads(batch).to(self.dtype)
        workloads[batch.actual_batch_size :] = -1
        return workloads

    def get_groups(self, batch):
        return batch.sample_id // 10 - 7


def batch_of(rank, step, group_size):
    """Groups of that size, whose rows lie on all ranks in turn; the last rows are padding."""
    world, count = dist.get_world_size(), ROWS - 2
    first = step * world * count
    places = range(first + rank, first + world * count, world)
    return make_batch([10 * (1 + place // group_size) + place % group_size for place in places], ROWS)


def rows_of(batch):
    """The id of every real row, and all of its values."""
    return list(zip(batch.sample_id.tolist(), map(repr, rows_as_values(batch))))


def check_groups(before, after, group_size):
    """All rows are there as they were, and every group is in one of the batches of `after`."""
    assert sorted(of_all(chain.from_iterable(before))) == sorted(of_all(chain.from_iterable(after)))
    for home in (Counter(sample // 10 for sample, _ in rows) for rows in after):
        assert set(home.values()) <= {group_size}


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("options", [{"equal_size": False}, {}, {"equal_size": False, "min_gain": 1.0}])
@on_ranks
def test_groups_come_together(options, transport):
    group_size = 3
    with closing(GroupShuffler(ShufflerOptions(**options, transport=transport, verify=True))) as shuffler:
        for step, shuffler.dtype in enumerate((torch.int64, torch.int32)):
            batch = batch_of(dist.get_rank(), step, group_size)
            after = rows_of(shuffler.shuffle(batch))
            check_groups([rows_of(batch)], [after], group_size)
            counts = of_all([len(after)])
            assert not options.get("equal_size", True) or max(counts) - min(counts) in (0, group_size)
            assert len(set(of_all([shuffler.last_stats.loads_after]))) == 1


@on_ranks
def test_groups_of_a_window_end_in_one_step_of_one_rank():
    batches = [batch_of(dist.get_rank(), step, 3) for step in range(4)]
    with closing(GroupShuffler(ShufflerOptions(equal_size=False))) as shuffler:
        trained = list(windowed_iter(iter(batches), shuffler, 2))
    check_groups(map(rows_of, batches), [rows_of(batch) for batch in trained], 3)


class PairShuffler(SquareShuffler):
    """Rows of the same number, of all ranks, are a group."""

    def get_groups(self, batch):
        return torch.arange(batch.batch_size)


@on_two_ranks
def test_groups_of_a_batch_with_host_values():
    batch = random_hstu_batch(6, max_num_candidates=3, actual_batch_size=5, seed=dist.get_rank())
    with closing(PairShuffler()) as shuffler:
        result = shuffler.shuffle(batch)
        assert shuffler.last_stats.moved
    group_of = dict(of_all((row, number) for number, row in enumerate(rows_as_values(batch))))
    assert len(group_of) == 10 and sorted(group_of) == sorted(of_all(rows_as_values(result)))
    assert set(Counter(group_of[row] for row in rows_as_values(result)).values()) == {2}


class WrongGroups(CubicShuffler):
    def get_groups(self, batch):
        return self.wrong if dist.get_rank() else torch.zeros(batch.batch_size, dtype=torch.int64)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (torch.zeros(3), "groups has shape (3,), there are 4 rows; each has the number of its group"),
        (None, "rank 1: get_groups returned None; it returns an integer per row"),
    ],
    ids=str,
)
@on_two_ranks
def test_wrong_groups_of_one_rank_are_named_on_all(wrong, said):
    with closing(WrongGroups()) as shuffler:
        shuffler.wrong = wrong
        text = error_of(shuffler.shuffle, make_batch([10, 11, 20], 4))
    assert said in text and len(set(of_all([text]))) == 1
