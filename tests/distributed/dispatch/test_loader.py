"""SingleRankLoader on real ranks: one rank loads, all train the same number of steps, and a resumed run goes on.

Mistakes: test_mistakes.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.samplers.epoch import BatchOrderSampler
from commons.dispatch import SingleRankLoader
from commons.sequence_batch.rows import Rows
from tests.helpers.batches.any_batches import as_values, length_of, padded_batch
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on_two_ranks


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


def load_dicts(sizes, balanced):
    shares, batches = load(list(dict_batches(sizes)), balanced, src=dist.get_world_size() - 1)
    assert [len(share) for share in shares] == [len(batch["id"]) for batch in batches]
    assert all(batch["text"] == [f"t{row}" for row in batch["id"].tolist()] for batch in batches)
    return shares, [batch["id"].tolist() for batch in batches]


@pytest.mark.parametrize("balanced", [False, True])
def test_every_row_of_every_batch_once(ranks, balanced):
    sizes = [8, 5, 12]
    results = ranks.run(load_dicts, sizes, balanced)
    for step, size in enumerate(sizes):
        work = [length_of(sum(sizes[:step]) + row) ** 3 + 1 for row in range(size)]
        dealt = [shares[step] for shares, _ in results]
        in_turn = [list(range(rank, size, ranks.world_size)) for rank in range(ranks.world_size)]
        assert sorted(row for rows in dealt for row in rows) == list(range(size))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        assert balanced or dealt == in_turn
        largest = [max(sum(work[row] for row in rows) for rows in each) for each in (dealt, in_turn)]
        assert largest[0] <= largest[1]


def load_padded(sizes, rows, balanced):
    _, batches = load(list(padded_batches(sizes, rows)), balanced)
    return [(batch.batch_size, Rows.of(batch).real, batch.sample_id.tolist()) for batch in batches]


@pytest.mark.parametrize("balanced", [False, True])
def test_an_incomplete_last_batch_is_shared_out(ranks, balanced):
    rows = 3 * ranks.world_size
    results = ranks.run(load_padded, [rows, rows - 2, 1], rows, balanced)
    for step, size in enumerate([rows, rows - 2, 1]):
        dealt = [result[step] for result in results]
        assert {batch_size for batch_size, _, _ in dealt} == {3}
        ids = sorted(sample for _, real, ids in dealt for sample in ids[:real])
        first = 1 + sum([rows, rows - 2, 1][:step])
        assert ids == list(range(first, first + size))
    assert sorted(result[2][1] for result in results) == [0] * (ranks.world_size - 1) + [1]


def failing():
    yield from dict_batches([4, 4])
    raise OSError("disk on fire")


@on_two_ranks
def test_an_error_of_the_loader_is_raised_once_after_the_batches_before():
    batches = iter(SingleRankLoader(failing()))
    assert len([next(batches), next(batches)]) == 2
    assert error_of(next, batches) == "RuntimeError: rank 0: OSError: disk on fire"
    assert next(batches, None) is None


def plain_loader():
    return DataLoader(list(dict_batches([4] * 6)), batch_size=None)


def own_loader():
    batches = list(dict_batches([4] * 6))
    return ResumableLoader(batches, BatchOrderSampler(6, shuffle=True, seed=1))


def stop_and_resume(make, stop_at, everywhere, epochs):
    """Batches of some epochs in one go, and the same with a stop and a new loader in between."""
    is_source = not dist.is_initialized() or dist.get_rank() == 0

    def new():
        return SingleRankLoader(make() if is_source else None)

    whole_loader, first = new(), new()
    whole = [batch["id"].tolist() for _ in range(epochs) for batch in whole_loader]
    iterator = iter(first)
    parts = [next(iterator)["id"].tolist() for _ in range(stop_at)]
    state = first.state_dict()
    if not everywhere:  # the state of the source is enough
        states = [None]
        states[0] = state if is_source else None
        dist.broadcast_object_list(states)
        state = states[0]
    second = new()
    second.load_state_dict(state)
    parts += [batch["id"].tolist() for _ in range(epochs) for batch in second]
    for loader in (whole_loader, first, second):
        loader.close()
    return whole, parts, state["batches"]


@pytest.mark.parametrize("make", [plain_loader, own_loader])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_resumed_loader_goes_on_with_the_next_batch(two_ranks, make, everywhere):
    results = two_ranks.run(stop_and_resume, make, 4, everywhere, 2)
    for whole, parts, batches in results:
        assert parts == whole and len(whole) == 6 * 2 and batches == 4
    assert results[0] != results[1]


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


def read_when_closed():
    loader = SingleRankLoader(list(dict_batches([4] * 3)) if dist.get_rank() == 0 else None, timeout=20)
    begun = iter(loader)
    next(begun)
    loader.close()
    for batches in (begun, iter(loader)):
        with pytest.raises(RuntimeError, match="the SingleRankLoader is closed; it cannot be read again: make a new"):
            next(batches)


def test_a_closed_loader_is_refused(two_ranks):
    """Other ranks' data seemed to end, and the source waited for them in a collective of the user's group."""
    two_ranks.run(read_when_closed)


@pytest.mark.parametrize("pin_memory", [False, True])  # as for a DataLoader, also on a machine without a GPU
def test_without_ranks(pin_memory):
    loader = SingleRankLoader(list(padded_batches([2, 1], 2)), workloads_of, pin_memory=pin_memory)
    assert [as_values(batch) for batch in loader] == [as_values(batch) for batch in padded_batches([2, 1], 2)]
