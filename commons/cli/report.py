"""`evenrank report`: reports what balancing gained in a run and where the time went, from the run's log.

The report has a table with a column for every run, notes, advice and pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from commons.cli.answer import ON_TERMINAL, Answer, AnswerOutputs, AnswerTable, Section
from commons.console import format_number
from commons.run_log.advice import advice_of, headline_of, verdict_on, warning_of
from commons.run_log.comparison import RunComparison, best_first, compare_runs
from commons.run_log.files import LOG_FILE
from commons.run_log.reading import read_runs, setting, short_names
from commons.run_log.report import RunReport
from commons.run_log.standard_error import shown_with_error, with_errors
from commons.run_log.step_time import PARTS

# Most slow ranks that a note names, and most runs whose speed is among the first numbers.
_MOST_NAMED = 4

_TERMS = (
    ("imbalance", "largest load of a rank ÷ the mean − 1; all ranks wait for the largest. Mean over steps"),
    ("speed-up of the slowest rank", "largest load as loaded ÷ largest load as balanced, both summed over steps"),
    ("possible", "largest load as loaded ÷ lower bound of every plan's largest load, both summed over steps"),
    (
        "speed-up of a step, measured",
        "time of a step without balancing ÷ with balancing, including exchange and waiting; estimated from the "
        "milliseconds per load of the run's own steps",
    ),
    ("work at the bound", "milliseconds per load × lower bound of every plan's largest load"),
    ("unevenness that is left", "milliseconds per load × the slowest rank's load in excess of that bound"),
    ("the rest", "time that does not grow with the slowest rank's load: embeddings, optimizer, gradients, data"),
    ("not split", "work and the rest together, in a run without milliseconds per load"),
    ("hidden", "fraction of gather and plan that no step waited for"),
    ("keys", "embedding lookups of a rank's rows; the sharding of the tables decides which rank does them"),
)


@dataclass
class Report:
    """Report what balancing gained in a run and where its time went; several runs are compared with the first.

    Reads log.jsonl in a run's folder (trainer.run_dir), also while the run is still running.

    For example:
      evenrank report runs/train
      evenrank report runs/unbalanced runs/balanced --html report.html
      evenrank report runs/train --figure report.png
      evenrank report runs/train --json
    """

    # Folders of runs; the others are compared with the first.
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(help_behavior_hint="(one or more)")]
    # Where the report is printed or written.
    of_output: Annotated[AnswerOutputs, tyro.conf.arg(name="output"), tyro.conf.OmitArgPrefixes] = ON_TERMINAL

    def run(self) -> None:
        """Read, compute, print, draw."""
        if not self.runs:
            raise ValueError("no run is given; report reads the folders of runs (trainer.run_dir): give one or more")
        self.of_output.require({f"the log of {run}": run / LOG_FILE for run in self.runs})
        self.of_output.give(answer_of([RunReport(log) for log in read_runs(self.runs)]))


def answer_of(reports: Sequence[RunReport]) -> Answer:
    """The answer about runs, at least one; the others are compared with the first."""
    comparisons, ranked = compare_runs(reports), best_first(reports)
    notes, advice = tuple(_notes(reports, comparisons)), _advice(reports, comparisons, ranked)
    names = tuple(report.log.name for report in reports)
    table = AnswerTable(("", *names), tuple(_rows(reports, comparisons)))
    return Answer(
        title="What balancing gained" if comparisons else f"What balancing gained in {names[0]}",
        answer=advice[-1],
        figures=tuple(_figures(reports, ranked)),
        sections=(
            Section("All numbers", tables=(table,), notes=notes),
            Section(
                "Comparison of the runs" if comparisons else "Balance over the run",
                tuple(advice[:-1]),
                lambda: import_module("commons.cli.report_pictures").pictures_of(reports),
            ),
            Section("How to read it", terms=_TERMS),
        ),
        content={
            "runs": [report.to_dict() for report in reports],
            "beside_the_first": [each.to_dict() for each in comparisons],
            "notes": notes,
            "advice": advice,
        },
    )


def _rows(reports: Sequence[RunReport], comparisons: Sequence[RunComparison]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table that have a value in any run; a heading has one cell."""
    columns = [_column(report) for report in reports]
    for column, comparison in zip(columns[1:], comparisons):
        column["beside the first"] = _differences(comparison)
    for title in dict.fromkeys(title for column in columns for title in column):
        cells = [column.get(title, {}) for column in columns]
        labels = dict.fromkeys(label for of_run in cells for label in of_run)
        rows = [(label, *(of_run.get(label, "") for of_run in cells)) for label in labels]
        known = [row for row in rows if any(row[1:])]
        if title and known:
            yield (title,)
        yield from known


