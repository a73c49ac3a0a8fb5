"""A vision encoder and a text decoder, each balanced by its own workload.

Samples have a text and an image; long texts need not have large images, so ranks with even texts have uneven images.
Here the rows of a step are even for the decoder. For the encoder only the images change rank: every rank encodes an
even share, the features are sent back to the ranks of their texts, and the gradients take the reverse way.

Trains every step twice, with images that stay and images that move, and compares losses and times.

Examples:
    torchrun --nproc-per-node 2 examples/balance_per_module.py
    torchrun --nproc-per-node 4 examples/balance_per_module.py --rows 32 --steps 10
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commons.checks import require_at_least
from commons.console import print_summary
from commons.trainer.config.load import load_config
from commons.trainer.ranks.errors import run_main
from commons.trainer.ranks.launch import initialize_ranks
from evenrank import SelfAttentionTask, global_mean_loss, mean_over_ranks, redistribute_balanced

PATCH, WIDTH, HEADS, LAYERS, WORDS = 48, 256, 4, 2, 32
TASK = SelfAttentionTask(hidden_size=WIDTH, num_heads=HEADS, head_dim=WIDTH // HEADS, num_layers=LAYERS, causal=False)


@dataclass
class Config:
    """The settings of the example."""

    rows: int = 16  # samples per rank and step
    patches: int = 2048  # most patches of an image
    steps: int = 12  # steps to train; the first step is not timed
    seed: int = 0  # seed of samples and weights

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("patches", 1), ("steps", 2)):
            require_at_least(name, getattr(self, name), least)


class Encoder(nn.Module):
    """Computes a feature per image, `(rows, WIDTH)`, from images `(rows, patches, PATCH)` and numbers of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, images: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Encode row by row, so that no padding is computed."""
        features = [self.layers(self.embed(image[None, :size])).mean(1) for image, size in zip(images, sizes.tolist())]
        return torch.cat(features)


class Captioner(nn.Module):
    """Predicts one word from an image and a text of mean embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(2 * WIDTH, WORDS)
        self.largest: list[tuple[int, int]] = []  # by step, the encoder's largest load of a rank, before and after

    def forward(
        self, images: torch.Tensor, sizes: torch.Tensor, texts: torch.Tensor, labels: torch.Tensor, balances: bool
    ) -> torch.Tensor:
        """The sum of the loss over the rows of this rank."""
        features: Any  # features of this rank's own images
        if balances:
            moved = redistribute_balanced({"image": images, "size": sizes}, TASK.get_workloads(sizes))
            features = moved.send_home(self.encoder(moved.batch["image"], moved.batch["size"]))
            self.largest.append((int(moved.loads_before.max()), int(moved.loads_after.max())))
        else:
            features = self.encoder(images, sizes)
        logits = self.head(torch.cat([features, self.words(texts).mean(1)], dim=1))
        return nn.functional.cross_entropy(logits, labels, reduction="sum")


def draw(config: Config, step: int) -> tuple[torch.Tensor, ...]:
    """This rank's samples: heavy-tailed images, texts of equal length, labels that both determine."""
    generator = torch.Generator().manual_seed(config.seed + step * dist.get_world_size() + dist.get_rank())
    sizes = torch.randn(config.rows, generator=generator).mul(1.4).add(4.6).exp().clamp(1, config.patches).long()
    images = torch.randn(config.rows, config.patches, PATCH, generator=generator)
    texts = torch.randint(0, WORDS, (config.rows, 20), generator=generator)
    return images, sizes, texts, texts[:, 0]


def train(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, balances: bool) -> tuple:
    """Train one step; returns the loss, a mean over the rows of all ranks, and the seconds."""
    images, sizes, texts, labels = draw(config, step)
    dist.barrier()
    started = time.perf_counter()
    optimizer.zero_grad()
    loss = global_mean_loss(model(images, sizes, texts, labels, balances), len(labels))
    loss.backward()
    optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - started
    return float(mean_over_ranks(loss)), seconds


def main() -> None:
    """Train both models, alternating between them at every step."""
    config = load_config(Config, sys.argv[1:], description=__doc__)
    torch.set_num_threads(1)
    with initialize_ranks(device_type="cpu"):
        found: dict[bool, list[tuple]] = {}
        models = {}
        for balances in (False, True):
            torch.manual_seed(config.seed)
            model = DistributedDataParallel(Captioner())
            models[balances] = model, torch.optim.SGD(model.parameters(), lr=0.05)
            found[balances] = []
        for step in range(config.steps):
            for balances, (model, optimizer) in models.items():
                found[balances].append(train(config, model, optimizer, step, balances))
        if dist.get_rank() == 0:
            seconds = {balances: [each[1] for each in steps[1:]] for balances, steps in found.items()}
            ratios = [before / after for before, after in zip(seconds[False], seconds[True])]
            stays, moves = (sum(each) for each in zip(*models[True][0].module.largest))
            apart = max(abs(a[0] - b[0]) for a, b in zip(found[False], found[True]))
            print_summary(
                "balance per module",
                {
                    "ms per step, images stay": f"{statistics.median(seconds[False]) * 1e3:.0f}",
                    "ms per step, images move": f"{statistics.median(seconds[True]) * 1e3:.0f}",
                    "median ratio of the steps": f"{statistics.median(ratios):.2f}",
                    "ratio of the encoder's work": f"{stays / moves:.2f}",
                    "losses, first and last": f"{found[True][0][0]:.4f}, {found[True][-1][0]:.4f}",
                    "losses differ by at most": f"{apart:.1e}",
                },
            )


if __name__ == "__main__":
    run_main(main)
