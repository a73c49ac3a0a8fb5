"""The exchange without a process group: what the host knows of the rows to come, and what is sent.

That rows arrive whole: tests/distributed/distributed/test_shuffler.py.
"""

import re
from dataclasses import dataclass, field
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.shared.one_of_many_ranks import packed_rows, planned_exchange, words_of_rows
from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.exchange import verification
from commons.distributed.exchange.payload import PayloadLayout
from commons.distributed.exchange.verification import checksums
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.host_copies import host_copy
from commons.sequence_batch.open_batch import row_counts, row_fields
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.batches.any_batches import concat_rows
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch
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


def exchanges_for(plan, batches):
    layout = PayloadLayout.of(BatchSchema.of(batches[0]))
    return [planned_exchange(plan.gathered, plan.destination, layout, rank) for rank in range(len(batches))]


def rows_of_ranks(batches, destination):
    """Rows in order as every rank is to have them."""
    everything = concat_rows([batch.index_select(range(row_counts(batch)[1])) for batch in batches])
    return [everything.index_select(np.flatnonzero(np.array(destination, int) == rank)) for rank in range(len(batches))]


@st.composite
def cases(draw):
    num_ranks = draw(st.integers(1, 4))
    batches, first = [], 0
    options = {
        "values_dtype": draw(st.sampled_from(JAGGED_DTYPES)),
        "tiny_dtype": draw(st.sampled_from(JAGGED_DTYPES)),
        "weights_dtype": draw(st.sampled_from([None, torch.float32, torch.float16, torch.float64])),
        "max_length": draw(st.sampled_from([0, 1, 6])),
    }
    for _ in range(num_ranks):
        rows = draw(st.integers(0, 5))
        real = draw(st.integers(0, rows))
        batches.append(random_batch(draw(st.integers(0, 999)), rows, real, first_id=first, **options))
        first += real
    destination = draw(st.lists(st.integers(0, num_ranks - 1), min_size=first, max_size=first))
    return batches, destination


def unpacked_on_meta(exchange, batch):
    """The result on a device without values."""
    buffer, _, indices = exchange.pack([batch])
    return exchange.unpack(batch, [torch.cat(buffer).to("meta")], indices.to("meta"))


@given(case=cases())
def test_the_host_knows_the_rows_of_a_result_on_a_device(case):
    """Unpacked on "meta", which holds no values that could be read back."""
    batches, destination = case
    exchanges = exchanges_for(plan_for(batches, destination), batches)
    for exchange, batch, rows in zip(exchanges, batches, rows_of_ranks(batches, destination)):
        on_device = unpacked_on_meta(exchange, batch)
        assert on_device.features.lengths().device.type == "meta"
        assert on_device.batch_size == max(1, batch.batch_size, rows.batch_size)
        padding = [0] * (on_device.batch_size - rows.batch_size)
        for key, mine, true in zip(KEYS, *(each.host_lengths(*KEYS) for each in (on_device, rows))):
            assert mine.tolist() == true.tolist() + padding, key
        for name in ("tiny", "labels"):
            known, true = (each.lengths() for each in (getattr(on_device, name), getattr(rows, name)))
            known = host_copy(known).view(-1, on_device.batch_size)
            assert known.tolist() == [each + padding for each in true.view(len(known), -1).tolist()]


@dataclass
class VisitsBatch(HSTUBatch):
    host_fields: ClassVar[tuple[str, ...]] = ("num_candidates", "visits")
    visits: torch.Tensor = field(kw_only=True)


def test_the_host_knows_numbers_of_rows_that_have_moved():
    drawn = [random_hstu_batch(4, max_num_candidates=3, actual_batch_size=3, seed=seed) for seed in range(2)]
    batches = [VisitsBatch(**vars(batch), visits=batch.num_candidates.int() * 10) for batch in drawn]
    counts = np.concatenate([batch.num_candidates[:3].numpy() for batch in batches])
    plan = plan_for(batches, [1, 0, 0, 1, 0, 1], np.stack([counts, 10 * counts], axis=1))
    for exchange, batch, rows in zip(exchanges_for(plan, batches), batches, ([1, 2, 4], [0, 3, 5])):
        on_device = unpacked_on_meta(exchange, batch)
        assert on_device.host_values("num_candidates").tolist() == [*counts[rows], 0]
        assert on_device.host_values("visits").tolist() == [*(10 * counts[rows]), 0]
        assert (on_device.num_candidates.dtype, on_device.visits.dtype) == (torch.int64, torch.int32)


