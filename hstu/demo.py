"""The demo: HSTU trained on two ranks, as batches are loaded and balanced, side by side.

generated archive ─► preprocessor ─► ranks that train both ways (demo_ranks) ─► table, picture, JSON (demo_report).

Examples:
  python -m hstu.demo
  python -m hstu.demo --steps 20 --batch-size 32 --max-history-seqlen 1024
  python -m hstu.demo --quick --run-dir runs/quick
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console

from commons.trainer.comparison import read_results, results_path
from commons.trainer.comparison_options import ComparisonOptions, choose_ranks, describe_data, prepare_data
from commons.trainer.config import load_config
from commons.trainer.errors import run_main
from commons.trainer.torchrun import torchrun
from hstu.demo_report import report


@dataclass
class DemoOptions(ComparisonOptions):
    """What the demo trains, and for how long."""


def parse_options() -> DemoOptions:
    """The options on the command line of this process.

    Raises:
        ValueError: an unknown option or a wrong value.
    """
    return load_config(DemoOptions, sys.argv[1:], prog="python -m hstu.demo", description=__doc__)


def main() -> None:
    """Prepare the data, start the ranks, report."""
    options = parse_options()
    console = Console()
    console.print(describe_data(prepare_data(options)))
    num_ranks, where = choose_ranks(options.device)
    console.print(where)
    results_path(options.run_dir).unlink(missing_ok=True)
    status = torchrun(["--standalone", f"--nproc_per_node={num_ranks}", "-m", "hstu.demo_ranks", *sys.argv[1:]])
    if status:
        sys.exit(status)
    report(read_results(options.run_dir), options.run_dir, console)


if __name__ == "__main__":
    run_main(main)
