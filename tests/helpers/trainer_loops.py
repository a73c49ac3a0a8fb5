"""Models and shufflers for the training loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.helpers.pipelines import CubicShuffler

__all__ = ["CubicShuffler", "Output"]


@dataclass
class Output:
    loss_sum: torch.Tensor
    num_loss_tokens: int
    ids: list[int]
