"""SIMULATE: what balancing would gain on given data, before anything is trained.

Batches as a single rank would load them become those of W ranks, step by step; every step, or every window of steps, is
planned as in training. With a calibration the result is in milliseconds, the fixed cost of a step included; without one
it compares the largest loads, and so says what the gain is at most.
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
        window: steps that were planned together; fewer at the end.
        cost_before: float64 `(steps,)`, of the slowest rank in every step: milliseconds, or workload.
        cost_after: the same with balancing, which gives the steps of a window other rows.
        cost_mean: the same of an even share, as the rows were loaded.
        mean_after: the same of an even share, as the rows are trained; other than `cost_mean` with a window alone.
        cost_bound: float64 `(windows,)`, of the planner's lower bound, which no plan can go below; the sum over the
            steps of a window.
        largest_share: float64 `(steps,)`, the costliest row ÷ an even share; above 1 it alone holds a rank up.
        in_ms: whether costs are milliseconds.
        tokens_moved: tokens that changed rank, as a fraction of all.
        loads_before: int64 `(num_ranks,)`, of the step with the largest imbalance.
        loads_after: the same with balancing; of a window, of its step with the largest imbalance.
    """

    num_ranks: int
    window: int
    cost_before: np.ndarray
    cost_after: np.ndarray
    cost_mean: np.ndarray
    mean_after: np.ndarray
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
        return _mean_imbalance(self.cost_after, self.mean_after)

    @property
    def total_imbalance_before(self) -> float:
        """Sum over steps of the largest cost ÷ that of the mean − 1: steps count by what they cost."""
        return float(self.cost_before.sum() / self.cost_mean.sum() - 1)

    @property
    def total_imbalance_after(self) -> float:
        """The same with balancing; windows compare by it, whose steps cost more or less than those as loaded."""
        return float(self.cost_after.sum() / self.mean_after.sum() - 1)

    @property
    def speed_up(self) -> float:
        """Total cost of all steps before ÷ after; the shuffle's own cost, hidden in training, is left out."""
        return float(self.cost_before.sum() / self.cost_after.sum())

    @property
    def possible_speed_up(self) -> float:
        """The same at the planner's lower bound: no plan gains more."""
        return float(self.cost_before.sum() / self.cost_bound.sum())

    def to_dict(self) -> dict[str, Any]:
        """What came out, JSON-ready; costs are means over steps, of the slowest rank."""
        return {
            "ranks": self.num_ranks,
            "window": self.window,
            "steps": len(self.cost_before),
            "unit": "ms" if self.in_ms else "load",
            "cost_before": float(self.cost_before.mean()),
            "cost_after": float(self.cost_after.mean()),
            "imbalance_before": self.imbalance_before,
            "imbalance_after": self.imbalance_after,
            "total_imbalance_before": self.total_imbalance_before,
            "total_imbalance_after": self.total_imbalance_after,
            "speed_up": self.speed_up,
            "possible_speed_up": self.possible_speed_up,
            "tokens_moved": self.tokens_moved,
            "dominated_steps": int((self.largest_share > 1).sum()),
            "largest_share": float(self.largest_share.max()),
        }


def deal_in_turn(batches: Sequence[RowCosts], num_ranks: int) -> list[RowCosts]:
    """The batches that ranks load where the rows of a single rank's batches are dealt to them in turn.

    Args:
        batches: as a single rank loads them; those behind the last whole step are left out.
        num_ranks: ranks.

    Returns:
        `num_ranks` batches for each step, which have the rows of as many given ones: row i of them on rank i modulo the
        ranks.

    >>> batches = [RowCosts(*[np.array(rows)] * 3) for rows in ([0, 1], [2, 3])]
    >>> [dealt.tokens.tolist() for dealt in deal_in_turn(batches, 2)]
    [[0, 2], [1, 3]]
    """
    dealt = []
    for first in range(0, len(batches) - num_ranks + 1, num_ranks):
        of_step = batches[first : first + num_ranks]
        columns = [
            np.concatenate([getattr(batch, name) for batch in of_step]) for name in ("workloads", "tokens", "pairs")
        ]
        dealt += [RowCosts(*(values[rank::num_ranks] for values in columns)) for rank in range(num_ranks)]
    return dealt


