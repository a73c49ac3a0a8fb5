"""The page of `evenrank report --html`."""

from __future__ import annotations

from collections.abc import Sequence

from commons.cli.page import Page, PageTable, Section
from commons.cli.report_pictures import pictures_of, short_names
from commons.cli.report_table import advice_lines, notes_of, sections_of
from commons.run_log.comparison import Against, best_first
from commons.run_log.report import RunReport

# Runs whose speed stands among the first numbers; of more, the fastest.
_MOST_SPEEDS = 4
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
    rows: list[tuple[str, ...]] = []
    for title, of_section in sections_of(reports, against):
        rows += [(title,)] if title else []
        rows += [(label, *cells) for label, cells in of_section]
    table = PageTable(("", *names), tuple(rows))
    numbers = Section("All numbers", tables=(table,), notes=tuple(notes_of(reports, against)))
    pictures, several = pictures_of(reports), len(reports) > 1
    if several:
        sections = [numbers, Section("Beside each other", tuple(advice[:-1]), pictures)]
    else:
        sections = [*([Section("Balance over the run", pictures=pictures)] if pictures else []), numbers]
    sections.append(Section("How to read it", terms=_TERMS))
    return Page(
        title="What balancing gained",
        subtitle="; ".join(map(_describe, reports)) + ".",
        answer=advice[-1] if several else " ".join(advice),
        copy=(),
        figures=tuple(_figures(reports)),
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


def _figures(reports: Sequence[RunReport]) -> list[tuple[str, str]]:
    """The numbers to see first: of several runs the speed of each, best first, and what balancing did in the best."""
    names = dict(zip((report.log.name for report in reports), short_names(reports)))
    compared = [each for each in best_first(reports) if each.compares]
    best = compared[0].run if compared else reports[-1].log.name
    report = next(each for each in reports if each.log.name == best)
    gain = report.gain
    would = "" if report.balancing == "balanced" else " if balanced"
    of = f", {names[best]}" if len(reports) > 1 else ""
    figures: list[tuple[float | None, str, str]] = [
        (each.rows_per_s, "{:.2f}×", f"rows per second of {names[each.run]} ÷ {names[each.base]}")
        for each in compared[:_MOST_SPEEDS]
    ]
    figures += [
        (gain.imbalance_before, "{:.1%}", f"imbalance as loaded{of}"),
        (gain.imbalance_after, "{:.1%}", f"imbalance{would or ' as balanced'}{of}"),
        (gain.work, "{:.2f}×", f"speed-up of the slowest rank{would}{of}"),
        (gain.step, "{:.2f}×", f"speed-up of a step{would}, measured{of}"),
    ]
    return [(pattern.format(value), name) for value, pattern, name in figures if value is not None]
