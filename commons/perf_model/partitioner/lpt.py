"""LPT, longest processing time first: the next heaviest row goes to the lightest partition that may take it.

Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969); with a limit on the number of
rows per partition as in the k-partitioning literature.
"""

from __future__ import annotations

import heapq

import numpy as np

from commons.perf_model.partitioner.problem import Limits


def lpt(weights: np.ndarray, num_parts: int, limits: Limits, base: np.ndarray | None = None) -> np.ndarray:
    """Assign rows, heaviest first, to the lightest partition with room; ties by fewest rows, then by index.

    Args:
        weights: int64 `(n,)`, descending.
        num_parts: number of partitions.
        limits: fewest and most rows per partition.
        base: int64 `(k,)`, load of each partition before it has any rows.

    Returns:
        int64 `(n,)`, the partition of each row.

    """
    min_count, max_count = limits
    parts = [0] * len(weights)
    counts = [0] * num_parts
    # Rows beyond min_count in each partition: there are only so many, and each one taken leaves one less.
    spare = len(weights) - min_count * num_parts
    # A heap entry is (load, rows, partition) in one integer: comparing one integer is faster than comparing a tuple.
    load_unit = (len(weights) + 1) * num_parts
    heap = [part + (0 if base is None else int(base[part]) * load_unit) for part in range(num_parts)]
    heapq.heapify(heap)
    for row, weight in enumerate(weights.tolist()):
        entry = heap[0]
        part = entry % num_parts
        while counts[part] >= min_count:
            if spare:
                spare -= 1
                break
            heapq.heappop(heap)
            entry = heap[0]
            part = entry % num_parts
        parts[row] = part
        counts[part] += 1
        if counts[part] == max_count:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, entry + weight * load_unit + num_parts)
    return np.array(parts, np.int64)
