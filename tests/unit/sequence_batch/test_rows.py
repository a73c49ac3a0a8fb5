"""Rows of any batch: what a batch of some samples becomes is the batch made from these samples in the first place.

Jagged tensors whose parts lie unusually are taken for what they are, or refused.
"""

from __future__ import annotations

import types
from collections import UserDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.micro_batching import pack_rows
from commons.sequence_batch.open_batch import row_counts
from commons.sequence_batch.row_leaves import describe_leaf
from commons.sequence_batch.rows import Rows, select_rows
from tests.helpers.batches.any_batches import (
    KINDS,
    as_values,
    concat_rows,
    count_rows,
    dense,
    everything,
    jagged,
    kjt,
    nested,
    padded_batch,
    plain_batch,
    there_and_back,
)


def tensors_of(batch):
    return [tensor for leaf in Rows.of(batch).leaves.values() for tensor in describe_leaf((), leaf).tensors(leaf)]


samples = st.lists(st.integers(0, 30), min_size=1, max_size=6)
kinds = pytest.mark.parametrize("kind", list(KINDS))


@kinds
@settings(max_examples=10)
@given(data=st.data())
def test_selected_rows(kind, data):
    ids = data.draw(samples)
    indices = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=8))
    batch = KINDS[kind](ids)
    before = as_values(batch)
    result = select_rows(batch, np.array(indices[::-1])[::-1])
    assert type(result) is type(batch)
    assert count_rows(result) == Rows.of(result).real == len(indices)
    assert as_values(result) == as_values(KINDS[kind]([ids[index] for index in indices]))
    assert as_values(batch) == before


@kinds
@settings(max_examples=10)
@given(parts=st.lists(st.lists(st.integers(0, 30), max_size=4), min_size=1, max_size=4))
def test_concatenated_rows(kind, parts):
    result = concat_rows([KINDS[kind](ids) for ids in parts])
    assert as_values(result) == as_values(KINDS[kind]([sample for ids in parts for sample in ids]))


@given(parts=st.lists(st.tuples(st.lists(st.integers(1, 30), max_size=4), st.integers(0, 3)), min_size=1, max_size=4))
def test_padding_comes_last(parts):
    result = concat_rows([padded_batch(ids, len(ids) + extra) for ids, extra in parts])
    ids = [sample for part, _ in parts for sample in part]
    assert as_values(result) == as_values(padded_batch(ids, len(ids) + sum(extra for _, extra in parts)))
    assert Rows.of(result).real == len(ids)


@settings(max_examples=10)
@given(samples, st.integers(0, 3))
def test_padded_rows(ids, extra):
    padded = Rows.of(padded_batch(ids)).pad(len(ids) + extra).batch
    assert as_values(padded) == as_values(padded_batch(ids, len(ids) + extra))
    everything_padded = Rows.of(everything(ids)).pad(len(ids) + extra).batch
    assert count_rows(everything_padded) == len(ids) + extra and Rows.of(everything_padded).real == len(ids)
    assert as_values(select_rows(everything_padded, range(len(ids)))) == as_values(everything(ids))
    padding = select_rows(everything_padded, range(len(ids), len(ids) + extra))
    assert not any(bool(tensor.any()) for tensor in tensors_of(padding))


def test_a_padding_row_before_a_real_one_is_refused():
    with pytest.raises(ValueError, match=r"indices \[2, 0\] put a padding row \(>= 2\) before a real one; padding"):
        select_rows(padded_batch([4, 7], 3), [2, 0])


def test_results_own_their_storage():
    for make in (dense, nested, kjt):
        batch = make([3, 1])
        for result in (select_rows(batch, [0, 1]), concat_rows([batch]), Rows.of(batch).pad(2).batch):
            mine, own = (
                {tensor.untyped_storage().data_ptr() for tensor in tensors_of(each)} for each in (batch, result)
            )
            assert not mine & own


def test_every_tensor_is_pinned(monkeypatch):
    """JaggedTensor has no pin_memory of its own."""
    copied = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: copied.append(tensor) or tensor.clone())
    batch = {"x": dense([1, 2]), "jagged": jagged([1, 2]), "texts": ["a", "b"], "array": np.ones(2)}
    assert as_values(Rows.of(batch).pin().batch) == as_values(batch)
    assert len(copied) == 4  # of the JaggedTensor values, lengths and weights


def test_gradients_flow_through_rows():
    scores = torch.arange(3.0, requires_grad=True)
    concat_rows([select_rows(scores, [2, 0]), select_rows(scores, [0])]).sum().backward()
    assert scores.grad.tolist() == [2, 0, 1]


