"""Plans near home for many partitions, in a time that grows with the rows that have to move.

With a home and a slack, a plan for its own sake is not needed: the lower bound says how low the loads may go. As long
as one is above that, the heaviest partition swaps a row with the lightest one. In the rounds of `locality.repair` all
heavy partitions look at all light ones; the plans are as good, but each of some dozens of rounds looks at everything.
So those rounds get only what the swaps leave above the limit. Where that is one partition of thousands, or a few, to
look at everything for each is most of the time: they are dealt anew, each with the lightest of all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.home_rows import movable, redeal_heaviest, repair_start, with_slack
from commons.perf_model.partitioner.locality import BITS, FREE, NODE_COST, Home, even_counts
from commons.perf_model.partitioner.problem import INT64_MAX, Limits, Problem
from commons.perf_model.partitioner.refined import near
from commons.perf_model.partitioner.request import Request
from commons.perf_model.partitioner.swaps import NO_ROW, Cap

# From this many partitions on, plans are made here first.
MANY = 512
# Partitions that may fail to swap with a heavy one before it is left as it is.
ASKED = 64
# Swaps per row, far more than plans need.
MOST_SWAPS = 2
# One of so many left above the limit is dealt anew, with others as light as need be.
FEW_LEFT = 4096
# That may cost as much as moving one of so many tokens.
FEW_MOVED = 32


def near_home_of_many(request: Request, problem: Problem, bound: int) -> np.ndarray | None:
    """A plan within `1 + slack` of the bound that leaves many rows at home.

    Args:
        request: with a home.
        problem: its rows.
        bound: lower bound of the largest load.

    Returns:
        int64 `(n,)`, the partition of each sample; None where such a plan has not been found, or is better sought
        otherwise: a slack below what plans are refined to, or a home above the cap.

    """
    home, num_parts = request.home, request.num_parts
    limit = with_slack(bound, request.slack)
    if home is None or limit < near(bound):
        return None
    cap = None
    if request.max_tokens is not None and request.tokens is not None:
        cap = Cap(request.tokens, request.max_tokens)
        if _largest(cap.weights, home, num_parts) > cap.limit:
            return None
    home_load = _largest(request.workloads, home, num_parts)
    even = problem.limits.keep(np.bincount(home, minlength=num_parts))
    if home_load <= bound or (even and home_load <= limit):
        return home.copy()
    limit = min(limit, home_load - 1)
    sizes = movable(request.workloads if request.tokens is None else request.tokens)
    by_row = Home(home[problem.order], sizes[problem.order], request.ranks_per_node)
    parts = by_row.parts if even else even_counts(problem.weights, num_parts, problem.limits, limit, by_row)
    row_cap = None if cap is None else Cap(cap.weights[problem.order], cap.limit)
    if row_cap is not None and _largest(row_cap.weights, parts, num_parts) > row_cap.limit:
        return None
    parts = lower_heaviest(problem.weights, parts, num_parts, problem.limits, limit, by_row, row_cap)
    if problem.largest_load(parts) > limit:
        repaired: np.ndarray | None = None
        total = int(by_row.sizes.sum())
        left = int(np.count_nonzero(sum_by_rank(parts, problem.weights, num_parts) > limit))
        if left <= num_parts // FEW_LEFT:
            repaired = redeal_heaviest(problem, parts, by_row, limit, row_cap)
            if repaired is not None and by_row.cost(repaired) - by_row.cost(parts) > total // FEW_MOVED:
                repaired = None
        if repaired is None:
            repaired = repair_start(problem, parts, by_row, limit, row_cap)
        if repaired is None or 2 * by_row.cost(repaired) > total:
            return None
        parts = repaired
    return problem.by_sample(parts)


def lower_heaviest(
    weights: np.ndarray,
    parts: np.ndarray,
    num_parts: int,
    limits: Limits,
    limit: int,
    home: Home,
    cap: Cap | None = None,
) -> np.ndarray:
    """Let the heaviest partition swap a row with the lightest one until no load is above `limit`.

    The swap is that which takes off most load per token moved, and leaves the lightest within the limit. The lightest
    of the node is asked first, then some of the lightest of all. Where none of them can, as with two rows of which
    each fills a partition, the lightest of all may once rise above the limit and pass the rest on.

    Before that, while there is room everywhere, partitions with a row that almost fills them get the lightest rows of
    all for what they have to give and their node cannot take.

    Args:
        weights: int64 `(n,)`, descending.
        parts: int64 `(n,)`, the partition of each row to begin with.
        num_parts: number of partitions.
        limits: fewest and most rows per partition; `parts` keeps them.
        limit: largest load wanted.
        home: where rows are now and what moving them costs; a partition is a rank.
        cap: a second weight that stays within a limit; `parts` keeps it.

    Returns:
        int64 `(n,)`, the partition of each row; some may be above the limit.

    """
    plan = _Plan(weights, parts, num_parts, limits, limit, home, cap)
    num_large = int(np.count_nonzero(weights > limit - weights))
    plan.has_large[plan.parts[:num_large]] = True
    for row in range(num_large):
        heavy = int(plan.parts[row])
        while plan.loads[heavy] > limit and (found := plan.within_node(heavy)) is not None:
            plan.swap(heavy, *found)
        plan.leave_lightest(heavy)
    most_swaps = MOST_SWAPS * len(weights)
    while most_swaps:
        heavy = int(plan.heavy_loads.argmax())
        if plan.heavy_loads[heavy] <= limit:
            break
        found = plan.find_swap(heavy)
        if found is None:
            if not plan.leave_lightest(heavy):
                plan.give_up(heavy)
        else:
            plan.swap(heavy, *found)
            most_swaps -= 1
    return plan.parts


@dataclass(slots=True)
class _Plan:
    """A plan that swaps change in place.

    Attributes:
        weights: int64 `(n,)`, descending.
        parts: int64 `(n,)`, the partition of each row.
        num_parts: number of partitions.
        limits: fewest and most rows per partition.
        limit: largest load wanted.
        home: where rows are now.
        cap: a second weight and its limit.
        loads: int64 `(k,)`.
        heavy_loads: the same, and -1 for those that are given up.
        held: int64 `(k,)`, the second weight.
        rows: by partition, its rows, heaviest first.
        left_node: partitions for which their node's lightest can do nothing.
        left_lightest: those for which the lightest of all can do nothing.
        forced: those that have brought another above the limit.
        has_large: bool `(k,)`, partitions with a row that no second one of its size fits beside.
        num_light: rows from this one on are in partitions without room.

    """

    weights: np.ndarray
    parts: np.ndarray
    num_parts: int
    limits: Limits
    limit: int
    home: Home
    cap: Cap | None
    loads: np.ndarray = field(init=False)
    heavy_loads: np.ndarray = field(init=False)
    held: np.ndarray | None = field(init=False)
    rows: list[np.ndarray] = field(init=False)
    left_node: set[int] = field(init=False)
    left_lightest: set[int] = field(init=False)
    forced: set[int] = field(init=False)
    has_large: np.ndarray = field(init=False)
    num_light: int = field(init=False)
    gain_shift: int = field(init=False)
    cost_shift: int = field(init=False)

    def __post_init__(self) -> None:
        self.parts = self.parts.copy()
        self.loads = sum_by_rank(self.parts, self.weights, self.num_parts)
        self.heavy_loads = self.loads.copy()
        self.held = None if self.cap is None else sum_by_rank(self.parts, self.cap.weights, self.num_parts)
        ends = np.cumsum(np.bincount(self.parts, minlength=self.num_parts))
        self.rows = np.split(np.argsort(self.parts, kind="stable"), ends[:-1])
        self.left_node, self.left_lightest, self.forced = set(), set(), set()
        self.has_large, self.num_light = np.zeros(self.num_parts, bool), len(self.parts)
        self.gain_shift = max(0, int(self.weights.max(initial=0)).bit_length() - BITS)
        self.cost_shift = max(0, (2 * NODE_COST * int(self.home.sizes.max(initial=0))).bit_length() - BITS)

    def find_swap(self, heavy: int) -> tuple[int, int, int] | None:
        """The partition to swap with, the row to give and the one to take, or `NO_ROW`; None if there is none."""
        found = self.within_node(heavy)
        if found is not None:
            return found
        if heavy not in self.left_lightest:
            loads = self.loads.copy()
            for _ in range(ASKED):
                light = int(loads.argmin())
                if loads[light] >= self.limit:
                    break
                best = self._best_within(heavy, light)
                if best is not None:
                    return light, *best
                loads[light] = INT64_MAX
            self.left_lightest.add(heavy)
        if heavy not in self.forced:
            self.forced.add(heavy)
            light = int(self.loads.argmin())
            best = self._best(heavy, light, int(self.loads[heavy] - self.loads[light]) - 1)
            if best is not None:
                self.heavy_loads[light] = self.loads[light]
                return light, *best
        return None

    def within_node(self, heavy: int) -> tuple[int, int, int] | None:
        """A swap with the lightest partition of the node; None if there is none, or has been none before."""
        node = self.home.ranks_per_node
        if node >= self.num_parts or heavy in self.left_node:
            return None
        first = heavy // node * node
        light = first + int(self.loads[first : first + node].argmin())
        best = self._best_within(heavy, light)
        if best is None:
            self.left_node.add(heavy)
            return None
        return light, *best

    def leave_lightest(self, heavy: int) -> bool:
        """Give a partition with one large row the lightest rows of all for others; whether there were any."""
        large = [bool(self.weights[row] > self.limit - self.weights[row]) for row in self.rows[heavy][:2]]
        if sum(large) != 1:
            return False
        self.has_large[heavy] = True
        load, failed = self.loads[heavy], 0
        for row in range(self.num_light - 1, -1, -1):
            if failed == ASKED or self.loads[heavy] <= self.limit:
                break
            light = int(self.parts[row])
            if light == heavy or self.has_large[light] or self.loads[light] >= self.limit:
                self.num_light -= row == self.num_light - 1
                continue
            best = self._best_within(heavy, light)
            if best is None:
                failed += 1
            else:
                self.swap(heavy, light, *best)
        return bool(self.loads[heavy] < load)

    def give_up(self, heavy: int) -> None:
        """Leave a partition above the limit."""
        self.heavy_loads[heavy] = -1

    def swap(self, heavy: int, light: int, row: int, back: int) -> None:
        """Give `row` from `heavy` to `light`, and `back`, unless `NO_ROW`, the other way."""
        self._give(heavy, light, row)
        if back != NO_ROW:
            self._give(light, heavy, back)
        for part in (heavy, light):
            if self.heavy_loads[part] >= 0:
                self.heavy_loads[part] = self.loads[part]

    def _give(self, source: int, target: int, row: int) -> None:
        self.rows[source] = np.delete(self.rows[source], np.searchsorted(self.rows[source], row))
        self.rows[target] = np.insert(self.rows[target], np.searchsorted(self.rows[target], row), row)
        self.parts[row] = target
        self.loads[source] -= self.weights[row]
        self.loads[target] += self.weights[row]
        if self.cap is not None and self.held is not None:
            self.held[source] -= self.cap.weights[row]
            self.held[target] += self.cap.weights[row]

    def _best_within(self, heavy: int, light: int) -> tuple[int, int] | None:
        """The best swap that leaves `light` within the limit."""
        return self._best(heavy, light, self.limit - int(self.loads[light]))

    def _best(self, heavy: int, light: int, room: int) -> tuple[int, int] | None:
        """The most efficient swap that takes at most `room` off a partition: the row, and what comes back for it.

        For each row that is the lightest row that brings enough back, or none.
        """
        if room <= 0:
            return None
        rows, others = self.rows[heavy], self.rows[light]
        none = np.full(len(rows), NO_ROW)
        backs = [none, none]
        exists = np.zeros((2, len(rows)), bool)
        if len(others):
            enough = np.searchsorted(-self.weights[others], room - self.weights[rows], side="right") - 1
            backs[0], exists[0] = others[np.maximum(enough, 0)], enough >= 0
        exists[1] = len(rows) > self.limits.min_count and len(others) < self.limits.max_count
        back = np.stack(backs, axis=1)
        there = back != NO_ROW
        taken = self.weights[rows][:, None] - np.where(there, self.weights[back], 0)
        cost = (self.home.cost_at(rows, light) - self.home.cost_at(rows, heavy))[:, None]
        cost = cost + np.where(there, self.home.cost_at(back, heavy) - self.home.cost_at(back, light), 0)
        allowed = exists.T & (taken > 0) & (taken <= room)
        if self.cap is not None and self.held is not None:
            more = self.cap.weights[rows][:, None] - np.where(there, self.cap.weights[back], 0)
            allowed &= (self.held[heavy] - more <= self.cap.limit) & (self.held[light] + more <= self.cap.limit)
        gain = np.minimum(taken, int(self.loads[heavy]) - self.limit) >> self.gain_shift
        efficiency = np.where(cost > 0, (gain << BITS) // np.maximum(cost >> self.cost_shift, 1), FREE + gain)
        efficiency = np.where(allowed, efficiency, -1)
        at, which = divmod(int(efficiency.argmax()), 2)
        return None if efficiency[at, which] < 0 else (int(rows[at]), int(back[at, which]))


def _largest(weights: np.ndarray, parts: np.ndarray, num_parts: int) -> int:
    return int(sum_by_rank(parts, weights, num_parts).max())