def simulate_steps(
    batches: Sequence[RowCosts],
    num_ranks: int,
    *,
    window: int = 1,
    calibration: Calibration | None = None,
    **plan_options: Any,
) -> SimulatedSteps:
    """Give batches to ranks, `num_ranks` per step, and plan every window of steps.

    Args:
        batches: of the ranks of the first step, of the second, and so on (`deal_in_turn`): at least `num_ranks` for
            each step of a window; what is left after the last whole step is not used.
            With a calibration their workloads are those of its CalibratedTask.
        num_ranks: ranks.
        window: steps that are planned together, at least 1; the last ones may be fewer.
        calibration: turns rows, tokens and pairs of a rank into milliseconds.
        **plan_options: as for `plan_shuffle`.

    Raises:
        ValueError: fewer batches than a window of steps takes, or no rank has work.
    """
    if not 1 <= num_ranks <= len(batches):
        raise ValueError(
            f"there are {len(batches)} batches for {num_ranks} ranks; a step needs one per rank: read more batches"
        )
    num_steps = len(batches) // num_ranks
    if not 1 <= window <= num_steps:
        raise ValueError(
            f"window is {window}, there are {num_steps} steps of {num_ranks} ranks; a window has from 1 to all: "
            "lower window, or read more batches"
        )
    windows = []
    for first in range(0, num_steps, window):
        last = min(first + window, num_steps)
        of_ranks = [batches[rank + first * num_ranks : last * num_ranks : num_ranks] for rank in range(num_ranks)]
        windows.append(_Window.of(of_ranks, calibration, plan_options))
    before, after = (np.concatenate([getattr(each, name) for each in windows]) for name in ("before", "after"))
    if before.max() == 0:
        raise ValueError("all workloads are 0; there is nothing to balance: check the data")
    worst = max(windows, key=lambda each: float(_spread(each.loads_before).max()))
    plans = [each.plan for each in windows]
    moved = sum(int(plan.gathered.tokens[plan.moves].sum()) for plan in plans)
    all_tokens = sum(int(plan.gathered.tokens.sum()) for plan in plans)
    return SimulatedSteps(
        num_ranks=num_ranks,
        window=window,
        cost_before=before.max(axis=1),
        cost_after=after.max(axis=1),
        cost_mean=before.mean(axis=1),
        mean_after=after.mean(axis=1),
        cost_bound=np.array([each.bound(calibration) for each in windows]),
        largest_share=np.concatenate([each.largest_share for each in windows]),
        in_ms=calibration is not None,
        tokens_moved=moved / all_tokens if all_tokens else 0.0,
        loads_before=_most_uneven(worst.loads_before),
        loads_after=_most_uneven(worst.loads_after),
    )


@dataclass(frozen=True, eq=False)
class _Window:
    """Steps that are planned together.

    Attributes:
        plan: where their rows go.
        before: float64 `(steps, num_ranks)`, what the rows of each rank cost.
        after: the same with balancing.
    """

    plan: ShufflePlan
    before: np.ndarray
    after: np.ndarray

    @classmethod
    def of(
        cls,
        of_ranks: Sequence[Sequence[RowCosts]],
        calibration: Calibration | None,
        plan_options: dict[str, Any],
    ) -> _Window:
        """Plan the batches of every rank, as many of each."""
        in_order = [batch for batches in of_ranks for batch in batches]
        rows = np.array([len(batch.workloads) for batch in in_order], dtype=np.int64)
        workloads, tokens, pairs = (
            np.concatenate([getattr(batch, name) for batch in in_order]) for name in ("workloads", "tokens", "pairs")
        )
        gathered = GatheredRows(rows, rows, workloads, tokens, steps=len(of_ranks[0]))
        plan = plan_shuffle(gathered, **plan_options)

        def cost(place: np.ndarray) -> np.ndarray:
            if calibration is None:
                return sum_by_rank(place, workloads, len(rows))
            return calibration.predict_ms(
                np.bincount(place, minlength=len(rows)),
                sum_by_rank(place, tokens, len(rows)),
                sum_by_rank(place, pairs, len(rows)),
            )

        before, after = (_by_step(cost(place), gathered) for place in (gathered.home, plan.destination))
        return cls(plan, before.astype(np.float64), after.astype(np.float64))

    @property
    def loads_before(self) -> np.ndarray:
        """int64 `(steps, num_ranks)`."""
        return _by_step(self.plan.loads_before, self.plan.gathered)

    @property
    def loads_after(self) -> np.ndarray:
        """int64 `(steps, num_ranks)`."""
        return _by_step(self.plan.loads_after, self.plan.gathered)

    @property
    def largest_share(self) -> np.ndarray:
        """float64 `(steps,)`, the costliest row of each step, as it was loaded, ÷ an even share."""
        gathered, share = self.plan.gathered, np.zeros(self.plan.gathered.steps)
        np.maximum.at(share, gathered.home % gathered.steps, gathered.workloads)
        return share / np.maximum(1.0, self.loads_before.mean(axis=1))

    def bound(self, calibration: Calibration | None) -> float:
        """What the steps cost where the planner's lower bound is the sum of their largest loads."""
        steps, bound = self.plan.gathered.steps, float(self.plan.lower_bound)
        if calibration is not None:
            bound = steps * calibration.per_step + bound / 2**calibration.unit_exponent
        # Where nobody moves, counts may stay unequal, which the bound of equal counts does not allow for.
        return min(bound, float(self.before.max(axis=1).sum()), float(self.after.max(axis=1).sum()))


def _by_step(of_places: np.ndarray, gathered: GatheredRows) -> np.ndarray:
    """From `(places,)` to `(steps, num_ranks)`."""
    return of_places.reshape(gathered.num_ranks, gathered.steps).T


def _mean_imbalance(largest: np.ndarray, mean: np.ndarray) -> float:
    """Over the steps in which there is work."""
    busy = mean > 0
    return float((largest[busy] / mean[busy]).mean() - 1)


def _spread(loads: np.ndarray) -> np.ndarray:
    """Largest ÷ mean load of every step, from `(steps, num_ranks)`."""
    return loads.max(axis=1) / np.maximum(1.0, loads.mean(axis=1))


def _most_uneven(loads: np.ndarray) -> np.ndarray:
    """The loads `(num_ranks,)` of the step with the largest imbalance."""
    return loads[int(_spread(loads).argmax())]
