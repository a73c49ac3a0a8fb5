"""The page of `evenrank simulate --lengths --html`."""

from __future__ import annotations

from commons.cli.page import Page, PageTable, Section
from commons.cli.simulate_answer import Answer, cells_of
from commons.cli.simulate_pictures import pictures_of
from commons.perf_model.gain import SLACKS, TRAINED_SLACK

_COLUMNS = (
    ("mean, p99", "over steps, the largest load of a rank ÷ the mean."),
    ("speed-up", "work per time ÷ that of the rows as loaded, of the layers alone."),
    ("possible", "the speed-up ÷ that of ranks that are all equal in every step."),
    ("tokens", "tokens of the fullest rank of any step ÷ the mean: what memory has to hold."),
    (
        "moved %",
        f"tokens that change rank, of all, where a plan may give up {', '.join(f'{slack:.0%}' for slack in SLACKS)} of "
        "the balance to keep rows where they are.",
    ),
    ("kB", f"what the busiest rank sends or receives in a step, with a slack of {TRAINED_SLACK:.0%}."),
    ("plan ms", "processor time of a step's plan on this machine; in training it is hidden behind the steps before."),
    ("step ms", "three times the slowest rank's forward operations ÷ (peak × MFU)."),
    ("exchange ms", "the bytes of the busiest rank ÷ the link's rate; it runs beside the steps."),
)


def page_of(answer: Answer, command: str) -> Page:
    """The answer as a page.

    Args:
        answer: what was simulated.
        command: how, for the page's end.
    """
    advice, largest = answer.advice(), answer.comparisons[-1]
    refined = next(way for way in largest.ways if way.name == "refined")
    best = max(largest.ways, key=largest.speed_up)
    rows = "drawn from it" if answer.num_rows is None else f"{answer.num_rows:,} rows"
    tokens = ", ".join(f"{name} {value:,.0f}" for name, value in answer.quantiles().items())
    tables = tuple(_table(answer, place) for place in range(len(answer.comparisons)))
    shown = set(tables[0].columns)
    on_ranks = f"on {largest.num_ranks} ranks"
    return Page(
        title="What balancing would gain",
        subtitle=f"{answer.source}: {rows}. Tokens of a row: {tokens}. Cost: {answer.task}.",
        answer=advice.text,
        copy=tuple(line for line in (advice.options, advice.code) if line),
        figures=(
            (f"{largest.ways[0].total:.2f}", f"largest load ÷ mean as loaded, {on_ranks}"),
            (f"{largest.speed_up(refined):.2f}×", "speed-up, each batch balanced"),
            (f"{largest.speed_up(best):.2f}×", f"speed-up, {best.name}"),
            (f"{largest.possible:.2f}×", "possible with equal ranks"),
        ),
        sections=(
            Section(
                "Where the load lies, and what lifts it",
                paragraphs=tuple(answer.dominant()),
                pictures=pictures_of(answer),
            ),
            Section("All ways of dealing the rows", paragraphs=answer.notes, tables=tables),
            Section(
                "How to read it",
                paragraphs=(
                    "Every way deals the same rows, as training would. Speed-up is that of the layers: embeddings, the "
                    "optimizer and the all-reduce of gradients take as long before as after, so that a whole step "
                    "gains less. Windows and steps of constant cost change which rows share a step.",
                ),
                terms=tuple(term for term in _COLUMNS if term[0].split(",")[0] in shown),
            ),
        ),
        command=command,
    )


def _table(answer: Answer, place: int) -> PageTable:
    result = answer.comparisons[place]
    cells = [cells_of(answer, result, way) for way in result.ways]
    best = max(range(len(result.ways)), key=lambda number: result.speed_up(result.ways[number]))
    return PageTable(
        tuple(cells[0]),
        tuple(tuple(row.values()) for row in cells),
        f"{result.num_ranks} ranks × {result.rows.batch_size} rows, {result.rows.num_steps} steps",
        marked=best,
    )
