"""redistribute_balanced on real ranks: uneven rows become even work, only what moves travels, and results come home."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.dispatch import redistribute_balanced
from commons.sequence_batch.rows import Rows, select_rows
from tests.helpers.batches.any_batches import KINDS, as_values, count_rows, length_of, padded_batch
from tests.helpers.batches.easyrec import easyrec_batch
from tests.helpers.ranks.on_ranks import of_all, on_ranks, on_two_ranks


def move_and_send_home(kind, ids_per_rank, none_for_none, options):
    rank = dist.get_rank()
    ids = ids_per_rank[rank]
    everyone = [sample for part in ids_per_rank for sample in part]
    batch = KINDS[kind](ids) if ids or not none_for_none else None
    workloads = None if batch is None else [length_of(sample) ** 2 + 1 for sample in ids]
    if "groups" in options and batch is not None:
        options = options | {"groups": [f"g{sample % 5}" for sample in ids]}
    moved = redistribute_balanced(batch, workloads, **options)
    assert as_values(moved.batch) == as_values(KINDS[kind]([everyone[row] for row in moved.indices]))
    home = moved.send_home(moved.batch)
    assert as_values(home) == as_values(KINDS[kind](ids) if ids else None)
    assert moved.bytes_received > 0 or bool((moved.home == rank).all())
    return moved.indices.tolist(), moved.home.tolist(), moved.loads_after.tolist(), moved.num_moved


def move_each(cases):
    world_size = dist.get_world_size()
    return [move_and_send_home(kind, parts[:world_size], *rest) for kind, parts, *rest in cases]


parts = st.lists(st.integers(0, 30), max_size=6)
cases = st.tuples(
    st.sampled_from(sorted(KINDS)),
    st.tuples(parts, st.lists(st.integers(0, 30), min_size=4, max_size=7), parts, parts),
    st.booleans(),
    st.sampled_from([{}, {"equal_size": False}, {"slack": 0.0}]),
)


@settings(max_examples=3)
@given(st.lists(cases, min_size=5, max_size=5))
def test_every_kind_of_batch(rank_pools, world_size, several):
    ranks = rank_pools[world_size]
    for (_, per_rank, _, options), results in zip(several, zip(*ranks.run(move_each, several))):
        per_rank = per_rank[: ranks.world_size]
        samples = [sample for part in per_rank for sample in part]
        origins = [rank for rank, part in enumerate(per_rank) for _ in part]
        rows = [indices for indices, *_ in results]
        assert sorted(row for each in rows for row in each) == list(range(len(samples))) and all(rows)
        assert all(home == [origins[row] for row in each] for each, (_, home, *_) in zip(rows, results))
        if options.get("equal_size", True):
            assert max(map(len, rows)) - min(map(len, rows)) <= 1
        loads = [sum(length_of(samples[row]) ** 2 + 1 for row in each) for each in rows]
        assert all(result[2] == loads for result in results)
        moved = sum(rank != origins[row] for rank, each in enumerate(rows) for row in each)
        assert {result[3] for result in results} == {moved}


def test_groups_come_together(ranks):
    per_rank = [list(range(rank, 40, ranks.world_size)) for rank in range(ranks.world_size)]
    results = ranks.run(move_and_send_home, "everything", per_rank, False, {"groups": None})
    samples = [sample for part in per_rank for sample in part]
    groups = [{samples[row] % 5 for row in indices} for indices, *_ in results]
    assert sum(map(len, groups)) == 5 and set.union(*groups) == set(range(5))


@on_ranks
def test_even_rows_stay_and_nothing_travels():
    meta = {"a": 1, "b": 2} if dist.get_rank() else {"b": 2, "a": 1}  # equal metadata in another order
    batch = {"x": torch.arange(3) + 3 * dist.get_rank(), "meta": meta}
    moved = redistribute_balanced(batch, [7, 7, 7])
    assert moved.bytes_sent == moved.bytes_received == moved.num_moved == 0
    assert torch.equal(moved.batch["x"], batch["x"]) and torch.equal(moved.send_home(moved.batch)["x"], batch["x"])


@on_two_ranks
def test_only_moved_rows_travel():
    """One rank has twelve rows, the other four; all weigh the same."""
    rank = dist.get_rank()
    rows = 12 if rank == 0 else 4
    batch = {"x": torch.full((rows, 1000), rank), "text": [f"{rank}-{row}" for row in range(rows)]}
    moved = redistribute_balanced(batch, [5] * rows)
    moved_bytes = Rows.of(select_rows(batch, range(4))).nbytes
    assert (len(moved.indices), moved.num_moved) == (8, 4)
    travelled, none = (moved.bytes_sent, moved.bytes_received)[:: 1 if rank == 0 else -1]
    assert f"8 rows, {4 * rank} of them from other ranks, largest load 1.5 → 1 × the mean" in repr(moved)
    assert none == 0 and moved_bytes < travelled < 1.02 * moved_bytes and len(set(of_all([travelled]))) == 1


@on_two_ranks
def test_values_of_each_rank_stay_on_it():
    batch, rank = easyrec_batch([1, 2, 3, 4]), dist.get_rank()
    batch.data_timestamp = float(rank)
    moved = redistribute_balanced(batch, [1 + 9 * rank] * 4)
    assert moved.num_moved and moved.batch.data_timestamp == rank


@on_two_ranks
def test_padding_is_left_out():
    ids = [1] if dist.get_rank() else [3, 1, 4]
    moved = redistribute_balanced(padded_batch(ids, 5), [9] * 5)
    assert count_rows(moved.batch) == Rows.of(moved.batch).real == 2
    assert moved.send_home({"id": moved.batch.sample_id})["id"].tolist() == ids
