"""Batches of other rows are made without their constructor, and hold all else as it was."""

from __future__ import annotations

import enum
import functools
import math
from collections import OrderedDict, namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.fields import copy_batch
from commons.sequence_batch.rows import Rows, select_rows
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.batches.any_batches import concat_rows, there_and_back
from tests.unit.sequence_batch.test_nested_batches import COPIES, learned


@dataclass
class FromOne(BaseBatch):
    """Labels come counted from 1; the constructor makes them count from 0, and may not see them again."""

    scale: InitVar[float] = 2.0
    made: torch.Tensor = field(init=False)
    unit: str = field(init=False)

    def __post_init__(self, scale: float) -> None:
        super().__post_init__()
        self.labels = self.labels - 1
        self.made = self.labels * scale
        self.unit = "s"
        self.position = torch.arange(self.batch_size)  # an attribute beside the fields
        self.key_index = {key: index for index, key in enumerate(self.features.keys())}

    @functools.cached_property
    def total(self) -> int:
        return int(self.labels.sum())


@dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor
    labels: torch.Tensor
    names: tuple[str, ...] = ("kept",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.labels - 1)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    ids: torch.Tensor
    labels: torch.Tensor
    names: tuple[str, ...] = ("kept",)
    __post_init__ = Frozen.__post_init__


class Pair(namedtuple("Pair", ["ids", "labels"])):
    """A tuple whose constructor changes what it is given."""

    def __new__(cls, ids: torch.Tensor, labels: torch.Tensor) -> Pair:
        return super().__new__(cls, ids, labels - 1)


