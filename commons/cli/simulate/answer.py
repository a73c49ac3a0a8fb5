"""The answer of `evenrank simulate`: a table for each number of ranks, pictures, and one sentence of advice."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from commons.cli.answer import Answer, AnswerTable, Section
from commons.cli.simulate.simulation import OF_LAYERS, Simulation
from commons.console import format_number
from commons.perf_model.gain import TRAINED_SLACK, Comparison


class _Column(NamedTuple):
    """A column of the table, with a number for every way; left out if no way has the number."""

    heading: str
    number: str  # its key in the JSON
    shown: str | Callable[[Any], str]  # a format pattern, or a function of the number
    meaning: str


def _ms(value: float | None) -> str:
    return format_number("{:,.3g}" if value is None or value < 100 else "{:,.0f}", value, "–")


_COLUMNS = (
    _Column("mean", "largest_to_mean", "{:.3f}", "over steps, the largest load of a rank ÷ the mean"),
    _Column("p99", "largest_to_mean_p99", "{:.3f}", "99th percentile of the same"),
    _Column("speed-up", "speed_up", "{:.2f}×", "work per time ÷ work per time of the rows as loaded"),
    _Column("possible", "possible_speed_up", "{:.2f}×", "upper bound of the speed-up for plans of this kind"),
    _Column("tokens", "tokens_to_mean", "{:.2f}", "most tokens of a rank in any step ÷ the mean"),
    _Column(
        "moved %",
        "tokens_moved",
        lambda by_slack: " / ".join(f"{100 * share:.0f}" for share in by_slack.values()) or "–",
        "fraction of all tokens that change rank, with a slack of {slacks}",
    ),
    _Column(
        "kB",
        "bytes_per_rank",
        lambda size: format_number("{:,.1f}", size and size / 1e3, "–"),
        f"data that the busiest rank sends or receives in a step, with a slack of {TRAINED_SLACK:.0%}",
    ),
    _Column("plan ms", "planning_ms", "{:.2f}", "processor time of a step's plan, which overlaps with earlier steps"),
    _Column("step ms", "step_ms", _ms, "time of a step, from the slowest rank's load"),
    _Column("exchange ms", "exchange_ms", _ms, "the busiest rank's bytes ÷ the link's rate; not in step ms"),
)
_HOW_TO_READ = (
    "Every way distributes the same rows to the ranks, as training would. Without a calibration, a speed-up is that of "
    "the layers: embeddings, the optimizer and the all-reduce of gradients do not become faster, so a whole step gains "
    "less. Windows and steps of constant cost change which rows share a step. A line that has another line's name in "
    "brackets has equal (=) or nearly equal (≈) values."
)


def answer_of(simulation: Simulation) -> Answer:
    """The answer of a simulation."""
    source, advice, content = simulation.source, simulation.advice(), simulation.to_dict()
    rows = "" if source.num_rows is None else f"{source.num_rows:,} rows, "
    tokens = ", ".join(f"{name} {value:,.0f}" for name, value in simulation.quantiles().items())
    ways = [way for of_ranks in content["ranks"] for way in of_ranks["ways"]]
    columns = [column for column in _COLUMNS if any(way[column.number] for way in ways)]
    slacks = ", ".join(dict.fromkeys(f"{float(slack):.0%}" for way in ways for slack in way["tokens_moved"]))
    of_fewer = [of_ranks["advice"] for of_ranks in content["ranks"][:-1]]
    fewer = Section("On fewer ranks", tuple(f"{each['text']} {each['options']}".rstrip() for each in of_fewer))
    return Answer(
        title="What balancing would gain",
        subtitle=(
            f"{source.name}: {rows}{source.batch_size} rows per rank; tokens of a row: {tokens}; cost: {source.task}"
        ),
        answer=advice.text,
        copy=tuple(line for line in (advice.options, advice.code) if line),
        figures=_figures(simulation.comparisons[-1], advice.way, " of the layers" * (source.of_what == OF_LAYERS)),
        sections=(
            *([fewer] if of_fewer else []),
            Section(
                "Where the work is",
                tuple(simulation.dominated()),
                lambda: import_module("commons.cli.simulate.pictures").pictures_of(simulation),
            ),
            Section(
                "Every way to distribute the rows",
                tables=tuple(
                    _table(columns, result, of_ranks)
                    for result, of_ranks in zip(simulation.comparisons, content["ranks"])
                ),
                terms=tuple((column.heading, column.meaning.format(slacks=slacks)) for column in columns),
                notes=simulation.notes,
            ),
            Section("How to read it", notes=(_HOW_TO_READ,)),
        ),
        content=content,
    )


def _figures(largest: Comparison, advised: str | None, layers: str) -> tuple[tuple[str, str], ...]:
    """The most important numbers: of the first balanced way, the advised way and the best way, each once."""
    batch, best = largest.balanced_batch, max(largest.ways, key=largest.speed_up)
    shown = {
        "each batch balanced" if way is batch else way.name: f"{largest.speed_up(way):.2f}×"
        for way in largest.ways
        if way is batch or way is best or way.name == advised
    }
    return (
        (f"{1 + largest.ways[0].imbalance:.2f}", f"largest load ÷ mean as loaded, on {largest.num_ranks} ranks"),
        *((speed_up, f"speed-up{layers}, {name}") for name, speed_up in shown.items()),
        (f"{largest.equal:.2f}×", "if all ranks were equal"),
    )


def _table(columns: list[_Column], result: Comparison, of_ranks: dict[str, Any]) -> AnswerTable:
    names, rows, advised = [way.name for way in result.ways], [], of_ranks["advice"]["way"]
    loads = [np.sort(way.loads, axis=1) for way in result.ways]
    for number, (name, numbers) in enumerate(zip(names, of_ranks["ways"])):
        # A way with the same loads as an earlier way has the earlier way's name in brackets.
        same = next(earlier for earlier in range(number + 1) if np.array_equal(loads[earlier], loads[number]))
        cells = (
            format_number(each.shown, numbers[each.number], "–")
            if isinstance(each.shown, str)
            else each.shown(numbers[each.number])
            for each in columns
        )
        rows.append((name if same == number else f"{name} (= {names[same]})", *cells))
    return AnswerTable(
        ("", *(column.heading for column in columns)),
        tuple(rows),
        f"{of_ranks['ranks']} ranks × {of_ranks['batch_size']} rows, {of_ranks['steps']} steps: "
        f"{result.equal:.2f}× with equal ranks",
        marked=names.index(advised) if advised in names else None,
        is_cut=True,
    )
