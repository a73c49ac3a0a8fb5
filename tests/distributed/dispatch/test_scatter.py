"""scatter_balanced on real ranks: every row once, nothing but the share on the wire, results in the batch's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.dispatch import scatter_balanced
from commons.sequence_batch.rows import Rows, select_rows
from tests.helpers.batches.any_batches import KINDS, as_values, count_rows, dense, length_of, padded_batch
from tests.helpers.ranks.faults import missed
from tests.helpers.ranks.on_ranks import of_all, on, on_four_ranks, on_ranks


def scatter_and_gather(kind, ids, src, options):
    """A share as the batch's own values, and what comes back of it."""
    is_source = dist.get_rank() == src
    batch = KINDS[kind](ids)
    workloads = [length_of(sample) + 1 for sample in ids]
    if is_source and "groups" in options:
        options = options | {"groups": [f"g{sample % 3}" for sample in ids]}
    share = scatter_balanced(
        batch if is_source else None,
        workloads if is_source else None,
        src=src,
        **{name: value for name, value in options.items() if is_source or name != "groups"},
    )
    real = share.indices[~share.is_padding].tolist()
    expected = KINDS[kind]([ids[row] for row in real])
    assert type(share.batch) is type(batch)
    assert as_values(select_rows(share.batch, range(len(real)))) == as_values(expected)
    assert count_rows(share.batch) == len(share.indices)
    back = share.gather_back(share.batch)
    assert (back is None) != is_source
    if is_source:
        assert as_values(back) == as_values(batch)
    everywhere = share.gather_back({"score": torch.tensor([*share.indices.double()])}, to_all=True)
    assert everywhere["score"].tolist() == list(range(len(ids)))
    loads = sum(workloads[row] for row in real)
    return real, len(share.indices), loads, share.imbalance


def scatter_each(cases):
    return [scatter_and_gather(*case) for case in cases]


cases = st.tuples(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.integers(0, 30), min_size=4, max_size=11),
    st.integers(0, 1),
    st.sampled_from([{}, {"pad": True}, {"equal_size": False}, {"pad": True, "equal_size": False}]),
)


@settings(max_examples=3)
@given(st.lists(cases, min_size=5, max_size=5))
def test_every_kind_of_batch(rank_pools, world_size, several):
    ranks = rank_pools[world_size]
    for (_, ids, _, options), results in zip(several, zip(*ranks.run(scatter_each, several))):
        rows, sizes, loads, imbalances = zip(*results)
        assert sorted(row for each in rows for row in each) == list(range(len(ids)))
        assert all(list(each) == sorted(each) for each in rows) and all(rows)
        if options.get("equal_size", True):
            assert max(map(len, rows)) - min(map(len, rows)) <= 1
        assert sizes == ((max(map(len, rows)),) * len(sizes) if "pad" in options else tuple(map(len, rows)))
        assert len(set(imbalances)) == 1
        assert imbalances[0] == pytest.approx(max(loads) * len(loads) / sum(loads) - 1)


def test_groups_stay_whole_and_fewer_rows_than_ranks(ranks):
    ids = list(range(12))
    results = ranks.run(scatter_and_gather, "everything", ids, 1, {"groups": None, "pad": True})
    for rows, *_ in results:
        assert all({other for other in ids if other % 3 == row % 3} <= set(rows) for row in rows)
    results = ranks.run(scatter_and_gather, "BaseBatch", [5], 0, {"pad": True})
    assert sorted(len(rows) for rows, *_ in results) == [0] * (ranks.world_size - 1) + [1]
    assert {size for _, size, *_ in results} == {1}


def scatter_wide_rows(rows, width):
    """Of rank 1."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        "ids": torch.randint(0, 9, (rows, width), generator=generator),
        "mask": torch.ones(rows, width, dtype=torch.bool),
        "text": [f"row {row}" for row in range(rows)],
    }
    return scatter_balanced(*((batch, [1] * rows) if dist.get_rank() == 1 else (None, None)), src=1)


@on_ranks
def test_a_rank_receives_its_share_and_no_more():
    share = scatter_wide_rows(64, 512)
    size = Rows.of(share.batch).nbytes
    assert len(share.indices) == 64 // dist.get_world_size()
    assert share.bytes_received == 0 if dist.get_rank() == 1 else size < share.bytes_received < 1.02 * size


@on("own_two_ranks")
def test_a_rank_that_does_not_take_part_is_named():
    said = missed(
        lambda: scatter_wide_rows(4, 2), lambda: scatter_balanced(dense([1, 2]), [1, 2], timeout=np.float32(0.5))
    )
    if dist.get_rank() == 0:
        assert said.startswith("RankMissingError: rank 1 did not take part in the scatter_balanced of step 1")
        assert "all ranks make the same calls" in said and "Shuffler" not in said


@pytest.mark.parametrize("pad", [False, True])
@on_ranks
def test_more_of_the_same_rows(pad):
    """Log-probabilities to the source, advantages from there: to the rows that they belong to."""
    is_source = dist.get_rank() == 1
    ids = list(range(10, 21))
    share = scatter_balanced(
        padded_batch(ids, 14) if is_source else None, [*ids, 0, 0, 0] if is_source else None, src=1, pad=pad
    )
    logprobs = share.gather_back(share.batch.sample_id.double() / 10)
    more = {"advantage": logprobs * 2, "text": [f"t{sample}" for sample in ids]} if is_source else None
    more = share.scatter_more(more)
    real = Rows.of(share.batch).real
    assert count_rows(more) == count_rows(share.batch)
    assert more["advantage"][:real].tolist() == pytest.approx((share.batch.sample_id[:real] / 5).tolist())
    assert more["text"][:real] == [f"t{sample}" for sample in share.batch.sample_id[:real].tolist()]
    wide = share.scatter_more(torch.arange(14) if is_source else None)  # of the whole batch, padding included
    assert wide[:real].tolist() == share.indices[:real].tolist()
    assert sum(of_all([real])) == 11


@on_four_ranks
def test_a_source_is_a_rank_of_its_group():
    group, dealt = dist.new_group([1, 3]), []
    if dist.get_rank() in (1, 3):
        is_source, rows = dist.get_rank() == 3, dense([1, 2, 3])
        src = np.int64(1) if is_source else 1  # as from an array of ranks
        share = scatter_balanced(*((rows, [3, 2, 1]) if is_source else (None, None)), src=src, group=group)
        back, dealt = share.gather_back(share.batch), share.indices.tolist()
        assert torch.equal(back, rows) if is_source else back is None
    assert sorted(of_all(dealt)) == [0, 1, 2]
