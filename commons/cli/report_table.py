"""What `evenrank report` prints: a column for every run, what to know of it, and one sentence of advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from commons.console import make_console
from commons.run_log.advice import advice_of, headline_of, verdict_on, warning_of
from commons.run_log.comparison import Against, beside_as_loaded, best_first
from commons.run_log.reading import setting
from commons.run_log.report import RunReport
from commons.run_log.standard_error import shown_with_error, with_errors
from commons.run_log.step_time import PARTS

# Width of a table that no terminal shows.
_WIDTH = 120
# Slow ranks that a note names.
_MOST_NAMED = 4
_UNKNOWN = ""


class Row(NamedTuple):
    """A number of every run.

    Attributes:
        label: what it is.
        cells: one for every run; "" for what is not known.
    """

    label: str
    cells: tuple[str, ...]


class Section(NamedTuple):
    """Rows that belong together.

    Attributes:
        title: what they tell; "" for the first.
        rows: at least one.
    """

    title: str
    rows: tuple[Row, ...]


def sections_of(reports: Sequence[RunReport], against: Sequence[Against]) -> list[Section]:
    """The table as text, without rows that no run knows.

    Args:
        reports: of the runs, at least one.
        against: of all but the first, beside that.
    """
    sections = [
        Section(title, tuple(Row(label, tuple(cell(report) for report in reports)) for label, cell in cells.items()))
        for title, cells in _SECTIONS.items()
    ]
    sections.append(Section("after training", tuple(_results(reports))))
    sections.append(Section(f"beside {against[0].base}" if against else "", tuple(_beside(against))))
    known = [Section(title, tuple(row for row in rows if any(row.cells))) for title, rows in sections]
    return [section for section in known if section.rows]


def notes_of(reports: Sequence[RunReport], against: Sequence[Against]) -> list[str]:
    """What to know of the runs, a line each."""
    of_runs = [f"{report.log.name}: {note}." for report in reports for note in _notes(report)]
    return of_runs + [
        f"{each.run} beside {each.base} differs in {'; '.join(each.differences)}: not balancing alone tells them apart."
        for each in against
        if each.differences
    ]


def print_report(reports: Sequence[RunReport], against: Sequence[Against]) -> None:
    """The table, notes and advice."""
    console = make_console(width=_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for report in reports:
        table.add_column(Text(report.log.name), justify="right", overflow="fold")
    for title, rows in sections_of(reports, against):
        if title:
            table.add_row(Text(title, style="bold"))
        for label, cells in rows:
            table.add_row(Text(f"  {label}"), *cells)  # metrics have names of the user's
    console.print(table)
    for line in notes_of(reports, against):
        console.print(Text(line))
    for line in advice_lines(reports, against):
        console.print(Text(line, style="bold"))


def advice_lines(reports: Sequence[RunReport], against: Sequence[Against]) -> list[str]:
    """What to make of every run, and of several, last, all of them compared."""
    if not against:
        return [said for report in reports for said in (warning_of(report), advice_of(report)) if said]
    # Beside a run that is balanced, nobody has to be told to turn that on.
    told = [report for report in reports if report.balancing != "off"] or reports
    beside = beside_as_loaded(reports)
    of_runs = [
        f"{report.log.name}: {said}"
        for report in told
        for said in (warning_of(report), advice_of(report, beside.get(report.log.name)))
        if said
    ]
    headline = headline_of(best_first(reports))
    verdicts = [verdict_on(each, reports[0], report) for each, report in zip(against, reports[1:])]
    # What the headline says already is not said twice.
    more = [said for each, said in zip(against, verdicts) if said and said != headline_of([each])]
    return [*of_runs, *more, headline]


def _number(pattern: str, value: float | None) -> str:
    """A number by a format, "" for what is not known."""
    return _UNKNOWN if value is None or value != value else pattern.format(value)


def _metric(pattern: str, value: float | None, error: float | None) -> str:
    """A metric and its standard error, "" for what is not known."""
    return _UNKNOWN if value is None or value != value else shown_with_error(value, error, pattern)


def _change(pattern: str, before: float | None, after: float | None) -> str:
    """Two numbers and an arrow, or the one that is known."""
    return " → ".join(pattern.format(each) for each in (before, after) if each is not None)


def _moves(report: RunReport) -> bool:
    return report.balancing == "balanced" and not report.by_work


def _moved(pattern: str, report: RunReport, value: float | None, unit: float = 1.0) -> str:
    """What has moved, of a run that moves rows."""
    return _number(pattern, value / unit) if value is not None and _moves(report) else _UNKNOWN


def _balancing(report: RunReport) -> str:
    if report.by_work:
        is_sampler = setting(report.log.config, "trainer.balance_sampler") is True
        return "read by work" if is_sampler else "dealt out by work"
    if report.balancing == "balanced":
        return "each batch" if report.window == 1 else f"windows of {report.window}"
    return "observed" if report.balancing == "observed" else "no"


def _part(name: str) -> Callable[[RunReport], str]:
    """A part of a step, and its share."""

    def cell(report: RunReport) -> str:
        time = report.step_time
        part = None if time is None else time.parts().get(name)
        if time is None or part is None or len(time.parts()) == 1:  # all of a step is no part of it
            return _UNKNOWN
        return f"{part:,.1f} ({part / time.total:.0%})" if time.total > 0 else f"{part:,.1f}"

    return cell


def _saved(report: RunReport) -> str:
    time = report.step_time
    return _UNKNOWN if time is None or report.balancing == "off" else _number("{:,.1f}", time.saved)


# By section and label, what a run has there.
_SECTIONS: Mapping[str, Mapping[str, Callable[[RunReport], str]]] = {
    "": {
        "steps": lambda report: f"{report.steps:,}",
        "ranks": lambda report: _number("{}", report.ranks),
        "rows per step": lambda report: _number("{:,.0f}", report.rows_per_step),
        "balanced": _balancing,
    },
    "speed": {
        "median step, ms": lambda report: _number("{:,.1f}", report.speed.step_ms),
        "rows per second": lambda report: _number("{:,.1f}", report.speed.rows_per_s),
        "tokens per second": lambda report: _number("{:,.0f}", report.speed.tokens_per_s),
        "TFLOPS per rank": lambda report: _number("{:,.3g}", report.speed.tflops_per_rank),
        "MFU": lambda report: _number("{:.1%}", report.speed.mfu),
    },
    "balance": {
        "imbalance, mean": lambda report: _change("{:.1%}", report.gain.imbalance_before, report.gain.imbalance_after),
        "imbalance, worst line": lambda report: _change("{:.1%}", report.gain.worst_before, report.gain.worst_after),
        "speed-up of the slowest rank": lambda report: _number("{:.2f}×", report.gain.work),
        "  possible": lambda report: _number("{:.2f}×", report.gain.possible),
        "speed-up of a step, measured": lambda report: _number("{:.2f}×", report.gain.step),
        "  by the calibration": lambda report: _number("{:.2f}×", report.gain.predicted_step),
        "tokens moved": lambda report: _moved("{:.1%}", report, report.gain.token_fraction_moved),
        "kB sent by rank 0 in a step": lambda report: _moved("{:,.1f}", report, report.gain.bytes_sent, 1e3),
        "steps not worth it (gated)": lambda report: _number("{:.0%}", report.gain.gated or None),
        "imbalance of keys": lambda report: _change(
            "{:.1%}", report.gain.lookups_before, report.gain.lookups_after if _moves(report) else None
        ),
    },
    "a mean step, ms": {
        **{name: _part(name) for name in PARTS},
        "all of it": lambda report: _number("{:,.1f}", None if report.step_time is None else report.step_time.total),
        "balancing takes off": _saved,
    },
    "beside the steps, ms of a step": {
        "gather": lambda report: _number("{:,.1f}", None if report.background is None else report.background.gather_ms),
        "plan": lambda report: _number("{:,.1f}", None if report.background is None else report.background.plan_ms),
        "exchange of windows": lambda report: _number(
            "{:,.1f}", None if report.background is None else report.background.exchange_ms
        ),
        "hidden": lambda report: _number("{:.1%}", None if report.background is None else report.background.hidden),
    },
}


def _results(reports: Sequence[RunReport]) -> Iterator[Row]:
    """Loss and the last evaluation."""
    yield Row("loss", tuple(_number("{:.4f}", report.loss) for report in reports))
    evaluations = [{name: each for name, *each in with_errors(report.evaluation)} for report in reports]
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation):
        pattern = "{:,.0f}" if name == "rows" else "{:.4f}"
        yield Row(
            f"eval {name}", tuple(_metric(pattern, *evaluation.get(name, (None, None))) for evaluation in evaluations)
        )


def _beside(against: Sequence[Against]) -> Iterator[Row]:
    """What tells every run from the first."""
    if not against:
        return
    for label, cells in (
        ("speed-up, rows per second", [_number("{:.2f}×", each.rows_per_s) for each in against]),
        ("speed-up, median step", [_number("{:.2f}×", each.step_ms) for each in against]),
        ("speed-up by the loads", [_number("{:.2f}×", each.work) for each in against]),
        ("loss difference, largest", [_number("{:.1e}", each.loss.largest if each.loss else None) for each in against]),
        (
            "loss difference, at the end",
            [_number("{:.1e}", each.loss.at_end if each.loss else None) for each in against],
        ),
    ):
        yield Row(label, (_UNKNOWN, *cells))
    for name in dict.fromkeys(name for each in against for name in each.evaluation):
        apart = [_metric("{:+.1e}", each.evaluation.get(name), each.standard_errors.get(name)) for each in against]
        yield Row(f"eval {name}, difference", (_UNKNOWN, *apart))


def _notes(report: RunReport) -> Iterator[str]:
    """What to know of a run."""
    yield from report.log.notes
    if len(report.log.num_ranks) > 1:
        yield f"the number of ranks has changed: {', '.join(map(str, report.log.num_ranks))}; means are over all lines"
    named = report.slow_ranks[:_MOST_NAMED]
    more = f" and {len(report.slow_ranks) - len(named)} more" if len(report.slow_ranks) > len(named) else ""
    if named:
        yield (
            f"slow ranks, by the median of the others' load per ms: "
            f"{', '.join(f'rank {each.rank} at {each.speed:.2f}' for each in named)}{more}; that is not the data"
        )
