"""Train a semantic-ID decoder.

    torchrun --standalone --nproc_per_node=2 -m sid_gr.train --config sid_gr/configs/demo.toml
    torchrun --standalone --nproc_per_node=2 -m sid_gr.train --config sid_gr/configs/demo.toml \\
        --trainer.enable-balanced-shuffler --trainer.top-k-for-generation 20
    torchrun --standalone --nproc_per_node=4 -m sid_gr.train --config sid_gr/configs/random.toml \\
        --model.tensor-model-parallel-size 2

Config ─► ranks ─► semantic IDs ─► data ─► model ─► optimizer ─► shuffler ─► loop.
"""

from __future__ import annotations

from commons.trainer.errors import run_main
from commons.trainer.run import train_as_rank
from sid_gr.recipe import SIDGRRecipe


def main() -> None:
    """One rank of a run."""
    train_as_rank(SIDGRRecipe, prog="sid_gr.train", description=__doc__)


if __name__ == "__main__":
    run_main(main)
