"""ShuffleStats: what the shuffler did for one batch, in numbers that are the same on every rank but for the times.

docs/stats.md is the table of them for readers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from commons.perf_model.loads import imbalance
from commons.perf_model.shuffle_plan import ShufflePlan


@dataclass(frozen=True)
class ShuffleStats:
    """One step of the shuffler.

    Loads are in operations or, with a calibration, in its unit of time. In mode "observe" `largest_load_after`,
    `imbalance_after`, `optimality_gap` and the savings are those of the plan that was not carried out. A gated step
    saves nothing, and is reported so.

    Attributes:
        step: number of the batch since the shuffler was made.
        imbalance_before: largest load divided by the mean, minus 1, where the rows were.
        imbalance_after: the same under the plan.
        largest_load_before: load of the fullest rank where the rows were.
        largest_load_after: the same under the plan.
        lower_bound: no plan can have a smaller largest load.
        optimality_gap: largest planned load divided by the bound, minus 1.
        moved: whether any row changed rank.
        gated: a better plan was found, but its gain was below `min_gain` or `min_gain_ms`.
        num_rows: real rows of the global batch.
        rows_moved: rows that changed rank.
        tokens_moved: their tokens.
        token_fraction_moved: the same as a fraction of all tokens.
        rows_moved_across_nodes: rows that left their node; None where `ranks_per_node` is not given.
        tokens_moved_across_nodes: their tokens; None where `ranks_per_node` is not given.
        excess_tokens: how far the fullest rank exceeds `max_tokens_per_rank`.
        bytes_sent: payload bytes that this rank sent.
        gather_ms: the gather of workloads and lengths.
        plan_ms: planning, comparison of plans and index arrays.
        wait_ms: how long `finish_shuffle` waited for the plan; 0 when it was hidden behind compute.
        hidden_fraction: the part of gather and plan that nobody waited for.
        exchange_ms: from the plan to the batch, as seen by the host.
        predicted_saving: the part of the largest load that balancing takes away.
        predicted_saving_ms: the same in milliseconds; None without a calibration.
        step_ms: the step that trained the batch; None until the training loop has measured it.
        measured_saving_ms: the load that balancing takes away, at the milliseconds per load that the steps of this run
            have shown; None until the training loop has seen enough of them.
        loads_before: int64 `(num_ranks,)`.
        loads_after: int64 `(num_ranks,)`, of the rows as they are trained.
    """

    step: int
    imbalance_before: float
    imbalance_after: float
    largest_load_before: int
    largest_load_after: int
    lower_bound: int
    optimality_gap: float
    moved: bool
    gated: bool
    num_rows: int
    rows_moved: int
    tokens_moved: int
    token_fraction_moved: float
    rows_moved_across_nodes: int | None
    tokens_moved_across_nodes: int | None
    excess_tokens: int
    bytes_sent: int
    gather_ms: float
    plan_ms: float
    wait_ms: float
    hidden_fraction: float
    exchange_ms: float
    predicted_saving: float
    predicted_saving_ms: float | None
    loads_before: tuple[int, ...]
    loads_after: tuple[int, ...]
    step_ms: float | None = None
    measured_saving_ms: float | None = None

    @property
    def largest_load_trained(self) -> int:
        """Load of the fullest rank as the batch is trained: before balancing where nothing moved."""
        return max(self.loads_after, default=0)

    def carried_out(self, wait_ms: float, exchange_ms: float) -> ShuffleStats:
        """The stats with the times of the main thread, which waited for the plan and exchanged rows."""
        background = self.gather_ms + self.plan_ms
        hidden = min(1.0, max(0.0, 1.0 - wait_ms / background)) if background else 1.0
        return dataclasses.replace(self, wait_ms=wait_ms, exchange_ms=exchange_ms, hidden_fraction=hidden)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return dataclasses.asdict(self)


def stats_of_plan(
    plan: ShufflePlan,
    step: int,
    *,
    gather_ms: float,
    bytes_sent: int,
    ranks_per_node: int | None = None,
    units_per_ms: int | None = None,
) -> ShuffleStats:
    """Stats of a plan that is about to be carried out; the other times follow, see `ShuffleStats.carried_out`.

    Args:
        plan: the plan.
        step: number of the batch.
        gather_ms: milliseconds of the gather.
        bytes_sent: payload bytes that this rank sends.
        ranks_per_node: ranks that share a node, if known.
        units_per_ms: loads per millisecond, if they are times.
    """
    gathered = plan.gathered
    total_tokens = int(gathered.tokens.sum())
    tokens_moved = int(gathered.tokens[plan.moves].sum())
    loads_told = plan.loads_after if plan.gated else plan.loads_planned
    before, after = int(plan.loads_before.max(initial=0)), int(loads_told.max(initial=0))
    crosses = None if ranks_per_node is None else plan.destination // ranks_per_node != gathered.home // ranks_per_node
    return ShuffleStats(
        step=step,
        imbalance_before=imbalance(plan.loads_before),
        imbalance_after=imbalance(loads_told),
        largest_load_before=before,
        largest_load_after=after,
        lower_bound=plan.lower_bound,
        optimality_gap=after / plan.lower_bound - 1.0 if plan.lower_bound else 0.0,
        moved=plan.num_moved > 0,
        gated=plan.gated,
        num_rows=len(gathered.workloads),
        rows_moved=plan.num_moved,
        tokens_moved=tokens_moved,
        token_fraction_moved=tokens_moved / total_tokens if total_tokens else 0.0,
        rows_moved_across_nodes=None if crosses is None else int(crosses.sum()),
        tokens_moved_across_nodes=None if crosses is None else int(gathered.tokens[crosses].sum()),
        excess_tokens=plan.excess_tokens,
        bytes_sent=bytes_sent,
        gather_ms=gather_ms,
        plan_ms=0.0,
        wait_ms=0.0,
        hidden_fraction=1.0,
        exchange_ms=0.0,
        predicted_saving=(before - after) / before if before else 0.0,
        predicted_saving_ms=None if units_per_ms is None else (before - after) / units_per_ms,
        loads_before=tuple(plan.loads_before.tolist()),
        loads_after=tuple(plan.loads_after.tolist()),
    )
