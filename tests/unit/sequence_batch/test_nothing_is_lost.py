"""What rows, messages and loader workers cannot keep whole is refused by the name of its field, never kept in part."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.samplers.epoch import BatchOrderSampler
from commons.sequence_batch.wire import encode
from tests.helpers.batches.any_batches import concat_rows, count_rows, there_and_back

MASKED = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0], fill_value=1e20)


class Celsius(torch.Tensor):
    """A tensor whose type says what its values are."""


class Made(Dataset):
    """Batches that are made in the worker, by number."""

    def __init__(self, makers):
        self._makers = makers

    def __getitem__(self, index):
        return self._makers[index]()

    def __len__(self):
        return len(self._makers)


def loaded(num_workers, *makers):
    return list(ResumableLoader(Made(makers), BatchOrderSampler(len(makers)), num_workers=num_workers))


@pytest.mark.parametrize("function", [count_rows, encode])
def test_masked_arrays_are_refused(function):
    for held, kind in ((MASKED, "MaskedArray"), (np.zeros((3, 2)).view(np.matrix), "matrix")):
        with pytest.raises(TypeError, match=rf"field 'deep\.price' is a {kind}; rows are taken from plain arrays, .*"):
            function({"deep": {"price": held}})
    parts = {"price": np.ma.getdata(MASKED), "known": ~np.ma.getmaskarray(MASKED)}
    assert count_rows(parts) == 3


def test_memory_mapped_arrays_are_taken(tmp_path):
    mapped = np.memmap(tmp_path / "rows.bin", dtype=np.int32, mode="w+", shape=(3, 2))
    mapped[:] = np.arange(6).reshape(3, 2)
    assert concat_rows([{"x": mapped}, {"x": mapped}])["x"].sum() == 30
    assert there_and_back({"x": mapped})["x"].tolist() == mapped.tolist()


def make_masked():
    return {"price": np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0], fill_value=1e20)}


def make_leaf():
    return defaultdict(list, a=torch.ones(2, requires_grad=True))


def make_celsius():
    return {"heat": torch.ones(2).as_subclass(Celsius)}


def test_a_worker_gives_what_the_main_process_would():
    makers = (make_masked, make_leaf, make_celsius)
    for alone, (masked, leaf, heat) in ((0, loaded(0, *makers)), (1, loaded(1, *makers))):
        assert masked["price"].mask.tolist() == [False, True, False] and masked["price"].sum() == 4, alone
        assert leaf["a"].requires_grad and leaf.default_factory is list, alone
        assert type(heat["heat"]) is Celsius, alone


def make_computed():
    return {"score": torch.ones(2, requires_grad=True) * 2}


def make_nameless():
    return defaultdict(lambda: 1, a=torch.ones(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_computed, "'score' requires gradients, which end where a tensor leaves its process: pass detach"),
        (make_nameless, "'the batch itself' is a defaultdict whose factory is <function make_nameless"),
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


class Columns(list):
    """A list that can have attributes."""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": with_attribute(given(WithState()), "encodings", ["e"])}, "'x' is a WithState with the attribute 'enc"),
        ({"x": with_attribute(given(UserDict()), "extra", 1)}, "'x' is a UserDict with the attribute 'extra' beside"),
        ({"x": with_attribute(Columns([torch.ones(2)]), "names", ["a"])}, "'x' is a Columns with the attribute 'na"),
        ({"x": given(WithArguments("n"))}, "'x' is a WithArguments, which cannot be made without arguments"),
        ({"x": given(defaultdict(Counter))}, "'x' is a defaultdict whose factory is .*Counter.*; those that can be"),
        ({"x": torch.ones(2, requires_grad=True)}, "'x' requires gradients"),
        ({"x": torch.nn.Parameter(torch.ones(2))}, "'x' is a Parameter; it would arrive as a plain tensor: pass one"),
        ({"x": torch.ones(2).as_subclass(Celsius)}, "'x' is a Celsius; it would arrive as a plain tensor: pass one"),
        ({"x": JaggedTensor(torch.ones(2, requires_grad=True), lengths=torch.ones(2).long())}, "'x' requires grad"),
    ],
)  # fmt: skip
def test_what_would_arrive_as_something_else_is_refused(batch, message):
    with pytest.raises(TypeError, match=message):
        encode(batch)
