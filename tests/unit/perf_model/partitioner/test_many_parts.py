"""Plans near home for many partitions: what they keep."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared.lengths import COSTS, draw
from commons.perf_model.partitioner import Grid, partition, partition_grid

MANY = 512  # as in native/many_parts.hpp


class Case(NamedTuple):
    """Rows of many partitions."""

    tokens: np.ndarray
    home: np.ndarray
    num_parts: int

    @property
    def workloads(self) -> np.ndarray:
        return COSTS["HSTU"](self.tokens)

    def loads(self, parts: np.ndarray) -> np.ndarray:
        return np.bincount(parts, weights=self.workloads, minlength=self.num_parts).astype(np.int64)


def make_case(kind: str, num_parts: int, rows: int, seed: int, *, uneven: bool = False) -> Case:
    """`rows` per partition, or up to twice as many; "user-like" has rows that fill a partition."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 2 * rows, num_parts) if uneven else np.full(num_parts, rows)
    number = int(counts.sum())
    tokens = rng.integers(0, 4, number) if kind == "ties" else draw(kind, number, seed)
    return Case(tokens, np.repeat(np.arange(num_parts), counts), num_parts)


CASES = st.builds(
    make_case,
    st.sampled_from(["user-like", "zipf", "ties", "lognormal"]),
    st.sampled_from([MANY, MANY + 37]),
    st.just(4),
    st.integers(0, 2**16),
    uneven=st.booleans(),
)


@settings(max_examples=12, deadline=None)
@given(CASES, st.sampled_from([8, 5, 10**6]), st.sampled_from([0.0, 0.01, 0.1]), st.booleans(), st.booleans())
def test_keeps_what_is_promised(case: Case, node: int, slack: float, equal_size: bool, capped: bool) -> None:
    most_at_home = int(np.bincount(case.home, weights=case.tokens).max())
    plan = partition(
        case.workloads,
        case.num_parts,
        equal_size=equal_size,
        tokens=case.tokens,
        max_tokens=most_at_home if capped else None,
        home=case.home,
        ranks_per_node=node,
        slack=slack,
    )
    assert len(plan.assignment) == len(case.tokens)
    np.testing.assert_array_equal(plan.loads, case.loads(plan.assignment))
    counts = np.bincount(plan.assignment, minlength=case.num_parts)
    is_home = np.array_equal(plan.assignment, case.home)
    assert is_home or not equal_size or counts.max() - counts.min() <= 1
    assert plan.loads.max() >= plan.lower_bound
    assert is_home or plan.loads.max() < case.loads(case.home).max()
    if capped:
        assert np.bincount(plan.assignment, weights=case.tokens).max() <= most_at_home


def plan_window(case: Case, window: int, **keywords) -> tuple[Grid, np.ndarray, np.ndarray]:
    """A window near home, the rank of each row, and its batch: the rows of a rank are dealt to the batches in turn."""
    home, home_step = case.home, np.arange(len(case.home)) % window
    keywords.update(home=home, home_step=home_step, tokens=case.tokens)
    return partition_grid(case.workloads, case.num_parts, window, **keywords), home, home_step


@settings(max_examples=12, deadline=None)
@given(CASES, st.sampled_from([2, 4]), st.sampled_from([8, 5, 2**31 - 1]), st.sampled_from([0.01, 0.1]), st.booleans())
def test_a_window_keeps_what_is_promised(case: Case, window: int, node: int, slack: float, capped: bool) -> None:
    cell = case.home * window + np.arange(len(case.home)) % window
    most_at_home = int(np.bincount(cell, weights=case.tokens).max())
    options = {"max_tokens": most_at_home if capped else None, "ranks_per_node": node, "slack": slack}
    grid, home, home_step = plan_window(case, window, **options)
    cells = grid.assignment * window + grid.step
    loads = np.bincount(cells, weights=case.workloads, minlength=case.num_parts * window).astype(np.int64)
    np.testing.assert_array_equal(grid.loads, loads.reshape(-1, window).T)
    if capped:
        assert np.bincount(cells, weights=case.tokens).max() <= most_at_home
    loaded = np.bincount(cell, weights=case.workloads, minlength=len(loads)).reshape(-1, window).max(axis=0).sum()
    is_home = np.array_equal(cells, cell)
    assert grid.sum_of_largest >= grid.lower_bound
    assert is_home or grid.sum_of_largest < loaded
    alone = 0
    for step in range(window):
        rows = home_step == step
        alone += int(
            partition(
                case.workloads[rows], case.num_parts, tokens=case.tokens[rows], home=home[rows], **options
            ).loads.max()
        )
    assert grid.sum_of_largest <= alone
    counts = np.bincount(cells, minlength=len(loads))
    assert is_home or counts.max() - counts.min() <= 1 or grid.sum_of_largest == alone


@pytest.mark.parametrize(
    ("kind", "num_parts", "window", "most_moved", "most_crossing"),
    [
        ("lognormal", 64, 1, 0.10, 0.03),
        ("user-like", 64, 1, 0.10, 0.03),
        ("lognormal", 1024, 1, 0.10, 0.03),
        ("user-like", 1024, 1, 0.10, 0.03),
        ("zipf", 512, 1, 0.185, 0.09),
        ("user-like", 512, 4, 0.16, 0.09),
        ("zipf", 512, 4, 0.14, 0.05),
    ],
)
def test_few_tokens_move_and_the_slack_is_kept(
    kind: str, num_parts: int, window: int, most_moved: float, most_crossing: float
) -> None:
    case = make_case(kind, num_parts, 32 * window, 0)
    options = {"ranks_per_node": 8, "slack": 0.01}
    if window == 1:
        plan = partition(case.workloads, num_parts, tokens=case.tokens, home=case.home, **options)
    else:
        plan, *_ = plan_window(case, window, **options)
    moves, crosses = plan.assignment != case.home, plan.assignment // 8 != case.home // 8
    assert plan.optimality_gap <= (0.0101 if num_parts < MANY else 0.01)
    assert case.tokens[moves].sum() <= most_moved * case.tokens.sum()
    assert case.tokens[crosses].sum() <= most_crossing * case.tokens.sum()
