"""The page of `evenrank report --html`."""

from __future__ import annotations

from collections.abc import Sequence

from commons.cli.page import Page, PageTable, Section
from commons.cli.report_pictures import pictures_of_each, pictures_of_runs, short_names
from commons.cli.report_table import advice_lines, notes_of, sections_of
from commons.run_log.comparison import Against
from commons.run_log.report import RunReport

_TERMS = (
    ("imbalance", "largest load of a rank ÷ the mean − 1; all ranks wait for the largest. Mean over steps."),
    ("speed-up of the slowest rank", "largest load as loaded ÷ largest load as balanced, both summed over steps."),
    ("possible", "largest load as loaded ÷ the load that no plan can go below."),
    (
        "speed-up of a step, measured",
        "what a step would take without balancing ÷ what it takes, the exchange and the waiting included, at the "
        "milliseconds per load that the steps of the run itself show.",
    ),
    ("work at the bound", "milliseconds per load times the load that no plan can go below."),
    ("unevenness that is left", "the same of what the slowest rank has above that."),
    ("the rest", "what does not grow with the slowest rank's load: embeddings, optimizer, gradients, data."),
    ("hidden", "the part of gather and plan that no step waited for."),
    ("keys", "embedding lookups that a rank brings; how tables are sharded decides who looks them up."),
)


def page_of(reports: Sequence[RunReport], against: Sequence[Against], command: str) -> Page:
    """The report as a page.

    Args:
        reports: of the runs, at least one.
        against: of all but the first, beside that.
        command: how it was made, for the page's end.
    """
    advice, names = advice_lines(reports, against), [report.log.name for report in reports]
    together, several = pictures_of_runs(reports), len(reports) > 1
    sections = [Section("Beside each other", tuple(advice[:-1]), together)] if several else []
    pictures = pictures_of_each(reports) + (() if several else together)
    if pictures:
        sections.append(Section("Balance over the run", pictures=pictures))
    rows: list[tuple[str, ...]] = []
    for title, of_section in sections_of(reports, against):
        rows += [(title,)] if title else []
        rows += [(label, *cells) for label, cells in of_section]
    table = PageTable(("", *names), tuple(rows))
    sections.append(Section("All numbers", tables=(table,), notes=tuple(notes_of(reports, against))))
    sections.append(Section("How to read it", terms=_TERMS))
    return Page(
        title="What balancing gained",
        subtitle="; ".join(map(_describe, reports)) + ".",
        answer=advice[-1],
        copy=(),
        figures=tuple(_figures(reports, against)),
        sections=tuple(sections),
        command=command,
    )


def _describe(report: RunReport) -> str:
    parts = [f"{report.steps:,} steps"]
    if report.ranks is not None:
        parts.append(f"{report.ranks} ranks")
    if report.rows_per_step is not None:
        parts.append(f"{report.rows_per_step:,.0f} rows per step")
    return f"{report.log.name}: {', '.join(parts)}"


def _figures(reports: Sequence[RunReport], against: Sequence[Against]) -> list[tuple[str, str]]:
    """The numbers to see first: of the last run, and of it beside the first."""
    report, names = reports[-1], short_names(reports)
    gain, last = report.gain, against[-1] if against else None
    would = "" if report.balancing == "balanced" else " if balanced"
    of = f", {names[-1]}" if against else ""
    figures = [
        (gain.imbalance_before, "{:.1%}", f"imbalance as loaded{of}"),
        (gain.imbalance_after, "{:.1%}", f"imbalance{would or ' as balanced'}{of}"),
        (gain.work, "{:.2f}×", f"speed-up of the slowest rank{would}{of}"),
        (gain.step, "{:.2f}×", f"speed-up of a step{would}, measured{of}"),
    ]
    if last is not None:
        figures.append((last.rows_per_s, "{:.2f}×", f"rows per second of {names[-1]} ÷ {names[0]}"))
    return [(pattern.format(value), name) for value, pattern, name in figures if value is not None]
