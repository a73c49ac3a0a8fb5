"""The demo: HSTU trained on two ranks, once without and once with balancing.

generated ratings ─► ranks that train both ways ─► two run folders ─► evenrank report.

Examples:
  python -m hstu.demo
  python -m hstu.demo --steps 20 --batch-size 32 --max-history-seqlen 1024
  python -m hstu.demo --quick --run-dir runs/quick
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from commons.trainer.config.load import load_config
from commons.trainer.demo import DemoOptions, demo_as_rank, describe_data, prepare_data, start_ranks
from commons.trainer.ranks.errors import run_main
from hstu.recipe import HSTURecipe

TITLE = "HSTU on generated data with MovieLens-1M's format and lengths"


def main() -> None:
    """Prepare the data and start the ranks; in a process started by torchrun, train as one rank."""
    options = load_config(DemoOptions, sys.argv[1:], prog="python -m hstu.demo", description=__doc__)
    if not dist.is_torchelastic_launched():
        start_ranks("hstu.demo", options, describe_data(prepare_data(options)))
        return
    config = options.training_config(HSTURecipe.config_class, "hstu/configs/demo.toml")
    demo_as_rank(HSTURecipe, config, options, TITLE)


if __name__ == "__main__":
    run_main(main)
