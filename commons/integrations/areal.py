"""AReaL: the functions of its utils/seqpack.py, with the same signatures.

import areal.utils.seqpack
areal.utils.seqpack.ffd_allocate = evenrank.integrations.areal.ffd_allocate
"""

from __future__ import annotations

from typing import Any

from commons.micro_batching import allocation
from commons.micro_batching.allocation import AllocateFn
from commons.perf_model.partitioner import as_int64_workloads, partition


def ffd_allocate(
    values: Any, capacity: int, min_groups: int | None = None, n_groups_divisor: int = 1
) -> list[list[int]]:
    """Indices in groups of at most `capacity` tokens: no more groups than first-fit decreasing, and more even ones.

    Args:
        values: tokens of each item, integers `(n,)`.
        capacity: most tokens of a group.
        min_groups: fewest groups; None for as few as possible.
        n_groups_divisor: the number of groups is a multiple of it.

    Raises:
        RuntimeError: a value above the capacity, or no such groups exist; the same type as in AReaL.
    """
    return kk_allocate(values, capacity, min_groups, n_groups_divisor)


def kk_allocate(
    values: Any, capacity: int, min_groups: int | None = None, n_groups_divisor: int = 1, equal_size: bool = False
) -> list[list[int]]:
    """`ffd_allocate`; with `equal_size`, the sizes of the groups differ by one at most."""
    try:
        return allocation.refined_allocate(values, capacity, min_groups or 1, n_groups_divisor, equal_size=equal_size)
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def get_allocate_fn(algorithm: str = "ffd") -> AllocateFn:
    """The function of AReaL's setting `packing_algorithm`, "ffd" or "kk"; both plan with evenrank's "refined".

    Raises:
        ValueError: an unknown name.
    """
    functions: dict[str, AllocateFn] = {"ffd": ffd_allocate, "kk": kk_allocate}
    if algorithm not in functions:
        raise ValueError(f"packing_algorithm is {algorithm!r}; AReaL has 'ffd' and 'kk': choose one")
    return functions[algorithm]


def balanced_greedy_partition(nums: Any, K: int) -> list[list[int]]:
    """Indices in `K` groups of nearly equal sums, whose sizes differ by one at most.

    Raises:
        ValueError: fewer values than groups.
    """
    weights = as_int64_workloads(nums, "nums")
    if len(weights) < K:
        raise ValueError(f"there are {len(weights)} values, K is {K}; no group is empty: lower K or pass more")
    return partition(weights, K).groups()
