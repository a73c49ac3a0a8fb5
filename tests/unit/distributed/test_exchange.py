"""The exchange without a process group: the collectives are replaced by slicing, everything else is the real code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import batch_exchange
from commons.distributed.batch_exchange import exchange_rows, prepare_arrays
from commons.distributed.payload import PayloadLayout
from commons.distributed.row_routes import route_rows
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan
from commons.sequence_batch.fields import row_fields
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.batches import JAGGED_DTYPES, random_batch, rows_as_values


def lengths_of(batch):
    """int64 (real rows, keys of all jagged fields)."""
    columns = [
        value.lengths().view(len(value.keys()), batch.batch_size)[:, : batch.actual_batch_size].t().numpy()
        for _, value in row_fields(batch)
        if isinstance(value, KeyedJaggedTensor)
    ]
    return np.concatenate(columns, axis=1).astype(np.int64)


def plan_for(batches, destination):
    rows = np.array([batch.batch_size for batch in batches])
    real = np.array([batch.actual_batch_size for batch in batches])
    count = int(real.sum())
    gathered = GatheredRows(rows, real, np.ones(count, dtype=np.int64), np.ones(count, dtype=np.int64))
    destination = np.array(destination, dtype=np.int64)
    return ShufflePlan(gathered, destination, destination, 0)


def run_on_all_ranks(monkeypatch, batches, destination, all_gather):
    """Exchange twice: first record what every rank packs, then hand each rank what it would have received."""
    plan = plan_for(batches, destination)
    layout = PayloadLayout.of(BatchSchema.of(batches[0]))
    lengths = np.concatenate([lengths_of(batch) for batch in batches])
    routes = [route_rows(plan, lengths, layout, rank, all_gather) for rank in range(len(batches))]
    arrays = [prepare_arrays(each, layout, False) for each in routes]
    packed: dict[int, torch.Tensor] = {}

    def deliver(rank, received):
        if not packed.get(rank, torch.empty(0)).numel() and not routes[rank].sent_words:
            packed.setdefault(rank, torch.empty(0, dtype=torch.int32))
        if len(packed) < len(batches):
            return
        if all_gather:
            blocks = received.view(len(batches), routes[rank].gather_words)
            for source, words in packed.items():
                blocks[source, : len(words)] = words
            return
        parts = [torch.split(packed[source], routes[source].input_splits)[rank] for source in range(len(batches))]
        received.copy_(torch.cat(parts))

    def fake(rank):
        def send(words, received, _routes, _group, _async_op):
            packed[rank] = words.clone()
            deliver(rank, received)
            return None, words.numel() * 4

        return send

    def transfer(collective, device):
        return collective(None, False)[1]

    results = []
    for _ in range(2):
        results = []
        for rank, batch in enumerate(batches):
            monkeypatch.setattr(batch_exchange, "all_to_all_words", fake(rank))
            monkeypatch.setattr(batch_exchange, "all_gather_words", fake(rank))
            results.append(exchange_rows(batch, layout, routes[rank], arrays[rank], transfer)[0])
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
    with pytest.MonkeyPatch.context() as monkeypatch:
        plan, results = run_on_all_ranks(monkeypatch, batches, destination, all_gather)
    for rank, result in enumerate(results):
        expected = [everything[row] for row in np.flatnonzero(np.array(destination, dtype=int) == rank)]
        assert rows_as_values(result) == expected
        assert result.batch_size == plan.result_batch_size(rank) >= max(1, batches[rank].batch_size)
        assert result.actual_batch_size == len(expected)
        # padding is empty and zero
        assert not result.image[len(expected) :].any() and not result.sample_id[len(expected) :].any()
        per_key = result.features.lengths().view(3, -1).sum(1).tolist()
        assert result.features._length_per_key is None or result.features.length_per_key() == per_key


def test_results_own_their_storage(monkeypatch):
    batches = [random_batch(1, 3), random_batch(2, 3, first_id=3)]
    _, results = run_on_all_ranks(monkeypatch, batches, [1, 0, 1, 0, 1, 0], False)
    tensors = []
    for _, value in row_fields(results[0]):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            tensors += [value.values(), value.lengths()] + (
                [value.weights()] if value.weights_or_none() is not None else []
            )
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_nothing_is_sent_when_nobody_moves(monkeypatch):
    batches = [random_batch(1, 3), random_batch(2, 3, first_id=3)]

    def refuse(*_):
        raise AssertionError("a payload collective although nobody moves")

    monkeypatch.setattr(batch_exchange, "all_to_all_words", refuse)
    plan = plan_for(batches, [0, 0, 0, 1, 1, 1])
    layout = PayloadLayout.of(BatchSchema.of(batches[0]))
    lengths = np.concatenate([lengths_of(batch) for batch in batches])
    for rank, batch in enumerate(batches):
        routes = route_rows(plan, lengths, layout, rank, False)
        result, sent = exchange_rows(batch, layout, routes, prepare_arrays(routes, layout, False), None)
        assert result is batch and sent == 0


def test_only_moved_rows_are_sent():
    batches = [random_batch(1, 6), random_batch(2, 6, first_id=6)]
    layout = PayloadLayout.of(BatchSchema.of(batches[0]))
    lengths = np.concatenate([lengths_of(batch) for batch in batches])
    destination = [0] * 5 + [1] + [1] * 6
    routes = route_rows(plan_for(batches, destination), lengths, layout, 0, False)
    assert routes.sent_words == layout.words(lengths[5:6]).sum()
    assert routes.input_splits == [0, routes.sent_words]
