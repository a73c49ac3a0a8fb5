"""A start for the repair of a grid: the rows of each rank dealt to its own steps, but for those that do not fit."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from commons.perf_model.partitioner.locality import Home
from commons.perf_model.partitioner.problem import Problem

# A row of less than 1 / LARGE of what the lightest step may hold goes home even where it is too much there: swaps find
# better what to give away for it. A larger one seldom leaves by a swap.
LARGE = 8


def deal_at_home(problem: Problem, home: Home, limit: int) -> np.ndarray:
    """LPT that prefers the cells of a row's own rank, then those of its node.

    Among the cells that a row prefers it goes to the lightest one with room for one more row. A large row that would
    take that above the limit goes to its node's lightest, or the lightest of all, if it fits there. Rows beyond what
    the cells of a rank may count go the same way.

    Args:
        problem: the rows, and what the cells begin with.
        home: the rank of each row; rank `r` has the cells `[r · steps, r · steps + steps)`.
        limit: largest load wanted.

    Returns:
        int64 `(n,)`, the cell of each row; the counts keep their limits.

    """
    cells = _Cells(problem)
    steps, node = home.steps, home.steps * home.ranks_per_node
    large = (limit - max(cells.loads)) // LARGE
    parts = []
    for weight, rank in zip(problem.weights.tolist(), home.parts.tolist(), strict=True):
        chosen = cells.lightest(range(rank * steps, (rank + 1) * steps))
        if chosen is None or (weight >= large and cells.loads[chosen] + weight > limit):
            first = rank // home.ranks_per_node * node
            other = cells.lightest(range(first, min(first + node, problem.num_parts)))
            if other is None or cells.loads[other] + weight > limit:
                other = cells.lightest_of_all()
            if chosen is None or cells.loads[other] + weight <= limit:
                chosen = other
        cells.add(chosen, weight)
        parts.append(chosen)
    return np.array(parts, np.int64)


class _Cells:
    """Loads and counts of the cells while they fill, and which of them may take one more row."""

    def __init__(self, problem: Problem) -> None:
        self._min_count, self._max_count = problem.limits
        base = np.zeros(problem.num_parts, np.int64) if problem.base is None else problem.base
        self.loads: list[int] = base.tolist()
        self._counts = [0] * problem.num_parts
        # Rows beyond min_count in each cell: there are only so many, and each one taken leaves one less.
        self._spare = len(problem.weights) - self._min_count * problem.num_parts
        # With an entry for every change of a cell, of which only the last is true.
        self._heap = [(load, 0, cell) for cell, load in enumerate(self.loads)]
        heapq.heapify(self._heap)

    def lightest(self, cells: Iterable[int]) -> int | None:
        """The lightest with room for a row; ties by fewest rows, then by index. None if all are full."""
        return min(filter(self._is_open, cells), key=self._key, default=None)

    def lightest_of_all(self) -> int:
        """The same among all cells, one of which has room."""
        while not self._is_open(self._heap[0][2]) or self._heap[0] != self._key(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def add(self, cell: int, weight: int) -> None:
        """Put a row into a cell."""
        self._spare -= self._counts[cell] >= self._min_count
        self._counts[cell] += 1
        self.loads[cell] += weight
        heapq.heappush(self._heap, self._key(cell))

    def _key(self, cell: int) -> tuple[int, int, int]:
        return self.loads[cell], self._counts[cell], cell

    def _is_open(self, cell: int) -> bool:
        count = self._counts[cell]
        return count < self._min_count or (count < self._max_count and self._spare > 0)
