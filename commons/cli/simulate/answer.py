"""What `evenrank simulate` answers: a table for each number of ranks, pictures, and one sentence of advice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from commons.cli.answer import Answer, AnswerTable, Section
from commons.cli.simulate.simulation import OF_LAYERS, Simulation
from commons.console import format_number
from commons.perf_model.gain import TRAINED_SLACK, Comparison, DealtRows


class _Column(NamedTuple):
    """A number of every way, by its name in the JSON; left out where no way has it."""

    heading: str
    number: str
    shown: Callable[[Any], str]
    meaning: str


def _by(pattern: str) -> Callable[[Any], str]:
    return lambda value: format_number(pattern, value, "–")


def _ms(value: float | None) -> str:
    return format_number("{:,.3g}" if value is None or value < 100 else "{:,.0f}", value, "–")


def _moved(by_slack: dict[str, float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in by_slack.values()) or "–"


_COLUMNS = (
    _Column("mean", "largest_to_mean", _by("{:.3f}"), "over steps, the largest load of a rank ÷ the mean"),
    _Column("p99", "largest_to_mean_p99", _by("{:.3f}"), "the same, 99th percentile"),
    _Column("speed-up", "speed_up", _by("{:.2f}×"), "work per time ÷ that of the rows as loaded"),
    _Column("possible", "possible_speed_up", _by("{:.2f}×"), "no plan of that kind gains more"),
    _Column("tokens", "tokens_to_mean", _by("{:.2f}"), "of the fullest rank of any step ÷ the mean"),
    _Column("moved %", "tokens_moved", _moved, "tokens that change rank, of all, where a plan may give up {slacks}"),
    _Column(
        "kB",
        "bytes_per_rank",
        lambda size: format_number("{:,.1f}", size and size / 1e3, "–"),
        f"what the busiest rank sends or receives in a step, with a slack of {TRAINED_SLACK:.0%}",
    ),
    _Column("plan ms", "planning_ms", _by("{:.2f}"), "processor time of a step's plan, hidden behind the steps before"),
    _Column("step ms", "step_ms", _ms, "by the slowest rank's load"),
    _Column("exchange ms", "exchange_ms", _ms, "the busiest rank's bytes ÷ the link's rate, beside the steps"),
)
_HOW_TO_READ = (
    "Every way deals the same rows, as training would. Without a calibration a speed-up is that of the layers: "
    "embeddings, the optimizer and the all-reduce of gradients take as long before as after, so that a whole step "
    "gains less. Windows and steps of constant cost change which rows share a step. A line with the name of another in "
    "brackets is the same as that one (=), or looks the same (≈)."
)


def answer_of(simulation: Simulation) -> Answer:
    """All that a simulation has to say."""
    source, advice, content = simulation.source, simulation.advice(), simulation.to_dict()
    rows = "" if source.num_rows is None else f"{source.num_rows:,} rows, "
    tokens = ", ".join(f"{name} {value:,.0f}" for name, value in simulation.quantiles().items())
    of_rows = f"{rows}{source.batch_size} rows per rank; tokens of a row: {tokens}"
    numbers = [of_ranks["ways"] for of_ranks in content["ranks"]]
    of_ways = list(itertools.chain(*numbers))
    columns = [column for column in _COLUMNS if any(way[column.number] for way in of_ways)]
    slacks = ", ".join(dict.fromkeys(f"{float(slack):.0%}" for way in of_ways for slack in way["tokens_moved"]))
    tables = [_table(simulation, result, columns, ways) for result, ways in zip(simulation.comparisons, numbers)]

    def pictures() -> Sequence[Any]:
        from commons.cli.simulate.pictures import pictures_of  # draws: a table needs none of it

        return pictures_of(simulation)

    of_fewer = [simulation.advice(result) for result in simulation.comparisons[:-1]]
    fewer = Section("On fewer ranks", tuple(f"{each.text} {each.options}".rstrip() for each in of_fewer))
    return Answer(
        title="What balancing would gain",
        subtitle=f"{source.name}: {of_rows}; cost: {source.task}",
        answer=advice.text,
        copy=tuple(line for line in (advice.options, advice.code) if line),
        figures=_figures(simulation, simulation.comparisons[-1]),
        sections=(
            *([fewer] if of_fewer else []),
            Section("Where the work is", tuple(simulation.dominated()), pictures),
            Section(
                "Every way of dealing the rows",
                tables=tuple(tables),
                terms=tuple((column.heading, column.meaning.format(slacks=slacks)) for column in columns),
                notes=simulation.notes,
            ),
            Section("How to read it", notes=(_HOW_TO_READ,)),
        ),
        content=content,
    )


def _figures(simulation: Simulation, largest: Comparison) -> tuple[tuple[str, str], ...]:
    """The first balanced way, the one that is advised and the best, each once."""
    batch = largest.balanced_batch
    advised = simulation.advice(largest).way
    best = max(largest.ways, key=largest.speed_up)
    layers = " of the layers" if simulation.source.of_what == OF_LAYERS else ""
    shown = [way for way in largest.ways if way is batch or way is best or way.name == advised]
    return (
        (f"{1 + largest.ways[0].imbalance:.2f}", f"largest load ÷ mean as loaded, on {largest.num_ranks} ranks"),
        *(
            (
                f"{largest.speed_up(way):.2f}×",
                f"speed-up{layers}, {'each batch balanced' if way is batch else way.name}",
            )
            for way in shown
        ),
        (f"{largest.equal:.2f}×", "if all ranks were equal"),
    )


def _table(
    simulation: Simulation, result: Comparison, columns: Sequence[_Column], numbers: Sequence[Mapping[str, Any]]
) -> AnswerTable:
    names = [way.name for way in result.ways]
    advised = simulation.advice(result).way
    return AnswerTable(
        ("", *(column.heading for column in columns)),
        tuple(
            (_marked(result.ways, place), *(column.shown(of_way[column.number]) for column in columns))
            for place, of_way in enumerate(numbers)
        ),
        f"{result.num_ranks} ranks × {simulation.source.batch_size} rows, {result.rows.num_steps} steps: "
        f"{result.equal:.2f}× with equal ranks",
        marked=names.index(advised) if advised in names else None,
        is_cut=True,
    )


def _marked(ways: Sequence[DealtRows], place: int) -> str:
    """The name of a way, with that of an earlier one that gives ranks the same loads."""
    name, loads = ways[place].name, np.sort(ways[place].loads, axis=1)
    alike = (way.name for way in ways[:place] if np.array_equal(np.sort(way.loads, axis=1), loads))
    same = next(alike, None)
    return name if same is None else f"{name} (= {same})"
