"""A batch as bytes and back: the same batch, in storage of its own, without pickle."""

from __future__ import annotations

import datetime
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.sequence_batch.row_leaves import leaf_kind
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.schema import register_batch_type
from commons.sequence_batch.wire import MessageBuffer, decode, encode
from tests.helpers.batches.any_batches import KINDS, as_values, dense, nested
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch, rows_as_values


def there_and_back(*batches, extra=None):
    buffer = MessageBuffer(0, on_accelerator=False)
    buffer.append(encode(*batches, extra=extra))
    return decode(buffer.bytes)


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=10)
@given(ids=st.lists(st.integers(0, 30), max_size=6))
def test_a_batch_arrives_as_it_was(kind, ids):
    batch = KINDS[kind](ids)
    (result,), extra = there_and_back(batch, extra={"a": (1, None)})
    assert type(result) is type(batch) and as_values(result) == as_values(batch) and extra == {"a": (1, None)}


@pytest.mark.parametrize("dtype", [*JAGGED_DTYPES, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype(dtype):
    tensor = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    (result,), _ = there_and_back({"x": tensor, "y": tensor[:0], "z": tensor.t()[:, 1:].t()})
    assert result["x"].dtype == dtype and torch.equal(result["x"].to(torch.complex64), tensor.to(torch.complex64))
    assert result["y"].shape == (0, 2) and torch.equal(result["z"].to(torch.complex64), tensor[1:].to(torch.complex64))
    if dtype in JAGGED_DTYPES:
        batch = random_batch(3, 5, 4, values_dtype=dtype)
        (again,), _ = there_and_back(batch)
        assert rows_as_values(again, padding=True) == rows_as_values(batch, padding=True)


def test_arrays_and_views():
    batch = {
        "time": np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
        "bytes": np.array([b"a", b"bc"]),
        "swapped": np.array([1, 2], dtype=">i4"),
        "strided": np.arange(8).reshape(2, 4)[:, ::2],
        "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
        "expanded": torch.ones(1, 3).expand(2, 3),
    }
    (result,), _ = there_and_back(batch)
    for name in ("time", "bytes", "swapped", "strided"):
        assert result[name].dtype == batch[name].dtype and result[name].tobytes() == batch[name].tobytes()
    assert torch.equal(result["conjugated"], batch["conjugated"]) and torch.equal(result["expanded"], torch.ones(2, 3))


def test_several_batches_in_one_buffer():
    buffer = MessageBuffer(10, on_accelerator=False)
    batches = [dense([1, 2]), nested([3, 4]), ["a"]]
    for batch in batches:
        buffer.append(encode(batch))
    buffer.append(None)
    parts = buffer.bytes.split(buffer.sizes)
    assert [as_values(decode(part)[0][0]) for part in parts[:3]] == [as_values(batch) for batch in batches]
    assert buffer.sizes[3] == 0
    storages = [
        tensor.untyped_storage()
        for part in parts[:2]
        for leaf in Rows.of(decode(part)[0][0]).leaves.values()
        for tensor in leaf_kind(leaf).tensors(leaf)
    ]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert all(storage.nbytes() < buffer.bytes.numel() for storage in storages)


def test_a_message_is_little_more_than_its_tensors():
    batch = random_batch(0, 400)
    message = encode(batch)
    assert Rows.of(batch).nbytes < message.nbytes < 1.05 * Rows.of(batch).nbytes


@dataclass
class Unknown:
    x: torch.Tensor


def test_a_class_that_the_receiver_does_not_have(monkeypatch):
    message = MessageBuffer(0, on_accelerator=False)
    message.append(encode(Unknown(dense([1]))))
    monkeypatch.delattr(f"{__name__}.Unknown")
    with pytest.raises(KeyError, match=f"class Unknown of module {__name__} is unknown on this rank; .* import"):
        decode(message.bytes)


def test_what_cannot_be_sent():
    @dataclass
    class Local:
        x: torch.Tensor

    Pair = namedtuple("Elsewhere", ["x"])
    for batch, message in [
        (Local(dense([1])), "'the batch itself' is a .*Local, which is not found under that name"),
        ({"p": Pair(dense([1]))}, "'p' is a Elsewhere, which is not found"),
        ({"x": dense([1]), "when": datetime.date(2024, 1, 1)}, "'when' holds a date; what is not moved with the"),
        ({"x": dense([1]), "lists": [object()]}, "'lists' holds a object"),
        ({"x": dense([1]), "o": np.array([object()], dtype=object)}, "'o' holds a object"),
        ({"x": np.zeros(1, dtype=[("a", "i4")])}, "'x' is an array of dtype .* pass its fields as arrays of their own"),
    ]:
        with pytest.raises(TypeError, match=message):
            encode(batch)
    assert type(there_and_back(OrderedDict(x=dense([1])))[0][0]) is OrderedDict


def test_a_registered_class_is_found_wherever_it_was_made():
    @register_batch_type
    @dataclass
    class Registered:
        x: torch.Tensor

    (result,), _ = there_and_back(Registered(dense([1, 2])))
    assert type(result) is Registered and torch.equal(result.x, dense([1, 2]))
