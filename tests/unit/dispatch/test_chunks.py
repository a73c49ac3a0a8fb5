"""Rows dealt out: every row once, even work, whole groups, and predictions back in the batch's order."""

import dataclasses
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nested import nested_tensor

from commons.dispatch import redistribute_balanced, scatter_balanced, split_balanced
from commons.dispatch.planning import as_int64_ids, plan_redistribution
from commons.sequence_batch.open_batch import open_tree
from commons.sequence_batch.rows import Rows, select_rows
from tests.helpers.batches.any_batches import KINDS, as_values, count_rows, dense, everything, padded_batch


class NotAvailable:
    """As pandas.NA, whose comparisons are neither true nor false."""

    def __str__(self):
        return "<NA>"


samples = st.lists(st.integers(0, 30), min_size=1, max_size=12)
weights = st.integers(0, 1000)


@given(st.sampled_from(sorted(KINDS)), samples, st.data())
def test_chunks_hold_every_row_once_and_results_come_back(kind, ids, data):
    batch = KINDS[kind](ids)
    pad = data.draw(st.booleans())
    num_chunks = data.draw(st.integers(1, 15 if pad else len(ids)))
    equal_size = data.draw(st.booleans())
    workloads = data.draw(st.lists(weights, min_size=len(ids), max_size=len(ids)))
    result = split_balanced(batch, num_chunks, workloads, equal_size=equal_size, pad=pad)

    real = [rows[rows >= 0].tolist() for rows in result.indices]
    assert sorted(row for rows in real for row in rows) == list(range(len(ids)))
    assert all(rows == sorted(rows) for rows in real)
    if equal_size:
        assert max(map(len, real)) - min(map(len, real)) <= 1
    if len(ids) >= num_chunks:
        assert all(real)
    assert result.loads.tolist() == [sum(workloads[row] for row in rows) for rows in real]
    for chunk, rows, indices, padding in zip(result.chunks, real, result.indices, result.is_padding):
        assert type(chunk) is type(batch)
        assert as_values(select_rows(chunk, range(len(rows)))) == as_values(KINDS[kind]([ids[row] for row in rows]))
        assert count_rows(chunk) == len(indices) == (max(map(len, real)) if pad else len(rows))
        assert padding.tolist() == [False] * len(rows) + [True] * (len(indices) - len(rows))
        if kind in ("BaseBatch", "everything"):
            assert Rows.of(chunk).real == len(rows)
    assert as_values(result.restore(result.chunks)) == as_values(batch)
    predictions = [rows.double() for rows in result.indices]
    assert torch.cat(predictions)[result.inverse].tolist() == list(range(len(ids)))
    for results in (predictions, (each for each in predictions)):
        assert result.restore(results).tolist() == list(range(len(ids)))


@given(samples, st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans())
def test_groups_stay_whole(ids, num_chunks, num_groups, as_strings, equal_size):
    groups = [sample % num_groups for sample in ids]
    names = [f"group {group}" for group in groups] if as_strings else groups
    count = len(set(groups))
    workloads, options = [sample + 1 for sample in ids], {"groups": names, "equal_size": equal_size}
    if count < num_chunks:
        with pytest.raises(ValueError, match=f"there are ({count} groups|{len(ids)} rows) for"):
            split_balanced(dense(ids), num_chunks, workloads, **options)
        return
    if equal_size and len({groups.count(group) for group in groups}) > 1:
        with pytest.raises(ValueError, match="groups have .* equal_size is True; .*: pass equal_size=False"):
            split_balanced(dense(ids), num_chunks, workloads, **options)
        return
    result = split_balanced(dense(ids), num_chunks, workloads, **options)
    found = [{groups[row] for row in rows} for rows in result.indices]
    assert sum(map(len, found)) == count and min(map(len, found)) >= 1
    assert not equal_size or max(map(len, found)) - min(map(len, found)) <= 1
    assert result.restore(result.chunks).tolist() == dense(ids).tolist()


