"""Leveling: once the largest load is as low as it gets, exchanges that raise the smallest one."""

from __future__ import annotations

import numpy as np

from commons.perf_model.partitioner.exchange import NO_ROW, Choice, Pairs, WorkingPlan, first_best
from commons.perf_model.partitioner.problem import Limits
from commons.perf_model.partitioner.refined import TOLERANCE

# Rounds per group after which the groups are as level as they will get.
PATIENCE = 4


def level(weights: np.ndarray, groups: np.ndarray, num_groups: int, limits: Limits) -> np.ndarray:
    """Narrow the spread of the loads: largest − smallest.

    In each round the lightest group looks at all others for the exchange of rows, or the row, that brings the smaller
    of both loads highest; where it finds none, the heaviest looks for what brings the larger load lowest. What one
    group gains the other loses, so that no load rises above the larger of both: a capacity stays kept.

    Args:
        weights: int64 `(n,)`, descending.
        groups: int64 `(n,)`, the group of each row; `limits` are kept.
        num_groups: `k`.
        limits: fewest and most rows per group.

    Returns:
        int64 `(n,)`, the group of each row; the largest load is not larger, the smallest not smaller than before.

    """
    plan = WorkingPlan(weights, groups, num_groups, limits)
    enough = max(1, int(weights.sum()) // num_groups // TOLERANCE)
    for _ in range(PATIENCE * num_groups if num_groups > 1 else 0):
        ranked = np.argsort(-plan.loads, kind="stable")
        if int(plan.loads[ranked[0]] - plan.loads[ranked[-1]]) <= enough:
            break
        raised = _exchange(plan, heavy=ranked[:-1], light=np.repeat(ranked[-1:], num_groups - 1))
        if not raised and not _exchange(plan, heavy=np.repeat(ranked[:1], num_groups - 1), light=ranked[:0:-1]):
            break
    return plan.parts


def _exchange(plan: WorkingPlan, heavy: np.ndarray, light: np.ndarray) -> bool:
    """Carry out the exchange that brings two loads nearest, over all pairs of a heavy and a light group `(p,)`."""
    pairs = Pairs(heavy, light, first=np.zeros(1, np.int64))
    choice = Choice(plan, pairs)
    gap = plan.loads[pairs.heavy][choice.pair] - plan.loads[pairs.light][choice.pair]
    # How far the larger load falls, and the smaller rises; 0 is no exchange.
    best = np.zeros(len(gap), np.int64)
    best_back = np.full(len(gap), NO_ROW)
    for back, exists in choice.partners(choice.weight - gap // 2, range(-1, 1)):
        taken = choice.weight - plan.weights[back]
        gain = np.minimum(taken, gap - taken)
        better = exists & (gain > best)
        np.copyto(best, gain, where=better)
        np.copyto(best_back, back, where=better)
    gain = np.minimum(choice.weight, gap - choice.weight)
    better = plan.may_move(pairs)[choice.pair] & (gain > best)
    np.copyto(best, gain, where=better)
    np.copyto(best_back, NO_ROW, where=better)
    chosen = first_best(best, choice.first)
    if best[chosen[0]] <= 0:
        return False
    pair = choice.pair[chosen]
    plan.apply(pairs.heavy[pair], pairs.light[pair], choice.row[chosen], best_back[chosen])
    return True
