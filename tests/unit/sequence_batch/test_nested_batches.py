"""Batches with dicts, lists and other branches in them: opened, described, rebuilt, selected and copied."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from commons.sequence_batch import host_copies
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.open_batch import (
    batch_device,
    open_batch,
    replace_rows,
    require_one_device,
    row_counts,
    row_fields,
    value_at,
)
from commons.sequence_batch.rows import Rows, select_rows
from commons.sequence_batch.schema import BatchSchema, register_batch_type
from tests.helpers.batches.any_batches import as_values, concat_rows, dense, jagged, keyed, kjt, nested
from tests.helpers.batches.easyrec import PaddedEasyRecBatch, Reserves, easyrec_batch
from tests.helpers.batches.random_batches import rows_as_values

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Inner:
    ids: torch.Tensor
    unit: str = "s"
    batch_size: int | None = None
    actual_batch_size: int | None = None


@dataclass
class Deep(BaseBatch):
    """Branches of every kind beside the fields of BaseBatch."""

    more: dict[Any, Any] = field(default_factory=dict)
    listed: list[Any] = field(default_factory=list)
    inner: Inner | None = None


def tensors(ids: list[int]) -> TensorDict:
    held = TensorDict({"ids": dense(ids), "deep": {"mask": dense(ids, torch.bool)}}, batch_size=[len(ids)])
    held.set_non_tensor("names", ["kept", "whole"])
    return held


def deep(ids: list[int], rows: int | None = None) -> Deep:
    rows = len(ids) if rows is None else rows
    padded = torch.nn.functional.pad(dense(ids), (0, 0, 0, rows - len(ids)))
    factory = defaultdict(list)
    factory["x"] = padded
    more: dict[Any, Any] = {"kt": {"a": KeyedTensor(["k", "l"], [2, 1], padded.half())}, 7: (padded, "kept")}
    if rows == len(ids):
        more |= {"td": tensors(ids), "jt": jagged(ids), "factory": factory}
    return Deep(
        features=kjt(ids, rows),
        labels=padded[:, :1].float(),
        actual_batch_size=len(ids),
        more=more,
        listed=[Pair(padded, 3.0), kjt(ids, rows, weights=False)],
        inner=Inner(padded[:, 0], batch_size=rows, actual_batch_size=len(ids)),
    )


def learned(batch: Any) -> BatchSchema:
    return BatchSchema.from_text(BatchSchema.of(batch).text)


ONES, STACK = torch.ones(2), NonTensorStack(NonTensorData("x"), NonTensorData("y"))
ids = st.lists(st.integers(0, 30), min_size=1, max_size=5)


@given(ids, st.data())
def test_rows_of_a_nested_batch_are_selected_whole(samples, data):
    chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=6))
    expected = deep([samples[row] for row in chosen])
    result = deep(samples).index_select(chosen)
    assert as_values(result) == as_values(expected) and result.inner.actual_batch_size == len(chosen)
    easyrec = select_rows(easyrec_batch(samples), chosen)
    assert easyrec.batch_size == -1
    assert rows_as_values(easyrec) == rows_as_values(easyrec_batch([samples[row] for row in chosen]))


@given(ids, ids)
def test_batches_with_dicts_in_other_orders_are_joined(first, second):
    joined = concat_rows([easyrec_batch(first), easyrec_batch(second, backwards=True)])
    assert rows_as_values(joined) == rows_as_values(easyrec_batch(first + second))
    padded = Rows.of(easyrec_batch(first, len(first))).pad(len(first) + 2)
    expected = rows_as_values(easyrec_batch(first, len(first) + 2), padding=True)
    assert rows_as_values(padded.batch, padding=True) == expected
    assert padded.batch.actual_batch_size == len(first)


def test_metadata_with_nan_is_equal_at_any_depth():
    def batch(*means, **more):
        return {"ids": torch.arange(2), "means": ({"mean": list(map(float, means))} | more, 2)}

    assert concat_rows([batch("nan", std=None), batch("nan", std=None)])["ids"].tolist() == [0, 1, 0, 1]
    for other in (batch(0, std=None), batch("nan", 1, std=None), batch("nan", std=None, n=1), batch("nan", n=None)):
        with pytest.raises(ValueError, match="differ at 'means'"):
            concat_rows([batch("nan", std=None), other])


def test_batches_whose_keyed_tensors_differ_are_not_joined():
    other = easyrec_batch([1])
    other.dense_features["user"] = KeyedTensor(["age", "geo"], [2, 1], torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"batches 0 and 1 differ at 'dense_features\.user': "):
        concat_rows([easyrec_batch([1]), other])


def test_a_batch_is_opened_by_path():
    batch = deep([3, 4])
    tree = open_batch(batch)
    assert tree.plain["more", 7, 1] == "kept" and tree.plain["more", "td", "names"] == ["kept", "whole"]
    assert dict(row_fields(batch)).keys() == tree.leaves.keys()
    for path, value in row_fields(batch):
        found = value_at(batch, path)
        assert found is value or torch.equal(found, value)
    assert row_counts(batch) == (2, 2) and batch_device(easyrec_batch([1])).type == "cpu"
    for function in (batch_device, row_counts):
        with pytest.raises(ValueError, match="the batch is an Inner without rows"):
            function(Inner("no tensor", batch_size=2))
    with pytest.raises(ValueError, match="fields are on different devices: {'a': 'cpu', 'b': 'meta'}"):
        require_one_device({("a",): ONES, ("b",): ONES.to("meta")})
    changed = replace_rows(batch, {("more", "kt", "a", "values"): torch.ones(2, 3), ("inner", "ids"): torch.ones(2)})
    assert changed.more["kt"]["a"]["k"].tolist() == [[1, 1]] * 2 and changed.inner.ids.tolist() == [1, 1]
    assert as_values(batch) == as_values(deep([3, 4]))


@pytest.mark.parametrize("make", [deep, easyrec_batch, lambda ids: easyrec_batch(ids, 3)])
def test_a_schema_travels_and_makes_empty_batches(make):
    batch = make([3, 4])
    schema = learned(batch)
    assert schema == BatchSchema.of(batch) and not schema.differences(BatchSchema.of(batch))
    for rows in (0, 2):
        empty = schema.empty_batch(rows)
        assert BatchSchema.of(empty) == schema and row_counts(empty)[0] == rows
        assert type(empty) is type(batch) and empty.batch_size == (rows if isinstance(batch, Deep) else -1)
        assert len(rows_as_values(empty, padding=True)) == rows
        for _, value in row_fields(empty):
            assert not (value if isinstance(value, torch.Tensor) else value.lengths()).any()
    if make is deep:
        empty = schema.empty_batch(2)
        assert (empty.inner.batch_size, empty.inner.actual_batch_size, empty.inner.unit) == (2, 0, "s")
        assert type(empty.listed[0]) is Pair and empty.listed[0].right == 3.0
        assert empty.more["factory"].default_factory is list and empty.more["td"].get("names").data == ["kept", "whole"]
        assert isinstance(empty.more["jt"], JaggedTensor) and empty.more["jt"].values().shape == (0, 2)


def test_an_empty_batch_has_its_dicts_in_the_order_of_the_first_rank():
    """A model may join the values of a dict in its order."""
    column = torch.ones(2, 1)
    batch = deep([1, 2])
    batch.more = {"w": column, "unit": "s", "age": {"z": column, "b": column}, 3: column, "a": column}
    empty = learned(batch).empty_batch(2)
    assert list(empty.more) == list(batch.more) and list(empty.more["age"]) == ["z", "b"]


def test_an_object_of_each_rank_s_own_is_its_default_on_a_rank_without_data():
    batch = easyrec_batch([1, 2])
    batch.reserves, batch.checkpoint_info = Reserves(), {"step": 3}
    empty = learned(batch).empty_batch()
    assert empty.reserves is None and empty.checkpoint_info == {"step": 3}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", {}, "'labels': dict and {}"),
        ("labels", {"row": torch.zeros(2)}, "'labels.row': tensor int64 [] and tensor float32 []"),
        ("labels", {"row": jagged([1, 2])}, "'labels.row': tensor int64 [] and jagged elements [2] int64, weights"),
        ("dense_features", {"item": torch.zeros(2, 1)}, "'dense_features.item': KeyedTensor ['price'] of widths"),
        (
            "dense_features",
            {"item": KeyedTensor(["cost"], [1], ONES.view(2, 1))},
            "KeyedTensor ['price'] of widths [1] and KeyedTensor ['cost'] of widths [1]",
        ),
        ("sample_weights", {"ctr": torch.zeros(2), "cvr": torch.zeros(2)}, "'sample_weights.cvr': absent and tensor"),
        ("sequence_dense_features", [torch.zeros(2)], "'sequence_dense_features': dict and list"),
    ],
)
def test_a_structure_that_differs_is_named(name, value, message):
    batch = easyrec_batch([5, 6])
    different = BatchSchema.of(batch).differences(BatchSchema.of(dataclasses.replace(batch, **{name: value})))
    assert any(message in text for text in different) and not any("\n" in text for text in different), different


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"a": nested([5, 6])}, ValueError, "field 'labels.a' is a nested tensor"),
        ({"a": JaggedTensor(torch.ones(3), offsets=torch.tensor([1, 2, 3]))}, ValueError, "'labels.a' has offsets"),
        ({"a": JaggedTensor(ONES, lengths=ONES.int(), weights=ONES.view(2, 1))}, ValueError, "weights of shape .2, 1."),
        ({"a": torch.zeros(2), "b": {1, 2}}, TypeError, "'labels.b' holds a set"),
        ({"a": [torch.zeros(2).numpy()]}, TypeError, "'labels.a.0' holds an ndarray"),
        (TensorDict({"a": STACK}, batch_size=[2]), TypeError, "'labels.a' holds a Python object per row"),
        (TensorDict({"a": torch.zeros(3, 1)}, batch_size=[3]), ValueError, "disagree .*'labels.batch_size': 3"),
        (Inner(torch.zeros(2), batch_size=3), ValueError, "disagree .*'labels.batch_size': 3"),
        (Inner(torch.zeros(2), actual_batch_size=3), ValueError, "actual_batch_size is 3, batch_size is 2"),
    ],
)
def test_what_cannot_move_is_refused_by_its_path(value, error, message):
    with pytest.raises(error, match=message) as caught:
        BatchSchema.of(dataclasses.replace(easyrec_batch([5, 6]), labels=value))
    assert "\n" not in str(caught.value)


def test_parts_that_state_other_padding_are_refused():
    batch = dataclasses.replace(easyrec_batch([5], 2), labels=Inner(torch.zeros(2), actual_batch_size=2))
    with pytest.raises(ValueError, match=r"\{'actual_batch_size': 1, 'labels.actual_batch_size': 2\}"):
        row_counts(batch)


COPIES = {
    "to": lambda batch: batch.to(torch.device("cpu")),
    "to on a stream": lambda batch: batch.to(torch.device("cpu"), data_copy_stream=torch.cpu.Stream()),
    "pin_memory": lambda batch: batch.pin_memory(),
}


@pytest.mark.parametrize("how", list(COPIES))
def test_copies_of_a_batch_take_its_branches_along(how, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr("torchrec.sparse.jagged_tensor.KeyedJaggedTensor.pin_memory", lambda kjt: kjt)
    batch = deep([3, 4])
    result = COPIES[how](batch)
    assert as_values(result) == as_values(batch) and result.more is not batch.more
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    on_meta = batch.to(torch.device("meta"))
    for each in (batch, on_meta):  # a batch on the host has no stream to wait for
        each.record_stream(torch.cpu.Stream())
    assert len(recorded) > len(list(row_fields(batch))) and all(tensor.is_meta for tensor in recorded)


def test_the_host_knows_the_lengths_of_nested_fields_that_went_to_a_device():
    batch = deep([3, 4])
    batch.more["td"] = batch.more["td"].to("cpu")  # a TensorDict with a device of its own
    on_device = batch.to(torch.device("meta"))
    assert on_device.more["td"].device == torch.device("meta")
    for path in [("listed", 1), ("more", "jt")]:
        lengths = value_at(on_device, path).lengths()
        assert lengths.device.type == "meta"
        assert host_copies.host_copy(lengths).tolist() == value_at(batch, path).lengths().tolist()
    assert on_device.more["td"].get("ids").device.type == "meta"


# ------------------------------------------------------------------------------------- values of each rank's own


@register_batch_type
@dataclass
class Known:
    values: torch.Tensor
    when: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)


@register_batch_type(per_rank=("when", "info.source"))
@dataclass
class Own(Known):
    handle: Any = None


class Heir(Own):
    pass


@register_batch_type(per_rank=["handle"])
@dataclass
class NoDefault:
    values: torch.Tensor
    handle: Any


@register_batch_type
@dataclass
class Factory(NoDefault):
    handle: Any = field(default_factory=list)


def test_values_of_each_rank_do_not_make_batches_differ():
    def own(when: float, source: str, unit: str = "s") -> Own:
        return Own(torch.ones(2), when, {"t": torch.ones(2), "source": source, "sources": unit})

    first, other = BatchSchema.of(own(1.0, "a")), learned(own(2.0, "b"))
    assert first == other and not first.differences(other) and first.empty_batch().when == 1.0
    assert other.empty_batch().info["source"] == "b"
    assert BatchSchema.of(own(1.0, "a", "ms")) != first
    text = first.way_out(BatchSchema.of(own(1.0, "a", "ms")))
    assert text.endswith("register_batch_type(Own, per_rank=('info.sources',))")
    held = [Known(torch.ones(2), info={"deep": own(when, "a")}) for when in (1.0, 2.0)]
    assert BatchSchema.of(held[0]) == learned(held[1])  # as a part of another batch too
    joined = Rows.concat([Rows.of(each) for each in held])
    assert joined.batch.info["deep"].when == 1.0
    assert joined.with_own_of(Rows.of(held[1])).batch.info["deep"].when == 2.0
    heirs = [BatchSchema.of(Heir(torch.ones(2), when)) for when in (1.0, 2.0)]
    assert heirs[0] == heirs[1]
    undeclared = [BatchSchema.of(Known(torch.ones(2), when)) for when in (1.0, 2.0)]
    (difference,) = undeclared[0].differences(first)
    assert difference == f"batch type {__name__}.Known and {__name__}.Own"
    assert undeclared[0].way_out(undeclared[1]).endswith("register_batch_type(Known, per_rank=('when',))")
    assert undeclared[0].way_out(BatchSchema.of(Known(torch.ones(2).int(), 1.0))) == ""
    of_dicts = [Rows.of({"values": torch.ones(2), "when": when}).schema for when in (1.0, 2.0)]
    assert of_dicts[0] != of_dicts[1] and of_dicts[0].way_out(of_dicts[1]) == ""
    assert of_dicts[0] != Rows.of({"values": torch.ones(2), "then": 1.0}).schema


def test_declarations_add_up_and_are_checked():
    @dataclass
    class Local:
        values: torch.Tensor
        handle: Any = None

    with pytest.raises(TypeError, match=r"'handle' holds an object; .*register_batch_type\(Local, per_rank=.'handle'"):
        BatchSchema.of(Local(torch.ones(2), handle=object()))
    assert register_batch_type(Local) is Local and register_batch_type(Local, per_rank=["handle"]) is Local
    assert register_batch_type()(Local) is Local
    # JSON cannot hold this one: an empty batch has the default.
    schema = learned(Local(torch.ones(2), handle=object()))
    assert schema == BatchSchema.of(Local(torch.ones(2), handle=lambda: 0)) and schema.empty_batch().handle is None
    with pytest.raises(TypeError, match="a per_rank value of another type must be a field with a default"):
        BatchSchema.of(NoDefault(torch.ones(2), object()))
    assert learned(Factory(torch.ones(2), object())).empty_batch().handle == []
    # An attribute that is no field counts as one.
    register_batch_type(Local, per_rank=("stamp",))
    batches = [Local(torch.ones(2), handle=object()) for _ in range(2)]
    batches[0].stamp, batches[1].stamp = 1.0, 2.0
    assert BatchSchema.of(batches[0]) == BatchSchema.of(batches[1])
    # The name of a branch stands for the plain values below it.
    below = [BatchSchema.of(Local(torch.ones(2), {"rows": torch.ones(2), "n": n})) for n in (1, 2)]
    assert below[0] == below[1]
    register_batch_type(Local, per_rank=("values",))
    with pytest.raises(ValueError, match="per_rank of Local names 'values', which holds rows"):
        BatchSchema.of(Local(torch.ones(2)))


def test_a_batch_size_below_zero_states_nothing():
    assert row_counts(easyrec_batch([1, 2])) == (2, 2) and row_counts(easyrec_batch([1], 2)) == (2, 1)
    with pytest.raises(ValueError, match="'batch_size': 3"):
        row_counts(dataclasses.replace(easyrec_batch([1, 2]), batch_size=3))
    stated = dataclasses.replace(easyrec_batch([1, 2]), batch_size=2)
    (difference,) = BatchSchema.of(stated).differences(BatchSchema.of(easyrec_batch([1, 2])))
    assert difference == "field 'batch_size': absent and -1"
    with pytest.raises(ValueError, match="batches 0 and 1 differ at 'batch_size': -1 and 2"):
        concat_rows([easyrec_batch([1, 2]), stated])
    assert select_rows(stated, [0]).batch_size == 1 and keyed([1]).values().shape == (1, 3)
    assert isinstance(learned(easyrec_batch([1], 2)).empty_batch(), PaddedEasyRecBatch)


def test_objects_of_a_tensordict_that_hold_tensors_are_not_opened():
    """As verl's multi_modal_inputs and indices; also if a tensor has as many entries as the batch has rows."""
    batch, whole = TensorDict({"row": torch.arange(3)}, 3), {"table": torch.arange(3), "indices": torch.arange(3)}
    batch["whole"], batch["indices"] = NonTensorData(whole), NonTensorData(whole["indices"])
    batch["images"] = NonTensorStack(*(NonTensorData({"pixels": torch.full((3, 2), row)}) for row in range(3)))
    for rows in ([2, 0, 1], [1]):
        chunks = [select_rows(copy.deepcopy(batch), [row]) for row in rows]
        for result in (select_rows(batch, rows), concat_rows(chunks)):
            found = result.get("images").tolist()
            assert result["row"].tolist() == rows == [int(each["pixels"][0, 0]) for each in found]
            assert all(each["pixels"].shape == (3, 2) for each in found)
            assert torch.equal(result["indices"], whole["indices"]) and list(result["whole"]) == list(whole)
            assert torch.equal(result["whole"]["table"], whole["table"])
    chunks[0]["whole"] = NonTensorData({**whole, "table": torch.tensor([0, 1, 3])})
    with pytest.raises(ValueError, match="differ at 'whole'"):
        concat_rows([chunks[0], select_rows(batch, [0])])