def test_a_nested_tensor_with_gaps_and_one_ragged_elsewhere():
    gaps = torch.nested.narrow(
        torch.arange(12).view(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 1, 2]), layout=torch.jagged
    )
    assert [row.tolist() for row in select_rows(gaps, [2, 0]).unbind()] == [[10, 11], [0, 1]]
    assert [row.tolist() for row in concat_rows([gaps, gaps]).unbind()] == [[0, 1], [5], [10, 11]] * 2
    values = torch.arange(16).view(2, 4, 2)  # two heads, four tokens in rows of 1 and 3
    last = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 4]), jagged_dim=2)
    result = concat_rows([select_rows(last, [1]), last])
    assert [row.shape[1] for row in result.unbind()] == [3, 1, 3]
    assert torch.equal(result.unbind()[0], values[:, 1:]) and torch.equal(result.unbind()[1], values[:, :1])
    of_verl = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 4]))  # its (rope, tokens) positions
    of_verl._ragged_idx = 2  # torch still has the shape (2, j1, 2)
    for result in (there_and_back(of_verl), concat_rows([select_rows(last, [0]), select_rows(of_verl, [1])])):
        assert torch.equal(result.values(), values) and result.shape[:2] == (2, 2)


def test_nested_tensors_of_equal_lengths_can_still_be_combined():
    """As before rows were taken from them: torch combines nested tensors with one tensor of offsets."""
    ids = torch.nested.nested_tensor([torch.arange(3), torch.arange(1), torch.arange(2)], layout=torch.jagged)
    columns = torch.nested.nested_tensor_from_jagged(torch.arange(12).view(2, 6), ids.offsets(), jagged_dim=2)
    others = torch.nested.nested_tensor([torch.ones(2)] * 3, layout=torch.jagged)
    batch = {"ids": ids, "others": others, "deep": [ids * 2, columns]}
    for result in (
        select_rows(batch, [2, 0, 0]),
        concat_rows([batch, batch]),
        Rows.of(batch).pad(5).batch,
        there_and_back(batch),
    ):
        double, columns = result["deep"]
        assert (result["ids"] + double).values().tolist() == [3 * each for each in result["ids"].values().tolist()]
        assert columns.offsets() is double.offsets() is not result["others"].offsets()
    packed = pack_rows({"ids": result["ids"], "double": double}, pad_to_multiple_of=8)
    assert torch.equal((packed.unpack(packed.inputs["ids"]) * double).values(), double.values() ** 2 // 2)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers(dtype):
    largest = torch.iinfo(dtype).max
    values = [[largest, 1], [largest - 1, 2], [0, 3], [largest // 2 + 1, 4]]
    batch = {"dense": torch.tensor(values, dtype=dtype), "one": torch.tensor([row[0] for row in values], dtype=dtype)}
    lengths = torch.tensor([1, 0, 2, 1])
    batch["jagged"] = JaggedTensor(values=batch["one"], lengths=lengths)
    batch["nested"] = torch.nested.nested_tensor_from_jagged(batch["dense"], torch.tensor([0, 1, 1, 3, 4]))
    result = concat_rows([select_rows(batch, [2, 0]), select_rows(batch, [3])])
    assert result["dense"].tolist() == [values[row] for row in (2, 0, 3)] and result["dense"].dtype == dtype
    assert result["one"].tolist() == [values[row][0] for row in (2, 0, 3)]
    assert result["jagged"].values().tolist() == [values[row][0] for row in (1, 2, 0, 3)]
    assert result["nested"].values().tolist() == [values[row] for row in (1, 2, 0, 3)]
    transposed = select_rows(batch["dense"].t().contiguous().t(), [3, 3])
    assert transposed.tolist() == [values[3]] * 2


def test_a_dtype_that_nothing_can_be_selected_from_is_named():
    short = KeyedJaggedTensor(keys=["a"], values=torch.arange(3), lengths=torch.tensor([1, 2], dtype=torch.int16))
    with pytest.raises(TypeError, match=r"'deep\.a' has a dtype from which no rows can be selected \(.*'Short'\)"):
        select_rows({"deep": {"a": short}}, [1])
    wide = KeyedJaggedTensor(keys=["a"], values=torch.ones(3, dtype=torch.complex128), lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="dtype torch.complex128; dtypes of 1, 2, 4 or 8 bytes can be permuted"):
        select_rows(wide, [1])


def test_types_that_are_kept():
    batch = defaultdict(list, x=dense([1, 2]))
    assert select_rows(batch, [1]).default_factory is list
    encoding = UserDict(input_ids=dense([1, 2]))
    encoding.extra = "attribute"
    result = select_rows(encoding, [1])
    assert type(result) is UserDict and result.extra == "attribute" and len(encoding["input_ids"]) == 2
    criteo = Batch(dense([1, 2]), kjt([1, 2]), torch.tensor([0, 1]))
    assert as_values(select_rows(criteo, [1])) == as_values(Batch(dense([2]), kjt([2]), torch.tensor([1])))
    two_dims = TensorDict({"x": torch.arange(6).view(3, 2)}, batch_size=[3, 2])
    assert select_rows(two_dims, [2]).batch_size == (1, 2) and select_rows(two_dims, [2]).device is None
    with_text = TensorDict({"text": NonTensorStack("a", "b"), "x": torch.arange(2)}, batch_size=[2], device="cpu")
    assert select_rows(with_text, [1]).device == torch.device("cpu") and select_rows(with_text, [1])["text"] == ["b"]
    lazy = lazy_stack([TensorDict({"x": torch.arange(2)}), TensorDict({"x": torch.arange(2) + 5})])
    assert concat_rows([select_rows(lazy, [1])])["x"].tolist() == [[5, 6]]
    settings = types.MappingProxyType({"kept": "as it is"})
    assert select_rows({"x": dense([1]), "settings": settings}, [0])["settings"] is settings
    assert select_rows({"x": dense([1, 2]), "info": {"names": ["a", "b"]}}, [1])["info"] == {"names": ["b"]}


def test_numbers_of_rows_and_bytes():
    assert Rows.of({"deep": [padded_batch([1])]}).states_padding and not Rows.of(plain_batch([1])).states_padding
    assert count_rows(["a", "b"]) == 2
    looked_up = {("x",): (kjt([1]), True), ("y",): (jagged([1]), False), ("labels",): (kjt([1]), False)}
    assert all(describe_leaf(path, value).is_lookup == expected for path, (value, expected) in looked_up.items())
    assert Rows.of({"x": torch.zeros(2, 3), "y": np.zeros((2, 2), np.int16), "z": ["a", "b"]}).nbytes == 24 + 8
    doubled = Rows.of({"x": dense([1, 2])}).map(lambda path, leaf: leaf * (2 if path == ("x",) else 1)).batch
    assert torch.equal(doubled["x"], dense([1, 2]) * 2)


@tensorclass
class SomeTensorClass:
    x: torch.Tensor


def variable_batch_per_key():
    return KeyedJaggedTensor(
        ["a", "b"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64), stride_per_key_per_rank=[[1], [2]]
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: {"a": torch.zeros(3), "b": {"c": torch.zeros(4)}}, ValueError, r"rows: {'a': 3, 'b.c': 4}; the first"),
        (lambda: {"a": torch.zeros(3), "t": ["x", "y"]}, ValueError, r"{'a': 3, 't': 2}; .* to the whole batch into a"),
        (lambda: {"a": torch.tensor(1)}, ValueError, "field 'a' is a 0-dimensional tensor; .* repeat it for every row"),
        (lambda: {"a": np.array(1)}, ValueError, "field 'a' is a 0-dimensional array"),
        (lambda: {"a": torch.eye(3).to_sparse()}, ValueError, "field 'a' is a tensor of layout torch.sparse_coo;"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)]), ValueError, "'the batch itself' is a nested tensor"),
        (lambda: {"k": variable_batch_per_key()}, ValueError, "must have one row per sample: expand its rows"),
        (lambda: {"a": "x", "b": (1, 2)}, ValueError, "the batch is a dict without rows; .* add one"),
        (lambda: None, ValueError, "the batch is a NoneType without rows"),
        (lambda: TensorDict({"x": torch.zeros(3)}, batch_size=[]), ValueError, r"TensorDict of batch_size \[\]; rows"),
        (
            lambda: lazy_stack([TensorDict({"x": torch.arange(size)}) for size in (2, 3)]),
            ValueError,
            r"'x' of the LazyStackedTensorDict has rows of different shapes; .* call densify\(layout=torch.jagged\)",
        ),
        (lambda: SomeTensorClass(x=torch.zeros(2), batch_size=[2]), TypeError, r"a tensorclass; .* to_tensordict\(\)"),
        (lambda: KeyedTensor(["a"], [2], torch.zeros(2, 3), key_dim=0), ValueError, r"has key_dim 0; .* key_dim=1"),
        (lambda: {"k": KeyedTensor(["a"], [3], torch.zeros(3, 2))}, ValueError, r"has values of shape \(3, 2\)"),
        (lambda: {"k": KeyedTensor(["a"], [3], torch.zeros(3))}, ValueError, r"has values of shape \(3,\)"),
        (
            lambda: {"a": padded_batch([1, 2]), "b": padded_batch([1], 2)},
            ValueError,
            r"different numbers of real rows: {'a.actual_batch_size': 2, 'b.actual_batch_size': 1}",
        ),
    ],
)
def test_a_batch_whose_rows_cannot_be_taken(make, error, message):
    with pytest.raises(error, match=message) as caught:
        select_rows(make(), [0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 2], ValueError, r"indices contain 2, the batch has 2 rows; indices must be in \[0, 2\)"),
        ([-1], ValueError, "indices contain -1"),
        (torch.tensor([True, False]), ValueError, "indices have dtype torch.bool"),
        (np.array([0.0]), ValueError, "indices have dtype torch.float64"),
        ([[0]], ValueError, r"shape \(1, 1\); rows are chosen by a one-dimensional list"),
        *((wrong, TypeError, "and not an array of integers .*; rows") for wrong in (None, "a", [[0], [0, 1]], {0})),
    ],
)
def test_wrong_indices(indices, error, message):
    with pytest.raises(error, match=message):
        select_rows(dense([1, 2]), indices)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there are no batches to concatenate"),
        ([{"a": dense([1])}, {"b": dense([1])}], r"batches 0 and 1 differ at 'the batch itself': dict of \['a'\] and"),
        ([{"a": dense([1])}, {"a": kjt([1])}], r"differ at 'a': tensor int64 \[3\] and jagged \['long"),
        ([{"a": dense([1])}, {"a": dense([1]).int()}], r"differ at 'a': tensor int64 \[3\] and tensor int32 \[3\];"),
        ([dense([1]), dense([1])[:, :2]], r"tensor int64 \[3\] and tensor int64 \[2\]"),
        ([kjt([1]), kjt([1], weights=False)], "int64, weights float32, .* and jagged .* int64, lengths"),
        ([{"a": dense([1]), "m": 1}, {"a": dense([1]), "m": 2}], "differ at 'm': 1 and 2; .* or give a value per row"),
        ([{"a": dense([1]), "batch_size": 1}, {"a": dense([1]), "batch_size": 2}], "differ at 'batch_size': 1 and 2"),
        ([dense([1]), dense([1]).to("meta")], r"tensor int64 \[3\] on cpu and tensor int64 \[3\] on meta; only rows"),
        ([[dense([1])], (dense([1]),)], "differ at 'the batch itself': list and"),
    ],
)
def test_batches_that_cannot_be_joined(batches, message):
    with pytest.raises(ValueError, match=message):
        concat_rows(batches)


