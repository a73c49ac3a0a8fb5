"""SingleRankLoader on real ranks: one rank loads, all train the same number of steps, and a resumed run goes on.

Mistakes: test_mistakes.py.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.samplers.epoch import BatchOrderSampler
from commons.dispatch import SingleRankLoader, Trim
from commons.sequence_batch.rows import Rows
from tests.helpers.batches.any_batches import as_values, length_of, padded_batch
from tests.helpers.ranks.faults import error_of, own_groups
from tests.helpers.ranks.on_ranks import of_all, on_ranks, on_two_ranks


def dict_batches(sizes):
    first = 0
    for size in sizes:
        ids = torch.arange(first, first + size)
        yield {"id": ids, "text": [f"t{row}" for row in ids.tolist()]}
        first += size


def padded_batches(sizes, rows):
    first = 1
    for size in sizes:
        yield padded_batch(list(range(first, first + size)), rows)
        first += size


def workloads_of(batch):
    ids = batch["id"] if isinstance(batch, dict) else batch.sample_id
    return torch.tensor([length_of(sample) ** 3 + 1 for sample in ids.tolist()])


def load(batches, balanced, src=0):
    loader = SingleRankLoader(batches if dist.get_rank() == src else None, workloads_of if balanced else None, src=src)
    try:
        return [share.indices.tolist() for share in loader.shares()], list(loader)
    finally:
        loader.close()


@pytest.mark.parametrize("closed_on", [(), (0,)], ids=["no rank", "the source alone"])
@on_two_ranks
def test_a_loader_that_was_not_closed_on_a_rank_returns_its_groups(closed_on):
    made = []
    with own_groups():
        for _ in range(3):
            loader = SingleRankLoader([] if dist.get_rank() == 0 else None, timeout=20.0)
            assert list(loader) == []
            if dist.get_rank() in closed_on:
                loader.close()
            del loader
            made.append(len(dist.distributed_c10d._world.pg_names))
    assert made[0] == made[-1]


@pytest.mark.parametrize("balanced", [False, True])
@on_ranks
def test_every_row_of_every_batch_once(balanced):
    world_size, sizes = dist.get_world_size(), [8, 5, 12]
    shares, batches = load(list(dict_batches(sizes)), balanced, src=np.int64(world_size - 1))
    for step, size in enumerate(sizes):
        first, ids = sum(sizes[:step]), batches[step]["id"].tolist()
        assert ids == [first + row for row in shares[step]] and batches[step]["text"] == [f"t{row}" for row in ids]
        work = [length_of(first + row) ** 3 + 1 for row in range(size)]
        dealt = of_all([shares[step]])
        in_turn = [list(range(rank, size, world_size)) for rank in range(world_size)]
        assert sorted(row for rows in dealt for row in rows) == list(range(size))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        assert balanced or dealt == in_turn
        largest = [max(sum(work[row] for row in rows) for rows in each) for each in (dealt, in_turn)]
        assert largest[0] <= largest[1]


@pytest.mark.parametrize("balanced", [False, True])
@on_ranks
def test_an_incomplete_last_batch_is_shared_out(balanced):
    world_size = dist.get_world_size()
    rows = 3 * world_size
    sizes = [rows, rows - 2, 1]
    _, batches = load(list(padded_batches(sizes, rows)), balanced)
    real = [Rows.of(batch).real for batch in batches]
    for step, size in enumerate(sizes):
        assert batches[step].batch_size == 3
        first = 1 + sum(sizes[:step])
        assert sorted(of_all(batches[step].sample_id[: real[step]].tolist())) == list(range(first, first + size))
    assert sorted(of_all(real[2:])) == [0] * (world_size - 1) + [1]


def failing():
    yield from dict_batches([4, 4])
    raise OSError("disk on fire")


@on_two_ranks
def test_an_error_of_the_loader_is_raised_once_after_the_batches_before():
    batches = iter(SingleRankLoader(failing()))
    assert len([next(batches), next(batches)]) == 2
    assert error_of(next, batches) == "RuntimeError: rank 0: OSError: disk on fire"
    assert next(batches, None) is None


@on_two_ranks
def test_after_an_error_in_a_batch_the_loader_goes_on_with_the_next_one():
    """The rest of the epoch seemed to have ended."""
    loader = SingleRankLoader(list(dict_batches([4, 1, 4, 4])) if dist.get_rank() == 0 else None)
    batches = iter(loader)
    next(batches)
    assert "there are 1 rows for 2 parts" in error_of(next, batches)
    assert sorted(of_all(next(batches)["id"].tolist())) == [5, 6, 7, 8]
    loader.load_state_dict(loader.state_dict())  # on each rank its own
    assert sorted(of_all(row for batch in loader for row in batch["id"].tolist())) == [9, 10, 11, 12]
    loader.close()


class Damaged(DataLoader):
    """Cannot be opened at first, and has a row that cannot be read."""

    opened = 0

    def __iter__(self):
        self.opened += 1
        if self.opened == 1:
            raise OSError("not mounted")
        return super().__iter__()

    @staticmethod
    def read(rows):
        if 5 in rows:
            raise OSError("disk on fire")
        return {"id": torch.tensor(rows)}


@on_two_ranks
def test_a_resumed_loader_skips_a_batch_with_an_error_but_none_that_was_never_read():
    """The error came with every call, and the first batch was left out."""
    source = Damaged(range(12), batch_size=4, collate_fn=Damaged.read) if dist.get_rank() == 0 else None
    found = []
    with contextlib.closing(SingleRankLoader(source)) as loader:
        for _ in range(4):
            try:
                found.append(sorted(of_all(next(iter(loader))["id"].tolist())))
            except RuntimeError as error:
                found.append(str(error))
            loader.load_state_dict(loader.state_dict())
    errors = ["rank 0: OSError: not mounted", "rank 0: OSError: disk on fire"]
    assert found == [errors[0], [0, 1, 2, 3], errors[1], [8, 9, 10, 11]]
    with contextlib.closing(SingleRankLoader(failing())) as loader:  # a generator ends with its error
        loader.load_state_dict({"batches": 5, "loader": None})
        assert error_of(next, iter(loader)) == f"RuntimeError: {errors[1]}"


def plain_loader():
    return DataLoader(list(dict_batches([4] * 6)), batch_size=None)


def own_loader():
    batches = list(dict_batches([4] * 6))
    return ResumableLoader(batches, BatchOrderSampler(6, shuffle=True, seed=1))


@pytest.mark.parametrize("make", [plain_loader, own_loader])
@pytest.mark.parametrize("everywhere", [True, False])
@on_two_ranks
def test_a_resumed_loader_goes_on_with_the_next_batch(make, everywhere):
    """Two epochs in one go, and with a stop and a new loader in between; the state of the source is enough."""
    is_source = dist.get_rank() == 0
    with contextlib.ExitStack() as stack:
        whole_loader, first, second = (
            stack.enter_context(contextlib.closing(SingleRankLoader(make() if is_source else None))) for _ in range(3)
        )
        whole = [batch["id"].tolist() for _ in range(2) for batch in whole_loader]
        parts = [batch["id"].tolist() for batch in itertools.islice(first, 4)]
        states = of_all([first.state_dict()])
        second.load_state_dict(states[dist.get_rank() if everywhere else 0])
        assert second.state_dict() == states[dist.get_rank() if everywhere else 0]  # also before its first batch
        second.state_dict().clear()  # a copy: it is the caller's
        parts += [batch["id"].tolist() for _ in range(2) for batch in second]
        assert whole_loader.state_dict()["batches"] == 0  # at the end of the data, of the next epoch
    assert parts == whole and len(whole) == 6 * 2 and states[0]["batches"] == 4
    of_ranks = of_all([whole])
    assert of_ranks[0] != of_ranks[1]


@on_two_ranks
def test_what_a_loader_tells():
    data = DataLoader(list(dict_batches([4] * 3)), batch_size=None)
    loader = SingleRankLoader(data if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        assert len(loader) == 3 and loader.dataset is data.dataset and loader.sampler is data.sampler
    else:
        with pytest.raises(TypeError, match="rank 1 has no loader; .* pass the loader on all ranks"):
            len(loader)
    loader.close()


@on_two_ranks
def test_a_closed_loader_is_refused():
    """Other ranks' data seemed to end, and the source waited for them in a collective of the user's group."""
    loader = SingleRankLoader(list(dict_batches([4] * 3)) if dist.get_rank() == 0 else None, timeout=20)
    begun = iter(loader)
    next(begun)
    loader.close()
    for batches in (begun, iter(loader)):
        with pytest.raises(RuntimeError, match="the SingleRankLoader is closed; it cannot be read again: make a new"):
            next(batches)


@pytest.mark.parametrize("pin_memory", [False, True])  # as for a DataLoader, also on a machine without a GPU
def test_without_ranks(pin_memory):
    loader = SingleRankLoader(list(padded_batches([2, 1], 2)), workloads_of, pin_memory=pin_memory)
    assert loader.state_dict() == {"batches": 0, "loader": None}
    assert [as_values(batch) for batch in loader] == [as_values(batch) for batch in padded_batches([2, 1], 2)]


class Stateful(list):
    def load_state_dict(self, state):
        raise AssertionError("there is no state to load")


@pytest.mark.parametrize(("kind", "own"), [(list, {"place": 1}), (Stateful, None)])
def test_without_a_state_of_the_loader_earlier_batches_are_skipped(kind, own):
    batches = [{"id": torch.tensor([row])} for row in range(3)]
    loader = SingleRankLoader(kind(batches))
    loader.load_state_dict({"batches": 1, "loader": own})
    assert [batch["id"].tolist() for batch in loader] == [[1], [2]]


@on_two_ranks
def test_numbers_of_rows_may_differ_where_they_are_let():
    rows = {"id": torch.tensor([9, 1, 1, 1])} if dist.get_rank() == 0 else None
    loader = SingleRankLoader([rows], lambda batch: batch["id"], equal_size=False)
    assert sorted(of_all([len(share.indices) for share in loader.shares()])) == [1, 3]
    loader.close()


def test_trims_are_those_of_the_constructor():
    ids = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])
    trims = [Trim("mask")]
    loader = SingleRankLoader([{"ids": ids, "mask": ids.sign()}] * 2, trim=trims)
    trims.clear()
    assert [tuple(batch["ids"].shape) for batch in loader] == [(2, 2)] * 2
