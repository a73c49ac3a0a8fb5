"""`evenrank report`: what balancing gained in a run, and where the time went, from the log that the run has left."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from commons.cli.outputs import as_command, require_output
from commons.cli.report_table import advice_lines, notes_of, print_report
from commons.run_log.comparison import Against, compare_runs
from commons.run_log.files import LOG_FILE
from commons.run_log.folders import read_runs
from commons.run_log.report import RunReport


@dataclass
class Report:
    """Say what balancing gained in a run and where its time went; runs beside each other are compared with the first.

    Reads log.jsonl of a run's folder (trainer.run_dir), also while the run goes on; the folder of a demo has two runs.

    For example:
      evenrank report runs/train
      evenrank report runs/unbalanced runs/balanced --html report.html
      evenrank report runs/train --figure report.png
      evenrank report runs/train --json
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, the one to compare with first."""

    json: bool = False
    """Print JSON instead of a table."""

    html: Path | None = None
    """Where to write the report as a page with pictures, one .html file that needs no network; None for none."""

    figure: Path | None = None
    """Where to draw its pictures, as .png, .svg or .pdf."""

    def run(self) -> None:
        """Read, compute, print, draw."""
        if not self.runs:
            raise ValueError("no run is given; report reads the folders of runs (trainer.run_dir): give one or more")
        self._check_outputs()
        reports = [RunReport.of(log) for log in read_runs(self.runs)]
        against = compare_runs(reports)
        if self.json:
            content = {
                "runs": [report.to_dict() for report in reports],
                "beside_the_first": [each.to_dict() for each in against],
                "notes": notes_of(reports, against),
                "advice": advice_lines(reports, against),
            }
            sys.stdout.write(json.dumps(content, indent=2) + "\n")
        else:
            print_report(reports, against)
        self._draw(reports, against)

    def _check_outputs(self) -> None:
        """Before anything is read: whether page and pictures can be written. What draws them is imported if needed."""
        if self.html is not None:
            from commons.cli.page import require_page

            require_page(self.html)
        if self.figure is not None:
            from commons.cli.pictures import require_picture

            require_picture(self.figure)
        logs: dict[str, Path | None] = {f"the log of {run}": run / LOG_FILE for run in self.runs}
        for option, output in (("--html", self.html), ("--figure", self.figure)):
            if output is not None:
                require_output(output, option=option, inputs=logs)
        if self.html is not None and self.figure is not None and self.html.resolve() == self.figure.resolve():
            raise ValueError(f"--html and --figure are both {self.html}; each is a file: give two names")

    def _draw(self, reports: list[RunReport], against: list[Against]) -> None:
        """Write the page and the pictures, if asked for."""
        if self.html is not None:
            from commons.cli.page import write_page
            from commons.cli.report_page import page_of

            write_page(page_of(reports, against, self._command()), self.html)
        if self.figure is not None:
            from commons.cli.pictures import write_pictures
            from commons.cli.report_pictures import pictures_of_each, pictures_of_runs

            write_pictures([*pictures_of_each(reports), *pictures_of_runs(reports)], self.figure)
        for path in (self.html, self.figure):
            if path is not None and not self.json:
                Console().print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)

    def _command(self) -> str:
        return as_command("evenrank report", self, positional="runs")