def test_fewer_rows_than_there_are():
    with pytest.raises(ValueError, match="num_rows is 1, the batch has 2 rows; padding adds rows: raise num_rows"):
        Rows.of(dense([1, 2])).pad(1)
    frozen = types.MappingProxyType({"x": dense([1])})
    with pytest.raises(TypeError, match="holds a mappingproxy, whose items cannot be set"):
        select_rows(frozen, [0])


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


def three(**parts):
    return JaggedTensor(torch.arange(3), **parts)


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
        (lambda: keyed(values=torch.arange(9)), "lengths that add up to 7 and 9 values; .* remove the others$"),
        (lambda: keyed(values=torch.arange(6)), "lengths that add up to 7 and 6 values; .*s or add values$"),
        (lambda: three(lengths=torch.tensor([2, 1]), weights=torch.ones(2)), "2 weights and 3 values"),
        (
            lambda: three(lengths=torch.tensor([2, 3])),
            "offsets from 0 to 5, lengths that add up to 5, and 3 values; offsets lie within the values",
        ),
        (
            lambda: three(lengths=torch.tensor([1, 1]), offsets=torch.tensor([0, 1, 3])),
            "offsets from 0 to 3, lengths that add up to 2",
        ),
        (lambda: three(offsets=torch.tensor([-1, 1, 3])), "offsets from -1 to 3"),
    ],
)
def test_jagged_tensors_whose_rows_cannot_be_taken(make, message):
    with pytest.raises(ValueError, match=f"field 'x' has {message}"):
        count_rows({"x": make()})
