"""The native core gives the plans of the reference, bit for bit, and the reference serves without it."""

from __future__ import annotations

import logging
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.perf_model.partitioner import lower_bound, native_core, partition, reference
from commons.perf_model.partitioner.request import Request

CORE = native_core.native_core()
needs_core = pytest.mark.skipif(CORE is None, reason="the native core has not been built (no C++ compiler)")


@st.composite
def requests(draw) -> Request:
    """Any request: ties, zeros, giants, sums near 2^62, ragged homes, caps that hold and that do not."""
    k = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17, 33]))
    n = draw(st.integers(1, draw(st.sampled_from([4, 12, 40, 150]))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["ties", "zipf", "lognormal", "uniform", "bimodal", "huge"]))
    lengths = {
        "ties": lambda: rng.integers(0, 4, n),
        "zipf": lambda: rng.zipf(1.2, n).clip(max=4096),
        "lognormal": lambda: rng.lognormal(5, 1.4, n).astype(np.int64),
        "uniform": lambda: rng.integers(0, 1000, n),
        "bimodal": lambda: np.where(rng.random(n) < 0.2, 4096 - rng.integers(0, 500, n), 100 + rng.integers(0, 60, n)),
        "huge": lambda: rng.integers(0, (2**62 - 1) // n, n),
    }[kind]().astype(np.int64)
    workloads = 5120 * lengths + lengths**2 if kind != "huge" and draw(st.booleans()) else lengths
    tokens = draw(st.sampled_from([None, lengths, rng.integers(0, 50, n)]))
    home = draw(st.sampled_from([None, "even", "ragged", "one"]))
    homes = {None: None, "even": np.arange(n) % k, "ragged": rng.integers(0, k, n), "one": np.full(n, k - 1)}
    max_tokens = None
    if tokens is not None and draw(st.booleans()):
        max_tokens = max(1, int(int(tokens.sum()) / k * draw(st.sampled_from([0.5, 1.0, 1.03, 1.3]))))
    return Request(
        workloads=workloads,
        num_parts=k,
        method=draw(st.sampled_from(["refined", "refined", "refined", *reference.METHODS])),
        equal_size=draw(st.booleans()),
        tokens=tokens,
        max_tokens=max_tokens,
        home=homes[home],
        ranks_per_node=min(k, draw(st.sampled_from([1, 2, 8, 64]))),
        slack=draw(st.sampled_from([0.0, 0.01, 0.3, 1e-300, 5e-324, 1.0])),
    )


@needs_core
@settings(max_examples=400)
@given(requests())
def test_native_is_the_reference(request):
    native_plan, reference_plan = CORE.plan(request), reference.plan(request)
    assert native_plan.assignment.tolist() == reference_plan.assignment.tolist()
    assert native_plan.loads.tolist() == reference_plan.loads.tolist()
    assert (native_plan.bound, native_plan.most_tokens) == (reference_plan.bound, reference_plan.most_tokens)
    for equal_size in (True, False):
        arguments = (request.workloads, request.num_parts, equal_size)
        assert CORE.lower_bound(*arguments) == reference.lower_bound(*arguments)


@needs_core
def test_native_takes_lists_arrays_and_tensors_through_the_planner():
    workloads = [9, 7, 5, 3, 1, 1]
    expected = reference.plan(Request(workloads=np.array(workloads), num_parts=2)).assignment.tolist()
    assert partition(workloads, 2).assignment.tolist() == expected
    assert partition(np.array(workloads, np.int32), 2).assignment.tolist() == expected
    assert partition(torch.tensor(workloads), 2).assignment.tolist() == expected
    assert partition(np.repeat(workloads, 2)[::2], 2).assignment.tolist() == expected


@needs_core
def test_native_refuses_arrays_of_another_type_or_size():
    module = pytest.importorskip("commons.perf_model.partitioner._native")
    rows = np.zeros(3, np.int64)

    def plan(workloads=rows, method="lpt", tokens=None, max_tokens=None, home=None, slack=0.0):
        return module.plan(workloads, 2, method, True, tokens, max_tokens, home, 1, slack)

    for workloads in (np.zeros(3), np.zeros(3, np.int32), np.zeros(6, np.int64)[::2], [0, 0, 0]):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            plan(workloads=workloads)
    for mistake in ({"tokens": rows[:2]}, {"home": rows[:2]}, {"max_tokens": 5}, {"slack": 1.5}):
        with pytest.raises(ValueError, match="sizes do not match, or a number is out of its range"):
            plan(**mistake)
    with pytest.raises(ValueError, match="unknown method 'greedy'"):
        plan(method="greedy")
    with pytest.raises(ValueError, match="at least one row and one partition"):
        plan(workloads=rows[:0])
    with pytest.raises(ValueError, match="at least one row and one partition"):
        module.lower_bound(rows, 0, True)


@pytest.fixture
def no_core(monkeypatch):
    """As on a machine without a compiler."""
    monkeypatch.setitem(sys.modules, "commons.perf_model.partitioner._native", None)
    monkeypatch.delattr("commons.perf_model.partitioner._native", raising=False)
    native_core.native_core.cache_clear()
    yield
    native_core.native_core.cache_clear()


def test_without_a_compiler_the_reference_serves_and_says_so_once(no_core, caplog):
    with caplog.at_level(logging.WARNING, logger="commons.perf_model.partitioner.native_core"):
        plans = [partition([5, 4, 3, 2, 1], 2) for _ in range(3)]
        assert lower_bound([5, 4, 3, 2, 1], 2) == 8
    assert plans[0].loads.max() == 8
    assert [record.message for record in caplog.records if "native core is missing" in record.message] == [
        caplog.records[0].message
    ]


@needs_core
def test_a_core_of_other_sources_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(native_core, "PLANS", native_core.PLANS + 1)
    native_core.native_core.cache_clear()
    with caplog.at_level(logging.WARNING, logger="commons.perf_model.partitioner.native_core"):
        assert native_core.core_for("refined") is reference
    native_core.native_core.cache_clear()
    assert "it was built for plans" in caplog.text


@needs_core
def test_an_algorithm_of_ones_own_runs_in_python(monkeypatch):
    monkeypatch.setitem(reference.METHODS, "all_in_one", lambda rows, bound, split: np.zeros_like(rows.order))
    assert partition([1, 2, 3], 2, method="all_in_one", equal_size=False).loads.tolist() == [6, 0]


@needs_core
def test_planning_lets_other_threads_run():
    workloads = np.random.default_rng(0).zipf(1.3, 4096).clip(max=4096) ** 2
    request = Request(workloads=workloads, num_parts=128)
    main_ran = threading.Event()
    plans_until_main_ran = []

    def plan_until_main_ran():
        for count in range(2000):
            if main_ran.is_set():
                plans_until_main_ran.append(count)
                return
            CORE.plan(request)

    # With a switch interval this long, the main thread gets the interpreter only where planning lets go of it.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        planner = threading.Thread(target=plan_until_main_ran)
        planner.start()
        main_ran.set()
        planner.join()
    finally:
        sys.setswitchinterval(interval)
    assert plans_until_main_ran
