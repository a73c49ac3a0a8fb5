"""The routes of a plan: the native core gives the arrays of the reference, bit for bit, and holds nobody up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.perf_model import routes
from commons.perf_model.partitioner import native_core
from commons.perf_model.row_table import RowTable
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan

CORE = native_core.native_core()
needs_core = pytest.mark.skipif(CORE is None, reason="the native core has not been built (no C++ compiler)")


@st.composite
def cases(draw):
    """A plan of any kind, of one batch or a window: ragged places, padding, no rows; parts of all sizes."""
    ranks, steps = draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([1, 1, 2, 4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = rng.integers(0, draw(st.sampled_from([1, 4, 9])), ranks * steps)
    real = rows - rng.integers(0, 3, len(rows)).clip(max=rows)
    keys = draw(st.integers(0, 4))
    lengths = rng.integers(0, draw(st.sampled_from([1, 5, 3000])), (int(real.sum()), keys))
    parts, key = [], 0
    while key < keys:
        count = draw(st.integers(1, keys - key))
        parts += [[key, count, words] for words in draw(st.sampled_from([[1], [2], [4, 1]]))]
        key += count
    parts += [[-1, 1, draw(st.integers(0, 5))] for _ in range(draw(st.integers(0 if parts else 1, 2)))]
    gathered = GatheredRows(rows, real, lengths.sum(axis=1), lengths.sum(axis=1), RowTable.of(lengths, real), steps)
    destination = gathered.home.copy()
    moves = rng.random(len(destination)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    destination[moves] = rng.integers(0, ranks * steps, int(moves.sum()))
    plan = ShufflePlan(gathered, destination, destination, 0, pads=draw(st.booleans()))
    return plan, np.array(rng.permutation(parts)), draw(st.integers(0, ranks - 1)), draw(st.booleans())


@needs_core
@settings(max_examples=400)
@given(cases())
def test_native_is_the_reference(case):
    plan, parts, rank, all_gather = case
    native = routes.route_rows(plan, parts, rank, all_gather=all_gather)
    routes_without = routes._read_sizes(
        *_reference(plan, parts, rank, all_gather), plan.gathered.num_ranks, plan.gathered.steps, len(parts)
    )
    assert native.indices.dtype == routes_without.indices.dtype == np.int64
    assert native.indices.tolist() == routes_without.indices.tolist()
    for name in ("moves", "block_words", "sent_words", "segments", "regions", "input_splits", "output_splits"):
        assert getattr(native, name) == getattr(routes_without, name), name
    assert (native.own_parts, native.results) == (routes_without.own_parts, routes_without.results)


def _reference(plan, parts, rank, all_gather):
    indices, sizes = routes.reference_routes(plan, parts, rank, all_gather)
    return indices, sizes.tolist()


@needs_core
def test_native_refuses_what_is_no_plan():
    rows, parts = np.array([2, 1]), np.array([[0, 2, 1]])
    table = RowTable.of(np.array([[1, 2], [3, 4], [5, 6]]), rows)
    good = [rows, rows, np.array([0, 1, 1]), table.words, table.first, table.num_columns, 2, parts, 1, 0, False, True]
    CORE.route_rows(*good)
    mistakes = {
        0: rows[:1],
        1: rows + 1,
        2: np.array([0, 1, 2]),
        3: np.zeros_like(table.words),
        4: table.first + 9,
        5: 3,
        7: np.array([[1, 2, 1]]),
        8: 3,
        9: 2,
    }
    for position, mistake in mistakes.items():
        with pytest.raises(ValueError, match="route_rows takes a plan"):
            CORE.route_rows(*good[:position], mistake, *good[position + 1 :])
    with pytest.raises(ValueError, match="a gathered table: sizes do not match"):
        CORE.route_rows(*good[:4], table.first[:1], *good[5:])
    with pytest.raises(TypeError, match="incompatible function arguments"):
        CORE.route_rows(rows.astype(np.int32), *good[1:])
