"""`evenrank report`: what balancing gained in a run and where the time went, from the log that the run has left.

The answer is a table with a column for every run, notes, advice and pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from commons.cli.answer import ON_TERMINAL, Answer, AnswerOutputs, AnswerTable, Section
from commons.console import format_number
from commons.run_log.advice import advice_of, headline_of, verdict_on, warning_of
from commons.run_log.comparison import RunComparison, beside_as_loaded, best_first, compare_runs
from commons.run_log.files import LOG_FILE
from commons.run_log.reading import read_runs, setting, short_names
from commons.run_log.report import RunReport
from commons.run_log.standard_error import shown_with_error, with_errors
from commons.run_log.step_time import PARTS

# Slow ranks that a note names, and runs whose speed stands among the first numbers; of more, the fastest.
_MOST_NAMED = 4

_Cell = Callable[[RunReport], str]
_TERMS = (
    ("imbalance", "largest load of a rank ÷ the mean − 1; all ranks wait for the largest. Mean over steps"),
    ("speed-up of the slowest rank", "largest load as loaded ÷ largest load as balanced, both summed over steps"),
    ("possible", "largest load as loaded ÷ the load that no plan can go below, both summed over steps"),
    (
        "speed-up of a step, measured",
        "what a step would take without balancing ÷ what it takes, the exchange and the waiting included, at the "
        "milliseconds per load that the steps of the run itself show",
    ),
    ("work at the bound", "milliseconds per load times the load that no plan can go below"),
    ("unevenness that is left", "the same of what the slowest rank has above that"),
    ("the rest", "what does not grow with the slowest rank's load: embeddings, optimizer, gradients, data"),
    ("hidden", "the part of gather and plan that no step waited for"),
    ("keys", "embedding lookups that a rank brings; how tables are sharded decides who looks them up"),
)


@dataclass
class Report:
    """Say what balancing gained in a run and where its time went; runs beside each other are compared with the first.

    Reads log.jsonl of a run's folder (trainer.run_dir), also while the run goes on.

    For example:
      evenrank report runs/train
      evenrank report runs/unbalanced runs/balanced --html report.html
      evenrank report runs/train --figure report.png
      evenrank report runs/train --json
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, the one to compare with first."""

    of_output: Annotated[AnswerOutputs, tyro.conf.arg(name="output"), tyro.conf.OmitArgPrefixes] = ON_TERMINAL
    """Where the report goes."""

    def run(self) -> None:
        """Read, compute, print, draw."""
        if not self.runs:
            raise ValueError("no run is given; report reads the folders of runs (trainer.run_dir): give one or more")
        self.of_output.require({f"the log of {run}": run / LOG_FILE for run in self.runs})
        self.of_output.give(answer_of([RunReport(log) for log in read_runs(self.runs)]))


def answer_of(reports: Sequence[RunReport]) -> Answer:
    """The answer on runs, at least one; all but the first are compared with it."""
    beside = compare_runs(reports)
    notes, advice = _notes(reports, beside), _advice(reports, beside)
    names = tuple(report.log.name for report in reports)
    return Answer(
        title="What balancing gained" if beside else f"What balancing gained in {names[0]}",
        answer=advice[-1],
        figures=tuple(_figures(reports)),
        sections=(
            Section("All numbers", tables=(AnswerTable(("", *names), tuple(_rows(reports, beside))),), notes=notes),
            Section(
                "Beside each other" if beside else "Balance over the run",
                tuple(advice[:-1]),
                lambda: import_module("commons.cli.report_pictures").pictures_of(reports),
            ),
            Section("How to read it", terms=_TERMS),
        ),
        content={
            "runs": [report.to_dict() for report in reports],
            "beside_the_first": [each.to_dict() for each in beside],
            "notes": notes,
            "advice": advice,
        },
    )


def _rows(reports: Sequence[RunReport], beside: Sequence[RunComparison]) -> Iterator[tuple[str, ...]]:
    """The table as text, without rows that no run knows; a heading has one cell."""
    sections = {
        title: [(label, *map(cell, reports)) for label, cell in cells.items()] for title, cells in _SECTIONS.items()
    }
    sections["after training"] = list(_results(reports))
    if beside:
        sections[f"beside {beside[0].base}"] = list(_differences(beside))
    for title, rows in sections.items():
        known = [row for row in rows if any(row[1:])]
        if title and known:
            yield (title,)
        yield from known


def _results(reports: Sequence[RunReport]) -> Iterator[tuple[str, ...]]:
    """Loss and the last evaluation."""
    yield "loss", *(format_number("{:.4f}", report.loss) for report in reports)
    evaluations = [{name: each for name, *each in with_errors(report.evaluation)} for report in reports]
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation):
        pattern = "{:,.0f}" if name == "rows" else "{:.4f}"
        yield f"eval {name}", *(_metric(pattern, *evaluation.get(name, (None, None))) for evaluation in evaluations)


def _differences(beside: Sequence[RunComparison]) -> Iterator[tuple[str, ...]]:
    """How every run differs from the first."""
    for label, cell in _BESIDE.items():
        yield label, "", *map(cell, beside)
    for name in dict.fromkeys(name for each in beside for name in each.evaluation):
        apart = (_metric("{:+.1e}", each.evaluation.get(name), each.standard_errors.get(name)) for each in beside)
        yield f"eval {name}, difference", "", *apart


def _notes(reports: Sequence[RunReport], beside: Sequence[RunComparison]) -> tuple[str, ...]:
    """What to know of the runs, a line each."""
    of_runs = [f"{report.log.name}: {note}." for report in reports for note in _notes_on(report)]
    apart = [
        f"{each.run} beside {each.base} differs in {'; '.join(each.differences)}: not balancing alone tells them apart."
        for each in beside
        if each.differences
    ]
    return (*of_runs, *apart)


def _notes_on(report: RunReport) -> Iterator[str]:
    yield from report.log.notes
    if len(report.log.num_ranks) > 1:
        yield f"the number of ranks has changed: {', '.join(map(str, report.log.num_ranks))}; means are over all lines"
    named = [f"rank {each.rank} at {each.speed:.2f}" for each in report.slow_ranks[:_MOST_NAMED]]
    if named:
        more = f" and {len(report.slow_ranks) - _MOST_NAMED} more" if len(report.slow_ranks) > _MOST_NAMED else ""
        yield f"slow ranks, by the median of the others' load per ms: {', '.join(named)}{more}; that is not the data"


def _advice(reports: Sequence[RunReport], beside: Sequence[RunComparison]) -> list[str]:
    """What to make of every run, and of several, last, all of them compared."""
    if not beside:
        return [line for line in (warning_of(reports[0]), advice_of(reports[0])) if line]
    # Beside a balanced run, the advice to turn balancing on is of no use.
    advised = [report for report in reports if report.balancing != "off"] or reports
    over_as_loaded = beside_as_loaded(reports)
    of_runs = [
        f"{report.log.name}: {line}"
        for report in advised
        for line in (warning_of(report), advice_of(report, over_as_loaded.get(report.log.name)))
        if line
    ]
    verdicts = [verdict_on(each, reports[0], report) for each, report in zip(beside, reports[1:])]
    # A verdict that is the headline is left out.
    more = [line for each, line in zip(beside, verdicts) if line and line != headline_of([each])]
    return [*of_runs, *more, headline_of(best_first(reports))]


def _figures(reports: Sequence[RunReport]) -> list[tuple[str, str]]:
    """The numbers to see first: of several runs the speed of each, best first, and what balancing did in the best."""
    by_name = {report.log.name: report for report in reports}
    names = dict(zip(by_name, short_names(list(by_name))))
    compared = [each for each in best_first(reports) if each.compares]
    report = by_name[compared[0].run] if compared else reports[-1]
    gain, of = report.gain, f", {names[report.log.name]}" if len(reports) > 1 else ""
    would = "" if report.balancing == "balanced" else " if balanced"
    figures: list[tuple[float | None, str, str]] = [
        (each.rows_per_s, "{:.2f}×", f"rows per second of {names[each.run]} ÷ {names[each.base]}")
        for each in compared[:_MOST_NAMED]
    ]
    figures += [
        (gain.imbalance_before, "{:.1%}", f"imbalance as loaded{of}"),
        (gain.imbalance_after, "{:.1%}", f"imbalance{would or ' as balanced'}{of}"),
        (gain.work, "{:.2f}×", f"speed-up of the slowest rank{would}{of}"),
        (gain.step, "{:.2f}×", f"speed-up of a step{would}, measured{of}"),
    ]
    return [(pattern.format(value), name) for value, pattern, name in figures if value is not None]


def _metric(pattern: str, value: float | None, error: float | None) -> str:
    """A metric and its standard error, "" for what is not known."""
    return "" if value is None or value != value else shown_with_error(value, error, pattern)


def _of(part: str, name: str, pattern: str) -> _Cell:
    """A cell: an attribute of a part of the report; "" where there is no such part."""
    return lambda report: format_number(pattern, getattr(getattr(report, part), name, None))


def _change(before: str, after: str) -> _Cell:
    """A cell: two fractions of the gain and an arrow, or the one that is known."""

    def cell(report: RunReport) -> str:
        both = (getattr(report.gain, before), getattr(report.gain, after))
        return " → ".join(f"{each:.1%}" for each in both if each is not None)

    return cell


def _if_moved(cell: _Cell, otherwise: _Cell = lambda report: "") -> _Cell:
    """A cell of runs that move rows."""
    return lambda report: (cell if report.balancing == "balanced" and not report.by_work else otherwise)(report)


def _balancing(report: RunReport) -> str:
    if report.by_work:
        is_sampler = setting(report.log.config, "trainer.balance_sampler") is True
        return "read by work" if is_sampler else "dealt out by work"
    if report.balancing == "balanced":
        return "each batch" if report.window == 1 else f"windows of {report.window}"
    return "observed" if report.balancing == "observed" else "no"


def _speeds(report: RunReport) -> str:
    if not report.gain.speeds:
        return ""
    least, more = report.given_less[:1], len(report.given_less) - 1
    named = "".join(f", rank {each.rank} at {each.speed:.2f}" for each in least) + (
        f", {more} more" if more > 0 else ""
    )
    would = " if measured" if setting(report.log.config, "trainer.shuffler.speeds") == "observe" else ""
    return f"{report.gain.speeds:.1%}{would}{named}"


def _part(name: str) -> _Cell:
    """A cell: a part of a step, and its share."""

    def cell(report: RunReport) -> str:
        parts = {} if report.step_time is None else report.step_time.parts()
        if report.step_time is None or name not in parts or len(parts) == 1:  # all of a step is no part of it
            return ""
        return f"{parts[name]:,.1f} ({parts[name] / max(1e-12, report.step_time.total):.0%})"

    return cell


def _each_step(beside: RunComparison) -> str:
    each = beside.each_step
    return "" if each is None else f"{each.median:.2f}× ({each.low:.2f} to {each.high:.2f})"


# By section and label, what a run has there.
_SECTIONS: Mapping[str, Mapping[str, _Cell]] = {
    "": {
        "steps": lambda report: f"{report.steps:,}",
        "ranks": lambda report: format_number("{}", report.ranks),
        "rows per step": lambda report: format_number("{:,.0f}", report.rows_per_step),
        "balanced": _balancing,
    },
    "speed": {
        "median step, ms": _of("speed", "step_ms", "{:,.1f}"),
        "rows per second": _of("speed", "rows_per_s", "{:,.1f}"),
        "tokens per second": _of("speed", "tokens_per_s", "{:,.0f}"),
        "TFLOPS per rank": _of("speed", "tflops_per_rank", "{:,.3g}"),
        "MFU": _of("speed", "mfu", "{:.1%}"),
    },
    "balance": {
        "imbalance, mean": _change("imbalance_before", "imbalance_after"),
        "imbalance, worst line": _change("worst_before", "worst_after"),
        "speed-up of the slowest rank": _of("gain", "work", "{:.2f}×"),
        "  possible": _of("gain", "possible", "{:.2f}×"),
        "speed-up of a step, measured": _of("gain", "step", "{:.2f}×"),
        "  by the calibration": _of("gain", "predicted_step", "{:.2f}×"),
        "saved by speeds, of own work": _speeds,
        "tokens moved": _if_moved(_of("gain", "token_fraction_moved", "{:.1%}")),
        "kB sent by rank 0 in a step": _if_moved(
            lambda report: format_number("{:,.1f}", (report.gain.bytes_sent or 0) / 1e3)
        ),
        "steps not worth it (gated)": lambda report: format_number("{:.0%}", report.gain.gated or None),
        "imbalance of keys": _if_moved(
            _change("lookups_before", "lookups_after"), _of("gain", "lookups_before", "{:.1%}")
        ),
    },
    "a mean step, ms": {
        **{name: _part(name) for name in PARTS},
        "all of it": _of("step_time", "total", "{:,.1f}"),
        "balancing takes off": lambda report: (
            "" if report.balancing == "off" else _of("step_time", "saved", "{:,.1f}")(report)
        ),
    },
    "beside the steps, ms of a step": {
        "gather": _of("background", "gather_ms", "{:,.1f}"),
        "plan": _of("background", "plan_ms", "{:,.1f}"),
        "exchange of windows": _of("background", "exchange_ms", "{:,.1f}"),
        "hidden": _of("background", "hidden", "{:.1%}"),
    },
}
# By label, how a run differs from the first.
_BESIDE: Mapping[str, Callable[[RunComparison], str]] = {
    "speed-up, rows per second": lambda each: format_number("{:.2f}×", each.rows_per_s),
    "speed-up, median step": lambda each: format_number("{:.2f}×", each.step_ms),
    "speed-up, median of the steps": _each_step,
    "speed-up by the loads": lambda each: format_number("{:.2f}×", each.work),
    "loss difference, largest": lambda each: format_number("{:.1e}", each.loss.largest if each.loss else None),
    "loss difference, at the end": lambda each: format_number("{:.1e}", each.loss.at_end if each.loss else None),
}
