"""Leveling: swaps of rows that narrow the spread of a packing's loads."""

from __future__ import annotations

import numpy as np

from commons.perf_model.loads import sum_by_rank

# Leveling stops at a spread below mean load ÷ TOLERANCE, as the planner does: step times cannot show less.
TOLERANCE = 10_000
# Most rounds per group.
PATIENCE = 4


def level(weights: np.ndarray, parts: np.ndarray, num_groups: int, *, equal_size: bool) -> np.ndarray:
    """Narrow the spread of the loads, largest − smallest; neither load gets worse. O(n log n) for each round.

    Each round makes the swap, or the move of a row, between the lightest group and another group that brings their
    loads nearest; if there is none, between the heaviest group and another group. Neither load rises above the larger
    of the two before, so a capacity remains kept. `weights` int64 `(n,)` descend; `parts` are the groups of the rows.
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
    """Groups whose rows are swapped. Each group has an extra row of weight 0: a swap with it is a move."""

    def __init__(self, weights: np.ndarray, parts: np.ndarray, num_groups: int, equal_size: bool) -> None:
        self.weights = np.append(weights, np.zeros(num_groups, np.int64))  # (n + k,)
        self.parts = np.append(parts, np.arange(num_groups))  # (n + k,)
        self.loads = sum_by_rank(parts, weights, num_groups)  # (k,)
        self._counts = np.bincount(parts, minlength=num_groups)  # (k,)
        self._equal_size = equal_size
        self._num_rows = len(parts)

    def swap_best(self, group: int, *, takes: bool) -> bool:
        """Make the swap between `group` and any other group that brings their loads nearest; False if none helps.

        `takes`: whether the load of `group` increases, as for the lightest group.
        """
        sign = 1 if takes else -1
        # The extra rows of other groups only help if `group` gives load away.
        weights, parts = (each[: self._num_rows if takes else None] for each in (self.weights, self.parts))
        gap = (sign * (self.loads - self.loads[group]))[parts]
        own = np.append(np.flatnonzero(self.parts[: self._num_rows] == group), self._num_rows + group)
        own_weights = self.weights[own]
        # The best difference of two swapped rows is half the gap. For every row, find the two rows of the group with
        # the nearest differences below and above it; weights descend.
        place = np.searchsorted(-own_weights, sign * (gap // 2) - weights)
        at = np.array((np.maximum(place - 1, 0), np.minimum(place, len(own) - 1)))  # (2, n) or (2, n + k)
        taken = sign * (weights - own_weights[at])
        gain = np.minimum(taken, gap - taken)  # by this the larger of the two loads falls
        if self._equal_size:
            gain[self._forbidden(group, parts, own[at], takes)] = 0
        side, row = divmod(int(gain.argmax()), len(place))
        if gain[side, row] <= 0:
            return False
        self._swap(row, int(own[at[side, row]]))
        return True

    def _forbidden(self, group: int, parts: np.ndarray, own: np.ndarray, takes: bool) -> np.ndarray:
        """Whether the swap of each row of `parts` with `own` is a move that equal sizes forbid: bool, like `own`."""
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
