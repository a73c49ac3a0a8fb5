"""Train an HSTU model, for ranking or for retrieval.

    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/random.toml
    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/random.toml \\
        --trainer.enable-balanced-shuffler --trainer.run-dir runs/balanced
    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/retrieval.toml

random.toml needs no data; demo.toml, ranking.toml and retrieval.toml train on the data of `make demo`.

Config ─► ranks ─► data ─► model ─► optimizer ─► shuffler ─► loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commons.trainer import run
from commons.trainer.observe.train_log import TrainSummary
from commons.trainer.ranks.errors import run_main
from commons.trainer.ranks.rank_info import RankInfo
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig


def train(config: TrainConfig | Mapping[str, Any], *, ranks: RankInfo | None = None) -> TrainSummary:
    """Train as one rank of a run; called on all ranks, by Ray Train's TorchTrainer, a notebook or any script.

    For arguments, result and errors see `commons.trainer.run.train`.
    """
    return run.train(HSTURecipe, config, ranks=ranks)


def main() -> None:
    """Train as one rank of a run, configured by the command line."""
    run.train_as_rank(HSTURecipe, prog="hstu.train", description=__doc__)


if __name__ == "__main__":
    run_main(main)
