"""Simulation: distributes the rows of a source to ranks in several ways, and derives advice.

lengths, a config or a record ─► Source ─► simulate ─► Simulation: a Comparison for each number of ranks
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from commons.datasets.samplers.budget import BudgetBatchSampler
from commons.perf_model.gain import Budget, Comparison, DealtRows, LoadedRows, StepCost, compare_ways, deal
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.inputs import MOST_LOAD
from commons.perf_model.task_estimator import AttentionTask, HSTUAttentionTask, SelfAttentionTask

# Smallest speed-up for which balancing, or a larger change over a smaller one, is advised.
WORTH = 1.02
# The base of a speed-up of only the layers.
OF_LAYERS = "in the layers' time"
# Most rows, but at least so many steps, for which steps of constant cost are planned: each step needs a search.
_BUDGET_ROWS = 1 << 18
_FEWEST_STEPS = 8
# The method of other libraries, which is compared and never advised.
_NEVER_ADVISED = "Karmarkar-Karp"


@dataclass(frozen=True, eq=False)
class Source:
    """Rows to simulate."""

    name: str  # the user's name for the rows, such as a file
    load: Callable[[int, int], LoadedRows]  # (ranks, steps) → the rows of the first steps, as training loads them
    num_rows: int | None  # number of rows; None for any number
    batch_size: int  # rows per rank in a step
    tokens: np.ndarray  # int64 `(n,)`, of sample rows
    costs: np.ndarray  # int64 `(n,)`, of the same sample rows
    task: str  # a text of the cost of a row, see `describe_task`
    remedy: str  # the remedy for too few rows
    of_what: str = OF_LAYERS  # the base of a speed-up
    cost: StepCost | None = None  # converts loads to milliseconds; None to compare loads
    bytes_per_token: int | None = None  # bytes sent per token; None if unknown
    link_gbps: float | None = None  # 10^9 bits that a rank sends per second; None if unknown
    plan_options: Mapping[str, Any] | None = None  # of `plan_shuffle`, to compare only such plans; None for all ways
    # (window) → flags of our trainers for these plans, to copy with the flags of an advice
    flags: Callable[[int], str] = lambda window: ""
    options: str = ""  # the same in Python, to copy with the code of an advice
    notes: tuple[str, ...] = ()  # remarks, a line each

    def ways(self, rows: LoadedRows, windows: Sequence[int]) -> Iterator[DealtRows]:
        """Distribute rows in all ways; the first is as loaded."""
        if self.plan_options is None:
            yield from compare_ways(rows, windows)
            yield from _constant_cost(rows, self.batch_size)
            return
        yield rows.as_loaded
        yield deal(rows, "each batch", **self.plan_options)
        for window in windows:
            yield deal(rows, f"window of {window}", window, **self.plan_options)


def describe_task(model: AttentionTask | None) -> str:
    """A text of the cost of a row: the dimensions of the model whose operations are counted, None for tokens."""
    if model is None:
        return "tokens"
    kind, more = "transformer" if isinstance(model, SelfAttentionTask) else type(model).__name__, ""
    if isinstance(model, HSTUAttentionTask):
        kind, more = "hstu", f", values × {model.value_dim}" if model.value_dim else ""
        more += ", output of [u, x, y]" if model.concat_ux else ""
        more += f", attention within {model.max_attn_len} tokens" if model.max_attn_len else ""
    layers = f"{model.num_layers} layers, {model.num_heads} heads × {model.head_dim}"
    return f"{kind}, hidden {model.hidden_size}, {layers}{more}"


@dataclass(frozen=True)
class Advice:
    """Advice for one number of ranks."""

    text: str  # one sentence
    options: str = ""  # flags of our trainers, to copy; empty if no way is advised
    code: str = ""  # the same in Python
    way: str | None = None  # the name of the advised way; None if no way gains enough
    speed_up: float = 1.0  # of the advised way


@dataclass(frozen=True, eq=False)
class Simulation:
    """The results of a simulation."""

    source: Source
    comparisons: tuple[Comparison, ...]  # by number of ranks, ascending; at least one
    notes: tuple[str, ...] = ()  # remarks, a line each

    def quantiles(self) -> dict[str, float]:
        """Mean, median, 99th percentile and maximum of the tokens of a row."""
        tokens = self.source.tokens
        median, most = np.quantile(tokens, [0.5, 0.99], method="lower")
        return {"mean": float(tokens.mean()), "median": float(median), "p99": float(most), "max": float(tokens.max())}

    def dominated(self) -> list[str]:
        """For each number of ranks with such steps, a line on steps in which one row exceeds an even share."""
        lines = []
        for result in self.comparisons:
            if not result.dominated:
                continue
            most = result.possible_of_batches
            window = _best_of_windows(result, least=WORTH * most)
            remedy = "use a window of several batches (--window 2 4), more rows per step or shorter rows"
            if result.equal < WORTH * most:
                remedy = "this reduces the possible speed-up by less than 2 %"
            elif window is not None:
                remedy = (
                    f"so single batches gain at most {most:.2f}×; --trainer.shuffle-window {window.window} gains "
                    f"{result.speed_up(window):.2f}×, and shorter rows help too"
                )
            elif any(way.window > 1 for way in result.ways):
                remedy = "use more rows per step or shorter rows"
            lines.append(
                f"{result.num_ranks} ranks: in {result.dominated} of {result.rows.num_steps} steps one sample alone is "
                f"more than an even share of the work, up to {result.rows.largest_share.max():.2f}×; {remedy}."
            )
        return lines

    def advice(self, result: Comparison | None = None) -> Advice:
        """Advice for one number of ranks, by default the largest: the smallest change that gains nearly the most."""
        result = result or self.comparisons[-1]
        ways = [way for way in result.ways[1:] if way.name != _NEVER_ADVISED]
        budget = next((way for way in ways if way.budget is not None), None)
        found, gained = None, 1.0
        # From small changes to large: a larger change must gain 2 % more than the smaller one.
        for way in ways:
            if way is not budget and result.speed_up(way) >= WORTH * gained:
                found, gained = way, result.speed_up(way)
        further = budget if budget is not None and result.speed_up(budget) >= WORTH * gained else None
        advised = found or further
        if advised is None:
            return _nothing_gains(result, has_options=self.source.plan_options is not None)
        what, changes, options, code = _how(advised)
        possible = result.possible(advised)
        of = f"{result.equal:.2f}× with equal ranks" if possible is None else f"{possible:.2f}× possible"
        text = f"On {result.num_ranks} ranks {what}: {result.speed_up(advised):.2f}× of {of}, {self.source.of_what}"
        if advised is not ways[0]:
            counts = ", with equal counts" if self.source.plan_options is None else ""
            text += f" ({result.speed_up(ways[0]):.2f}× batch by batch{counts})"
        text += changes
        if further is not None and advised is not further:
            text += "; if lengths are known beforehand, steps of constant cost (BudgetBatchSampler) gain "
            text += f"{result.speed_up(further):.2f}×"
        if self.source.of_what == OF_LAYERS:
            text += "; a whole step gains less"
        options = f"{options} {self.source.flags(advised.window)}".rstrip()
        code += f"  # {self.source.options}" if self.source.options else ""
        return Advice(f"{text}.", options, code, advised.name, result.speed_up(advised))

    def to_dict(self) -> dict[str, Any]:
        """The results as data for JSON."""
        return {
            "lengths": {"source": self.source.name, "rows": self.source.num_rows, "tokens": self.quantiles()},
            "task": self.source.task,
            "ranks": [self._of_ranks(result) for result in self.comparisons],
            "notes": [*self.notes, *self.dominated()],
            "advice": asdict(self.advice()),
        }

    def _of_ranks(self, result: Comparison) -> dict[str, Any]:
        return {
            "ranks": result.num_ranks,
            "batch_size": self.source.batch_size,
            "steps": result.rows.num_steps,
            "speed_up_of_equal_ranks": result.equal,
            "possible_speed_up_of_single_batches": result.possible_of_batches,
            "dominated_steps": result.dominated,
            "largest_share": float(result.rows.largest_share.max()),
            "advice": asdict(self.advice(result)),
            "ways": [self._of_way(result, way) for way in result.ways],
        }

    def _of_way(self, result: Comparison, way: DealtRows) -> dict[str, Any]:
        """The numbers of a way by name; None for unknown numbers."""
        per_token, gbps = self.source.bytes_per_token, self.source.link_gbps
        size = None if way.sent_tokens is None or per_token is None else way.sent_tokens * per_token
        return {
            "way": way.name,
            "window": way.window,
            "imbalance": way.imbalance,
            "largest_to_mean": 1 + way.imbalance,
            "largest_to_mean_p99": float(np.quantile(way.largest_to_mean, 0.99)),
            "speed_up": result.speed_up(way),
            "possible_speed_up": result.possible(way),
            "speed_up_median": result.median_speed_up(way),
            "tokens_to_mean": way.fullest,
            "tokens_moved": {f"{slack:g}": share for slack, share in way.moved.items()},
            "bytes_per_rank": size,  # of the busiest rank in a step, mean over steps
            "planning_ms": way.planning_ms,
            "step_ms": result.step_ms(way),
            "exchange_ms": None if size is None or gbps is None else size * 8 / (gbps * 1e9) * 1e3,
        }


def simulate(source: Source, ranks: Sequence[int], windows: Sequence[int], steps: int) -> Simulation:
    """Distribute the rows of a source in all ways, for every number of ranks, each at least 2.

    `windows` are numbers of batches of every rank that are planned together; single batches are always simulated. With
    too few rows there are fewer steps. ValueError for too few rows for a step, rows without work, or costs above the
    maximum of a plan.
    """
    notes, comparisons = [*source.notes], []
    for num_ranks in sorted(set(ranks)):
        per_step = num_ranks * source.batch_size
        possible = steps if source.num_rows is None else min(steps, source.num_rows // per_step)
        if possible < steps:
            notes.append(
                f"{num_ranks} ranks: {possible} of {steps} steps. There are {source.num_rows:,} rows, {steps} steps "
                f"train {steps * per_step:,}; no row is used twice: {source.remedy}."
            )
        if possible:
            comparisons.append(compare(source, num_ranks, possible, windows))
            notes += _above_cap(comparisons[-1], (source.plan_options or {}).get("max_tokens"))
    if not comparisons:
        raise ValueError(
            f"{source.name} has {source.num_rows:,} rows, a step of {min(ranks)} ranks needs "
            f"{min(ranks) * source.batch_size:,}: {source.remedy}"
        )
    return Simulation(source, tuple(comparisons), tuple(notes))


def compare(source: Source, num_ranks: int, steps: int, windows: Sequence[int]) -> Comparison:
    """Distribute the rows of the first steps in all ways, for one number of ranks; errors as for `simulate`."""
    rows, longer = source.load(num_ranks, steps), [window for window in windows if 1 < window <= steps]
    if not rows.workloads.any():
        raise ValueError("all rows have length 0; there is nothing to balance: check the lengths")
    heaviest, longest = _heaviest_step(rows), max([1, *longer])
    if longest * heaviest >= MOST_LOAD:
        raise ValueError(
            f"a step of {num_ranks} ranks × {source.batch_size} rows can cost {heaviest:.2g} operations, and a window "
            f"has {longest} steps; the maximum of a plan is {MOST_LOAD:.2g}: lower --num-layers, which changes no "
            "ratio, or the rows of a step"
        )
    ways = tqdm(source.ways(rows, longer), f"{num_ranks} ranks", unit="way", leave=False, disable=None)
    return Comparison(rows, tuple(ways), source.cost)


def _above_cap(result: Comparison, cap: int | None) -> Iterator[str]:
    """Yield a line for each way that does not keep the cap on the tokens of a rank in all steps."""
    for way in result.ways[1:] if cap is not None else ():
        excess = way.tokens.max(axis=1) - cap
        if excess.max() > 0:
            yield (
                f"{result.num_ranks} ranks, {way.name}: {(excess > 0).sum()} of {len(excess)} steps have a rank above "
                f"max_tokens_per_rank ({cap:,}), by up to {excess.max():,} tokens."
            )


def _heaviest_step(rows: LoadedRows) -> float:
    return float(np.bincount(rows.step, rows.workloads.astype(np.float64)).max())


def _constant_cost(rows: LoadedRows, batch_size: int) -> Iterator[DealtRows]:
    """Yield steps of a BudgetBatchSampler whose budget per rank is the cost of a batch's rows on average.

    The budget is at least the cost of the costliest row. Nothing is yielded if all rows fit into one step.
    """
    per_step = rows.num_ranks * batch_size
    countable = int(MOST_LOAD / max(1.0, _heaviest_step(rows)) * (1 - 1e-9))
    some = rows.first_steps(min(max(_FEWEST_STEPS, _BUDGET_ROWS // per_step), countable))
    rows = some if some.workloads.any() else rows
    mean = float(rows.workloads.mean())
    average_rows = max(batch_size, math.ceil(int(rows.workloads.max()) / mean))
    sampler = BudgetBatchSampler(
        rows.workloads, budget_per_rank=math.ceil(average_rows * mean), num_ranks=rows.num_ranks, rank=0, shuffle=False
    )
    begin = time.thread_time()
    planned = list(sampler.plan(epoch=0))
    planning_ms = 1e3 * (time.thread_time() - begin) / len(planned)
    # Drop the last step, which has the remaining rows: in a whole epoch it would be one of many.
    if not (steps := planned[:-1]):
        return
    loads, tokens = (
        np.stack([sum_by_rank(ranks, values[of_rows], rows.num_ranks) for of_rows, ranks in steps])
        for values in (rows.workloads, rows.tokens)
    )
    most_rows = max(int(np.bincount(ranks).max()) for _, ranks in steps)
    yield DealtRows("constant cost", loads, tokens, planning_ms=planning_ms, budget=Budget(average_rows, most_rows))


def _nothing_gains(result: Comparison, *, has_options: bool) -> Advice:
    """The advice if no way gains enough; `has_options`: the plans are those of a shuffler's options, not all ways."""
    ranks = f"On {result.num_ranks} ranks"
    possible = max(result.possible(way) or 1.0 for way in result.ways)
    if has_options and possible >= WORTH:
        return Advice(
            f"{ranks} no plan with these options of the shuffler gains 2 %, of {possible:.2f}× possible: try others "
            "(--shuffler.slack, min-gain, max-tokens-per-rank, partitioner, equal-size), or leave balancing off."
        )
    if result.equal >= WORTH:
        return Advice(
            f"{ranks} no way to distribute these rows gains 2 %, of {result.equal:.2f}× with equal ranks: leave "
            "balancing off, or try more rows per step and longer windows (--window)."
        )
    most = max(1.0, *(result.speed_up(way) for way in result.ways))
    return Advice(f"{ranks} loads are even without balancing, which gains at most {most:.2f}×: leave it off.")


