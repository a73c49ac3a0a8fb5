"""The exchange without a process group: the collectives are replaced by slicing, everything else is the real code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.shared.one_of_many_ranks import packed_rows, planned_exchange, words_of_rows
from commons.distributed.exchange.payload import PayloadLayout
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.host_copies import host_copy
from commons.sequence_batch.open_batch import row_counts, row_fields
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.batches.easyrec import easyrec_batch
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch, rows_as_values
from tests.helpers.models.hstu_models import random_batch as random_hstu_batch

KEYS = ("user", "item", "action")


def lengths_of(batch):
    """int64 (real rows, keys of all jagged fields)."""
    rows, real = row_counts(batch)
    columns = []
    for _, value in row_fields(batch):
        if not isinstance(value, torch.Tensor):
            num_keys = len(value.keys()) if isinstance(value, KeyedJaggedTensor) else 1
            columns.append(value.lengths().view(num_keys, rows)[:, :real].t().numpy())
    return np.concatenate(columns, axis=1).astype(np.int64)


def plan_for(batches, destination, host_values=None):
    rows, real = np.array([row_counts(batch) for batch in batches]).T.copy()
    count = int(real.sum())
    lengths = np.concatenate([lengths_of(batch) for batch in batches])
    ones = np.ones(count, dtype=np.int64)
    gathered = packed_rows(rows, real, ones, ones, lengths, host_values)
    return ShufflePlan.of(gathered, np.array(destination, dtype=np.int64))


def exchanges_for(plan, batches, all_gather=False):
    layout = PayloadLayout.of(BatchSchema.of(batches[0]))
    return [
        planned_exchange(plan.gathered, plan.destination, layout, rank, all_gather=all_gather)
        for rank in range(len(batches))
    ]


def run_on_all_ranks(batches, destination, all_gather, host_values=None):
    """Pack on every rank, hand each one what it would have received, unpack."""
    plan = plan_for(batches, destination, host_values)
    exchanges = exchanges_for(plan, batches, all_gather)
    packed = [exchange.pack([batch]) for exchange, batch in zip(exchanges, batches)]
    results = []
    for rank, (exchange, batch) in enumerate(zip(exchanges, batches)):
        buffer, _, indices = packed[rank]
        received = exchange.received(buffer)
        if exchange.block_words:
            blocks = received.view(len(batches), exchange.block_words)
            for source, (_, sent, _) in enumerate(packed):
                blocks[source, : len(sent)] = sent
        else:
            parts = [torch.split(sent, exchanges[k].input_splits)[rank] for k, (_, sent, _) in enumerate(packed)]
            received.copy_(torch.cat(parts))
            assert [len(part) for part in parts] == exchange.output_splits
        results.append(exchange.unpack(batch, buffer, indices))
    return plan, results


@st.composite
def cases(draw):
    num_ranks = draw(st.integers(1, 4))
    batches, first = [], 0
    values = draw(st.sampled_from(JAGGED_DTYPES))
    tiny = draw(st.sampled_from(JAGGED_DTYPES))
    weights = draw(st.sampled_from([None, torch.float32, torch.float16, torch.float64]))
    longest = draw(st.sampled_from([0, 1, 6]))
    for _ in range(num_ranks):
        rows = draw(st.integers(0, 5))
        real = draw(st.integers(0, rows))
        batches.append(
            random_batch(
                draw(st.integers(0, 999)),
                rows,
                real,
                first_id=first,
                values_dtype=values,
                tiny_dtype=tiny,
                weights_dtype=weights,
                max_length=longest,
            )
        )
        first += real
    destination = draw(st.lists(st.integers(0, num_ranks - 1), min_size=first, max_size=first))
    return batches, destination


@pytest.mark.parametrize("all_gather", [False, True])
@given(case=cases())
def test_every_row_arrives_whole_and_in_order(all_gather, case):
    batches, destination = case
    everything = [row for batch in batches for row in rows_as_values(batch)]
    plan, results = run_on_all_ranks(batches, destination, all_gather)
    for rank, result in enumerate(results):
        expected = [everything[row] for row in np.flatnonzero(np.array(destination, dtype=int) == rank)]
        assert rows_as_values(result) == expected
        assert result.batch_size == max(1, batches[rank].batch_size, plan.result_real_rows[rank])
        assert result.actual_batch_size == len(expected)
        # padding is empty and zero
        assert not result.image[len(expected) :].any() and not result.sample_id[len(expected) :].any()
        per_key = result.features.lengths().view(3, -1).sum(1).tolist()
        assert result.features._length_per_key is None or result.features.length_per_key() == per_key


@given(
    rows=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=3),
    all_gather=st.booleans(),
    data=st.data(),
)
def test_rows_of_nested_batches_arrive_whole(rows, all_gather, data):
    padded = [len(ids) + data.draw(st.integers(0, 2)) for ids in rows]
    batches = [easyrec_batch(ids, count, backwards=count % 2 == 1) for ids, count in zip(rows, padded)]
    everything = [row for batch in batches for row in rows_as_values(batch)]
    ranks = st.integers(0, len(batches) - 1)
    destination = data.draw(st.lists(ranks, min_size=len(everything), max_size=len(everything)))
    _, results = run_on_all_ranks(batches, destination, all_gather)
    for rank, (ids, result) in enumerate(zip(rows, results)):
        arrived = [row for row, place in zip(everything, destination) if place == rank]
        assert rows_as_values(result) == arrived and result.actual_batch_size == len(arrived)
        assert len(rows_as_values(result, padding=True)) == max(padded[rank], len(arrived))
        assert not result.dense_features["user"].values()[len(arrived) :].any() and len(ids) <= padded[rank]


def unpacked_on_meta(exchange, batch):
    """The result on a device without values."""
    buffer, _, indices = exchange.pack([batch])
    return exchange.unpack(batch, [torch.cat(buffer).to("meta")], indices.to("meta"))


@given(case=cases())
def test_the_host_knows_the_rows_of_a_result_on_a_device(case):
    """Unpacked on "meta", which holds no values that could be read back."""
    batches, destination = case
    plan, results = run_on_all_ranks(batches, destination, False)
    for exchange, batch, result in zip(exchanges_for(plan, batches), batches, results):
        on_device = unpacked_on_meta(exchange, batch)
        assert on_device.features.lengths().device.type == "meta"
        for key, mine, true in zip(result.features.keys(), *(b.host_lengths(*KEYS) for b in (on_device, result))):
            assert mine.tolist() == true.tolist(), key
        for name in ("tiny", "labels"):
            known = host_copy(getattr(on_device, name).lengths())
            assert known.tolist() == getattr(result, name).lengths().tolist()


def test_the_host_knows_candidates_that_have_moved():
    batches = [random_hstu_batch(4, max_num_candidates=3, actual_batch_size=3, seed=seed) for seed in range(2)]
    counts = np.concatenate([batch.num_candidates[:3].numpy() for batch in batches])
    plan = plan_for(batches, [1, 0, 0, 1, 0, 1], counts[:, None])
    _, results = run_on_all_ranks(batches, [1, 0, 0, 1, 0, 1], False, counts[:, None])
    for exchange, batch, result in zip(exchanges_for(plan, batches), batches, results):
        on_device = unpacked_on_meta(exchange, batch)
        assert on_device.host_values("num_candidates").tolist() == result.num_candidates.tolist()
        assert on_device.num_candidates.dtype == torch.int64


def test_results_own_their_storage():
    batches = [random_batch(1, 3), random_batch(2, 3, first_id=3)]
    _, results = run_on_all_ranks(batches, [1, 0, 1, 0, 1, 0], False)
    tensors = []
    for _, value in row_fields(results[0]):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            tensors += [value.values(), value.lengths()] + (
                [value.weights()] if value.weights_or_none() is not None else []
            )
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_nothing_is_sent_when_nobody_moves():
    batches = [random_batch(1, 3), random_batch(2, 3, first_id=3)]
    for exchange in exchanges_for(plan_for(batches, [0, 0, 0, 1, 1, 1]), batches):
        assert not exchange.moves and not exchange.changes and exchange.bytes_sent == 0


def test_only_moved_rows_are_sent():
    batches = [random_batch(1, 6), random_batch(2, 6, first_id=6)]
    plan = plan_for(batches, [0] * 5 + [1] + [1] * 6)
    first, second = exchanges_for(plan, batches)
    words = int(words_of_rows(plan.gathered, first.layout)[5])
    assert first.input_splits == [0, words] and first.bytes_sent == 4 * words
    assert second.moves and second.bytes_sent == 0 and len(first.pack([batches[0]])[1]) == words


def test_a_batch_that_has_changed_since_the_start_is_refused():
    batches = [random_batch(1, 6), random_batch(2, 6, first_id=6)]
    first, _ = exchanges_for(plan_for(batches, [0] * 5 + [1] + [1] * 6), batches)
    with pytest.raises(ValueError, match="stays as it is until its shuffle is finished"):
        first.pack([random_batch(3, 7)])
