"""The native core plans grids as the reference does, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.perf_model.partitioner import native_core, partition_grid, reference
from commons.perf_model.partitioner.request import Request

CORE = native_core.native_core()
needs_core = pytest.mark.skipif(CORE is None, reason="the native core has not been built (no C++ compiler)")


@st.composite
def grid_requests(draw) -> Request:
    """Any request: ties, zeros, giants, sums near 2^62, ragged homes and batches, caps that hold and that do not."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    steps = draw(st.sampled_from([1, 2, 3, 4, 8]))
    n = draw(st.integers(1, draw(st.sampled_from([4, 40, 150, 400]))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["ties", "zipf", "user-like", "uniform", "bimodal", "one giant", "zeros", "huge"]))
    lengths = {
        "ties": lambda: rng.integers(0, 4, n),
        "zipf": lambda: rng.zipf(1.2, n).clip(max=4096),
        "user-like": lambda: (20 + rng.lognormal(np.log(130), 1.4, n)).clip(20, 8192),
        "uniform": lambda: rng.integers(0, 1000, n),
        "bimodal": lambda: np.where(rng.random(n) < 0.2, 4096 - rng.integers(0, 500, n), 100 + rng.integers(0, 60, n)),
        "one giant": lambda: np.where(np.arange(n) == n // 2, 100_000, rng.integers(0, 50, n)),
        "zeros": lambda: np.zeros(n),
        "huge": lambda: rng.integers(0, (2**62 - 1) // n, n),
    }[kind]().astype(np.int64)
    workloads = 5120 * lengths + lengths**2 if kind != "huge" and draw(st.booleans()) else lengths
    tokens = draw(st.sampled_from([None, lengths, rng.integers(0, 50, n)]))
    homes = {
        None: None,
        "even": np.arange(n) % ranks,
        "ragged": rng.integers(0, ranks, n),
        "one": np.full(n, ranks - 1),
    }
    batches = {None: None, "even": np.arange(n) * steps // n, "ragged": rng.integers(0, steps, n), "one": np.zeros(n)}
    home_step = batches[draw(st.sampled_from(list(batches)))]
    max_tokens = None
    if tokens is not None and draw(st.booleans()):
        mean = int(tokens.sum()) / (ranks * steps)
        max_tokens = max(1, int(mean * draw(st.sampled_from([0.5, 1.0, 1.03, 1.3, 3.0]))))
    return Request(
        workloads=workloads,
        num_parts=ranks,
        method=draw(st.sampled_from(["refined", "refined", "refined", *reference.METHODS])),
        equal_size=draw(st.booleans()),
        tokens=tokens,
        max_tokens=max_tokens,
        home=homes[draw(st.sampled_from(list(homes)))],
        ranks_per_node=min(ranks, draw(st.sampled_from([1, 2, 3, 64]))),
        slack=draw(st.sampled_from([0.0, 0.01, 0.3, 5e-324, 1.0])),
        num_steps=steps,
        home_step=None if home_step is None else home_step.astype(np.int64),
    )


@needs_core
@settings(max_examples=600)
@given(grid_requests())
def test_native_is_the_reference(request):
    native_plan, reference_plan = CORE.plan_grid(request), reference.plan_grid(request)
    assert native_plan.assignment.tolist() == reference_plan.assignment.tolist()
    assert native_plan.loads.tolist() == reference_plan.loads.tolist()
    assert (native_plan.bound, native_plan.most_tokens) == (reference_plan.bound, reference_plan.most_tokens)


@needs_core
@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("steps", [2, 8])
def test_native_is_the_reference_at_the_size_of_a_node(rows, steps):
    rng = np.random.default_rng(rows + steps)
    lengths = (20 + rng.lognormal(np.log(130), 1.4, 16 * rows * steps)).clip(20, 8192).astype(np.int64)
    home = np.arange(len(lengths)) % (16 * rows) // rows
    for keywords in ({}, {"home": home, "home_step": np.arange(len(lengths)) // (16 * rows), "tokens": lengths}):
        request = Request(5120 * lengths + lengths**2, 16, num_steps=steps, ranks_per_node=4, slack=0.01, **keywords)
        assert CORE.plan_grid(request).assignment.tolist() == reference.plan_grid(request).assignment.tolist()


@needs_core
def test_native_refuses_grids_of_another_size():
    module = pytest.importorskip("commons.perf_model.partitioner._native")
    rows = np.zeros(3, np.int64)

    def plan(num_steps, home_step=None):
        return module.plan(rows, 2, "lpt", True, None, None, None, 1, 0.0, num_steps, home_step)

    for num_steps in (0, 2**30):
        with pytest.raises(ValueError, match="at least one step, and fewer than 2\\^31 cells"):
            plan(num_steps)
    for mistake in ((2, rows[:2]), (None, rows)):
        with pytest.raises(ValueError, match="sizes do not match, or a number is out of its range"):
            plan(*mistake)


@needs_core
def test_an_algorithm_of_ones_own_is_cut_into_steps(monkeypatch):
    monkeypatch.setitem(reference.METHODS, "in_order", lambda rows, bound, split: rows.order % rows.num_parts)
    grid = partition_grid([8, 1, 7, 2], 2, 2, method="in_order")
    assert sorted(grid.loads.max(axis=1).tolist()) == [2, 8]
