"""How the demo's results are shown: the words of the HSTU demo."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from commons.trainer import comparison_report
from commons.trainer.comparison import ComparisonResults
from commons.trainer.comparison_report import Wording

WORDING = Wording(
    title="HSTU on generated data with MovieLens-1M's format and lengths",
    items="ratings",
    metrics={"auc_task_0": "AUC"},
)


def report(results: ComparisonResults, run_dir: Path, console: Console) -> None:
    """Print the table and draw the picture."""
    comparison_report.report(results, run_dir, console, WORDING)