def _column(report: RunReport) -> dict[str, dict[str, str]]:
    """The cells of a run, by section and label; "" for unknown values."""
    speed, gain, time, background = report.speed, report.gain, report.step_time, report.background
    total, parts = (None, {}) if time is None else (time.total, time.parts())
    parts = parts if len(parts) > 1 else {}  # without a slope, the only part is the whole step
    return {
        "": {
            "steps": f"{report.steps:,}",
            "ranks": format_number("{}", report.ranks),
            "rows per step": format_number("{:,.0f}", report.rows_per_step),
            "balanced": _balancing(report),
        },
        "speed": {
            "median step, ms": format_number("{:,.1f}", speed.step_ms),
            "rows per second": format_number("{:,.1f}", speed.rows_per_s),
            "tokens per second": format_number("{:,.0f}", speed.tokens_per_s),
            "TFLOPS per rank": format_number("{:,.3g}", speed.tflops_per_rank),
            "MFU": format_number("{:.1%}", speed.mfu),
        },
        "balance": {
            "imbalance, mean": _change(gain.imbalance_before, gain.imbalance_after),
            "imbalance, worst line": _change(gain.worst_before, gain.worst_after),
            "speed-up of the slowest rank": format_number("{:.2f}×", gain.work),
            "  possible": format_number("{:.2f}×", gain.possible),
            "speed-up of a step, measured": format_number("{:.2f}×", gain.step),
            "  by the calibration": format_number("{:.2f}×", gain.predicted_step),
            "saved by speeds, of own work": _speeds(report),
            "tokens moved": format_number("{:.1%}", gain.token_fraction_moved if report.moves_rows else None),
            "kB sent by rank 0 in a step": f"{(gain.bytes_sent or 0) / 1e3:,.1f}" if report.moves_rows else "",
            "steps not worth it (gated)": format_number("{:.0%}", gain.gated or None),
            "imbalance of keys": _change(gain.lookups_before, gain.lookups_after if report.moves_rows else None),
        },
        "a mean step, ms": {
            **{
                name: f"{parts[name]:,.1f} ({parts[name] / (total or 1.0):.0%})" if name in parts else ""
                for name in PARTS
            },
            "all of it": format_number("{:,.1f}", total),
            "balancing takes off": format_number("{:,.1f}", getattr(time, "saved", None)),
        },
        "beside the steps, ms of a step": {
            "gather": format_number("{:,.1f}", getattr(background, "gather_ms", None)),
            "plan": format_number("{:,.1f}", getattr(background, "plan_ms", None)),
            "exchange of windows": format_number("{:,.1f}", getattr(background, "exchange_ms", None)),
            "hidden": format_number("{:.1%}", getattr(background, "hidden", None)),
        },
        "after training": {
            "loss": format_number("{:.4f}", report.loss),
            **{
                f"eval {name}": _metric("{:,.0f}" if name == "rows" else "{:.4f}", value, error)
                for name, value, error in with_errors(report.evaluation)
            },
        },
    }


def _differences(comparison: RunComparison) -> dict[str, str]:
    """The cells of a run that compare it with the first, by label."""
    step, loss = comparison.each_step, comparison.loss
    return {
        "speed-up, rows per second": format_number("{:.2f}×", comparison.rows_per_s),
        "speed-up, median step": format_number("{:.2f}×", comparison.step_ms),
        "speed-up, median of the steps": f"{step.median:.2f}× ({step.low:.2f} to {step.high:.2f})" if step else "",
        "speed-up by the loads": format_number("{:.2f}×", comparison.work),
        "loss difference, largest": format_number("{:.1e}", getattr(loss, "largest", None)),
        "loss difference, at the end": format_number("{:.1e}", getattr(loss, "at_end", None)),
        **{
            f"eval {name}, difference": _metric("{:+.1e}", value, comparison.standard_errors.get(name))
            for name, value in comparison.evaluation.items()
        },
    }