def _how(way: DealtRows) -> tuple[str, str, str, str]:
    """What to do, what else it changes in training, the flags of our trainers, and the code, for a way."""
    on = "--trainer.enable-balanced-shuffler"
    pipeline = "balanced(TrainPipelineSparseDist)(..., batch_shuffler=shuffler)"
    if way.budget is not None:
        rows, most = way.budget.rows, way.budget.most_rows
        return (
            f"fill steps to the cost of {rows} average rows per rank, if lengths are known beforehand",
            "; the number of rows per step varies",
            f"--trainer.balance-sampler --trainer.budget-per-rank {rows} --trainer.train-batch-size {most} "
            "--trainer.shuffler.no-equal-size",
            f"BudgetBatchSampler(workloads, budget_per_rank=round({rows} * workloads.mean()), num_ranks=..., rank=...)",
        )
    if way.window > 1:
        return (
            f"balance windows of {way.window} batches",
            "; which rows share a step changes",
            f"{on} --trainer.shuffle-window {way.window}",
            f"windowed_iter(iter(dataloader), shuffler, window={way.window})",
        )
    if way.name == "free counts":
        return (
            "balance each batch, with any number of rows per rank",
            "; the number of rows per rank varies",
            f"{on} --trainer.shuffler.no-equal-size",
            f"{pipeline}  # ShufflerOptions(equal_size=False)",
        )
    return "balance each batch", "", on, pipeline


def _best_of_windows(result: Comparison, least: float) -> DealtRows | None:
    """The shortest window within 2 % of the best whose speed-up is at least `least`; None if there is none."""
    windows = [way for way in result.ways if way.window > 1]
    enough = max([least, *(result.speed_up(way) / WORTH for way in windows)])
    return next((way for way in windows if result.speed_up(way) >= enough), None)
