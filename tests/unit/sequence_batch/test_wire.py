"""A batch as bytes and back: the same batch, in storage of its own, without pickle; or an error that names the field.

Also on its way from a worker of a loader: one tensor with everything in it.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field, make_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets.loader import resumable as resumable_loader
from commons.datasets.loader.resumable import ResumableLoader, WrappedBatch, unwrap, wrap
from commons.datasets.samplers.epoch import BatchOrderSampler
from commons.sequence_batch.open_batch import open_tree
from commons.sequence_batch.row_leaves import describe_leaf
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.schema import BatchSchema, register_batch_type
from commons.sequence_batch.wire import MessageBuffer, decode, encode
from tests.helpers.batches.any_batches import KINDS, as_values, concat_rows, count_rows, dense, nested, there_and_back
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch, rows_as_values


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=10)
@given(ids=st.lists(st.integers(0, 30), max_size=6))
def test_a_batch_arrives_as_it_was(kind, ids):
    batch = KINDS[kind](ids)
    buffer = MessageBuffer(0, on_accelerator=False)
    buffer.append(encode(batch, extra={"a": (1, None)}))
    (result,), extra = decode(buffer.bytes)
    assert type(result) is type(batch) and as_values(result) == as_values(batch) and extra == {"a": (1, None)}


@pytest.mark.parametrize("dtype", [*JAGGED_DTYPES, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype(dtype):
    tensor = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    result = there_and_back({"x": tensor, "y": tensor[:0], "z": tensor.t()[:, 1:].t()})
    assert result["x"].dtype == dtype and torch.equal(result["x"].to(torch.complex64), tensor.to(torch.complex64))
    assert result["y"].shape == (0, 2) and torch.equal(result["z"].to(torch.complex64), tensor[1:].to(torch.complex64))
    if dtype in JAGGED_DTYPES:
        batch = random_batch(3, 5, 4, values_dtype=dtype)
        again = there_and_back(batch)
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
    result = there_and_back(batch)
    for name in ("time", "bytes", "swapped", "strided"):
        assert result[name].dtype == batch[name].dtype and result[name].tobytes() == batch[name].tobytes()
    assert torch.equal(result["conjugated"], batch["conjugated"]) and torch.equal(result["expanded"], torch.ones(2, 3))
    column = torch.arange(6.0).view(1, 6)[:, 2]  # contiguous, with a stride of 6
    assert there_and_back(column).tolist() == [2.0]


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
        for tensor in describe_leaf((), leaf).tensors(leaf)
    ]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert all(storage.nbytes() < buffer.bytes.numel() for storage in storages)


def test_a_message_is_little_more_than_its_tensors():
    batch = random_batch(0, 400)
    message = encode(batch)
    assert Rows.of(batch).nbytes < message.nbytes < 1.05 * Rows.of(batch).nbytes


Point = namedtuple("Point", ["x", "y"])


@dataclass
class Unknown:
    x: torch.Tensor


def test_a_class_that_the_receiver_does_not_have(monkeypatch):
    message = MessageBuffer(0, on_accelerator=False)
    message.append(encode(Unknown(dense([1]))))
    monkeypatch.delattr(f"{__name__}.Unknown")
    with pytest.raises(KeyError, match=f"class Unknown of module {__name__} is unknown on this rank; .* import"):
        decode(message.bytes)


@pytest.mark.parametrize("note", [{}, Point(1, 2), Point(dense([1]), 2)], ids=repr)
def test_a_message_cannot_make_a_receiver_call_anything(note):
    """Neither a function, nor a class that is not of the kind that the message says."""
    text = BatchSchema.of_tree(open_tree({"x": dense([1]), "note": note})).text
    known = f"{__name__}:Point" if note else "builtins:dict"
    for named in ("threading:Thread", "json:dumps"):
        with pytest.raises(KeyError, match="is unknown on this rank"):
            BatchSchema.from_text(text.replace(known, named)).empty_batch()


def test_a_registered_class_is_found_wherever_it_was_made():
    @register_batch_type
    @dataclass
    class Registered:
        x: torch.Tensor

    result = there_and_back(Registered(dense([1, 2])))
    assert type(result) is Registered and torch.equal(result.x, dense([1, 2]))


MASKED = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0], fill_value=1e20)


class Celsius(torch.Tensor):
    """A tensor whose type says what its values are."""


class Made(list):
    """Batches that are made in the worker, by number."""

    def __getitem__(self, index):
        return super().__getitem__(index)()


def loaded(num_workers, *makers):
    return list(ResumableLoader(Made(makers), BatchOrderSampler(len(makers)), num_workers=num_workers))


@pytest.mark.parametrize("function", [count_rows, encode])
def test_masked_arrays_are_refused(function):
    matrix = np.zeros((3, 2)).view(np.matrix)
    for held, kind, remedy in ((MASKED, "MaskedArray", "np.ma.getdata"), (matrix, "matrix", "np.asarray")):
        match = rf"field 'deep\.price' is a {kind}; arrays must be plain, .*: pass the result of {remedy}"
        with pytest.raises(TypeError, match=match):
            function({"deep": {"price": held}})
    parts = {"price": np.ma.getdata(MASKED), "known": ~np.ma.getmaskarray(MASKED)}
    assert count_rows(parts) == 3


def test_memory_mapped_arrays_are_taken(tmp_path):
    mapped = np.memmap(tmp_path / "rows.bin", dtype=np.int32, mode="w+", shape=(3, 2))
    mapped[:] = np.arange(6).reshape(3, 2)
    assert concat_rows([{"x": mapped}, {"x": mapped}])["x"].sum() == 30
    assert there_and_back({"x": mapped})["x"].tolist() == mapped.tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_gives_what_the_main_process_would(num_workers):
    masked, leaf, factory, heat = loaded(
        num_workers,
        lambda: {"price": MASKED},
        lambda: {"a": torch.ones(2, requires_grad=True)},
        lambda: defaultdict(Counter, a=torch.ones(2)),
        lambda: {"heat": torch.ones(2).as_subclass(Celsius)},
    )
    assert masked["price"].mask.tolist() == [False, True, False] and masked["price"].sum() == 4
    assert leaf["a"].requires_grad and factory.default_factory is Counter
    assert type(heat["heat"]) is Celsius


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"score": torch.ones(2, requires_grad=True) * 2}, "'score' requires gradients; gradients do not"),
        (lambda: defaultdict(lambda: 1, a=torch.ones(2)), "'the batch itself' is a defaultdict whose factory is"),
    ],
)
def test_what_no_worker_could_send_is_an_error_and_no_hang(make, message):
    with pytest.raises(TypeError, match=message):
        loaded(1, make)


class WithState(UserDict):
    def __init__(self, data=None):
        super().__init__(data)
        self.encodings = None


class WithArguments(dict):
    def __init__(self, name):
        self.name = name


def with_attribute(mapping, name, value):
    setattr(mapping, name, value)
    return mapping


def given(mapping):
    mapping["a"] = torch.ones(2)
    return mapping


def test_mappings_that_arrive_as_they_were():
    for factory in (None, list, int, dict):
        result = there_and_back(defaultdict(factory, a=torch.ones(2), b=(1,)))
        assert result.default_factory is factory and result["b"] == (1,) and result["a"].tolist() == [1, 1]
    for batch in (given(WithState()), given(OrderedDict()), given(Counter()), given(UserDict())):
        result = there_and_back(batch)
        assert type(result) is type(batch) and result["a"].tolist() == [1, 1]
    assert there_and_back(given(WithState())).encodings is None
    assert there_and_back(TensorDict({"x": torch.ones(2)}, batch_size=[2], device="cpu")).device == torch.device("cpu")


class Columns(list):
    """A list that can have attributes."""


Pair = namedtuple("Elsewhere", ["x"])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (make_dataclass("Local", ["x"])(torch.ones(1)), "'the batch itself' is a Local, which is not found under that"),
        ({"p": Pair(torch.ones(1))}, "'p' is an Elsewhere, which is not found"),
        ({"p": namedtuple("Columns", ["x"])(torch.ones(1))}, "'p' is a Columns, which is not found"),
        ({"x": torch.ones(1), "when": datetime.date(2024, 1, 1)}, "'when' holds a date; values other than tensors are"),
        ({"x": torch.ones(1), "lists": [object()]}, "'lists' holds an object"),
        ({"x": torch.ones(1), "wide": np.longdouble(1)}, "'wide' holds a numpy.longdouble; values other than tensors"),
        ({"x": torch.ones(1), "at": np.datetime64("2024-01-01", "ns")}, "'at' holds a numpy.datetime64; values other"),
        ({"x": torch.ones(1), "o": np.array([object()], dtype=object)}, "'o' holds an object"),
        ({"x": np.zeros(1, dtype=[("a", "i4")])}, "'x' is an array of dtype .* pass its fields as separate arrays"),
        ({"x": with_attribute(given(WithState()), "encodings", ["e"])}, "'x' is a WithState with the attribute 'enc"),
        ({"x": with_attribute(given(UserDict()), "extra", {"k": 1})}, "'x' is a UserDict with the attribute 'extra'"),
        ({"x": with_attribute(Columns([torch.ones(2)]), "names", ["a"])}, "'x' is a Columns with the attribute 'na"),
        ({"x": given(WithArguments("n"))}, "'x' is a WithArguments, which cannot be made without arguments"),
        ({"x": given(defaultdict(Counter))}, "'x' is a defaultdict whose factory is .*Counter.*; factories that"),
        ({"x": torch.ones(2, requires_grad=True)}, "'x' requires gradients"),
        ({"x": torch.nn.Parameter(torch.ones(2))}, "'x' is a Parameter; it would arrive as a plain tensor: pass a"),
        ({"x": torch.ones(2).as_subclass(Celsius)}, "'x' is a Celsius; it would arrive as a plain tensor: pass a"),
        ({"x": JaggedTensor(torch.ones(2, requires_grad=True), lengths=torch.ones(2).long())}, "'x' requires grad"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_unchanged_is_refused(batch, message):
    with pytest.raises(TypeError, match=message):
        encode(batch)


@dataclass
class Noted:
    """A batch of the user's own."""

    values: torch.Tensor
    note: object = None
    pinned: bool = field(default=False)

    def pin_memory(self):
        return dataclasses.replace(self, pinned=True)


