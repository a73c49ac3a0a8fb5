"""The resumable loader: exactly the rest of the batches, with and without workers; a new order in every epoch."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.loader.resumable import ResumableLoader, _Batches, _Given, wrap
from commons.datasets.samplers.epoch import EPOCH_START, BatchOrderSampler, Place, ShardedBatchSampler
from commons.datasets.sequences.file import SequenceFile
from commons.datasets.sids.map import random_sid_map
from tests.helpers.batches.any_batches import as_values
from tests.helpers.datasets.stored_users import copy_of_another_split


def make(generated, order="in turn", **arguments):
    settings = {"batch_size": 4, "max_history_seqlen": 8, "shuffle": True, "rank": 1, "world_size": 2, **arguments}
    loader = get_data_loader("ml-1m", dataset_path=generated, **settings)
    work, ranks = [20 + row**2 % 50 for row in range(len(loader.dataset))], {"num_ranks": 2, "rank": 1}
    if order == "window":
        return loader.with_sampler(BalancedBatchSampler(work, 4, window=3, **ranks))
    if order == "budget":
        return loader.with_sampler(BudgetBatchSampler(work, budget_per_rank=160, max_rows=5, **ranks))
    return loader


def epochs(loader, number: int) -> list[list]:
    return [[as_values(batch) for batch in loader] for _ in range(number)]


@pytest.mark.parametrize("order", ["in turn", "window", "budget"])
@pytest.mark.parametrize(("workers", "stop"), [(0, 0), (2, 1), (0, -1)])
def test_a_resumed_loader_gives_exactly_the_rest(generated, order, workers, stop):
    first, second, third = epochs(make(generated, order), 3)
    stop = len(second) - 1 if stop < 0 else stop
    loader = make(generated, order, num_workers=workers)
    for _ in loader:  # the state lies within the second epoch
        pass
    iterator = iter(loader)
    assert [as_values(batch) for batch in itertools.islice(iterator, stop)] == second[:stop]
    state = json.loads(json.dumps(loader.state_dict()))
    assert [as_values(batch) for batch in iterator] == second[stop:]  # saving disturbs nothing
    # A place counts rows of the data, with any number of workers.
    resumed = make(generated, order, num_workers=2 - workers)
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(state["epoch"])  # as torch's loops do in every epoch
    assert resumed.state_dict() == state
    assert epochs(resumed, 2) == [second[stop:], third]
    assert first


@pytest.mark.parametrize("name", ["ml-1m", "random", "sid-ml-1m", "sid-random"])
def test_batches_are_on_the_host_whatever_the_default_device_is(generated, name):
    """In a script that has called torch.set_default_device; no data is on this one."""
    path = {} if name.endswith("random") else {"dataset_path": generated}
    sizes = {"num_batches": 2} if name.endswith("random") else {}
    sids = {"sid_map": random_sid_map(5000, (20, 20, 20))} if name.startswith("sid-") else {}
    options = {"batch_size": 4, "max_history_seqlen": 8, **path, **sizes, **sids}

    def read():
        loader = get_data_loader(name, **options)
        return [wrap(loader.dataset[key]).unwrap() for key in itertools.islice(loader.sampler, 2)]

    expected = [as_values(batch) for batch in read()]
    with torch.device("meta"):
        found = read()
    assert [as_values(batch) for batch in found] == expected


class DamagedRows(torch.utils.data.Dataset):
    """Batches of row numbers; those of some rows cannot be read."""

    def __init__(self, errors):
        self.errors = errors

    def __getitem__(self, rows):
        for row in rows:
            if row in self.errors:
                raise self.errors[row]
        return {"rows": torch.tensor(rows)}


@pytest.mark.parametrize(
    ("workers", "error"), [(0, ValueError("row 4")), (2, KeyError("row 4")), (2, RuntimeError("row 4"))]
)
def test_a_state_behind_an_error_is_behind_its_batch(workers, error):
    def loader(num_workers=0):
        errors = {4: error, 13: error}
        return ResumableLoader(DamagedRows(errors), ShardedBatchSampler(14, 2), num_workers=num_workers)

    def read_all(batches):
        while True:
            try:
                batch = next(batches, None)
            except type(error):
                yield "error"
            else:
                if batch is None:
                    return
                yield batch["rows"].tolist()

    whole = [[0, 1], [2, 3], "error", [6, 7], [8, 9], [10, 11], "error"]
    first, read, states = loader(workers), [], []
    for each in read_all(iter(first)):
        read.append(each)
        states.append(json.loads(json.dumps(first.state_dict())))
    assert read == whole and first.state_dict()["epoch"] == 1
    for done, state in enumerate(states, start=1):
        resumed = loader()
        resumed.load_state_dict(state)
        assert list(read_all(iter(resumed))) == whole[done:]


def test_a_sampler_that_fails_beside_workers_loses_no_batch():
    """Nor does a worker that dies: the batch that is missing is the next one."""
    for in_workers in (True, False):
        progress = _Given(0, EPOCH_START)
        with pytest.raises(ZeroDivisionError):
            next(_Batches((1 // each for each in [0]), progress, in_workers=in_workers))
        assert progress.num_batches == (not in_workers)


def test_a_data_set_of_the_users_own_may_use_our_names():
    """What it holds there is no description of its rows."""

    class Shuffled(TensorDataset):
        row_order = np.arange(6)[::-1]

    sampler = BatchOrderSampler(6)
    loader = ResumableLoader(Shuffled(torch.arange(6)), sampler)
    assert loader.state_dict() == {"epoch": 0, "row": 0, "steps": 0, "sampler": sampler.identity()}


def test_a_state_of_another_loader(generated, tmp_path):
    state = make(generated).state_dict()
    for arguments, message in (
        ({"batch_size": 8}, "state has batch_size 4, this loader has 8"),
        ({"rank": 0}, "state has rank 1, this loader has 0"),
        ({"seed": 7}, "state has seed 1234, this loader has 7"),
        ({"split": "test"}, "state has num_rows"),
    ):
        with pytest.raises(ValueError, match=message):
            make(generated, **arguments).load_state_dict(state)
    other = copy_of_another_split(SequenceFile(generated, "ml-1m", []).path, tmp_path / "ml-1m.parquet")
    with pytest.raises(ValueError, match="state has split_seed 0, this loader has 7"):
        make(other).load_state_dict(state)
    for other_state in ({}, {"epoch": 0}, {"epoch": 0, "row": 3}, {"num_workers": 0, "iterator": {}}):
        with pytest.raises(ValueError, match="it must have epoch, row, steps and sampler"):
            make(generated).load_state_dict(other_state)


def test_another_planner_matters_only_within_a_window(generated):
    loader = make(generated, "window")
    state = loader.state_dict()
    state["sampler"]["plans"] = "other"
    with pytest.raises(ValueError, match="state has plans other, this loader has"):
        loader.load_state_dict(state | {"steps": 1})
    next(iter(loader))
    loader.load_state_dict(state | {"row": 24})
    assert loader.state_dict()["row"] == 24


def test_places_before_the_first_are_refused(generated):
    sampler = make(generated).sampler
    for value in (-1, 1.5, "1", None, True):
        with pytest.raises(ValueError, match=f"epoch is {value!r}; it must be an integer of at least 0"):
            sampler.set_epoch(value)
        with pytest.raises(ValueError, match=f"row is {value!r}; it must be an integer of at least 0"):
            sampler.start_at(value)
    sampler.start_at(1)
    sampler.set_epoch(np.int64(3))
    assert type(sampler.epoch) is int and (sampler.epoch, sampler.start) == (3, (0, 0))


def test_more_ranks_and_workers_than_rows(generated):
    num_users = len(make(generated, split="test").dataset)
    for rank, expected in ((num_users - 1, 1), (num_users, 0)):
        loader = make(generated, split="test", rank=rank, world_size=num_users + 2, num_workers=3)
        assert [[batch.actual_batch_size for batch in loader] for _ in range(2)] == [[1] * expected] * 2


def test_an_epoch_that_is_left_is_not_begun_again(generated):
    abandoned = make(generated)
    assert as_values(next(iter(abandoned))) != as_values(next(iter(abandoned)))


@given(
    num_rows=st.integers(0, 60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_sharded_places(num_rows, batch_size, world_size, shuffle, drop_last, data):
    rank = data.draw(st.integers(0, world_size - 1))
    first_row = data.draw(st.integers(0, num_rows))

    def sampler():
        options = {"rank": rank, "world_size": world_size, "shuffle": shuffle, "drop_last": drop_last}
        result = ShardedBatchSampler(num_rows, batch_size, **options)
        result.set_epoch(3)
        result.start_at(first_row)
        return result

    own = np.arange(num_rows)
    if shuffle:
        own = np.random.default_rng([0, 3]).permutation(num_rows)
    steps = [own[row : row + batch_size * world_size] for row in range(first_row, num_rows, batch_size * world_size)]
    if drop_last:
        steps = [step for step in steps if len(step) == batch_size * world_size]
    expected = [step[rank::world_size].tolist() for step in steps if len(step) > rank]
    assert list(sampler().step_rows(3, Place(first_row))) == [len(step) for step in steps]
    assert list(sampler()) == expected
    stop = data.draw(st.integers(0, len(expected)))
    resumed = sampler()
    resumed.start_at(*resumed.place_after(stop, 3, Place(first_row)))
    assert list(resumed) == expected[stop:]
    assert resumed.epoch == 4 and resumed.start == Place()


@given(num_batches=st.integers(0, 20), stop=st.integers(0, 20), shuffle=st.booleans())
def test_batch_order_places(num_batches, stop, shuffle):
    stop = min(stop, num_batches)
    expected = list(BatchOrderSampler(num_batches, rows_per_step=6, shuffle=shuffle, seed=2))
    assert sorted(expected) == list(range(num_batches))
    resumed = BatchOrderSampler(num_batches, rows_per_step=6, shuffle=shuffle, seed=2)
    resumed.start_at(*resumed.place_after(stop, 0, Place()))
    assert list(resumed) == expected[stop:]
