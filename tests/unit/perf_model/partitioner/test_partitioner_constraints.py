"""Token caps and homes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model.partitioner import partition


@st.composite
def rows_with_home(draw, max_rows=40):
    """Workloads, tokens, number of partitions, home: with equal counts, or ragged, some of them empty."""
    k = draw(st.integers(1, 9))
    if draw(st.booleans()):
        home = [part for part in range(k) for _ in range(draw(st.integers(1, 5)))]
    else:
        home = draw(st.lists(st.integers(0, k - 1), max_size=max_rows))
    n = len(home)
    largest = draw(st.sampled_from([3, 1000, 2**50]))
    workloads = draw(st.lists(st.integers(0, largest), min_size=n, max_size=n))
    tokens = draw(st.one_of(st.just(workloads), st.lists(st.integers(0, 50), min_size=n, max_size=n)))
    return workloads, tokens, k, home


def sums(values, parts, k):
    result = [0] * k
    for value, part in zip(values, parts, strict=True):
        result[part] += value
    return result


@given(
    rows_with_home(),
    st.booleans(),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from(["refined", "karmarkar_karp", "lpt", "snake"]),
)
def test_home_is_never_made_worse(case, equal_size, ranks_per_node, slack, method):
    workloads, tokens, k, home = case
    keywords = {"method": method, "equal_size": equal_size}
    free = partition(workloads, k, **keywords)
    plan = partition(workloads, k, tokens=tokens, home=home, ranks_per_node=ranks_per_node, slack=slack, **keywords)
    home_loads = sums(workloads, home, k)
    assert plan.loads.tolist() == sums(workloads, plan.assignment.tolist(), k)
    largest, free_largest = int(plan.loads.max()), int(free.loads.max())
    assert plan.lower_bound <= largest <= max(home_loads)
    assert largest <= free_largest * (1 + Fraction(slack)) or plan.assignment.tolist() == home
    if largest == max(home_loads):
        assert plan.assignment.tolist() == home
    elif equal_size:
        counts = np.bincount(plan.assignment, minlength=k)
        assert counts.max() - counts.min() <= 1
    if free_largest >= max(home_loads):
        assert plan.assignment.tolist() == home


@given(rows_with_home(), st.booleans(), st.floats(1.0, 2.0), st.booleans())
def test_a_cap_is_kept_or_refused(case, equal_size, room, stay):
    workloads, tokens, k, home = case
    max_tokens = max(1, int(sum(tokens) / k * room))
    keywords = {"equal_size": equal_size, "tokens": tokens, "max_tokens": max_tokens}
    if stay:
        keywords.update(home=home, slack=0.01)
    effort = partition(workloads, k, best_effort=True, **keywords)
    most = max(sums(tokens, effort.assignment.tolist(), k))
    try:
        plan = partition(workloads, k, **keywords)
    except ValueError as error:
        assert most > max_tokens
        assert "max_tokens" in str(error)
        return
    assert max(sums(tokens, plan.assignment.tolist(), k)) <= max_tokens
    assert plan.assignment.tolist() == effort.assignment.tolist()
    assert max(plan.loads) >= plan.lower_bound
    home_is_feasible = max(sums(tokens, home, k)) <= max_tokens
    if stay and home_is_feasible:
        assert max(plan.loads) <= max(sums(workloads, home, k))


def test_best_effort_exceeds_the_cap_by_the_token_balanced_plan_at_most():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, 128).astype(np.int64)
    cap = int(lengths.sum()) // 8 - 50
    plan = partition(lengths**2, 8, tokens=lengths, max_tokens=cap, best_effort=True)
    by_tokens = partition(lengths, 8)
    assert np.bincount(plan.assignment, weights=lengths).max() <= by_tokens.loads.max()


def test_a_sample_above_the_cap_is_named_or_let_through():
    arguments = {"tokens": [3, 99, 3, 3], "max_tokens": 50}
    with pytest.raises(ValueError, match="sample 1 alone has 99 tokens, max_tokens is 50"):
        partition([1, 1, 1, 1], 2, **arguments)
    plan = partition([1, 1, 1, 1], 2, best_effort=True, **arguments)
    assert max(sums(arguments["tokens"], plan.assignment.tolist(), 2)) == 102


def lengths_of(name: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = {
        "lognormal": rng.lognormal(np.log(512) - np.log(2) / 2, np.sqrt(np.log(2)), n).clip(1, 4096),
        "user-like": (20 + rng.lognormal(np.log(130), 1.4, n)).clip(20, 8192),
    }[name]
    return lengths.astype(np.int64)


@pytest.mark.parametrize("name", ["lognormal", "user-like"])
def test_few_tokens_leave_home(name):
    moved, crossed = [], []
    for seed in range(4):
        lengths = lengths_of(name, 64 * 32, seed)
        home = np.arange(len(lengths)) // 32
        plan = partition(5120 * lengths + lengths**2, 64, tokens=lengths, home=home, ranks_per_node=8, slack=0.01)
        moved.append(lengths[plan.assignment != home].sum() / lengths.sum())
        crossed.append(lengths[plan.assignment // 8 != home // 8].sum() / lengths.sum())
    assert np.mean(moved) <= 0.10 and np.mean(crossed) <= 0.03


def test_a_cap_that_only_the_way_back_home_keeps_is_no_error():
    values = [3, 5, 11, 13, 15, 17]  # without a home, swaps get to 33 tokens
    plan = partition(values, 2, equal_size=False, tokens=values, max_tokens=32, home=[0, 0, 0, 0, 0, 1])
    assert plan.loads.tolist() == [32, 32]
