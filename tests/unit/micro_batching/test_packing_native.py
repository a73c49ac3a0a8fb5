"""The native core gives the groups of the reference, and the reference serves without it."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.micro_batching import native_core, reference, refined_allocate
from commons.micro_batching.bounds import l2_bound
from commons.micro_batching.request import PackRequest
from commons.perf_model.partitioner import native_core as planner_core

CORE = native_core.native_packer()
needs_core = pytest.mark.skipif(CORE is None, reason="the native core has not been built (no C++ compiler)")


@st.composite
def requests(draw) -> PackRequest:
    """Any request: ties, zeros, giants, sums near 2^63, capacities that hold nothing and everything."""
    num_rows = draw(st.integers(1, draw(st.sampled_from([4, 12, 40, 150]))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["ties", "zipf", "lognormal", "uniform", "bimodal", "thirds", "huge"]))
    values = {
        "ties": lambda: rng.integers(0, 4, num_rows),
        "zipf": lambda: rng.zipf(1.2, num_rows).clip(max=4096),
        "lognormal": lambda: rng.lognormal(5, 1.4, num_rows),
        "uniform": lambda: rng.integers(0, 1000, num_rows),
        "bimodal": lambda: np.where(rng.random(num_rows) < 0.2, 4096 - rng.integers(0, 500, num_rows), 128),
        "thirds": lambda: rng.integers(200, 500, num_rows),
        "huge": lambda: rng.integers(0, (2**63 - 1) // num_rows, num_rows),
    }[kind]()
    values = values.astype(np.int64)
    factor = draw(st.sampled_from([9, 10, 10, 10, 11, 15, 20, 40, 500]))
    return PackRequest(
        values=values,
        capacity=min(max(1, int(values.max()) * factor // 10), 2**63 - 1),
        algorithm=draw(st.sampled_from(["ffd", "kk", "refined", "refined"])),
        min_groups=draw(st.one_of(st.just(1), st.integers(1, num_rows))),
        divisor=min(num_rows, draw(st.sampled_from([1, 1, 2, 3, 8]))),
        equal_size=draw(st.booleans()),
    )


@needs_core
@settings(max_examples=200)
@given(requests())
def test_native_is_the_reference(request):
    assert CORE.pack(request) == reference.pack(request)


@needs_core
def test_native_is_the_reference_where_the_search_goes_deep():
    # About three rows to a group, and hardly any room: packed again and again.
    for num_rows, seed in ((64, 5), (64, 7), (64, 8), (256, 5), (256, 6), (700, 1)):
        rng = np.random.default_rng(seed)
        values = rng.lognormal(np.log(90), 0.35, num_rows) + rng.lognormal(np.log(200), 0.5, num_rows)
        values = values.clip(1, 1024).astype(np.int64)
        request = PackRequest(values, int(values.max()), "refined")
        assert CORE.pack(request) == reference.pack(request)


@needs_core
def test_cores_refuse_values_that_are_none():
    for values in ([3, -1], [2**62, 2**62], [5, 9]):
        request = PackRequest(np.array(values), 8, "refined")
        assert CORE.pack(request) is None and reference.pack(request) is None


@needs_core
def test_native_checks_what_it_is_given():
    from commons.perf_model.partitioner import _native

    rows = np.ones(3, np.int64)
    with pytest.raises(TypeError, match="values is no int64 buffer"):
        _native.pack(np.ones(3), 5, "ffd", 1, 1, False)
    with pytest.raises(ValueError, match="unknown packing algorithm 'greedy'"):
        _native.pack(rows, 5, "greedy", 1, 1, False)
    for arguments in (
        (rows[:0], 5, "ffd", 1, 1),
        (rows, 0, "ffd", 1, 1),
        (rows, 5, "ffd", 4, 1),
        (rows, 5, "ffd", 1, 0),
    ):
        with pytest.raises(ValueError, match="pack takes checked arguments"):
            _native.pack(*arguments, False)
    with pytest.raises(TypeError, match="pack takes 6 arguments, got 0"):
        _native.pack()


@pytest.fixture
def fresh_cores():
    """Whatever is patched, the cores are looked for again."""
    caches = (native_core.native_packer, planner_core.native_core)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def warnings_of(caplog):
    return [record.message for record in caplog.records if "native core" in record.message]


def test_without_a_compiler_the_reference_serves_and_says_so_once(monkeypatch, fresh_cores, caplog):
    monkeypatch.setitem(sys.modules, "commons.perf_model.partitioner._native", None)
    monkeypatch.delattr("commons.perf_model.partitioner._native", raising=False)
    with caplog.at_level(logging.WARNING):
        assert [refined_allocate([8, 7, 6, 5, 4], 15) for _ in range(2)] == [[[0, 1], [2, 3, 4]]] * 2
    assert len(warnings_of(caplog)) == 1


@needs_core
@pytest.mark.parametrize("built_for", [None, native_core.PACKINGS + 1])
def test_a_core_of_other_sources_is_not_used(monkeypatch, fresh_cores, caplog, built_for):
    from commons.perf_model.partitioner import _native

    if built_for is None:  # built before it could pack
        monkeypatch.delattr(_native, "PACKINGS")
    else:
        monkeypatch.setattr(_native, "PACKINGS", built_for)
    with caplog.at_level(logging.WARNING):
        assert native_core.core() is reference
        assert refined_allocate([2, 2], 4) == [[0, 1]]
    assert len(warnings_of(caplog)) == 1 and f"packings {built_for or 0}" in warnings_of(caplog)[0]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(60, 100))
def test_the_bound_is_the_definition(values, capacity):
    weights = np.sort(np.array(values))[::-1]
    best = 1
    for alpha in {0, *(value for value in values if 2 * value <= capacity)}:
        alone = [value for value in values if value > capacity - alpha]
        large = [value for value in values if capacity - alpha >= value and 2 * value > capacity]
        light = [value for value in values if 2 * value <= capacity and value >= alpha]
        beyond = sum(light) - (len(large) * capacity - sum(large))
        best = max(best, len(alone) + len(large) + max(0, -(-beyond // capacity)))
    assert l2_bound(weights, capacity) == best
