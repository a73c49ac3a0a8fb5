"""Leveling: once the largest load is as low as it gets, swaps of rows that raise the smallest one."""

from __future__ import annotations

import numpy as np

from commons.perf_model.loads import sum_by_rank

# As where the planner stops: one part in ten thousand is far below what a step time can show.
TOLERANCE = 10_000
# Rounds per group after which the groups are as level as they will get.
PATIENCE = 4


def level(weights: np.ndarray, parts: np.ndarray, num_groups: int, *, equal_size: bool) -> np.ndarray:
    """Narrow the spread of the loads, largest − smallest; neither gets worse. O(n log n) for each round.

    In each round the lightest group looks at all others for the swap of rows, or the row, that brings two loads
    nearest; where it finds none, the heaviest does. What one group gains the other loses, so that no load rises above
    the larger of both: a capacity stays kept. int64 weights `(n,)` descend; `parts` are the groups of the rows.
    """
    groups = _Groups(weights, parts, num_groups, equal_size)
    enough = max(1, int(weights.sum()) // num_groups // TOLERANCE)
    for _ in range(PATIENCE * num_groups if num_groups > 1 else 0):
        heaviest, lightest = int(groups.loads.argmax()), int(groups.loads.argmin())
        if groups.loads[heaviest] - groups.loads[lightest] <= enough:
            break
        if not groups.swap_best(lightest, takes=True) and not groups.swap_best(heaviest, takes=False):
            break
    return groups.parts[: len(parts)]


class _Groups:
    """Groups whose rows are swapped. Each has a row of nothing besides: a swap with that is a move."""

    def __init__(self, weights: np.ndarray, parts: np.ndarray, num_groups: int, equal_size: bool) -> None:
        self.weights = np.append(weights, np.zeros(num_groups, np.int64))  # (n + k,)
        self.parts = np.append(parts, np.arange(num_groups))  # (n + k,)
        self.loads = sum_by_rank(parts, weights, num_groups)  # (k,)
        self._counts = np.bincount(parts, minlength=num_groups)  # (k,)
        self._equal_size = equal_size
        self._num_rows = len(parts)

    def swap_best(self, group: int, *, takes: bool) -> bool:
        """Swap a row of `group` and one of any other group, so that two loads come nearest; False if none do.

        `takes` says whether load comes to the group, as to the lightest.
        """
        sign = 1 if takes else -1
        # Rows of nothing are only of use to a group that gives.
        weights, parts = (each[: self._num_rows if takes else None] for each in (self.weights, self.parts))
        gap = (sign * (self.loads - self.loads[group]))[parts]
        own = np.append(np.flatnonzero(self.parts[: self._num_rows] == group), self._num_rows + group)
        own_weights = self.weights[own]
        # For every row the two rows of the group on either side of the best difference, half the gap. Weights descend.
        place = np.searchsorted(-own_weights, sign * (gap // 2) - weights)
        at = np.array((np.maximum(place - 1, 0), np.minimum(place, len(own) - 1)))  # (2, n) or (2, n + k)
        taken = sign * (weights - own_weights[at])
        gain = np.minimum(taken, gap - taken)  # how far the larger load falls, and the smaller rises
        if self._equal_size:
            gain[self._forbidden(group, parts, own[at], takes)] = 0
        side, row = divmod(int(gain.argmax()), len(place))
        if gain[side, row] <= 0:
            return False
        self._swap(row, int(own[at[side, row]]))
        return True

    def _forbidden(self, group: int, parts: np.ndarray, own: np.ndarray, takes: bool) -> np.ndarray:
        """Where the swap of each row, in `parts`, for `own`, a row of the group, is a forbidden move, like `own`."""
        fewest, larger = divmod(self._num_rows, len(self.loads))
        may_give, may_take = self._counts > fewest, self._counts < fewest + (larger > 0)
        may_move = may_give & may_take[group] if takes else may_take & may_give[group]
        is_move = own >= self._num_rows
        is_move[:, self._num_rows :] = True
        return is_move & ~may_move[parts]

    def _swap(self, row: int, own: int) -> None:
        other, group = int(self.parts[row]), int(self.parts[own])
        taken = self.weights[row] - self.weights[own]
        self.loads[group] += taken
        self.loads[other] -= taken
        for each, giver, taker in ((row, other, group), (own, group, other)):
            if each < self._num_rows:
                self.parts[each] = taker
                self._counts[giver] -= 1
                self._counts[taker] += 1
