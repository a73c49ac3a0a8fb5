"""What goes over all rows of a global batch: the native core gives the numbers of numpy, and refuses mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model import row_sums
from commons.perf_model.partitioner import as_int64_workloads, inputs, native_core

CORE = native_core.native_core()
needs_core = pytest.mark.skipif(CORE is None, reason="the native core has not been built (no C++ compiler)")
INT64_MAX = 2**63 - 1


@pytest.fixture
def in_numpy(monkeypatch):
    """A function computed as without a compiler."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(row_sums, "native_core", lambda: None)
            return function(*arguments)

    return call


@st.composite
def plans(draw):
    """Home, destination, values, ranks and steps of rows."""
    ranks, steps, rows = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    home, destination = (rng.integers(0, ranks * steps, rows) for _ in range(2))
    stays = rng.random(rows) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return home, np.where(stays, home, destination), rng.integers(0, 2**50, rows), ranks, steps


@needs_core
@given(case=plans(), ranks_per_node=st.integers(1, 10))
def test_sums_moves_and_digest_are_those_of_numpy(case, ranks_per_node):
    home, destination, values, ranks, steps = case
    moves = home, destination, values, steps, ranks_per_node
    assert row_sums.count_moves(*moves).tolist() == row_sums.reference_moves(*moves).tolist()
    arrays = [home, np.zeros(0, np.int64), destination, -values]
    assert row_sums.digest(arrays) == row_sums.reference_digest(arrays)
    assert 0 <= row_sums.digest(arrays) <= INT64_MAX
    sums = np.zeros(ranks * steps, np.int64)
    np.add.at(sums, home, values)
    assert row_sums.sum_at(home, values, ranks * steps).tolist() == sums.tolist()
    counts = np.bincount(home, minlength=ranks * steps)
    assert row_sums.sum_at(home, None, ranks * steps).tolist() == counts.tolist()
    assert row_sums.place_of_rows(counts).tolist() == sorted(home.tolist())


def test_without_a_compiler_numpy_serves(in_numpy):
    place = np.array([1, 0, 1])
    assert in_numpy(row_sums.sum_at, place, np.array([4, 2, 1]), 3).tolist() == [2, 5, 0]
    assert in_numpy(row_sums.sum_at, place, None, 3).tolist() == [1, 2, 0]
    assert in_numpy(row_sums.place_of_rows, np.array([1, 0, 2])).tolist() == [0, 2, 2]
    moves = in_numpy(row_sums.count_moves, np.array([0, 1, 2]), np.array([1, 1, 0]), np.array([5, 6, 7]), 1, 2)
    assert moves.tolist() == [[3], [18], [2], [12], [1], [7]]
    assert in_numpy(row_sums.digest, [place]) == row_sums.digest([place])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 29), st.integers(0, 29))
def test_a_digest_tells_orders_and_numbers_apart(values, one, other):
    changed, swapped = np.array(values), np.array(values)
    one, other = one % len(values), other % len(values)
    changed[one] += 1
    swapped[[one, other]] = swapped[[other, one]]
    digest = row_sums.digest([np.array(values)])
    assert digest != row_sums.digest([changed])
    assert (digest == row_sums.digest([swapped])) == (values[one] == values[other])


@needs_core
def test_native_refuses_what_is_out_of_its_range():
    module, three = CORE.module, np.zeros(3, np.int64)
    for place in (three + 2, three - 1):
        with pytest.raises(ValueError, match="sum_at: a place is out of its range"):
            module.sum_at(place, None, 2)
    with pytest.raises(ValueError, match="sum_at: sizes do not match"):
        module.sum_at(three, three[:2], 1)
    with pytest.raises(ValueError, match="count_moves takes a plan: a number"):
        module.count_moves(three - 1, three, three, 1, 1)
    with pytest.raises(ValueError, match="count_moves takes a plan: sizes"):
        module.count_moves(three, three, three, 0, 1)
    with pytest.raises(ValueError, match="place_of_rows takes counts"):
        module.place_of_rows(three - 1)


@needs_core
@given(st.lists(st.sampled_from([0, 1, 7, 2**61, 2**62 - 1, 2**62, INT64_MAX, -1]), max_size=6))
def test_numbers_that_the_core_finds_well_are_those_that_numpy_does(values):
    array = np.array(values, np.int64)
    assert CORE.module.all_within(array, INT64_MAX, 2**62 - 1) == (min(values, default=0) >= 0 and sum(values) < 2**62)
    assert CORE.module.all_within(array, 6, INT64_MAX) == all(0 <= value <= 6 for value in values)
    errors = []
    for core in (CORE, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inputs, "native_core", lambda core=core: core)
            try:
                errors.append(as_int64_workloads(array).tolist())
            except ValueError as error:
                errors.append(str(error))
    assert errors[0] == errors[1]


@needs_core
def test_many_rows_are_summed_without_the_interpreter_lock(in_numpy):
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 2000, 64)
    home = row_sums.place_of_rows(counts)
    destination = rng.permutation(home)
    assert home.tolist() == in_numpy(row_sums.place_of_rows, counts).tolist()
    for function, *arguments in (
        (row_sums.sum_at, destination, home, 64),
        (row_sums.count_moves, home, destination, home, 4, 8),
        (row_sums.digest, [home, destination]),
    ):
        native, reference = function(*arguments), in_numpy(function, *arguments)
        np.testing.assert_equal(native, reference)
    assert CORE.module.all_within(home, 63, 2**62) and not CORE.module.all_within(home, 62, 2**62)
