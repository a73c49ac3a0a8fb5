"""BaseBatch: its invariants, and index_select against the slow, obvious selection."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch, rows_as_values


def make(rows=3, **changes):
    features = KeyedJaggedTensor(keys=["item"], values=torch.arange(rows), lengths=torch.ones(rows, dtype=torch.int32))
    return BaseBatch(**{"features": features, "batch_size": rows, "feature_to_max_seqlen": {"item": 1}, **changes})


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 7),
    dtype=st.sampled_from(JAGGED_DTYPES),
    weights=st.sampled_from([None, torch.float32, torch.float16, torch.float64]),
    data=st.data(),
)
def test_index_select_equals_the_slow_selection(seed, rows, dtype, weights, data):
    real = data.draw(st.integers(0, rows))
    batch = random_batch(seed, rows, real, values_dtype=dtype, tiny_dtype=dtype, weights_dtype=weights)
    chosen_real = data.draw(st.lists(st.integers(0, real - 1), max_size=9)) if real else []
    chosen_padding = data.draw(st.lists(st.integers(real, rows - 1), max_size=3)) if real < rows else []
    selected = batch.index_select(torch.tensor(chosen_real + chosen_padding, dtype=torch.int64))
    expected = rows_as_values(batch, padding=True)
    assert rows_as_values(selected, padding=True) == [expected[i] for i in chosen_real + chosen_padding]
    assert (selected.batch_size, selected.actual_batch_size) == (len(chosen_real + chosen_padding), len(chosen_real))
    assert type(selected) is type(batch) and selected.note == batch.note
    assert selected.features.length_per_key() == [int(x.sum()) for x in selected.features.lengths().view(3, -1)]


def test_loss_tokens_count_real_rows_only():
    assert make().num_loss_tokens() == 0
    assert make(labels=torch.zeros(3, 2)).num_loss_tokens() == 6
    batch = random_batch(3, 5, 2)
    assert batch.num_loss_tokens() == batch.labels.values().numel()
    features = KeyedJaggedTensor(keys=["item"], values=torch.arange(2), lengths=torch.tensor([1, 1, 0]))
    padded = make(features=features, labels=torch.zeros(3, 2), actual_batch_size=2)
    assert padded.num_loss_tokens() == 4
    padded.labels = {"a": torch.zeros(3, 2), "b": features}
    assert padded.num_loss_tokens() == 4 + 2


def test_lengths_on_a_device_are_not_read():
    make(features=make().features.to(torch.device("meta")), actual_batch_size=2)  # a padding row with a value


@dataclasses.dataclass
class PlainBatch(BaseBatch):
    """A user's class that adds nothing."""


@dataclasses.dataclass(kw_only=True)
class PricedBatch(BaseBatch):
    """A user's class with a field that has no default."""

    prices: torch.Tensor


def test_features_and_labels_are_enough():
    features, labels = make().features, torch.arange(3.0)
    for batch in (
        PlainBatch(features, labels=labels),
        PricedBatch(features, labels=labels, prices=torch.ones(3)),
        PlainBatch(features, 3, {}, [], labels, 3),  # in the order of all fields
    ):
        assert (batch.batch_size, batch.actual_batch_size) == (3, 3)
        assert (batch.feature_to_max_seqlen, batch.contextual_feature_names) == ({}, [])
        assert batch.num_loss_tokens() == 3 and batch.host_lengths("item")[0].tolist() == [1, 1, 1]
        selected = batch.index_select([2, 0])
        assert selected.batch_size == 2 and selected.labels.tolist() == [2.0, 0.0]
        assert BatchSchema.of(batch).empty_batch().batch_size == 0
    assert PlainBatch(features).num_loss_tokens() == 0
    assert not hasattr(BaseBatch, "__len__") and "__bool__" not in BaseBatch.__dict__


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual_batch_size": 4}, "actual_batch_size is 4, batch_size is 3"),
        ({"actual_batch_size": -1}, "actual_batch_size is -1; it must be an integer of at least 0"),
        *(({"batch_size": size}, f"batch_size is {size!r}; it must be an integer of at least 0") for size in ("3", -1)),
        ({"batch_size": 0}, "number of rows: {'batch_size': 0, 'features': 3}"),
        ({"actual_batch_size": 2}, "values in padding rows"),
        ({"batch_size": None, "labels": torch.zeros(2)}, r"number of rows: \{'features': 3, 'labels': 2\}"),
        ({"contextual_feature_names": ["age"]}, r"contextual features \['age'\] are not among the keys"),
        ({"contextual_feature_names": ["item", "item"]}, "a repeated name would add a feature's tokens again"),
        ({"contextual_feature_names": "item"}, "contextual_feature_names is 'item'; it must be a list of names"),
        ({"features": torch.ones(3)}, "features is a Tensor; sequences are a KeyedJaggedTensor"),
    ],
)
def test_a_wrong_batch_is_refused(changes, message):
    with pytest.raises(TypeError if "list of names" in message or "Keyed" in message else ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize("labels", [[0, 1, 1], (0, 1, 1), np.array([0, 1, 1]), {"click": [0, 1, 1]}])
def test_labels_that_would_not_move_with_their_rows_are_refused(labels):
    with pytest.raises(TypeError, match=r"^labels is an? (list|tuple|ndarray|dict) without tensors; labels move with "):
        make(labels=labels)
    assert make(labels={}).num_loss_tokens() == 0