def test_padding_that_a_batch_states():
    batch = padded_batch([3, 1, 4], 8)
    halves = split_balanced(batch, 2, [5, 5, 5] + [99] * 5, pad=True)
    assert [count_rows(chunk) for chunk in halves.chunks] == [4, 4]
    assert sorted(Rows.of(chunk).real for chunk in halves.chunks) == [1, 2]
    tight = split_balanced(batch, 2, [5, 5, 5] + [99] * 5)
    assert sorted(count_rows(chunk) for chunk in tight.chunks) == [1, 2]
    grouped = split_balanced(batch, 2, [5, 5, 5] + [99] * 5, groups=[1, 2, 1] + [3] * 5, equal_size=False)
    assert sorted(indices.tolist() for indices in grouped.indices) == [[0, 2], [1]]
    for result in (halves, tight, grouped):
        assert result.loads.sum() == 15
        assert result.restore([chunk.sample_id for chunk in result.chunks]).tolist() == [3, 1, 4]
        assert as_values(result.restore(result.chunks)) == as_values(padded_batch([3, 1, 4]))


@pytest.mark.parametrize(
    ("batch", "num_chunks", "workloads", "options", "message"),
    [
        (dense([])[:0], 1, [], {}, "the batch has 0 real rows; at least one is needed"),
        (padded_batch([], 3), 1, [1, 1, 1], {}, "the batch has 0 real rows"),
        (dense([1]), 2, [1], {}, r"1 rows for 2 parts \(chunks or ranks\); .* or pad=True"),
        (dense([1, 2]), 0, [1, 2], {}, "num_chunks is 0; it must be an integer of at least 1"),
        (dense([1, 2]), 2, [1], {}, "workloads has 1 entries, there are 2 rows"),
        (dense([1, 2]), 2, [1, 2], {"groups": [1]}, r"groups have shape \(1,\) .* there are 2 rows"),
        (dense([1, 2]), 2, [1, 2], {"groups": [0.5, 1.5]}, "dtype float64"),
        (dense([1, 2]), 2, [1, 2], {"groups": nested_tensor([torch.ones(1), torch.ones(2)])}, "groups is a nested"),
        (dense([1, 2]), 2, [1, 2], {"groups": torch.ones(2, device="meta")}, r"groups is on meta; .* groups.cpu\(\)"),
        (dense([1, 2]), 2, [1, 2], {"groups": np.ma.masked_equal(["a", "b"], "b")}, r"groups\[1\] is masked; every"),
        (dense([1, 2]), 2, [1, 2], {"groups": ["a", None]}, r"groups\[1\] is None; .*: give each its own id"),
        (dense([1, 2]), 2, [1, 2], {"groups": ["a", float("nan")]}, r"groups\[1\] is nan; .*: give each its own id"),
        (
            dense([1, 2]),
            2,
            [1, 2],
            {"groups": ["a", np.float32("nan")]},
            r"groups\[1\] is nan; .*: give each its own id",
        ),
        (dense([1, 2]), 2, [1, 2], {"groups": [NotAvailable(), "a"]}, r"groups\[0\] is <NA>; .*: give each its own id"),
        (
            *({"ids": [torch.zeros(2), torch.zeros(1)]}, 2, [2, 1], {}),
            r"list with a tensor per row into a jagged nested tensor \(a JaggedTensor if a shuffler moves it\), or",
        ),
    ],
)
def test_bad_input(batch, num_chunks, workloads, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        split_balanced(batch, num_chunks, workloads, **options)
    assert "\n" not in str(caught.value)


def test_results_that_do_not_fit():
    halves = split_balanced(dense([1, 2, 3]), 2, [1, 2, 3])
    with pytest.raises(ValueError, match="there are 1 results for 2 chunks; each chunk has one"):
        halves.restore(halves.chunks[:1])
    with pytest.raises(ValueError, match="results of chunk 0 have 0 rows, chunk 0 has"):
        halves.restore([chunk[:0] for chunk in halves.chunks])


def test_a_batch_is_parsed_once_per_call():
    batch, parsed = everything([4, 7, 1, 9, 2]), []
    opened = mock.patch("commons.sequence_batch.rows.open_tree", lambda value: parsed.append(value) or open_tree(value))
    with opened:
        split_balanced(batch, 2, [4, 7, 1, 9, 2], pad=True)
        scatter_balanced(batch, [4, 7, 1, 9, 2], pad=True)
    assert len(parsed) == 2 and all(value is batch for value in parsed)


def test_chunks_are_a_sequence_with_a_short_repr():
    batch = {"ids": torch.arange(1, 11), "long": torch.zeros(10, 1000)}
    chunks = split_balanced(batch, 4, batch["ids"])
    assert isinstance(chunks, Sequence) and len(chunks) == 4
    assert list(chunks) == chunks.chunks and chunks[-1] is chunks.chunks[3] and chunks[1:3] == chunks.chunks[1:3]
    assert repr(chunks) == "BalancedChunks(4 of 2 to 3 rows, largest load 1.091 × the mean)"


def test_shares_and_moved_rows_without_ranks_and_their_short_repr():
    share = scatter_balanced({"ids": torch.arange(3)}, [3, 1, 2])
    assert share.batch["ids"].tolist() == [0, 1, 2] and share.bytes_received == 0
    assert share.gather_back(share.batch)["ids"].tolist() == [0, 1, 2]
    assert repr(share) == "BalancedShare(3 rows, largest load of a rank 1 × the mean)"
    padded = scatter_balanced(padded_batch([3, 1, 2], rows=4), [3, 1, 2, 0], pad=True)
    padded = dataclasses.replace(padded, imbalance=0.25)
    assert repr(padded) == "BalancedShare(4 rows, 1 of them padding, largest load of a rank 1.25 × the mean)"
    moved = redistribute_balanced({"ids": torch.arange(3)}, [3, 1, 2])
    assert repr(moved) == "RedistributedRows(3 rows, 0 of them from other ranks, largest load 1 → 1 × the mean)"


def test_rows_move_where_only_counts_are_uneven():
    workloads, rows = np.array([1, 1, 1, 1, 8, 4, 4, 4]), np.array([5, 3])
    assert np.bincount(plan_redistribution(workloads, rows).destination).tolist() == [4, 4]
    assert not plan_redistribution(workloads, rows, equal_size=False).moves.any()
    assert not plan_redistribution(np.array([2, 2, 2, 2]), np.array([2, 2])).moves.any()
    for heavy, light in ((3, 1), (7, 2)):
        for workloads, rows in (([light] * 6 + [heavy] * 2, [6, 2]), ([heavy] * 2 + [light] * 6, [2, 6])):
            plan = plan_redistribution(np.array(workloads), np.array(rows))
            assert np.bincount(plan.destination).tolist() == [4, 4] and plan.loads_after.max() <= heavy + 3 * light
            assert np.array(workloads)[plan.moves].sum() <= sum(workloads) / 2  # of two assignments the nearer one


@pytest.mark.parametrize(
    ("workloads", "rows_per_rank", "destination"),
    [
        ([0, 9, 0], [3, 0], [1, 0, 0]),
        ([0, 9, 0], [1, 2, 0], [0, 1, 2]),
        ([0, 0, 9, 0], [2, 2, 0, 0], [2, 0, 1, 3]),
    ],
)
def test_a_rank_without_rows_gets_the_lightest_of_a_rank_with_several(workloads, rows_per_rank, destination):
    """Although no load falls."""
    plan = plan_redistribution(np.array(workloads), np.array(rows_per_rank), equal_size=False)
    assert plan.destination.tolist() == destination


def test_ids_of_many_groups_differ():
    ids = list(map(str, range(2000)))
    assert len(set(as_int64_ids(ids, len(ids)).tolist())) == len(ids)
    assert as_int64_ids([], 0).tolist() == []
    for dtype in (np.int64, object):  # other ranks may have another one
        assert as_int64_ids(np.array([7, -(2**63)], dtype=dtype), 2).tolist() == [7, -(2**63)]
    assert as_int64_ids([7, "a", 2**70], 3)[0] == 7