def _notes(reports: Sequence[RunReport], comparisons: Sequence[RunComparison]) -> Iterator[str]:
    """Yield remarks on the runs, a line each."""
    for report in reports:
        notes, ranks, slow = [*report.log.notes], report.log.num_ranks, report.slow_ranks
        if len(ranks) > 1:
            notes.append(f"the number of ranks has changed: {', '.join(map(str, ranks))}; means are over all lines")
        if slow:
            named = ", ".join(f"rank {each.rank} at {each.speed:.2f}" for each in slow[:_MOST_NAMED])
            named += f" and {len(slow) - _MOST_NAMED} more" if len(slow) > _MOST_NAMED else ""
            notes.append(f"slow ranks, load per ms ÷ median of the others: {named}; the data are not the reason")
        yield from (f"{report.log.name}: {note}." for note in notes)
    for each in comparisons:
        if each.differences:
            yield f"besides balancing, {each.run} and {each.base} differ in {'; '.join(each.differences)}."
        elif not each.equal_steps:
            yield (
                f"with a budget the steps of {each.run} and {each.base} are not the same: compare rows per second, "
                "and metrics after the same number of rows."
            )
        if not each.equal_units:
            yield (
                f"the loads of {each.run} and {each.base} have different units (another shuffler or calibration): "
                "their imbalances and speed-ups of the slowest rank do not compare."
            )


def _advice(
    reports: Sequence[RunReport], comparisons: Sequence[RunComparison], ranked: Sequence[RunComparison]
) -> list[str]:
    """Advice on every run; for several runs, also comparisons, with the summary of all runs last."""
    if not comparisons:
        return [line for line in (warning_of(reports[0]), advice_of(reports[0])) if line]
    # With a balanced run in the report, the advice to turn balancing on is useless.
    advised = [report for report in reports if report.balancing != "off" or report.by_work] or reports
    as_loaded = {report.log.name for report in reports if report.is_as_loaded}
    over_as_loaded = {each.run: each for each in ranked if each.base in as_loaded}
    of_runs = [
        f"{report.log.name}: {line}"
        for report in advised
        for line in (warning_of(report), advice_of(report, over_as_loaded.get(report.log.name)))
        if line
    ]
    verdicts = [verdict_on(each, reports[0], report) for each, report in zip(comparisons, reports[1:])]
    # Do not repeat the headline.
    more = [line for each, line in zip(comparisons, verdicts) if line and line != headline_of([each])]
    headline = headline_of(ranked)
    if len(comparisons) == 1 and more and more[0].startswith(headline.removesuffix(".")):
        return [*of_runs, *more]
    return [*of_runs, *more, headline]


def _figures(reports: Sequence[RunReport], ranked: Sequence[RunComparison]) -> list[tuple[str, str]]:
    """The most important numbers: the speeds of several runs, best first, and the gain of the best or only run."""
    by_name = {report.log.name: report for report in reports}
    names = dict(zip(by_name, short_names(list(by_name))))
    compared = [each for each in ranked if each.compares]
    report = by_name[compared[0].run] if compared else reports[-1]
    gain, of = report.gain, f", {names[report.log.name]}" if len(reports) > 1 else ""
    would = "" if report.balancing == "balanced" else " if balanced"
    figures: list[tuple[float | None, str, str]] = [
        (each.rows_per_s, "{:.2f}×", f"rows per second of {names[each.run]} ÷ {names[each.base]}")
        for each in compared[:_MOST_NAMED]
    ]
    figures += [
        (gain.imbalance_before, "{:.1%}", f"imbalance as {'loaded' if report.knows_loaded else 'trained'}{of}"),
        (gain.imbalance_after, "{:.1%}", f"imbalance{would or ' as balanced'}{of}"),
        (gain.work, "{:.2f}×", f"speed-up of the slowest rank{would}{of}"),
        (gain.step, "{:.2f}×", f"speed-up of a step{would}, measured{of}"),
    ]
    return [(pattern.format(value), name) for value, pattern, name in figures if value is not None]


def _metric(pattern: str, value: float | None, error: float | None) -> str:
    """The text of a metric with its standard error; "" if unknown."""
    return "" if value is None or value != value else shown_with_error(value, error, pattern)


def _change(before: float | None, after: float | None) -> str:
    """Two fractions with an arrow, or only the known one."""
    return " → ".join(f"{each:.1%}" for each in (before, after) if each is not None)


def _balancing(report: RunReport) -> str:
    if report.by_work:
        is_sampler = setting(report.log.config, "trainer.balance_sampler") is True
        return "read by work" if is_sampler else "assigned by work"
    if report.balancing == "balanced":
        return "each batch" if report.window == 1 else f"windows of {report.window}"
    return "observed" if report.balancing == "observed" else "no"


def _speeds(report: RunReport) -> str:
    if not report.gain.speeds:
        return ""
    named = "".join(f", rank {each.rank} at {each.speed:.2f}" for each in report.given_less[:1])
    named += f", {len(report.given_less) - 1} more" if len(report.given_less) > 1 else ""
    would = " if measured" if setting(report.log.config, "trainer.shuffler.speeds") == "observe" else ""
    return f"{report.gain.speeds:.1%}{would}{named}"