def test_only_moved_rows_are_sent():
    batches = [random_batch(1, 6), random_batch(2, 6, first_id=6)]
    plan = plan_for(batches, [0] * 5 + [1] + [1] * 6)
    first, second = exchanges_for(plan, batches)
    words = int(words_of_rows(plan.gathered, first.layout)[5])
    assert first.input_splits == [0, words] and first.bytes_sent == 4 * words
    assert second.moves and second.bytes_sent == 0 and len(first.pack([batches[0]])[1]) == words
    for rank in range(2):  # each sends a block of the largest sender's size to the only other one
        gathered = planned_exchange(plan.gathered, plan.destination, first.layout, rank, all_gather=True)
        assert gathered.bytes_sent == 4 * words
    for still in exchanges_for(plan_for(batches, [0] * 6 + [1] * 6), batches):
        assert not still.moves and not still.changes and still.bytes_sent == 0


# Of a batch of two rows and one of padding, whose keys have the values 0, 1 | 2 and 3 | 4, 5: a part, the places that
# get the content of others, and which checksums (of values, weights, labels, whole rows) change.
DAMAGES = {
    "nothing": ("values", [0, 1], [0, 1], []),
    "values of a key in a row": ("values", [0, 1], [1, 0], [0, 3]),
    "values of the keys of a row": ("values", [0, 3], [3, 0], [0, 3]),
    "values of two rows": ("values", [0, 2], [2, 0], [0, 3]),
    "a lost weight": ("weights", [5], [0], [1, 3]),
    "numbers of a dense row": ("labels", ([0, 0], [0, 1]), ([0, 0], [1, 0]), [2, 3]),
    "dense rows": ("labels", [0, 1], [1, 0], [3]),
    "padding": ("labels", [2], [0], []),
}


@pytest.mark.parametrize(("part", "to", "source", "changed"), DAMAGES.values(), ids=DAMAGES)
def test_checksums_depend_on_all_contents_and_their_places_within_rows(part, to, source, changed):
    values = torch.arange(6) + 10
    features = KeyedJaggedTensor(["a", "b"], values, values / 7, lengths=torch.tensor([2, 1, 0, 1, 2, 0]))
    batch = BaseBatch(features, 3, labels=torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]), actual_batch_size=2)
    layout = PayloadLayout.of(BatchSchema.of(batch))
    before = checksums([batch], layout)
    reordered = [batch.index_select([1]), batch.index_select([0])]
    assert torch.equal(checksums([batch.index_select([1, 0])], layout), before)
    assert torch.equal(checksums(reordered, layout), before)
    damaged = {"values": values, "weights": features.weights(), "labels": batch.labels}[part]
    damaged[to] = damaged[source]
    assert torch.nonzero(checksums([batch], layout) != before).flatten().tolist() == changed


@pytest.mark.parametrize("chunk", [1, 4, 1 << 20])
@given(case=cases())
def test_checksums_of_batches_are_those_of_their_rows_in_chunks_of_any_size(chunk, case):
    batches, _ = case
    layout = PayloadLayout.of(BatchSchema.of(batches[0]))
    rows = [batch.index_select([row]) for batch in batches for row in range(row_counts(batch)[1])]
    with mock.patch.object(verification, "_CHUNK", chunk):
        whole = checksums(batches, layout)
        assert torch.equal(whole, sum((checksums([row], layout) for row in rows), torch.zeros_like(whole)))


def test_a_batch_that_has_changed_since_the_start_is_refused():
    batches = [random_batch(1, 6), random_batch(2, 6, first_id=6)]
    first, _ = exchanges_for(plan_for(batches, [0] * 5 + [1] + [1] * 6), batches)
    with pytest.raises(ValueError, match="must not change until its shuffle is finished"):
        first.pack([random_batch(3, 7)])


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("image", lambda batch: batch.image.half(), "is tensor float16 [2, 3], and was tensor bfloat16 [2, 3]"),
        ("flag", lambda batch: batch.flag[:, None], "is tensor bool [1], and was tensor bool []"),
        ("even", lambda batch: batch.sample_id % 2 == 0, "is tensor bool [], and was absent"),
    ],
)
def test_a_copy_of_other_fields_than_at_the_start_is_refused(name, change, said):
    """As a batch's own `to` may return; the sizes are those that were planned."""
    batch = random_batch(1, 6)
    copied = batch.to(torch.device("cpu"))
    setattr(copied, name, change(copied))
    said = f"field {name!r} {said} when the shuffle was started; rows move in the form that they had then: change or"
    with pytest.raises(ValueError, match=re.escape(said)):
        BatchSchema.of(batch).require_same_fields(copied)
