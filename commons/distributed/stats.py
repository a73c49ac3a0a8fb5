"""ShuffleStats: what the shuffler did for one batch, in numbers that are the same on every rank but for the times."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.perf_model.shuffle_plan import ShufflePlan


@dataclass(frozen=True)
class ShuffleStats:
    """One step of the shuffler.

    Attributes:
        step: number of the batch since the shuffler was made.
        imbalance_before: largest load divided by the mean, minus 1, where the rows were.
        imbalance_after: the same under the plan (in mode "observe": what balancing would have given).
        optimality_gap: largest planned load divided by a provable lower bound, minus 1.
        moved: whether any row changed rank.
        gated: a better plan was found, but its gain was below `min_gain`.
        num_rows: real rows of the global batch.
        rows_moved: rows that changed rank.
        tokens_moved: their tokens.
        token_fraction_moved: the same as a fraction of all tokens.
        excess_tokens: how far the fullest rank exceeds `max_tokens_per_rank`.
        bytes_sent: payload bytes that this rank sent.
        gather_ms: the gather of workloads and lengths.
        plan_ms: planning, comparison of plans and index arrays.
        wait_ms: how long `finish_shuffle` waited for the plan; 0 when it was hidden behind compute.
        exchange_ms: from the plan to the batch, as seen by the host.
        loads_before: int64 `(num_ranks,)`.
        loads_after: int64 `(num_ranks,)`, of the rows as they are trained.
    """

    step: int
    imbalance_before: float
    imbalance_after: float
    optimality_gap: float
    moved: bool
    gated: bool
    num_rows: int
    rows_moved: int
    tokens_moved: int
    token_fraction_moved: float
    excess_tokens: int
    bytes_sent: int
    gather_ms: float
    plan_ms: float
    wait_ms: float
    exchange_ms: float
    loads_before: tuple[int, ...]
    loads_after: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return dataclasses.asdict(self)


def imbalance(loads: np.ndarray) -> float:
    """Largest load divided by the mean, minus 1; 0 for no load at all."""
    total = int(loads.sum())
    return 0.0 if total == 0 else int(loads.max()) * len(loads) / total - 1.0


def stats_of_plan(plan: ShufflePlan, step: int, **measured: Any) -> ShuffleStats:
    """Stats of a plan, completed by what was measured while it was made and carried out."""
    total_tokens = int(plan.gathered.tokens.sum())
    tokens_moved = int(plan.gathered.tokens[plan.moves].sum())
    largest = int(plan.loads_planned.max(initial=0))
    return ShuffleStats(
        step=step,
        imbalance_before=imbalance(plan.loads_before),
        imbalance_after=imbalance(plan.loads_planned),
        optimality_gap=largest / plan.lower_bound - 1.0 if plan.lower_bound else 0.0,
        moved=plan.num_moved > 0,
        gated=plan.gated,
        num_rows=len(plan.gathered.workloads),
        rows_moved=plan.num_moved,
        tokens_moved=tokens_moved,
        token_fraction_moved=tokens_moved / total_tokens if total_tokens else 0.0,
        excess_tokens=plan.excess_tokens,
        loads_before=tuple(plan.loads_before.tolist()),
        loads_after=tuple(plan.loads_after.tolist()),
        **measured,
    )
