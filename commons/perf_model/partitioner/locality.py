"""Locality: reach a load as good as the refined one while most rows stay where they are.

A plan is repaired from home: every partition starts with the rows that are there now, and those that are too heavy
swap rows with others, choosing the swap that takes off most load per token moved. A token that crosses nodes
counts `NODE_COST` times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.problem import Limits
from commons.perf_model.partitioner.swaps import (
    NO_ROW,
    Cap,
    Choice,
    Pairs,
    WorkingPartition,
    first_best,
    pair_up,
)

# A token over the network between nodes costs as much as this many within a node.
NODE_COST = 4
# Rows looked at for each row: the lightest that fits is the cheapest, unless one of the next is away from home.
REACH = 4
# Every round lowers the sum of all excess loads, and these are far more rounds than plans need.
MAX_ROUNDS = 64
# With several steps, go on to larger groups when this many rounds have not taken off a quarter of the excess loads.
PATIENCE = 4
# Efficiency is (load taken off) · 2^31 ÷ (cost), both reduced to 31 bits: an integer, and the same on every CPU.
BITS = 31
# A swap that costs nothing, or brings rows home, is worth more than any other.
FREE = 1 << 62
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where rows are now, and what it costs to move them.

    Attributes:
        parts: int64 `(n,)`, the rank each row is on; a rank's partitions are `[rank · steps, rank · steps + steps)`.
        sizes: int64 `(n,)`, tokens of each row; their sum is below 2^60.
        ranks_per_node: ranks per node; as many as there are if all are on one.
        steps: partitions per rank, between which rows move at no cost.

    """

    parts: np.ndarray
    sizes: np.ndarray
    ranks_per_node: int
    steps: int = 1

    def cost_at(self, rows: np.ndarray, parts: np.ndarray | int) -> np.ndarray:
        """Cost of having `rows` in `parts`: 0 at home, their size within the node, `NODE_COST` times that beyond."""
        home, ranks = self.parts[rows], parts // self.steps
        same_node = home // self.ranks_per_node == ranks // self.ranks_per_node
        return self.sizes[rows] * np.where(home == ranks, 0, np.where(same_node, 1, NODE_COST))

    def cost(self, parts: np.ndarray) -> int:
        """Cost of the plan `parts`."""
        return int(self.cost_at(np.arange(len(parts)), parts).sum())


def repair(
    weights: np.ndarray,
    parts: np.ndarray,
    num_parts: int,
    limits: Limits,
    limit: int,
    home: Home,
    cap: Cap | None = None,
    base: np.ndarray | None = None,
) -> np.ndarray:
    """Take the load above `limit` off every partition by swaps that move few tokens.

    First within ranks, then within nodes, then between all partitions. A swap takes no partition above the limit, so
    it may end with some that are still above it.

    Args:
        weights: int64 `(n,)`, descending.
        parts: int64 `(n,)`, the partition of each row to begin with.
        num_parts: number of partitions.
        limits: fewest and most rows per partition; `parts` keeps them.
        limit: largest load wanted.
        home: where rows are now and what moving them costs.
        cap: a second weight of which a swap takes no partition above a limit.
        base: int64 `(k,)`, load of each partition before it has any rows.

    Returns:
        int64 `(n,)`, the partition of each row.

    """
    plan = WorkingPartition(weights, parts, num_parts, limits, cap, base)
    gain_shift = max(0, int(weights.max(initial=0)).bit_length() - BITS)
    cost_shift = max(0, (2 * NODE_COST * int(home.sizes.max(initial=0))).bit_length() - BITS)
    rounds = 0
    for size in _group_sizes(home, num_parts):
        groups = [np.arange(first, min(first + size, num_parts)) for first in range(0, num_parts, size)]
        level = 0
        first, checkpoint = rounds, 0
        while rounds < MAX_ROUNDS:
            if home.steps > 1 and (rounds - first) % PATIENCE == 0:
                excess = int(np.maximum(plan.loads - limit, 0).sum())
                if rounds > first and checkpoint - excess < checkpoint // 4:
                    break
                checkpoint = excess
            pairs, most_heavy = _pairs_within(groups, plan.loads, limit, level)
            if pairs is None:
                break
            rounds += 1
            if _swap(plan, pairs, limit, home, gain_shift, cost_shift):
                level = max(level - 1, 0)
            elif most_heavy > 1:
                level += 1
            else:
                break
    return plan.parts


