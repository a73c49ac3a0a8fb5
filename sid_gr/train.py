"""Train a semantic-ID decoder.

    torchrun --standalone --nproc_per_node=2 -m sid_gr.train --config sid_gr/configs/random.toml
    torchrun --standalone --nproc_per_node=2 -m sid_gr.train --config sid_gr/configs/random.toml \\
        --trainer.enable-balanced-shuffler --trainer.run-dir runs/balanced
    torchrun --standalone --nproc_per_node=4 -m sid_gr.train --config sid_gr/configs/random.toml \\
        --model.tensor-model-parallel-size 2 --trainer.run-dir runs/tensor-parallel

random.toml needs no data; demo.toml trains on the data of `make demo-sid`.

Config ─► ranks ─► semantic IDs ─► data ─► model ─► optimizer ─► shuffler ─► loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commons.trainer import run
from commons.trainer.observe.train_log import TrainSummary
from commons.trainer.ranks.errors import run_main
from commons.trainer.ranks.rank_info import RankInfo
from sid_gr.recipe import SIDGRRecipe
from sid_gr.train_config import TrainConfig


def train(config: TrainConfig | Mapping[str, Any], *, ranks: RankInfo | None = None) -> TrainSummary:
    """Train as one rank of a run; called on all ranks, by Ray Train's TorchTrainer, a notebook or any script.

    For arguments, result and errors see `commons.trainer.run.train`.
    """
    return run.train(SIDGRRecipe, config, ranks=ranks)


def main() -> None:
    """Train as one rank of a run, configured by the command line."""
    run.train_as_rank(SIDGRRecipe, prog="sid_gr.train", description=__doc__)


if __name__ == "__main__":
    run_main(main)
