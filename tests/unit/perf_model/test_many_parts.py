"""Plans near home for many partitions: what they keep."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.perf_model.partitioner import partition
from commons.perf_model.partitioner.inputs import as_int64_workloads

MANY = 512  # as in native/many_parts.hpp


class Case(NamedTuple):
    """Rows of many partitions."""

    tokens: np.ndarray
    home: np.ndarray
    num_parts: int

    @property
    def workloads(self) -> np.ndarray:
        return as_int64_workloads(5120 * self.tokens + self.tokens**2)

    def loads(self, parts: np.ndarray) -> np.ndarray:
        return np.bincount(parts, weights=self.workloads, minlength=self.num_parts).astype(np.int64)


def make_case(kind: str, num_parts: int, rows: int, seed: int, *, uneven: bool = False) -> Case:
    """`rows` per partition, or up to twice as many; "user-like" has rows that fill a partition."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 2 * rows, num_parts) if uneven else np.full(num_parts, rows)
    number = int(counts.sum())
    if kind == "user-like":
        tokens = (20 + rng.lognormal(np.log(130), 1.4, number)).clip(20, 8192)
    elif kind == "zipf":
        tokens = rng.zipf(1.2, number).clip(1, 4096)
    elif kind == "ties":
        tokens = rng.integers(0, 4, number)
    else:
        tokens = rng.lognormal(5.89, 0.83, number).clip(1, 4096)
    return Case(tokens.astype(np.int64), np.repeat(np.arange(num_parts), counts), num_parts)


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


@pytest.mark.parametrize(
    ("kind", "num_parts", "seed", "most_moved", "most_crossing"),
    [
        ("lognormal", 1024, 0, 0.10, 0.03),
        ("user-like", 1024, 0, 0.10, 0.03),
        ("zipf", 1024, 0, 0.17, 0.08),
        ("zipf", 512, 0, 0.185, 0.09),
    ],
)
def test_few_tokens_move_and_the_slack_is_kept(
    kind: str, num_parts: int, seed: int, most_moved: float, most_crossing: float
) -> None:
    case = make_case(kind, num_parts, 32, seed)
    plan = partition(case.workloads, num_parts, tokens=case.tokens, home=case.home, ranks_per_node=8, slack=0.01)
    moves, crosses = plan.assignment != case.home, plan.assignment // 8 != case.home // 8
    assert plan.optimality_gap <= 0.01
    assert case.tokens[moves].sum() <= most_moved * case.tokens.sum()
    assert case.tokens[crosses].sum() <= most_crossing * case.tokens.sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_zipf_on_512_ranks_moves_a_fifth_at_most(seed: int) -> None:
    """Where swaps leave ranks above the slack, dealing those anew has moved 31.9 % of the tokens."""
    tokens = np.clip(np.random.default_rng(seed).zipf(1.2, 512 * 32), 1, 4096)
    case = Case(3 + 2 * tokens, np.repeat(np.arange(512), 32), 512)
    plan = partition(case.workloads, 512, tokens=case.tokens, home=case.home, ranks_per_node=8, slack=0.01)
    assert plan.optimality_gap <= 0.01
    assert case.tokens[plan.assignment != case.home].sum() <= 0.20 * case.tokens.sum()


@pytest.mark.parametrize(("kind", "num_parts", "rows", "seed"), [("zipf", 512, 32, 0), ("lognormal", 4096, 8, 8)])
def test_ranks_that_swaps_leave_above_the_slack_are_dealt_anew(kind: str, num_parts: int, rows: int, seed: int) -> None:
    case = make_case(kind, num_parts, rows, seed)
    plan = partition(case.workloads, num_parts, tokens=case.tokens, home=case.home, ranks_per_node=8, slack=0.01)
    assert case.loads(plan.assignment).max() <= 1.01 * plan.lower_bound
