"""What `evenrank simulate` answers: a table, JSON, and one sentence of advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from commons.cli.simulate_sources import Source, compare
from commons.console import format_number, make_console
from commons.perf_model.gain import TRAINED_SLACK, Comparison, DealtRows

# Balancing is worth its options from this speed-up on; another way is worth its price if it gains so much more.
WORTH = 1.02
# Width of a table that no terminal shows.
_WIDTH = 120
# What other libraries ship; it is compared and never advised.
_NEVER_ADVISED = "Karmarkar-Karp"


@dataclass(frozen=True)
class Advice:
    """What to do."""

    text: str  # one sentence
    options: str = ""  # flags of our trainers, to copy; empty for none
    code: str = ""  # the same in Python
    way: str | None = None  # the name of the way that is advised; None where nothing gains
    speed_up: float = 1.0  # of that way


@dataclass(frozen=True, eq=False)
class Answer:
    """What was simulated, and what came of it."""

    source: Source  # of the rows
    tokens: np.ndarray  # int64 `(n,)`, of rows, to describe them
    costs: np.ndarray  # int64 `(n,)`, of the same rows
    comparisons: tuple[Comparison, ...]  # by number of ranks, ascending; at least one
    link_gbps: float | None  # 10^9 bits that a rank sends per second; None for no time of exchanges
    notes: tuple[str, ...]  # what else to say, a line each

    @property
    def title(self) -> str:
        """The rows in a line."""
        rows = "" if self.source.num_rows is None else f"{self.source.num_rows:,} rows, "
        tokens = ", ".join(f"{name} {value:,.0f}" for name, value in self.quantiles().items())
        return f"{self.source.name}: {rows}{self.source.batch_size} rows per rank; tokens of a row: {tokens}"

    @property
    def slacks(self) -> list[float]:
        """Those that the ways were planned with, ascending."""
        return sorted({slack for result in self.comparisons for way in result.ways for slack in way.moved})

    def bytes_per_rank(self, way: DealtRows) -> float | None:
        """Bytes that the busiest rank sends or receives in a step, mean over steps."""
        if way.sent_tokens is None or self.source.bytes_per_token is None:
            return None
        return way.sent_tokens * self.source.bytes_per_token

    def exchange_ms(self, way: DealtRows) -> float | None:
        """Milliseconds of its exchange; None without --link-gbps."""
        size = self.bytes_per_rank(way)
        return None if size is None or self.link_gbps is None else size * 8 / (self.link_gbps * 1e9) * 1e3

    def quantiles(self) -> dict[str, float]:
        """Mean, median, 99th percentile and maximum of the tokens of a row."""
        median, most = np.quantile(self.tokens, [0.5, 0.99], method="lower")
        mean = float(self.tokens.mean())
        return {"mean": mean, "median": float(median), "p99": float(most), "max": float(self.tokens.max())}

    def dominant(self) -> list[str]:
        """What to say of steps in which one row is more than an even share, and what lifts it."""
        lines = []
        for result in self.comparisons:
            if not result.dominated:
                continue
            lifted, most = _best_of_windows(result), result.possible_of_batches
            remedy = "a window of several batches (--window 2 4), more rows per step or shorter rows lift it"
            if result.equal < WORTH * most:
                remedy = "it cannot be split, and costs less than 2 % of what equal ranks would gain"
            elif lifted is not None and result.speed_up(lifted) >= WORTH * most:
                remedy = (
                    f"it cannot be split, so that single batches gain {most:.2f}× at most; --trainer.shuffle-window "
                    f"{lifted.window} lifts that to {result.speed_up(lifted):.2f}×, shorter rows too"
                )
            elif lifted is not None:
                remedy = "more rows per step or shorter rows lift it"
            lines.append(
                f"{result.num_ranks} ranks: in {result.dominated} of {result.rows.num_steps} steps one sample alone is "
                f"more than an even share of the work, up to {result.rows.largest_share.max():.2f}×; {remedy}."
            )
        return lines

    def advice(self, result: Comparison | None = None) -> Advice:
        """One sentence for a number of ranks, or the largest: the least change that gains, and one more that pays."""
        result = result or self.comparisons[-1]
        ways = [way for way in result.ways[1:] if way.name != _NEVER_ADVISED]
        budget = next((way for way in ways if way.budget is not None), None)
        found, gained = None, 1.0
        # From small changes to large: a larger one has to pay for itself.
        for way in ways:
            if way is not budget and result.speed_up(way) >= WORTH * gained:
                found, gained = way, result.speed_up(way)
        further = budget if budget is not None and result.speed_up(budget) >= WORTH * gained else None
        advised = found or further
        if advised is None:
            return _nothing_gains(result)
        what, changes, options, code = _how(advised)
        possible = result.possible(advised)
        of = f"{result.equal:.2f}× with equal ranks" if possible is None else f"{possible:.2f}× possible"
        parts = [f"On {result.num_ranks} ranks {what}: {result.speed_up(advised):.2f}× of {of}, {self.source.of_what}"]
        if advised is not ways[0]:
            parts.append(f" ({result.speed_up(ways[0]):.2f}× batch by batch, with equal counts)")
        parts.append(changes)
        if further is not None and advised is not further:
            parts.append(
                "; where lengths are known beforehand, steps of constant cost (BudgetBatchSampler) gain "
                f"{result.speed_up(further):.2f}×"
            )
        if self.source.of_what == "in the layers' time":
            parts.append("; a whole step gains less")
        return Advice("".join([*parts, "."]), options, code, advised.name, result.speed_up(advised))

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "lengths": {"source": self.source.name, "rows": self.source.num_rows, "tokens": self.quantiles()},
            "task": self.source.task,
            "ranks": [self._of_ranks(result) for result in self.comparisons],
            "notes": [*self.notes, *self.dominant()],
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
            "bytes_per_rank": self.bytes_per_rank(way),
            "planning_ms": way.planning_ms,
            "step_ms": result.step_ms(way),
            "exchange_ms": self.exchange_ms(way),
        }


def simulate(
    source: Source, ranks: Sequence[int], windows: Sequence[int], steps: int, link_gbps: float | None = None
) -> Answer:
    """Deal the rows of a source in every way, for every number of ranks, of at least 2.

    `windows` are batches of every rank that are planned together; 1 is always among the ways. There are fewer steps
    where the source has fewer rows; ValueError where they are too few for a step.
    """
    notes, comparisons = [], []
    for num_ranks in sorted(set(ranks)):
        per_step = num_ranks * source.batch_size
        possible = steps if source.num_rows is None else min(steps, source.num_rows // per_step)
        if possible < steps:
            notes.append(
                f"{num_ranks} ranks: {possible} of {steps} steps. There are {source.num_rows:,} rows, {steps} steps "
                f"train {steps * per_step:,}; no row counts twice: {source.remedy}."
            )
        if possible:
            comparisons.append(compare(source, num_ranks, possible, windows))
    if not comparisons:
        raise ValueError(
            f"{source.name} has {source.num_rows:,} rows, a step of {min(ranks)} ranks trains "
            f"{min(ranks) * source.batch_size:,}: {source.remedy}"
        )
    return Answer(source, *source.summary(), tuple(comparisons), link_gbps, tuple(notes))


def _nothing_gains(result: Comparison) -> Advice:
    """Advice for where no way gains enough, whether one could or not."""
    ranks = f"On {result.num_ranks} ranks"
    if result.equal >= WORTH:
        return Advice(
            f"{ranks} no way of dealing these rows gains 2 %, of {result.equal:.2f}× with equal ranks: leave "
            "balancing off, or look at more rows per step and longer windows (--window)."
        )
    most = max(1.0, *(result.speed_up(way) for way in result.ways))
    return Advice(f"{ranks} these rows are even as they are loaded: balancing gains {most:.2f}× at most, leave it off.")


def _how(way: DealtRows) -> tuple[str, str, str, str]:
    """What to do to have a way, what it changes besides where rows are trained, flags of our trainers, and code."""
    on = "--trainer.enable-balanced-shuffler"
    pipeline = "balanced(TrainPipelineSparseDist)(..., batch_shuffler=shuffler)"
    if way.budget is not None:
        rows, most = way.budget.rows, way.budget.most_rows
        return (
            f"fill steps to the cost of {rows} average rows per rank, where lengths are known beforehand",
            "; how many rows a step has varies",
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
            "; how many rows a rank has varies",
            f"{on} --trainer.shuffler.no-equal-size",
            f"{pipeline}  # ShufflerOptions(equal_size=False)",
        )
    return "balance each batch", "", on, pipeline


def _best_of_windows(result: Comparison) -> DealtRows | None:
    """The shortest window within 2 % of the best."""
    windows = [way for way in result.ways if way.window > 1]
    most = max((result.speed_up(way) for way in windows), default=0.0)
    return next((way for way in windows if WORTH * result.speed_up(way) >= most), None)


def print_answer(answer: Answer) -> None:
    """A table per number of ranks, what to know of it, and the advice."""
    console = make_console(width=_WIDTH, highlight=False)
    console.print(Text(answer.title))
    console.print(Text(f"cost: {answer.source.task}"))
    left_out: list[str] = []
    for result in answer.comparisons:
        table, left_out = _fitting_table(answer, result, console)
        console.print(table)
    if left_out:
        console.print(f"Lines are too short for {', '.join(left_out)}, which wider ones show, and --json.")
    slacks = ", ".join(f"{slack:.0%}" for slack in answer.slacks)
    trained = f", with slack {TRAINED_SLACK:.0%}" if len(answer.slacks) > 1 else ""
    sent = "" if answer.source.bytes_per_token is None else "kB: of the busiest rank per step, and "
    for line in (
        "mean, p99: largest load ÷ mean, over steps; possible: no plan of that kind gains more; tokens: fullest rank ÷ "
        "mean;",
        f"moved: of all tokens, with slack {slacks}; {sent}plan ms: of a step{trained}.",
        *answer.notes,
        *answer.dominant(),
    ):
        console.print(Text(line))
    for result in answer.comparisons[:-1]:
        console.print(Text(answer.advice(result).text))
    advice = answer.advice()
    console.print(Text(advice.text, style="bold"))
    for line in (advice.options, advice.code):
        if line:
            console.print(Text(f"  {line}"))


def _fitting_table(answer: Answer, result: Comparison, console: Console) -> tuple[Table, list[str]]:
    """A table as wide as lines are at most, and the columns that it has no room for."""
    cells = [cells_of(answer, result, way) for way in result.ways]
    names, wide = list(cells[0]), console.options.update_width(10_000)  # or the least width is that of the console
    for shown in range(len(names), 1, -1):
        table = _table(answer, result, [{name: row[name] for name in names[:shown]} for row in cells])
        if console.measure(table, options=wide).minimum <= console.width:
            break
    return table, names[shown:]


def heading_of(answer: Answer, result: Comparison) -> str:
    """Above a table."""
    return f"{result.num_ranks} ranks × {answer.source.batch_size} rows, {result.rows.num_steps} steps"


def _table(answer: Answer, result: Comparison, cells: list[dict[str, str]]) -> Table:
    title = f"{heading_of(answer, result)}: {result.equal:.2f}× with equal ranks"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in cells[0]:
        # What has words may wrap where lines are short; numbers stay whole.
        least = {"": len("Karmarkar"), "moved %": len("moved %")}.get(name)
        justify: JustifyMethod = "left" if name == "" else "right"
        table.add_column(name, justify=justify, no_wrap=least is None, min_width=least, overflow="fold")
    for row in cells:
        table.add_row(*row.values())
    return table


def cells_of(answer: Answer, result: Comparison, way: DealtRows) -> dict[str, str]:
    """A row of the table, by column."""
    moved = " / ".join(f"{100 * way.moved[slack]:.0f}" if slack in way.moved else "–" for slack in answer.slacks)
    size = answer.bytes_per_rank(way)
    cells = {
        "": way.name,
        "mean": f"{1 + way.imbalance:.3f}",
        "p99": f"{np.quantile(way.largest_to_mean, 0.99):.3f}",
        "speed-up": f"{result.speed_up(way):.2f}×",
        "possible": format_number("{:.2f}×", result.possible(way), "–"),
        "tokens": f"{way.fullest:.2f}",
        "moved %": moved if way.moved else "–",
        "kB": format_number("{:,.1f}", size and size / 1e3, "–"),
        "plan ms": format_number("{:.2f}", way.planning_ms, "–"),
    }
    if answer.source.bytes_per_token is None:
        del cells["kB"]
    if result.cost is not None:
        cells["step ms"] = _ms(result.step_ms(way))
    if answer.link_gbps is not None:
        cells["exchange ms"] = _ms(answer.exchange_ms(way))
    return cells


def _ms(value: float | None) -> str:
    return format_number("{:,.3g}" if value is None or value < 100 else "{:,.0f}", value, "–")
