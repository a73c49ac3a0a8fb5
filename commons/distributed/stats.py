"""ShuffleStats: what the shuffler did for one batch, in numbers; all but times and bytes are equal on all ranks.

docs/stats.md explains each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.perf_model.loads import imbalance, ranks_of_fastest, times_of
from commons.perf_model.shuffle_plan import ShufflePlan


@dataclass(frozen=True)
class ShuffleStats:
    """The stats of one step.

    Loads are in operations or, with a calibration, in its unit of time. In mode "observe" `largest_load_after`,
    `imbalance_after`, `optimality_gap` and the savings describe the plan, although it is not carried out. A gated step
    has no savings.

    With `speeds="measured"`, `largest_load_*`, `imbalance_*`, `lower_bound` and the savings are times: a rank's time
    for its load, expressed as the load that the fastest rank processes in that time.

    In a window, "before" describes the batches as they were loaded and "after" the batches as they are trained. A
    step's batch before and after has different rows, so compare only sums over the window. The window's bound, bytes
    and times are divided evenly among its steps; `optimality_gap`, `predicted_saving`, `moved` and `gated` are the
    window's.
    """

    step: int  # number of the batch since the shuffler was made, counted from 0
    window: int  # batches of a rank that were planned together; 1 without a window
    imbalance_before: float  # largest load divided by the mean, minus 1, before balancing
    imbalance_after: float  # the same under the plan
    largest_load_before: int  # load of the fullest rank before balancing
    largest_load_after: int  # the same under the plan
    lower_bound: int  # no plan can have a smaller largest load
    optimality_gap: float  # largest planned load divided by the bound, minus 1
    moved: bool  # whether any row changed rank
    gated: bool  # a better plan was found, but its gain was below `min_gain`
    num_rows: int  # real rows of the global batch
    num_tokens: int  # their tokens
    rows_moved: int  # rows that changed rank
    tokens_moved: int  # their tokens
    token_fraction_moved: float  # the same as a fraction of all tokens
    rows_moved_across_nodes: int | None  # rows that left their node; None without `ranks_per_node`
    tokens_moved_across_nodes: int | None  # their tokens; None without `ranks_per_node`
    excess_tokens: int  # by how many tokens the fullest rank exceeds `max_tokens_per_rank`
    bytes_sent: int  # payload bytes that this rank sent
    gather_ms: float  # the gather of workloads and lengths
    plan_ms: float  # planning, comparison of plans and index arrays
    wait_ms: float  # how long `finish_shuffle` waited for the plan; 0 when it was hidden behind compute
    hidden_fraction: float  # the fraction of gather and plan that `finish_shuffle` did not wait for
    exchange_ms: float  # from the plan to the batch, on the host's clock
    # The fraction by which balancing lowers the largest load; None for a step of a balancing sampler's window.
    predicted_saving: float | None
    predicted_saving_ms: float | None  # the same in milliseconds; None without a calibration
    loads_before: tuple[int, ...]  # int64 `(num_ranks,)`
    loads_after: tuple[int, ...]  # int64 `(num_ranks,)`, of the rows as they are trained
    # int64 `(num_ranks,)`, embedding lookups: values of all KeyedJaggedTensors except the labels, before balancing.
    lookups_before: tuple[int, ...] = ()
    lookups_after: tuple[int, ...] = ()  # int64 `(num_ranks,)`, the same after balancing
    lookup_imbalance_before: float = 0.0  # most lookups of a rank divided by the mean, minus 1, before balancing
    lookup_imbalance_after: float = 0.0  # the same after balancing
    # float `(num_ranks,)`, load per millisecond of each rank's own work, from its last `report_step_time`, which is
    # about an earlier batch; None for a rank without a report.
    rank_speeds: tuple[float | None, ...] = ()
    # int64 `(num_ranks,)`, estimated speeds, 1024 for the fastest rank; with `speeds="measured"` the next plan gives
    # each rank work in proportion. Empty with "equal".
    speeds: tuple[int, ...] = ()
    # The fraction by which loads in proportion to these speeds shorten the slowest rank's work; None with "equal".
    speed_saving: float | None = None
    step_ms: float | None = None  # the step that trained the batch; None until the training loop has measured it
    # The lowering of the largest load, in milliseconds by the times of this run's steps; None until the training loop
    # has measured enough steps.
    measured_saving_ms: float | None = None

    @property
    def largest_load_trained(self) -> int:
        """Load of the fullest rank as the batch is trained: `largest_load_before` if nothing moved."""
        return self.largest_load_before if self.loads_after == self.loads_before else self.largest_load_after

    def carried_out(self, wait_ms: float, exchange_ms: float) -> ShuffleStats:
        """Add the main thread's times: its wait for the plan, and the exchange."""
        background = self.gather_ms + self.plan_ms
        hidden = min(1.0, max(0.0, 1.0 - wait_ms / background)) if background else 1.0
        return dataclasses.replace(self, wait_ms=wait_ms, exchange_ms=exchange_ms, hidden_fraction=hidden)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class WindowStats:
    """The stats of a window; an imbalance is the sum over steps of the largest load ÷ the sum of mean loads, − 1."""

    window: int  # number of the window since the shuffler was made
    steps: int  # batches of a rank
    imbalance_before: float  # as the batches were loaded
    imbalance_after: float  # under the plan, which mode "observe" does not carry out
    optimality_gap: float  # the planned sum of the largest loads divided by its lower bound, minus 1
    num_rows: int  # real rows of all ranks
    token_fraction_moved: float  # tokens that changed rank, as a fraction of all tokens
    bytes_sent: int  # payload bytes that this rank sent
    read_ms: float  # reading the batches and their workloads
    gather_ms: float  # the gather of workloads and lengths
    plan_ms: float  # planning, comparison of plans and index arrays
    exchange_ms: float  # from the plan to the batches
    wait_ms: float  # how long the pipeline waited for the window

    @classmethod
    def of(
        cls, number: int, stats: Sequence[ShuffleStats], read_ms: float, speeds: np.ndarray | None = None
    ) -> WindowStats:
        """Make the stats of a window from those of its steps, at least one; `wait_ms` is 0.

        `speeds` are those of the plan, int64 `(num_ranks,)`; None for equal ones.
        """
        loads = sum(sum(each.loads_before) for each in stats)
        tokens = sum(each.num_tokens for each in stats)
        ranks, first = ranks_of_fastest(len(stats[0].loads_before), speeds), stats[0]

        def over_mean(largest: int) -> float:
            return largest * ranks / loads - 1.0 if loads else 0.0

        return cls(
            window=number,
            steps=len(stats),
            imbalance_before=over_mean(sum(each.largest_load_before for each in stats)),
            imbalance_after=over_mean(sum(each.largest_load_after for each in stats)),
            optimality_gap=first.optimality_gap,
            num_rows=sum(each.num_rows for each in stats),
            token_fraction_moved=sum(each.tokens_moved for each in stats) / tokens if tokens else 0.0,
            bytes_sent=sum(each.bytes_sent for each in stats),
            read_ms=read_ms,
            gather_ms=sum(each.gather_ms for each in stats),
            plan_ms=sum(each.plan_ms for each in stats),
            exchange_ms=sum(each.exchange_ms for each in stats),
            wait_ms=0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return dataclasses.asdict(self)


def stats_of_plan(
    plan: ShufflePlan,
    step: int,
    *,
    gather_ms: float,
    plan_ms: float,
    bytes_sent: int,
    ranks_per_node: int | None = None,
    units_per_ms: int | None = None,
    lookups: np.ndarray | None = None,
    speeds: Mapping[str, Any] | None = None,
) -> tuple[ShuffleStats, ...]:
    """Make the stats of a plan, one for each of its steps; `carried_out` adds the main thread's times later.

    Args:
        plan: the plan.
        step: number of its first step.
        gather_ms: milliseconds of the gather.
        plan_ms: milliseconds of planning.
        bytes_sent: payload bytes that this rank sends.
        ranks_per_node: ranks per node; None if not known.
        units_per_ms: units of load per millisecond, with a calibration; None without.
        lookups: int64 `(num_ranks, 2 · steps)`, embedding lookups of each step before balancing, then of each step
            after; None if not known.
        speeds: `rank_speeds`, `speeds` and `speed_saving` of the class.
    """
    steps, speeds_used = plan.gathered.steps, plan.speeds
    # By step, of every rank: places are rank · steps + step.
    befores, afters, planned = (
        each.reshape(-1, steps).T for each in (plan.loads_before, plan.loads_after, plan.loads_planned)
    )
    reported = afters if plan.gated else planned
    largest_before, largest_after = (times_of(each, speeds_used).max(axis=1).tolist() for each in (befores, reported))
    before, after = sum(largest_before), sum(largest_after)
    looked_up = np.zeros((0, 2 * steps), dtype=np.int64) if lookups is None else lookups
    num_rows, num_tokens, rows_moved, tokens_moved, rows_crossed, tokens_crossed = plan.moved.tolist()

    return tuple(
        ShuffleStats(
            step=step + index,
            window=steps,
            imbalance_before=imbalance(befores[index], speeds_used),
            imbalance_after=imbalance(reported[index], speeds_used),
            largest_load_before=largest_before[index],
            largest_load_after=largest_after[index],
            lower_bound=plan.lower_bound // steps,
            optimality_gap=after / plan.lower_bound - 1.0 if plan.lower_bound else 0.0,
            moved=any(rows_moved),
            gated=plan.gated,
            num_rows=num_rows[index],
            num_tokens=num_tokens[index],
            rows_moved=rows_moved[index],
            tokens_moved=tokens_moved[index],
            token_fraction_moved=tokens_moved[index] / num_tokens[index] if num_tokens[index] else 0.0,
            rows_moved_across_nodes=None if ranks_per_node is None else rows_crossed[index],
            tokens_moved_across_nodes=None if ranks_per_node is None else tokens_crossed[index],
            excess_tokens=plan.excess_tokens,
            bytes_sent=bytes_sent // steps,
            gather_ms=gather_ms / steps,
            plan_ms=plan_ms / steps,
            wait_ms=0.0,
            hidden_fraction=1.0,
            exchange_ms=0.0,
            predicted_saving=(before - after) / before if before else 0.0,
            predicted_saving_ms=None if units_per_ms is None else (before - after) / units_per_ms / steps,
            loads_before=tuple(befores[index].tolist()),
            loads_after=tuple(afters[index].tolist()),
            lookups_before=tuple(looked_up[:, index].tolist()),
            lookups_after=tuple(looked_up[:, steps + index].tolist()),
            lookup_imbalance_before=imbalance(looked_up[:, index]),
            lookup_imbalance_after=imbalance(looked_up[:, steps + index]),
            **(speeds or {}),
        )
        for index in range(steps)
    )
