"""The page of `evenrank simulate --html`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commons.cli.page import Page, PageTable, Section
from commons.cli.simulate_answer import Answer, cells_of, heading_of
from commons.cli.simulate_pictures import pictures_of
from commons.perf_model.gain import TRAINED_SLACK, Comparison, DealtRows

_COLUMNS = {
    "mean": "mean, p99: over steps, the largest load of a rank ÷ the mean.",
    "speed-up": "work per time ÷ that of the rows as loaded.",
    "possible": "the speed-up at the lower bound of the plans: none of that kind gains more.",
    "tokens": "tokens of the fullest rank of any step ÷ the mean: what memory has to hold.",
    "moved %": "tokens that change rank, of all, where a plan may give up {slacks} of the balance.",
    "kB": f"what the busiest rank sends or receives in a step, with a slack of {TRAINED_SLACK:.0%}.",
    "plan ms": "processor time of a step's plan on this machine; in training it is hidden behind the steps before.",
    "step ms": "by the calibration, or three times the slowest rank's forward operations ÷ (peak × MFU).",
    "exchange ms": "the bytes of the busiest rank ÷ the link's rate; it runs beside the steps.",
}
_HOW_TO_READ = (
    "Every way deals the same rows, as training would. Without a calibration a speed-up is that of the layers: "
    "embeddings, the optimizer and the all-reduce of gradients take as long before as after, so that a whole step "
    "gains less. Windows and steps of constant cost change which rows share a step. A line with the name of another in "
    "brackets is the same as that one (=), or looks the same (≈)."
)


def page_of(answer: Answer, command: str) -> Page:
    """The answer as a page, which ends with the command that made it."""
    advice, largest = answer.advice(), answer.comparisons[-1]
    tables = tuple(_table(answer, result) for result in answer.comparisons)
    slacks = ", ".join(f"{slack:.0%}" for slack in answer.slacks)
    advices = [answer.advice(result) for result in answer.comparisons]
    by_ranks = Section(
        "What to do, by number of ranks",
        paragraphs=tuple(f"{each.text} {each.options}".rstrip() for each in advices),
    )
    return Page(
        title="What balancing would gain",
        subtitle=f"{answer.title}. Cost: {answer.source.task}.",
        answer=advice.text,
        copy=tuple(line for line in (advice.options, advice.code) if line),
        figures=_figures(answer, largest),
        sections=(
            *([by_ranks] if len(advices) > 1 else []),  # of one number, the first lines say it
            Section(
                "Where the work is",
                paragraphs=tuple(answer.dominant()),
                pictures=pictures_of(answer),
            ),
            Section(
                "Every way of dealing the rows",
                tables=tables,
                terms=tuple(
                    (name, text.format(slacks=slacks)) for name, text in _COLUMNS.items() if name in tables[0].columns
                ),
                notes=(*answer.notes, _HOW_TO_READ),
            ),
        ),
        command=command,
    )


def _figures(answer: Answer, largest: Comparison) -> tuple[tuple[str, str], ...]:
    """The first balanced way, the one that is advised and the best, each once."""
    batch = next(way for way in largest.ways if way.name in ("refined", "each batch"))
    advised = answer.advice(largest).way
    best = max(largest.ways, key=largest.speed_up)
    layers = " of the layers" if answer.source.of_what == "in the layers' time" else ""
    on_ranks = f"on {largest.num_ranks} ranks"
    return (
        (f"{1 + largest.ways[0].imbalance:.2f}", f"largest load ÷ mean as loaded, {on_ranks}"),
        *(
            (
                f"{largest.speed_up(way):.2f}×",
                f"speed-up{layers}, {'each batch balanced' if way is batch else way.name}",
            )
            for way in largest.ways
            if way is batch or way is best or way.name == advised
        ),
        (f"{largest.equal:.2f}×", "if all ranks were equal"),
    )


def _table(answer: Answer, result: Comparison) -> PageTable:
    cells = [cells_of(answer, result, way) for way in result.ways]
    names = [way.name for way in result.ways]
    advised = answer.advice(result).way
    return PageTable(
        tuple(cells[0]),
        tuple((_marked(result.ways, place), *list(row.values())[1:]) for place, row in enumerate(cells)),
        heading_of(answer, result),
        marked=names.index(advised) if advised in names else None,
    )


def _marked(ways: Sequence[DealtRows], place: int) -> str:
    """The name of a way, with that of an earlier one that gives ranks the same loads."""
    name, loads = ways[place].name, np.sort(ways[place].loads, axis=1)
    alike = (way.name for way in ways[:place] if np.array_equal(np.sort(way.loads, axis=1), loads))
    same = next(alike, None)
    return name if same is None else f"{name} (= {same})"
