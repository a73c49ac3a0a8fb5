"""ROWS: what is counted and summed over all rows of a global batch.

It is little work of many steps, and numpy lets go of the interpreter lock in each of them: taking it back, many times
per batch, costs a thread that launches kernels more than the work does. The native core (native/row_sums.hpp) computes
each of these at once, and keeps the lock unless there are many rows. Without it numpy computes the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.native_core import native_core

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def place_of_rows(real_rows: np.ndarray) -> np.ndarray:
    """int64 `(N,)`, the place of each row, of which place p has `real_rows[p]`."""
    core = native_core()
    if core is None:
        return np.repeat(np.arange(len(real_rows), dtype=np.int64), real_rows)
    return core.module.place_of_rows(real_rows)


def sum_at(place: np.ndarray, values: np.ndarray | None, num_places: int) -> np.ndarray:
    """int64 `(num_places,)` sums of `values` by place, or how many rows each place has."""
    core = native_core()
    if core is not None:
        return core.module.sum_at(place, values, num_places)
    if values is None:
        return np.bincount(place, minlength=num_places).astype(np.int64)
    return sum_by_rank(place, values, num_places)


def count_moves(
    home: np.ndarray, destination: np.ndarray, tokens: np.ndarray, steps: int, ranks_per_node: int
) -> np.ndarray:
    """What moves, by the step in which it is trained.

    Args:
        home: int64 `(N,)`, the place of each row; rank · steps + step.
        destination: int64 `(N,)`, the place that trains it.
        tokens: int64 `(N,)`.
        steps: of the plan.
        ranks_per_node: ranks that share a node.

    Returns:
        int64 `(6, steps)`: rows and their tokens, those that change rank and theirs, those that leave their node and
        theirs.
    """
    core = native_core()
    if core is None:
        return reference_moves(home, destination, tokens, steps, ranks_per_node)
    return core.module.count_moves(home, destination, tokens, steps, ranks_per_node)


def reference_moves(
    home: np.ndarray, destination: np.ndarray, tokens: np.ndarray, steps: int, ranks_per_node: int
) -> np.ndarray:
    """`count_moves` in numpy."""
    sender, (receiver, step) = home // steps, np.divmod(destination, steps)
    counts = []
    for chosen in (
        slice(None),
        sender != receiver,
        sender // ranks_per_node != receiver // ranks_per_node,  # who leaves the node leaves the rank
    ):
        counts += [np.bincount(step[chosen], minlength=steps), sum_by_rank(step[chosen], tokens[chosen], steps)]
    return np.array(counts, dtype=np.int64)


def digest(arrays: Sequence[np.ndarray]) -> int:
    """63 bits over int64 arrays of one dimension: the sum of their numbers, each mixed with its position.

    The mixing is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014). It tells apart what differs by accident, not by design.
    """
    core = native_core()
    return reference_digest(arrays) if core is None else core.module.digest(list(arrays))


def reference_digest(arrays: Sequence[np.ndarray]) -> int:
    """`digest` in numpy."""
    values = np.concatenate([*arrays, np.zeros(0, np.int64)], dtype=np.int64).view(np.uint64)
    state = np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    total = int(_mixed(values + state).sum(dtype=np.uint64)) & _MASK
    return int(_mixed(np.array([total], np.uint64))[0]) >> 1


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
