"""What `evenrank simulate --lengths` answers: a table, JSON, and one sentence of advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from commons.console import make_console
from commons.perf_model.gain import SLACKS, TRAINED_SLACK, Comparison, DealtRows
from commons.perf_model.task_estimator import training_flops

# Balancing is worth its options from this speed-up on; another way is worth its price if it gains so much more.
WORTH = 1.02
# Width of a table that no terminal shows.
_WIDTH = 120


@dataclass(frozen=True)
class StepTime:
    """Milliseconds from operations and bytes.

    Attributes:
        peak_tflops: operations per second of a device at most, in 10^12; None for no time of steps.
        mfu: the part of it that training reaches.
        link_gbps: 10^9 bits that a rank sends per second; None for no time of exchanges.
    """

    peak_tflops: float | None
    mfu: float
    link_gbps: float | None

    def step_ms(self, way: DealtRows) -> float | None:
        """Forward and backward pass of the slowest rank, mean over steps."""
        if self.peak_tflops is None:
            return None
        largest = float(way.loads.max(axis=1).mean())
        return training_flops(1) * largest / (self.peak_tflops * self.mfu * 1e12) * 1e3

    def exchange_ms(self, num_bytes: float | None) -> float | None:
        """The busiest rank's share of the exchange."""
        if self.link_gbps is None or num_bytes is None:
            return None
        return num_bytes * 8 / (self.link_gbps * 1e9) * 1e3


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        text: one sentence.
        options: flags of our trainers, to copy; empty for none.
        code: the same in Python.
        way: the name of the way that is advised; None where nothing gains.
        speed_up: of that way.
    """

    text: str
    options: str = ""
    code: str = ""
    way: str | None = None
    speed_up: float = 1.0


@dataclass(frozen=True, eq=False)
class Answer:
    """What was simulated, and what came of it.

    Attributes:
        source: of the lengths, as the user named it.
        num_rows: rows that there are; None for a distribution.
        tokens: int64 `(n,)`, of the rows, to describe them.
        costs: int64 `(n,)`, of the same rows.
        task: what a row costs, in words.
        comparisons: by number of ranks, ascending; at least one.
        bytes_per_token: what a token takes on the wire.
        time: turns cost into milliseconds; None for none.
        notes: what else to say, a line each.
    """

    source: str
    num_rows: int | None
    tokens: np.ndarray
    costs: np.ndarray
    task: str
    comparisons: tuple[Comparison, ...]
    bytes_per_token: int
    time: StepTime | None
    notes: tuple[str, ...]

    def bytes_per_rank(self, way: DealtRows) -> float | None:
        """Bytes that the busiest rank sends or receives in a step, mean over steps."""
        return None if way.sent_tokens is None else way.sent_tokens * self.bytes_per_token

    def step_ms(self, way: DealtRows) -> float | None:
        """Milliseconds of a step, if asked for."""
        return None if self.time is None else self.time.step_ms(way)

    def exchange_ms(self, way: DealtRows) -> float | None:
        """Milliseconds of its exchange, if asked for."""
        return None if self.time is None else self.time.exchange_ms(self.bytes_per_rank(way))

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
            lifted = _best_of_windows(result)
            remedy = "more rows per step (--batch-size) or shorter rows (--max-length) lift it"
            most = result.ways[0].total / result.bound
            if result.possible < WORTH * most:
                remedy = "it cannot be split, and costs less than 2 % of what is possible"
            elif lifted is not None and result.speed_up(lifted) >= WORTH * most:
                remedy = (
                    f"it cannot be split, so that single batches gain {most:.2f}× at most; --trainer.shuffle-window "
                    f"{lifted.window} lifts that to {result.speed_up(lifted):.2f}×, a shorter --max-length too"
                )
            lines.append(
                f"{result.num_ranks} ranks: in {result.dominated} of {result.rows.num_steps} steps one sample alone is "
                f"more than an even share of the work, up to {result.largest_share.max():.2f}×; {remedy}."
            )
        return lines

    def advice(self, result: Comparison | None = None) -> Advice:
        """One sentence for a number of ranks: the least change that gains, and a further one that pays.

        Args:
            result: of that number; None for the largest.
        """
        result = result or self.comparisons[-1]
        ways = {way.name: way for way in result.ways}
        refined, budget = ways["refined"], ways["constant cost"]
        found, gained = None, 1.0
        # From small changes to large: a larger one has to pay for itself.
        for way in [refined, ways["free counts"], *(way for way in result.ways if way.window > 1)]:
            if result.speed_up(way) >= WORTH * gained:
                found, gained = way, result.speed_up(way)
        further = result.speed_up(budget) >= WORTH * gained
        if found is None and not further:
            return _nothing_gains(result)
        advised = found or budget
        what, changes, options, code = _how(advised)
        parts = [
            f"On {result.num_ranks} ranks {what}: {result.speed_up(advised):.2f}×, {result.share(advised):.0%} of the "
            f"possible {result.possible:.2f}×, {self.of_what}"
        ]
        if advised is not refined:
            parts.append(f" ({result.speed_up(refined):.2f}× batch by batch, with equal counts)")
        parts.append(changes)
        if advised is not budget and further:
            parts.append(
                "; where lengths are known beforehand, steps of constant cost (BudgetBatchSampler) gain "
                f"{result.speed_up(budget):.2f}×"
            )
        if self.task != "tokens":
            parts.append("; a whole step gains less")
        return Advice("".join([*parts, "."]), options, code, advised.name, result.speed_up(advised))

    @property
    def of_what(self) -> str:
        """What a speed-up is a ratio of."""
        if self.task == "tokens":
            return "in tokens of the slowest rank"
        return "in the layers' time"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        advice = self.advice()
        return {
            "lengths": {"source": self.source, "rows": self.num_rows, "tokens": self.quantiles()},
            "task": self.task,
            "ranks": [self._of_ranks(result) for result in self.comparisons],
            "notes": [*self.notes, *self.dominant()],
            "advice": asdict(advice),
        }

    def _of_ranks(self, result: Comparison) -> dict[str, Any]:
        return {
            "ranks": result.num_ranks,
            "batch_size": result.rows.batch_size,
            "steps": result.rows.num_steps,
            "possible_speed_up": result.possible,
            "possible_speed_up_of_single_batches": result.ways[0].total / result.bound,
            "dominated_steps": result.dominated,
            "largest_share": float(result.largest_share.max()),
            "advice": asdict(self.advice(result)),
            "ways": [self._of_way(result, way) for way in result.ways],
        }

    def _of_way(self, result: Comparison, way: DealtRows) -> dict[str, Any]:
        largest = way.largest_to_mean
        return {
            "way": way.name,
            "window": way.window,
            "largest_to_mean": float(largest.mean()),
            "largest_to_mean_p99": float(np.quantile(largest, 0.99)),
            "largest_to_mean_of_sums": way.total,
            "speed_up": result.speed_up(way),
            "speed_up_median": result.median_speed_up(way),
            "share_of_possible": result.share(way),
            "tokens_to_mean": way.fullest,
            "tokens_moved": {f"{slack:g}": share for slack, share in way.moved.items()},
            "bytes_per_rank": self.bytes_per_rank(way),
            "planning_ms": way.planning_ms,
            "step_ms": self.step_ms(way),
            "exchange_ms": self.exchange_ms(way),
        }


def _nothing_gains(result: Comparison) -> Advice:
    """Advice for where no way gains enough, whether one could or not."""
    ranks = f"On {result.num_ranks} ranks"
    if result.possible >= WORTH:
        return Advice(
            f"{ranks} no way of dealing these rows gains 2 %, of {result.possible:.2f}× with equal ranks: leave "
            "balancing off, or look at more rows per step (--batch-size) and longer windows (--window)."
        )
    most = max(1.0, *(result.speed_up(way) for way in result.ways))
    return Advice(
        f"{ranks} these lengths are even as they are loaded: balancing gains {most:.2f}× at most, leave it off."
    )


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
    if not windows:
        return None
    least = min(way.total for way in windows)
    return next(way for way in windows if way.total <= WORTH * least)


def print_answer(answer: Answer) -> None:
    """A table per number of ranks, what to know of it, and the advice."""
    console = make_console(width=_WIDTH, highlight=False)
    rows = "drawn" if answer.num_rows is None else f"{answer.num_rows:,} rows"
    tokens = ", ".join(f"{name} {value:,.0f}" for name, value in answer.quantiles().items())
    console.print(Text(f"{answer.source}: {rows}; tokens of a row: {tokens}"))
    console.print(Text(f"cost: {answer.task}"))
    for result in answer.comparisons:
        table, left_out = _fitting_table(answer, result, console)
        console.print(table)
    if left_out:
        console.print(f"Lines are too short for {', '.join(left_out)}, which wider ones show, and --json.")
    slacks = ", ".join(f"{slack:.0%}" for slack in SLACKS)
    for line in (
        "mean, p99: largest load ÷ mean, over steps; possible: speed-up ÷ that of equal ranks; "
        "tokens: fullest rank ÷ mean;",
        f"moved: of all tokens, with slack {slacks}; kB: of the busiest rank per step, and plan ms, with slack "
        f"{TRAINED_SLACK:.0%}.",
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
        table = _table(result, [{name: row[name] for name in names[:shown]} for row in cells])
        if console.measure(table, options=wide).minimum <= console.width:
            break
    return table, names[shown:]


def _table(result: Comparison, cells: list[dict[str, str]]) -> Table:
    title = (
        f"{result.num_ranks} ranks × {result.rows.batch_size} rows, {result.rows.num_steps} steps: "
        f"{result.possible:.2f}× possible"
    )
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
    largest = way.largest_to_mean
    size = answer.bytes_per_rank(way)
    moved = " / ".join(f"{100 * way.moved[slack]:.0f}" if slack in way.moved else "–" for slack in SLACKS)
    cells = {
        "": way.name,
        "mean": f"{largest.mean():.3f}",
        "p99": f"{np.quantile(largest, 0.99):.3f}",
        "speed-up": f"{result.speed_up(way):.2f}×",
        "possible": f"{result.share(way):.0%}",
        "tokens": f"{way.fullest:.2f}",
        "moved %": moved if way.moved else "–",
        "kB": "–" if size is None else f"{size / 1e3:,.1f}",
        "plan ms": "–" if way.planning_ms is None else f"{way.planning_ms:.2f}",
    }
    if answer.time is not None and answer.time.peak_tflops is not None:
        cells["step ms"] = _ms(answer.step_ms(way))
    if answer.time is not None and answer.time.link_gbps is not None:
        cells["exchange ms"] = _ms(answer.exchange_ms(way))
    return cells


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
