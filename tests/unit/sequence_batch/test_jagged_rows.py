"""Jagged tensors whose parts do not lie as one would expect: taken for what they are, or refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.sequence_batch.open_batch import row_counts
from commons.sequence_batch.rows import Rows, select_rows
from tests.helpers.batches.any_batches import concat_rows, count_rows, there_and_back


@dataclass
class Held:
    x: Any


def within(rows, before, after, width):
    """A JaggedTensor whose offsets leave values out at both ends."""
    flat = [-1.0] * before + [value for row in rows for value in row] + [-2.0] * after
    values = torch.tensor(flat, dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in rows])
    offsets = before + torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return JaggedTensor(values[:, None].expand(-1, 2) if width else values, offsets=offsets, weights=values * 10)


def as_rows(value):
    values, weights = (tensor.split(value.lengths().tolist()) for tensor in (value.values(), value.weights()))
    assert value.values().shape[0] == value.weights().shape[0] == int(value.lengths().sum())
    return [(row.tolist(), weight.tolist()) for row, weight in zip(values, weights)]


def expected(rows, width):
    return [([[item, item] for item in row] if width else row, [item * 10 for item in row]) for row in rows]


rows_of_numbers = st.lists(st.lists(st.integers(0, 9).map(float), max_size=3), min_size=1, max_size=4)


@given(rows_of_numbers, rows_of_numbers, st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_offsets_that_do_not_begin_at_0(rows, others, before, after, width):
    value = within(rows, before, after, width)
    order = list(range(len(rows)))[::-1]
    assert as_rows(there_and_back(value)) == expected(rows, width)
    assert as_rows(select_rows(value, order)) == expected(rows[::-1], width)
    assert as_rows(concat_rows([value, within(others, after, before, width)])) == expected(rows + others, width)
    assert as_rows(Rows.of(value).pad(len(rows) + 2).batch) == expected([*rows, [], []], width)


def keyed(**changes):
    parts = {"keys": ["a", "b"], "values": torch.arange(7), "lengths": torch.tensor([2, 1, 1, 1, 1, 1])}
    return KeyedJaggedTensor(**{**parts, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keyed(values=torch.arange(7)[:, None]), r"has values of shape \(7, 1\); .* flatten them"),
        (lambda: keyed(weights=torch.ones(7, 1)), r"has weights of shape \(7, 1\)"),
        (lambda: keyed(weights=torch.ones(8)), "has 8 weights and 7 values; every value has one weight: match"),
        (lambda: keyed(lengths=None, offsets=torch.arange(7) + 2), "has offsets that begin at 2; .* cut off"),
        (lambda: keyed(keys=["a", "a"]), r"has duplicate keys \['a'\]; keys must be unique"),
        (lambda: keyed(stride=2), "has 6 lengths for 2 keys and 2 rows; there is one per key and row, 4 in all"),
    ],
)
def test_fields_that_cannot_be_described(make, message):
    with pytest.raises(ValueError, match=f"^field 'x' {message}") as caught:
        row_counts(Held(make()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keyed(values=torch.arange(9)), "lengths that add up to 7 and 9 values; .* remove the others"),
        (lambda: keyed(weights=torch.ones(8)), "8 weights and 7 values"),
        (
            lambda: JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 1]), weights=torch.ones(2)),
            "2 weights and 3 values",
        ),
        (
            lambda: JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 3])),
            "offsets from 0 to 5, lengths that add up to 5, and 3 values; offsets lie within the values",
        ),
        (
            lambda: JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 1]), offsets=torch.tensor([0, 1, 3])),
            "offsets from 0 to 3, lengths that add up to 2",
        ),
        (lambda: JaggedTensor(torch.arange(3), offsets=torch.tensor([-1, 1, 3])), "offsets from -1 to 3"),
    ],
)
def test_jagged_tensors_whose_rows_cannot_be_taken(make, message):
    with pytest.raises(ValueError, match=f"field 'x' has {message}"):
        count_rows({"x": make()})
