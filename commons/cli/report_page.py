"""The page of `evenrank report --html`."""

from __future__ import annotations

from commons.cli.page import Page, PageTable, Section
from commons.cli.report_answer import ReportAnswer
from commons.cli.report_pictures import pictures_of, short_names
from commons.run_log.comparison import best_first
from commons.run_log.report import RunReport

# Runs whose speed stands among the first numbers; of more, the fastest.
_MOST_SPEEDS = 4
_TERMS = (
    ("imbalance", "largest load of a rank ÷ the mean − 1; all ranks wait for the largest. Mean over steps."),
    ("speed-up of the slowest rank", "largest load as loaded ÷ largest load as balanced, both summed over steps."),
    ("possible", "largest load as loaded ÷ the load that no plan can go below, both summed over steps."),
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


def page_of(answer: ReportAnswer, command: str) -> Page:
    """The report as a page, which ends with the command that made it."""
    reports, advice = answer.reports, answer.advice()
    rows: list[tuple[str, ...]] = []
    for title, of_section in answer.sections():
        rows += [(title,)] if title else []
        rows += [(label, *cells) for label, cells in of_section]
    table = PageTable(("", *(report.log.name for report in reports)), tuple(rows))
    numbers = Section("All numbers", tables=(table,), notes=tuple(answer.notes()))
    pictures = pictures_of(reports)
    if answer.beside:
        sections = [numbers, Section("Beside each other", tuple(advice[:-1]), pictures)]
    else:
        sections = [*([Section("Balance over the run", pictures=pictures)] if pictures else []), numbers]
    return Page(
        title="What balancing gained",
        subtitle="; ".join(map(_describe, reports)) + ".",
        answer=advice[-1] if answer.beside else " ".join(advice),
        copy=(),
        figures=tuple(_figures(answer)),
        sections=(*sections, Section("How to read it", terms=_TERMS)),
        command=command,
    )


def _describe(report: RunReport) -> str:
    parts = [f"{report.steps:,} steps"]
    if report.ranks is not None:
        parts.append(f"{report.ranks} ranks")
    if report.rows_per_step is not None:
        parts.append(f"{report.rows_per_step:,.0f} rows per step")
    return f"{report.log.name}: {', '.join(parts)}"


def _figures(answer: ReportAnswer) -> list[tuple[str, str]]:
    """The numbers to see first: of several runs the speed of each, best first, and what balancing did in the best."""
    reports = {report.log.name: report for report in answer.reports}
    names = dict(zip(reports, short_names(answer.reports)))
    compared = [each for each in best_first(answer.reports) if each.compares]
    report = reports[compared[0].run] if compared else answer.reports[-1]
    gain, of = report.gain, f", {names[report.log.name]}" if answer.beside else ""
    would = "" if report.balancing == "balanced" else " if balanced"
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