def test_a_batch_travels_as_one_tensor_in_shared_memory():
    batch = random_batch(0, 4)
    wrapped = wrap(batch)
    assert isinstance(wrapped, WrappedBatch) and wrapped.message.is_shared()
    opened = unwrap(wrapped)
    wrapped.message.zero_()  # nothing of it is left in the batch
    assert torch.equal(opened.features.values(), batch.features.values())
    assert opened.features.values().any() and not opened.features.values().is_shared()


def test_tensors_that_a_message_cannot_hold():
    variable = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(5), lengths=torch.tensor([1, 2, 2]), stride_per_key_per_rank=[[1], [2]]
    )
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    sparse = torch.eye(3).to_sparse()
    for held in (variable, strided, sparse, torch.empty(2, device="meta")):
        batch = {"ids": torch.arange(3), "held": held}
        assert wrap(batch) is batch
    assert isinstance(wrap(Noted(torch.ones(1))), WrappedBatch)


def test_the_pinning_thread_unwraps(monkeypatch):
    unwrapped = wrap(Noted(torch.ones(3))).pin_memory()
    assert unwrapped.pinned and unwrapped.values.tolist() == [1.0] * 3
    assert unwrap(unwrapped) is unwrapped
    plain = wrap([torch.ones(2), {"note": "of no class that could pin itself"}])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor * 2)
    assert str(plain.pin_memory()) == str([torch.full((2,), 2.0), {"note": "of no class that could pin itself"}])
    monkeypatch.setattr(resumable_loader, "decode", None)
    assert unwrap(unwrapped) is unwrapped
