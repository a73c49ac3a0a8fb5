"""Refinement: swap rows between a heavy and a light partition until the largest load is near its lower bound."""

from __future__ import annotations

import numpy as np

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

# Give up when this many rounds have not taken a quarter off what is left above the target.
PATIENCE = 16
# Rows looked at on either side of the best difference. A cap rules many of them out, so then it is more.
REACH = 1
REACH_WITH_CAP = 16


def refine(
    weights: np.ndarray,
    parts: np.ndarray,
    num_parts: int,
    limits: Limits,
    target: int,
    cap: Cap | None = None,
    base: np.ndarray | None = None,
) -> np.ndarray:
    """Lower the largest load to `target`, or as far as swaps go.

    In each round the partitions above the target share the others out among them. Each finds the swap that brings
    the larger of both loads lowest: for a row of its own that is with a row as much lighter as is nearest to half the
    difference of the loads. If the heaviest finds none, half as many look among all others, at last it alone.

    Args:
        weights: int64 `(n,)`, descending.
        parts: int64 `(n,)`, the partition of each row.
        num_parts: number of partitions.
        limits: fewest and most rows per partition; `parts` keeps them.
        target: stop when no load is above it.
        cap: a second weight that stays within a limit; `parts` keeps it.
        base: int64 `(k,)`, load of each partition before it has any rows.

    Returns:
        int64 `(n,)`, the partition of each row; the largest load is never above that of `parts`.

    """
    plan = WorkingPartition(weights, parts, num_parts, limits, cap, base)
    reach = REACH if cap is None else REACH_WITH_CAP
    level = 0
    rounds = 0
    checkpoint: int | None = None
    while num_parts > 1:
        ranked = np.argsort(-plan.loads, kind="stable")
        heaviest = int(plan.loads[ranked[0]])
        if heaviest <= target:
            break
        if rounds % PATIENCE == 0:
            if checkpoint is not None and checkpoint - heaviest < (checkpoint - target) // 4:
                break
            checkpoint = heaviest
        rounds += 1
        num_over = int(np.count_nonzero(plan.loads > target))
        num_heavy = max(1, min(num_over, num_parts // 2) >> level)
        if _swap(plan, pair_up(ranked, num_heavy), reach):
            level = max(level - 1, 0)
        elif num_heavy > 1:
            level += 1
        else:
            break
    return plan.parts


def _swap(plan: WorkingPartition, pairs: Pairs, reach: int) -> bool:
    """Carry out the best swap of every heavy partition; whether the first, the heaviest, found one."""
    choice = Choice(plan, pairs)
    heavy_load, light_load = plan.loads[pairs.heavy][choice.pair], plan.loads[pairs.light][choice.pair]
    gap = heavy_load - light_load
    # How far the larger of both loads falls; 0 is no swap.
    best = np.zeros(len(gap), np.int64)
    best_row = np.full(len(gap), NO_ROW)

    def consider(row: np.ndarray | None, taken: np.ndarray, allowed: np.ndarray) -> None:
        fall = np.minimum(taken, gap - taken)
        better = allowed & (fall > best) & plan.keeps_cap(pairs, choice, row)
        np.copyto(best, fall, where=better)
        np.copyto(best_row, NO_ROW if row is None else row, where=better)

    for row, exists in choice.partners(choice.weight - gap // 2, range(-reach, reach)):
        consider(row, choice.weight - plan.weights[row], exists)
    may_move = plan.may_move(pairs)
    if may_move.any():
        consider(None, choice.weight, may_move[choice.pair])

    chosen = first_best(best, choice.first)
    found = best[chosen] > 0
    chosen = chosen[found]
    pair = choice.pair[chosen]
    plan.apply(pairs.heavy[pair], pairs.light[pair], choice.row[chosen], best_row[chosen])
    return bool(found[0])
