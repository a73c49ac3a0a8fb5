"""SIMULATE: what balancing would gain on given data, before anything is trained.

Batches as single ranks would load them are dealt to W ranks, step by step; every step is planned as in training. With a
calibration the result is in milliseconds, the fixed cost of a step included; without one it compares the largest loads,
and so says what the gain is at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.perf_model.calibration import Calibration
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.shuffle_plan import GatheredRows, ShufflePlan, plan_shuffle


@dataclass(frozen=True)
class RowCosts:
    """The real rows of one rank's batch.

    Attributes:
        workloads: int64 `(rows,)`.
        tokens: int64 `(rows,)`, tokens that the model computes.
        pairs: int64 `(rows,)`, pairs that the mask of a layer keeps.
    """

    workloads: np.ndarray
    tokens: np.ndarray
    pairs: np.ndarray


@dataclass(frozen=True)
class SimulatedSteps:
    """What balancing does for a number of ranks.

    Attributes:
        num_ranks: ranks.
        cost_before: float64 `(steps,)`, of the slowest rank in every step: milliseconds, or workload.
        cost_after: the same with balancing.
        cost_mean: the same of an even share.
        cost_bound: the same of the planner's lower bound, which no plan can go below.
        largest_share: float64 `(steps,)`, the costliest row ÷ an even share; above 1 it alone holds a rank up.
        in_ms: whether costs are milliseconds.
        tokens_moved: tokens that changed rank, as a fraction of all.
        loads_before: int64 `(num_ranks,)`, of the step with the largest imbalance.
        loads_after: the same with balancing.
    """

    num_ranks: int
    cost_before: np.ndarray
    cost_after: np.ndarray
    cost_mean: np.ndarray
    cost_bound: np.ndarray
    largest_share: np.ndarray
    in_ms: bool
    tokens_moved: float
    loads_before: np.ndarray
    loads_after: np.ndarray

    @property
    def imbalance_before(self) -> float:
        """Mean over steps of largest ÷ mean cost − 1."""
        return _mean_imbalance(self.cost_before, self.cost_mean)

    @property
    def imbalance_after(self) -> float:
        """The same with balancing."""
        return _mean_imbalance(self.cost_after, self.cost_mean)

    @property
    def speed_up(self) -> float:
        """Total cost of all steps before ÷ after; the shuffle's own cost, hidden in training, is left out."""
        return float(self.cost_before.sum() / self.cost_after.sum())

    @property
    def possible_speed_up(self) -> float:
        """The same at the planner's lower bound: no plan gains more."""
        return float(self.cost_before.sum() / self.cost_bound.sum())


def simulate_steps(
    batches: Sequence[RowCosts], num_ranks: int, *, calibration: Calibration | None = None, **plan_options: Any
) -> SimulatedSteps:
    """Deal batches to ranks, `num_ranks` per step, and plan every step.

    Args:
        batches: at least `num_ranks`; what is left after the last whole step is not used. With a calibration their
            workloads are those of its CalibratedTask.
        num_ranks: ranks.
        calibration: turns rows, tokens and pairs of a rank into milliseconds.
        **plan_options: as for `plan_shuffle`.

    Raises:
        ValueError: fewer batches than ranks, or no rank has work.
    """
    if not 1 <= num_ranks <= len(batches):
        raise ValueError(
            f"there are {len(batches)} batches for {num_ranks} ranks; a step needs one per rank: read more batches"
        )
    costs, bounds, shares, moved, all_tokens, worst = [], [], [], 0, 0, None
    for first in range(0, len(batches) - num_ranks + 1, num_ranks):
        of_ranks = batches[first : first + num_ranks]
        plan = plan_shuffle(_gathered(of_ranks), **plan_options)
        costs.append([_cost(plan, rank, of_ranks, calibration) for rank in (plan.gathered.home, plan.destination)])
        bounds.append(_bound(plan, calibration))
        shares.append(float(plan.gathered.workloads.max(initial=0)) / max(1.0, float(plan.loads_before.mean())))
        moved += int(plan.gathered.tokens[plan.moves].sum())
        all_tokens += int(plan.gathered.tokens.sum())
        if worst is None or _spread(plan) > _spread(worst):
            worst = plan
    before, after = np.array(costs, dtype=np.float64).transpose(1, 0, 2)
    if worst is None or before.max() == 0:
        raise ValueError("all workloads are 0; there is nothing to balance: check the data")
    return SimulatedSteps(
        num_ranks=num_ranks,
        cost_before=before.max(axis=1),
        cost_after=after.max(axis=1),
        cost_mean=before.mean(axis=1),
        # Where nobody moves, counts may stay unequal, which the bound of equal counts does not allow for.
        cost_bound=np.minimum(bounds, np.minimum(before.max(axis=1), after.max(axis=1))),
        largest_share=np.array(shares),
        in_ms=calibration is not None,
        tokens_moved=moved / all_tokens if all_tokens else 0.0,
        loads_before=worst.loads_before,
        loads_after=worst.loads_after,
    )


def _mean_imbalance(largest: np.ndarray, mean: np.ndarray) -> float:
    """Over the steps in which there is work."""
    busy = mean > 0
    return float((largest[busy] / mean[busy]).mean() - 1)


def _gathered(of_ranks: Sequence[RowCosts]) -> GatheredRows:
    rows = np.array([len(batch.workloads) for batch in of_ranks], dtype=np.int64)
    workloads = np.concatenate([batch.workloads for batch in of_ranks])
    return GatheredRows(rows, rows, workloads, np.concatenate([batch.tokens for batch in of_ranks]))


def _cost(
    plan: ShufflePlan, rank: np.ndarray, of_ranks: Sequence[RowCosts], calibration: Calibration | None
) -> np.ndarray:
    """Cost of every rank, when row r is trained by `rank[r]`."""
    num_ranks = len(of_ranks)
    if calibration is None:
        return sum_by_rank(rank, plan.gathered.workloads, num_ranks)
    pairs = np.concatenate([batch.pairs for batch in of_ranks])
    return calibration.predict_ms(
        np.bincount(rank, minlength=num_ranks),
        sum_by_rank(rank, plan.gathered.tokens, num_ranks),
        sum_by_rank(rank, pairs, num_ranks),
    )


def _bound(plan: ShufflePlan, calibration: Calibration | None) -> float:
    """Cost of a rank that has the planner's lower bound as its load."""
    if calibration is None:
        return float(plan.lower_bound)
    return calibration.per_step + plan.lower_bound / 2**calibration.unit_exponent


def _spread(plan: ShufflePlan) -> float:
    return float(plan.loads_before.max() / max(1.0, plan.loads_before.mean()))