def _group_sizes(home: Home, num_parts: int) -> list[int]:
    """Partitions of a rank, of a node and of all, those left out that are but one or are the next ones."""
    rank, node = home.steps, home.steps * home.ranks_per_node
    sizes = [rank] if 1 < rank < node else []
    return [*sizes, node, num_parts] if node < num_parts else [*sizes, num_parts]


def _pairs_within(groups: list[np.ndarray], loads: np.ndarray, limit: int, level: int) -> tuple[Pairs | None, int]:
    """In each group, the partitions above the limit (fewer at a higher level) with the others; the most of a group."""
    found: list[Pairs] = []
    most_heavy = 0
    for group in groups:
        num_over = int(np.count_nonzero(loads[group] > limit))
        if num_over and len(group) > 1:
            ranked = group[np.argsort(-loads[group], kind="stable")]
            num_heavy = max(1, min(num_over, len(group) // 2) >> level)
            most_heavy = max(most_heavy, num_heavy)
            found.append(pair_up(ranked, num_heavy))
    if not found:
        return None, 0
    offsets = np.cumsum([0, *(len(pairs.heavy) for pairs in found[:-1])])
    pairs = Pairs(
        heavy=np.concatenate([pairs.heavy for pairs in found]),
        light=np.concatenate([pairs.light for pairs in found]),
        first=np.concatenate([pairs.first + offset for pairs, offset in zip(found, offsets)]),
    )
    return pairs, most_heavy


def _swap(plan: WorkingPartition, pairs: Pairs, limit: int, home: Home, gain_shift: int, cost_shift: int) -> bool:
    """Carry out the most efficient swap of every heavy partition; whether there was any."""
    choice = Choice(plan, pairs)
    heavy, light = pairs.heavy[choice.pair], pairs.light[choice.pair]
    excess = plan.loads[heavy] - limit
    room = limit - plan.loads[light]
    cost_out = home.cost_at(choice.row, light) - home.cost_at(choice.row, heavy)
    best = np.full(len(room), _NONE)
    best_row = np.full(len(room), NO_ROW)

    def consider(row: np.ndarray | None, taken: np.ndarray, cost: np.ndarray, allowed: np.ndarray) -> None:
        gain = np.minimum(taken, excess) >> gain_shift
        efficiency = np.where(cost > 0, (gain << BITS) // np.maximum(cost >> cost_shift, 1), FREE + gain)
        better = allowed & (taken > 0) & (taken <= room) & (efficiency > best) & plan.keeps_cap(pairs, choice, row)
        np.copyto(best, efficiency, where=better)
        np.copyto(best_row, NO_ROW if row is None else row, where=better)

    for row, exists in choice.partners(choice.weight - room, range(-1, -1 - REACH, -1)):
        cost_back = home.cost_at(row, heavy) - home.cost_at(row, light)
        consider(row, choice.weight - plan.weights[row], cost_out + cost_back, exists)
    may_move = plan.may_move(pairs)
    if may_move.any():
        consider(None, choice.weight, cost_out, may_move[choice.pair])

    chosen = first_best(best, choice.first)
    chosen = chosen[best[chosen] > _NONE]
    pair = choice.pair[chosen]
    plan.apply(pairs.heavy[pair], pairs.light[pair], choice.row[chosen], best_row[chosen])
    return len(chosen) > 0


def even_counts(weights: np.ndarray, num_parts: int, limits: Limits, limit: int, home: Home) -> np.ndarray:
    """Start from home, and move as few and as light rows as make the counts keep their limits.

    The fullest partitions keep the most rows. One with too many gives up consecutive rows (by weight): the lightest,
    or if that leaves it above `limit`, the lightest that do not. A given-up row goes to the lightest partition with
    room in its node if it fits there, else to the lightest of all.

    Args:
        weights: int64 `(n,)`, descending.
        num_parts: number of partitions.
        limits: fewest and most rows per partition.
        limit: largest load wanted.
        home: where rows are now.

    Returns:
        int64 `(n,)`, the partition of each row.

    """
    counts = np.bincount(home.parts, minlength=num_parts)
    loads = sum_by_rank(home.parts, weights, num_parts)
    quota = np.clip(counts, limits.min_count, limits.max_count)
    # What the limits leave over, or lack, is settled with the fullest and emptiest ones.
    fullest = np.argsort(-counts, kind="stable")
    surplus = int(quota.sum()) - len(weights)
    if surplus > 0:
        quota[fullest[::-1][quota[fullest[::-1]] > limits.min_count][:surplus]] -= 1
    elif surplus < 0:
        quota[fullest[quota[fullest] < limits.max_count][:-surplus]] += 1
    parts = home.parts.copy()
    given = []
    for part in np.flatnonzero(counts > quota).tolist():
        rows = np.flatnonzero(home.parts == part)
        num_given = int(counts[part] - quota[part])
        sums = np.concatenate(([0], np.cumsum(weights[rows])))
        given_load = sums[num_given:] - sums[: len(sums) - num_given]  # by first row given up, descending
        enough = np.flatnonzero(loads[part] - given_load <= limit)
        first = int(enough[-1]) if len(enough) else 0
        given.append(rows[first : first + num_given])
        loads[part] -= given_load[first]
    missing = quota - counts
    nodes = np.arange(num_parts) // home.ranks_per_node
    for row in np.sort(np.concatenate(given)).tolist() if given else []:
        takers = np.flatnonzero(missing > 0)
        near = takers[nodes[takers] == nodes[home.parts[row]]]
        near = near[loads[near] + weights[row] <= limit]
        candidates = near if len(near) else takers
        taker = candidates[np.argmin(loads[candidates])]
        parts[row] = taker
        loads[taker] += weights[row]
        missing[taker] -= 1
    return parts


def relabel(parts: np.ndarray, rows: np.ndarray, names: np.ndarray, home: Home) -> np.ndarray:
    """Name the partitions of a finished plan so that many tokens are at home: the largest saving first.

    With several partitions per rank, those of one step exchange their names: `names[part]` says whose step it is.

    Args:
        parts: int64 `(m,)`, the partition in `[0, g)` of each of `rows`.
        rows: int64 `(m,)`, the rows that the plan is about.
        names: int64 `(g,)`, the partitions that they go to.
        home: where rows are now.

    Returns:
        int64 `(m,)`, for each of `rows` one of `names`.

    """
    num_names = len(names)
    steps = names % home.steps
    slot = np.full((int(max(home.parts.max(), names.max() // home.steps)) + 1) * home.steps, NO_ROW)
    slot[names] = np.arange(num_names)
    home_slot = slot[home.parts[rows] * home.steps + steps[parts]]
    near = home_slot != NO_ROW
    overlaps, saving = _sum_by_key(parts[near] * num_names + home_slot[near], home.sizes[rows[near]])
    part, at = np.divmod(overlaps, num_names)
    num_nodes = (len(slot) - 1) // (home.steps * home.ranks_per_node) + 1
    if num_nodes > 1:
        # Beside the rows at home, those that only stay in their node are saved from the dearer way.
        node_sizes = np.zeros(num_names * num_nodes, np.int64)
        np.add.at(node_sizes, parts * num_nodes + home.parts[rows] // home.ranks_per_node, home.sizes[rows])
        saving += (NODE_COST - 1) * node_sizes[part * num_nodes + names[at] // (home.steps * home.ranks_per_node)]
    named = np.full(num_names, -1)
    free = np.ones(num_names, bool)
    for index in np.argsort(-saving, kind="stable").tolist():
        if named[part[index]] < 0 and free[at[index]]:
            named[part[index]] = names[at[index]]
            free[at[index]] = False
    # As many names of each step are left as partitions.
    unnamed, left = np.flatnonzero(named < 0), np.flatnonzero(free)
    by_step = np.argsort(steps[unnamed], kind="stable"), np.argsort(steps[left], kind="stable")
    named[unnamed[by_step[0]]] = names[left[by_step[1]]]
    return named[parts]


def _sum_by_key(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys, ascending, and the sum of the values of each."""
    distinct, place = np.unique(keys, return_inverse=True)
    return distinct, sum_by_rank(place, values, len(distinct))
