"""`evenrank report`: what balancing gained in a run, and where the time went, from the log that the run has left."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from commons.cli.outputs import AnswerOutputs
from commons.cli.report.answer import answer_of
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

    of_output: Annotated[AnswerOutputs, tyro.conf.arg(name="output"), tyro.conf.OmitArgPrefixes] = field(
        default_factory=AnswerOutputs
    )
    """Where the report goes."""

    def run(self) -> None:
        """Read, compute, print, draw."""
        if not self.runs:
            raise ValueError("no run is given; report reads the folders of runs (trainer.run_dir): give one or more")
        self.of_output.require({f"the log of {run}": run / LOG_FILE for run in self.runs})
        self.of_output.give(answer_of([RunReport.of(log) for log in read_runs(self.runs)]))
