"""`evenrank report`: what balancing gained in a run, and where the time went, from the log that the run has left."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from commons.cli.outputs import command_line, require_answer_outputs, write_answer_outputs
from commons.cli.report_answer import ReportAnswer
from commons.run_log.files import LOG_FILE
from commons.run_log.reading import read_runs
from commons.run_log.report import RunReport


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
        logs: dict[str, Path | None] = {f"the log of {run}": run / LOG_FILE for run in self.runs}
        require_answer_outputs(self.html, self.figure, logs)
        answer = ReportAnswer.of([RunReport.of(log) for log in read_runs(self.runs)])
        if self.json:
            sys.stdout.write(json.dumps(answer.to_dict(), indent=2) + "\n")
        else:
            answer.print()
        if self.html is not None or self.figure is not None:
            # Imported here: what draws takes a second, and a table needs none of it.
            from commons.cli.report_page import page_of
            from commons.cli.report_pictures import pictures_of

            write_answer_outputs(
                self.html,
                self.figure,
                lambda: page_of(answer, command_line.get()),
                lambda: pictures_of(answer.reports),
                quiet=self.json,
            )
