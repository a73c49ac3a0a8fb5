"""What the host knows of a batch on a device: equal to the device's lengths whatever was done, and never stale.

The device is "meta": its tensors have no values, so that whatever reads them back fails.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from commons.datasets.hstu_batch import HSTUBatch
from commons.sequence_batch.host_copies import attach_host_copy, carry_host_copy, host_arrays, host_copy, to_device
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.batches.random_batches import RichBatch, random_batch
from tests.helpers.batches.square_shuffler import SquareShuffler, closing
from tests.helpers.models.hstu_models import random_batch as random_hstu_batch

META, CPU = torch.device("meta"), torch.device("cpu")
KEYS = ("user", "item", "action")


@dataclass
class CountedBatch(RichBatch):
    """Every row has a number that the model plans by, and one of another kind that it does not."""

    host_fields: ClassVar[tuple[str, ...]] = ("number", "optional")

    number: torch.Tensor = field(kw_only=True)
    optional: torch.Tensor | None = field(default=None, kw_only=True)


def counted_batch(seed: int, rows: int, real: int | None = None, **changes: Any) -> CountedBatch:
    number = torch.arange(rows, dtype=torch.int32) % 7
    number[rows if real is None else real :] = 0
    return CountedBatch(**vars(random_batch(seed, rows, real)), number=number, **changes)


def assert_knows(batch: CountedBatch, like: CountedBatch) -> None:
    """The batch, on a device, says on the host what the host batch says."""
    expected = like.features.lengths().view(len(KEYS), -1)
    for lengths, row in zip(batch.host_lengths(*KEYS), expected):
        assert lengths.dtype == np.int64
        assert lengths.tolist() == row.tolist()
    assert batch.host_values("number").tolist() == like.number.tolist()
    for name in ("tiny", "labels"):
        known = host_copy(getattr(batch, name).lengths())
        assert known is not None and torch.equal(known, getattr(like, name).lengths())


@given(seed=st.integers(0, 999), rows=st.integers(1, 7), data=st.data())
def test_the_host_knows_what_the_device_has(seed: int, rows: int, data: st.DataObject) -> None:
    real = data.draw(st.integers(0, rows))
    host = counted_batch(seed, rows, real)
    batch: Any = host.to(META) if data.draw(st.booleans()) else host.to(META).to(META)
    assert_knows(batch, host)
    assert batch.features.length_per_key() == host.features.length_per_key()
    chosen = data.draw(st.lists(st.integers(0, real - 1), max_size=9)) if real else []
    chosen += data.draw(st.lists(st.integers(real, rows - 1), max_size=3)) if real < rows else []
    selected = batch.index_select(chosen)
    assert selected.features.lengths().device == META
    assert_knows(selected, host.index_select(chosen))
    assert selected.features.length_per_key() == host.index_select(chosen).features.length_per_key()


def test_another_field_has_lengths_of_its_own() -> None:
    first, second = counted_batch(0, 4), counted_batch(1, 4, optional=torch.tensor([5, 3, 0, 1]))
    batch, other = first.to(META), second.to(META)
    assert other.host_values("optional").tolist() == [5, 3, 0, 1]
    for refused in (torch.ones(4), torch.ones(4, 1, dtype=torch.int64)):  # not one integer per row
        schema = BatchSchema.of(counted_batch(1, 4, optional=refused))
        assert [each.name for each in schema.host_fields] == ["number"]
    assert_knows(dataclasses.replace(batch, image=other.image), first)
    mixed = dataclasses.replace(batch, features=other.features)
    assert mixed.host_lengths("item")[0].tolist() == second.host_lengths("item")[0].tolist()
    batch.features, batch.number = other.features, other.number
    assert batch.host_lengths("item")[0].tolist() == second.host_lengths("item")[0].tolist()
    assert batch.host_values("number").tolist() == second.number.tolist()


@pytest.mark.parametrize("side", ["device", "host"])
def test_lengths_that_are_written_to_are_forgotten(side: str) -> None:
    host = counted_batch(0, 4)
    batch = host.to(META)
    (batch if side == "device" else host).features.lengths().add_(1)
    torch.autograd.graph.increment_version(batch.number)  # what docs name for writes without a version
    assert host_copy(batch.features.lengths()) is host_copy(batch.number) is None
    assert host_copy(batch.tiny.lengths()) is host.tiny.lengths()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("side", ["device", "host"])
def test_a_tensor_that_was_given_other_memory_forgets(side: str, times: int) -> None:
    host = counted_batch(0, 4)
    batch = host.to(META)
    lengths = (batch if side == "device" else host).features.lengths()
    for _ in range(times):  # memory that is let go of may be taken again, for other values
        lengths.data = torch.zeros_like(lengths)
    assert host_copy(batch.features.lengths()) is None
    lengths = (batch if side == "device" else host).labels.lengths()
    lengths.data = lengths[1:]  # a part of the same memory
    assert host_copy(batch.labels.lengths()) is None


def test_memory_is_not_kept_for_what_was_known_of_it() -> None:
    host = torch.arange(1000)
    copied = torch.empty(1000, dtype=torch.int64, device=META)
    attach_host_copy(copied, host)
    before = StorageWeakRef(host.untyped_storage()), StorageWeakRef(copied.untyped_storage())
    copied.data = torch.empty(2, dtype=torch.int64, device=META)
    assert before[1].expired() and host_copy(copied) is None
    del host, copied
    assert before[0].expired()


def test_copies_and_pickles_of_a_tensor_know_nothing() -> None:
    host = counted_batch(0, 4)
    lengths = host.to(META).features.lengths()
    shallow = copy.copy(lengths)
    assert host_copy(shallow) is None and host_copy(lengths) is not None  # each has a version of its own
    copies = (copy.deepcopy(lengths), copy.deepcopy(shallow), pickle.loads(pickle.dumps(lengths)))
    for copied in (*copies, lengths.clone(), lengths.view(-1)):
        assert copied.device == META and host_copy(copied) is None
    saved = io.BytesIO()
    torch.save(lengths, saved)
    saved.seek(0)
    assert host_copy(torch.load(saved, weights_only=True)) is None


def test_tensors_of_inference_mode_are_known_too() -> None:
    with torch.inference_mode():
        host = torch.arange(3)
        on_device = host.to(META)
        carry_host_copy(host, on_device)
        assert host_copy(on_device) is host


def test_an_in_place_copy_is_known_after_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec's in-place copy writes into memory that was taken before."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.cpu)  # "meta" has no streams
    host = counted_batch(0, 4)
    assert_knows(host.to(META, data_copy_stream=torch.cpu.Stream()), host)


class _Device(torch.Tensor):
    """A tensor that says it lies on a device, and counts how often it is read."""

    reads = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return META

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            cls.reads += 1
            return args[0].as_subclass(torch.Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_was_made_on_the_device_is_read_back_once() -> None:
    first, second = torch.tensor([[1, 2], [3, 4]]).as_subclass(_Device), torch.tensor([5]).as_subclass(_Device)
    _Device.reads = 0
    for _ in range(2):
        arrays = host_arrays([first, second, torch.tensor([6], dtype=torch.int32)])
        assert [array.tolist() for array in arrays] == [[[1, 2], [3, 4]], [5], [6]]
    assert _Device.reads == 1


def test_arrays_go_to_the_device_as_one() -> None:
    arrays = [np.arange(3), np.arange(0), np.arange(4).reshape(2, 2)]
    tensors = to_device(arrays, CPU)
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_hosts_know_candidates_and_say_which_names_they_know() -> None:
    host = random_hstu_batch(6, max_num_candidates=3, actual_batch_size=5)
    assert host.num_candidates is not None
    batch = host.to(META)
    contextual, items, candidates = batch.host_sequence_lengths()
    tokens, targets = host.sequence_lengths()
    assert (contextual + 2 * items).tolist() == tokens.tolist()
    assert (2 * candidates).tolist() == targets.tolist()
    for call in (lambda: batch.host_lengths("item", "shop"), lambda: batch.global_lengths("shop")):
        with pytest.raises(KeyError, match=r"features \['shop'\] are not among the batch's keys"):
            call()
    with pytest.raises(KeyError, match="'labels' is not among the host_fields of this HSTUBatch"):
        batch.host_values("labels")
    without = random_hstu_batch(6)
    assert isinstance(without, HSTUBatch) and not without.host_sequence_lengths()[2].any()
    with pytest.raises(KeyError, match="num_candidates"):
        without.host_values("num_candidates")


def _batch_with(names: tuple[str, ...]) -> Any:
    """A batch of a new class, always of one name, as from a notebook's cell that runs again."""

    @dataclass
    class AnewBatch(RichBatch):
        host_fields: ClassVar[tuple[str, ...]] = names
        number: torch.Tensor = field(kw_only=True)

    return AnewBatch(**vars(random_batch(1, 4)), number=torch.arange(4))


def test_a_class_that_is_defined_anew_has_its_own_host_fields() -> None:
    for names in ((), ("number",)):
        batch = _batch_with(names)
        with closing(SquareShuffler()) as shuffler:
            _, workloads = shuffler.shuffle(batch, return_workloads=True)
            assert workloads.tolist() == shuffler.get_workloads(batch).tolist()
            with pytest.raises(ValueError, match="AnewBatch, host field 'sample_id'; type, structure"):
                shuffler.shuffle(_batch_with(("sample_id",)))


def test_a_batch_that_stays_can_be_freed_early() -> None:
    """TorchRec resizes the storages of a batch's features to nothing (`free_features_storage_early`)."""
    with closing(SquareShuffler()) as shuffler:
        features = shuffler.shuffle(random_batch(1, 4)).features
    assert features.values().untyped_storage().resizable() and features.lengths().untyped_storage().resizable()
