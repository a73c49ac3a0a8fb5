"""What pages for users of other projects say of results: no worse than the algorithms that these ship.

Those are plain Python here, written from their descriptions: largest differencing and first-fit decreasing.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.shared.plain import plain_first_fit, plain_karmarkar_karp
from commons.micro_batching import get_allocate_fn
from commons.perf_model.partitioner import partition

KINDS = {
    "zipf": lambda rng, rows: rng.zipf(1.2, rows).clip(1, 4096),
    "lognormal": lambda rng, rows: np.exp(rng.normal(5, 1.4, rows)).astype(np.int64).clip(1, 4096),
    "bimodal": lambda rng, rows: np.where(rng.random(rows) < 0.2, 4096, 128),
    "few values": lambda rng, rows: rng.integers(1, 10, rows) * 400,
}


def _largest(values: list[int], parts: list[list[int]]) -> int:
    return max(sum(values[row] for row in part) for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_never_above_plain_differencing(kind):
    rng = np.random.default_rng(0)
    for _ in range(60):
        num_parts, each = (int(number) for number in rng.integers(1, 9, 2))
        workloads = [24576 * length + length**2 for length in KINDS[kind](rng, num_parts * each).tolist()]
        for equal_size in (True, False):
            plain = plain_karmarkar_karp(workloads, num_parts, equal_size)
            planned = partition(workloads, num_parts, equal_size=equal_size)
            assert _largest(workloads, planned.groups()) <= _largest(workloads, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_never_more_than_those_of_plain_first_fit_or_differencing(kind):
    rng = np.random.default_rng(1)
    for _ in range(40):
        values, capacity = KINDS[kind](rng, int(rng.integers(1, 65))).tolist(), int(rng.integers(4096, 20000))
        groups = get_allocate_fn("refined")(values, capacity)
        assert _largest(values, groups) <= capacity
        assert sorted(itertools.chain(*groups)) == list(range(len(values)))
        assert len(groups) <= len(plain_first_fit(values, capacity))
        for fewer in range(1, len(groups)):  # into which differencing puts more than the capacity
            assert _largest(values, plain_karmarkar_karp(values, fewer, equal_size=False)) > capacity