def from_one() -> FromOne:
    features = KeyedJaggedTensor(["item"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    return FromOne(features, 4, {"item": 1}, labels=torch.arange(1, 5))


REBUILT = {
    "select_rows": lambda batch: select_rows(batch, range(4)),
    "concat_rows": lambda batch: concat_rows([select_rows(batch, [0, 1]), select_rows(batch, [2, 3])]),
    "pad_rows": lambda batch: select_rows(Rows.of(batch).pad(6).batch, range(4)),
    "pin_rows": lambda batch: Rows.of(batch).pin().batch,
    "wire": there_and_back,
}


WAYS = {
    **REBUILT,
    **COPIES,
    "index_select": lambda batch: batch.index_select([0, 1, 2, 3]),
    "copy": lambda batch: copy_batch(batch, {}),
}


@pytest.mark.parametrize("how", list(WAYS))
def test_the_constructor_is_not_run_again(how, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    batch = from_one()
    assert batch.total == 6
    result = WAYS[how](batch)
    assert result.labels.tolist() == result.position.tolist() == [0, 1, 2, 3]
    assert result.made.tolist() == [0, 2, 4, 6] and (result.unit, result.key_index) == ("s", {"item": 0})
    assert "total" not in vars(result)  # it is of the rows, and asked for again


@pytest.mark.parametrize("how", list(REBUILT))
@pytest.mark.parametrize("batch_type", [Frozen, FrozenSlots, Pair])
def test_frozen_and_slotted_batches(batch_type, how, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    result = REBUILT[how](batch_type(torch.arange(4), torch.arange(1, 5)))
    assert type(result) is batch_type and result.labels.tolist() == [0, 1, 2, 3]
    assert getattr(result, "names", ("kept",)) == ("kept",)


def test_what_depends_on_the_rows_moves_with_them():
    result = select_rows(from_one(), [3, 1])
    assert result.position.tolist() == result.labels.tolist() == [3, 1] and result.total == 4


def test_a_dataclass_that_is_a_dict_is_filled_by_its_constructor():
    """As the outputs of transformers, whose items are their fields."""

    @dataclass
    class Output(OrderedDict):
        logits: torch.Tensor
        names: tuple[str, ...] = ("kept",)
        made: int = field(init=False, default=1)

        def __post_init__(self) -> None:
            self["logits"] = self.logits

    result = select_rows(Output(torch.arange(3)), [2, 0])
    assert result["logits"].tolist() == result.logits.tolist() == [2, 0]


@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_batch_is_the_others_without_their_rows(rows):
    batch = from_one()
    empty = learned(batch).empty_batch(rows)
    assert vars(empty).keys() | {"total"} == vars(batch).keys() | {"total"}
    assert (empty.batch_size, empty.actual_batch_size, empty.unit) == (rows, 0, "s")
    assert empty.key_index == {"item": 0} and empty.labels.tolist() == empty.made.tolist() == [0] * rows
    assert BatchSchema.of(empty) == BatchSchema.of(batch)


class Color(enum.Enum):
    RED = (1, "r")


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", ["x", "y"])


@dataclass
class Noted:
    values: torch.Tensor
    note: Any


def noted(note: Any) -> Noted:
    return Noted(torch.ones(2), note)


@pytest.mark.parametrize(
    "value",
    [
        {1: ("a", ["b", (2,), []]), "1": {True: None, (1,): {}}},
        (math.inf, -math.inf, 2**70, 0.1, 1j, b"\x00\xff"),
        Color.RED,
        Level.LOW,
        [Access.READ | Access.WRITE],
        {Color.RED: Point(1, (2,))},
        OrderedDict(b=1, a=2),
        torch.Size([2, 3]),
        torch.bfloat16,
        *(np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("x"), torch.device("cuda", 1)),
        "lone \ud800",
    ],
    ids=repr,
)
def test_a_rank_without_data_holds_the_same_plain_values(value):
    schema = learned(noted(value))
    again = schema.empty_batch().note
    assert again == value and type(again) is type(value) and repr(again) == repr(value)
    assert schema == BatchSchema.of(noted(value))
    (difference,) = schema.differences(BatchSchema.of(noted("other")))
    assert difference.endswith(" and 'other'") and "\ud800" not in difference


def test_not_a_number_is_equal_to_itself():
    schema = learned(noted({"a": [math.nan]}))
    assert schema == BatchSchema.of(noted({"a": [math.nan]})) and math.isnan(schema.empty_batch().note["a"][0])


def test_dicts_are_equal_in_any_order_and_keep_their_own():
    first, second = noted({"b": 1, "a": {2: 0, 1: 0}}), noted({"a": {1: 0, 2: 0}, "b": 1})
    assert BatchSchema.of(first) == BatchSchema.of(second) and not BatchSchema.of(first).differences(learned(second))
    assert list(learned(first).empty_batch().note) == ["b", "a"]
    one, other = torch.ones(2), torch.ones(2, 1)
    assert BatchSchema.of(noted({1: one, "1": other})) == BatchSchema.of(noted({"1": other, 1: one}))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *(({1, 2}, "a set"), ([lambda: 0], "a function"), (range(2), "a range")),
        *((np.ones(2), "an ndarray"), (object(), "an object")),
    ],
)
def test_what_an_empty_rank_could_not_hold_is_refused(value, kind):
    with pytest.raises(TypeError, match=f"^'note' holds {kind}; .* are sent as JSON: use ") as caught:
        BatchSchema.of(noted(value))
    assert "\n" not in str(caught.value)
    batch = noted(None)
    batch.beside = value  # an attribute that is no field is no other
    with pytest.raises(TypeError, match=f"^'beside' holds {kind}"):
        BatchSchema.of(batch)


def test_an_enum_that_this_rank_does_not_know(monkeypatch):
    schema = learned(noted(Color.RED))
    monkeypatch.delattr(f"{__name__}.Color")
    with pytest.raises(KeyError, match="class Color of module .* is unknown on this rank; .* import"):
        schema.empty_batch()
    without = BatchSchema(tuple(each for each in schema.fields if each.path != ("note",)))
    for _ in range(2):
        (difference,) = schema.differences(without)
        assert ":Color" in difference and difference.endswith(" and absent")
        monkeypatch.setattr(f"{__name__}.Color", enum.Enum("Color", ["GREEN"]), raising=False)  # of another version


# No two are the same, though Python calls some equal.
_ALIKE = [
    *(0, False, 0.0, -0.0, 1, True, 1.0, Level.LOW, None, "None", "", b"", "a", b"a", math.inf, -math.inf),
    *([], (), {}, [0], [False], [0.0], [-0.0], (0,), [None], [[0]], [[1]], [(1,)], [1, 2], (1, 2), Point(1, 2), "[0]"),
    *({"a": 0}, {"a": False}, {"a": [0]}, {0: 1}, {"0": 1}, {False: 1}, {1: 2}, {"1": 2}, {1.0: 2}),
    *(OrderedDict(a=0), OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), torch.Size([0]), torch.Size([1, 2])),
    *(Color.RED, "<Color.RED: (1, 'r')>"),
]


@pytest.mark.parametrize("second", _ALIKE, ids=repr)
def test_values_that_look_alike_differ(second):
    """A schema that is known is taken over for the very same values alone."""
    known: dict[Any, BatchSchema] = {}
    own = learned(noted(second))
    for first in _ALIKE:
        before = BatchSchema.of(Noted(torch.zeros(3), first), None, known)
        after = BatchSchema.of(Noted(torch.zeros(2), second), None, known)
        assert after == own and after.text == own.text and len(known) <= 1
        assert (before == after) == (first is second) and (after is before) <= (before == after)
        if first is not second:
            (difference,) = before.differences(own)
            shown = difference.removeprefix("field 'note': ").split(" and ")
            assert difference.startswith("field 'note': ") and "\n" not in difference and shown[0] != shown[1]


def test_a_known_schema_is_not_that_of_a_batch_that_has_changed():
    known: dict[Any, BatchSchema] = {}
    like = Noted(torch.zeros(2), [1, "a"])
    assert BatchSchema.of(like, None, known) is BatchSchema.of(Noted(torch.zeros(5), [1, "a"]), None, known)
    like.note.append(2)  # the list that the known schema was made of
    assert BatchSchema.of(like, None, known) == BatchSchema.of(Noted(torch.zeros(5), [1, "a", 2]))
    assert BatchSchema.of(Noted(torch.zeros(2, 1), like.note), None, known).dense[0].trailing == (1,)
    for note in ([torch.ones(2)], (torch.ones(2),)):  # alike but for the kind of a branch
        batch = Noted(torch.zeros(2), note)
        assert BatchSchema.of(batch, None, known) == BatchSchema.of(batch)
    for name in ("beside", "other"):  # or for the name of an attribute
        batch = noted(1)
        setattr(batch, name, 1)
        assert BatchSchema.of(batch, None, known) == BatchSchema.of(batch)


def test_another_thread_may_clear_the_cache_of_schemas():
    """That of a window, which describes batches with other plain values."""

    class Cleared(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            self.clear()

    batch = Noted(torch.zeros(3), "mine")
    assert BatchSchema.of(batch, None, Cleared()) == BatchSchema.of(batch)
