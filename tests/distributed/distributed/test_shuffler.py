"""The shuffler on real ranks: nothing lost, never worse, in two phases, to the end of data."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.channel import agree
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.options import ShufflerOptions
from commons.perf_model.partitioner import METHODS
from commons.sequence_batch import branches, fields
from commons.sequence_batch.fields import batch_items
from commons.sequence_batch.row_leaves import describe_leaf
from commons.sequence_batch.rows import Rows
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch, rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, closing, my_batch
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on_ranks, on_two_ranks

FLOATS = [torch.float32, torch.float16, torch.float64]


def _shuffle(seed, rows, real, options, kwargs):
    batch = my_batch(seed, rows, real, **kwargs)
    with closing(SquareShuffler(ShufflerOptions(**options))) as shuffler:
        result, indices, workloads = shuffler.shuffle(batch, return_indices=True, return_workloads=True)
        again = shuffler.shuffle(batch)
        assert rows_as_values(again, padding=True) == rows_as_values(result, padding=True)
        stats = shuffler.last_stats
    leaves = itertools.chain(*(describe_leaf((), leaf).tensors(leaf) for leaf in Rows.of(result).leaves.values()))
    storages = [tensor.untyped_storage().data_ptr() for tensor in leaves if tensor.numel()]
    assert len(set(storages)) == len(storages) or not stats.moved  # TorchRec frees some early
    assert torch.equal(SquareShuffler.get_workloads(shuffler, result)[: result.actual_batch_size], workloads)
    return batch, result, indices.tolist(), int(workloads.sum()), stats


def _lookups(batch):
    return sum(
        value.values().numel()
        for name, value in vars(batch).items()
        if isinstance(value, KeyedJaggedTensor) and name != "labels"
    )


def check(answers, options, padding):
    batches, results, indices, loads_after, of_ranks = zip(*answers)
    starts = itertools.accumulate((batch.batch_size for batch in batches), initial=0)
    ids = [start + row for start, batch in zip(starts, batches) for row in range(batch.actual_batch_size)]
    by_id = dict(zip(ids, itertools.chain(*map(rows_as_values, batches))))
    assert sorted(itertools.chain(*indices)) == ids  # nothing lost, nothing doubled
    for batch, result, own in zip(batches, results, indices):
        assert own == sorted(own) and len(own) == result.actual_batch_size
        assert result.batch_size == max(1, batch.batch_size, len(own))
        expected = [by_id[index] for index in own] + padding * (result.batch_size - len(own))
        assert rows_as_values(result, padding=True) == expected
    stats = of_ranks[0]
    assert max(loads_after) <= max(stats.loads_before)  # never worse
    assert loads_after == stats.loads_after
    lookups = [tuple(map(_lookups, each)) for each in (batches, results)]
    assert lookups == [stats.lookups_before, stats.lookups_after]
    if sum(lookups[0]):
        assert stats.lookup_imbalance_before == max(lookups[0]) * len(results) / sum(lookups[0]) - 1
    if stats.moved and options["equal_size"]:
        assert max(map(len, indices)) - min(map(len, indices)) <= 1
        assert max(loads_after) < max(stats.loads_before)
    # What does not depend on the rank or on time is the same everywhere.
    same = ("imbalance_before", "imbalance_after", "rows_moved", "tokens_moved", "loads_before", "loads_after")
    same += ("lookups_before", "lookups_after", "rank_speeds")
    assert len({tuple(getattr(each, name) for name in same) for each in of_ranks}) == 1


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.tuples(st.sampled_from([0, 1, 3, 7]), st.integers(0, 7)), min_size=4, max_size=4),
    options=st.fixed_dictionaries(
        {
            "transport": st.sampled_from(["all_to_all", "all_gather"]),
            "partitioner": st.sampled_from(sorted(METHODS)),
            "equal_size": st.booleans(),
            "slack": st.sampled_from([0.0, 0.01, 0.2]),
        }
    ),
    dtypes=st.tuples(*map(st.sampled_from, (JAGGED_DTYPES, JAGGED_DTYPES, [None, *FLOATS]))),
)
def test_samples_are_conserved_and_never_worse(ranks, seed, sizes, options, dtypes):
    rows = [size for size, _ in sizes][: ranks.world_size]
    real = [min(size, count) for size, count in sizes][: ranks.world_size]
    kwargs = dict(zip(("values_dtype", "tiny_dtype", "weights_dtype"), dtypes))
    padding = rows_as_values(random_batch(0, 1, 0, **kwargs), padding=True)
    check(ranks.run(_shuffle, seed, rows, real, options, kwargs), options, padding)


class DirectShuffler(SquareShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch.features.lengths().view(3, -1).sum(0).to(torch.int64) ** 2 + 10


class LearnedShuffler(SquareShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        costs = super().get_workloads(batch).clamp(max=255).to(torch.bfloat16)
        return costs.requires_grad_() if dist.get_rank() else costs


@on_two_ranks
def test_workloads_may_be_in_bfloat16_and_have_a_graph():
    batch = my_batch(5, [16] * 4)
    with closing(LearnedShuffler()) as shuffler:
        result, workloads = shuffler.shuffle(batch, return_workloads=True)
        assert workloads.tolist() == shuffler.get_workloads(result).tolist()


class BufferShuffler(SquareShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        self.buffer[:] = super().get_workloads(batch)
        return self.buffer


@pytest.mark.parametrize("buffer", [torch.zeros(16, dtype=torch.int64), np.zeros(16, dtype=np.int64)])
@on_two_ranks
def test_costs_may_be_returned_in_the_same_memory_for_every_batch(buffer):
    batches = [my_batch(seed, [16] * 4) for seed in range(3)]
    with closing(BufferShuffler()) as shuffler:
        shuffler.buffer = buffer
        handles = [shuffler.start_shuffle(batch) for batch in batches]
        for batch, handle in zip(batches, handles):
            result = shuffler.finish_shuffle(batch, handle)
            load = handle.stats.loads_after[dist.get_rank()]
            assert load == int(SquareShuffler.get_workloads(shuffler, result).sum())


@pytest.mark.parametrize("mode, most", [("balance", 2), ("observe", 1)])
@on_ranks
def test_the_fields_of_a_batch_are_walked_at_most_twice_per_step(mode, most):
    batch = my_batch(5, [16] * 4, max_length=60 if dist.get_rank() == 0 else 1)
    walks = mock.Mock(side_effect=batch_items)
    with (
        closing(DirectShuffler(ShufflerOptions(mode=mode))) as shuffler,
        mock.patch.object(fields, "batch_items", walks),
        mock.patch.object(branches, "batch_items", walks),
    ):
        handle = shuffler.start_shuffle(batch)
        result = shuffler.finish_shuffle(batch, handle)
    assert walks.call_count == most and (result is not batch) == (mode == "balance")


@pytest.mark.parametrize("longest, exchanges", [(60, 3), (0, 0)])
@on_ranks
def test_a_shuffle_is_two_gathers_of_numbers_and_one_exchange_if_rows_move(longest, exchanges):
    batch = my_batch(5, [16] * 4, max_length=longest if dist.get_rank() == 0 else longest // 60)
    gather, exchange = (mock.Mock(side_effect=each) for each in (agree.all_gather_single, dist.all_to_all_single))
    with closing(SquareShuffler(ShufflerOptions(transport="all_to_all"))) as shuffler:
        shuffler.shuffle(batch)  # the first also agrees on the schema, and makes groups
        with (
            mock.patch.object(agree, "all_gather_single", gather),
            mock.patch.object(dist, "all_to_all_single", exchange),
        ):
            for _ in range(3):
                shuffler.shuffle(batch)
    assert (gather.call_count, exchange.call_count) == (6, exchanges)


@on_two_ranks
def test_handles_are_used_once_and_on_their_own_batch():
    with closing(SquareShuffler()) as shuffler:
        batch = my_batch(1, [4] * 4)
        handle = shuffler.start_shuffle(batch)
        next_handle = shuffler.start_shuffle(following := my_batch(1, [4] * 4))

        def finished_with(other):
            return error_of(shuffler.finish_shuffle, other, handle)

        other = finished_with(batch.index_select([0, 1]))
        assert "started with a RichBatch of 4 rows" in other and "2 rows" in other
        for labels, found in ((None, "absent"), (batch.sample_id, "tensor int64 []")):
            said = finished_with(dataclasses.replace(batch, labels=labels))
            assert f"field 'labels' is {found}, and was jagged ['label'] float32, lengths int64 when the" in said
        batch.actual_batch_size = 3
        assert "of 4 rows, 3 of them real" in finished_with(batch)
        batch.actual_batch_size = 4
        one_other_field = dataclasses.replace(batch, sample_id=batch.sample_id.clone())
        likes = (like := my_batch(1, [4] * 4), like.to("cpu"), dataclasses.replace(like), one_other_field)
        for alike in (*likes, following, following.to("cpu"), following.to("meta")):
            assert "and is finished with another one; finish a shuffle with" in finished_with(alike)
        shuffler.finish_shuffle(batch, handle)
        shuffler.finish_shuffle(following, next_handle)
        assert "used twice" in finished_with(batch)
    assert "closed" in error_of(shuffler.start_shuffle, batch)


@on_two_ranks
def test_a_rank_without_a_batch_is_told_how_to_shuffle():
    batch = None if dist.get_rank() else my_batch(1, [4] * 4)
    with closing(SquareShuffler()) as shuffler:
        for _ in range(2):  # the shuffler stays usable
            text = error_of(shuffler.shuffle, batch)
            assert text.startswith("TypeError: rank 1: the batch is None; shuffle() needs one: without a batch, call")
        handle = shuffler.start_shuffle(batch)
        text = error_of(shuffler.finish_shuffle, batch, handle)
        assert "the handle of step 2 is finished with None; a shuffle that was started without a batch is" in text


@on_two_ranks
def test_a_shuffle_that_ended_for_all_is_no_failure_to_tell_others():
    with closing(SquareShuffler()) as shuffler, mock.patch.object(ControlChannel, "post_failure") as posted:
        handle = shuffler.start_shuffle(None)
        with pytest.raises(ValueError, match="no rank has a batch at step 0; the data has ended"):
            shuffler.finish_shuffle(my_batch(1, [4] * 4), handle)
        assert handle.has_ended() and not posted.called
