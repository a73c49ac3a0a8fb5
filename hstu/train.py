"""Train an HSTU model, for ranking or for retrieval.

    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/demo.toml
    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/retrieval.toml
    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/demo.toml \\
        --trainer.enable-balanced-shuffler --trainer.train-batch-size 16

Config ─► ranks ─► data ─► objective ─► model ─► optimizer ─► shuffler ─► loop.
"""

from __future__ import annotations

from commons.trainer.errors import run_main
from commons.trainer.run import train_as_rank
from hstu.recipe import HSTURecipe


def main() -> None:
    """One rank of a run."""
    train_as_rank(HSTURecipe, prog="hstu.train", description=__doc__)


if __name__ == "__main__":
    run_main(main)
