"""The optimizers of a model: their config, and the construction of the optimizer of the dense parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from commons.checks import Positive, require_field_types
from commons.trainer.sharding import EmbeddingOptimizer, Sharding, dense_parameters


@dataclass
class OptimizerArgs:
    """The optimizers of the model."""

    dense_optimizer: Literal["adam", "sgd"] = "adam"  # optimizer of all parameters except embedding tables
    dense_lr: Positive = 1e-3  # learning rate of dense_optimizer
    adam_betas: tuple[float, float] = (0.9, 0.999)  # Adam's decay rates of the running means
    adam_eps: Positive = 1e-8  # Adam's term against division by zero
    # Optimizer of the embedding tables; on CPU fbgemm has "sgd" and "rowwise_adagrad".
    embedding_optimizer: EmbeddingOptimizer = "rowwise_adagrad"
    embedding_lr: Positive = 0.05  # learning rate of embedding_optimizer
    sharding: Sharding | None = None  # sharding of the embedding tables; None lets TorchRec's planner choose

    def kinds(self) -> dict[str, str]:
        """The names of the optimizers; a checkpoint fits only the same optimizers."""
        return {"dense_optimizer": self.dense_optimizer, "embedding_optimizer": self.embedding_optimizer}

    def __post_init__(self) -> None:
        require_field_types(self)
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(
                f"adam_betas is {self.adam_betas}; they are two numbers of at least 0 and below 1: correct it"
            )


def build_optimizer(model: nn.Module, args: OptimizerArgs) -> torch.optim.Optimizer:
    """Create the optimizer of all parameters that are not updated in the backward pass."""
    parameters = dense_parameters(model).values()
    if args.dense_optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=args.dense_lr)
    return torch.optim.Adam(parameters, lr=args.dense_lr, betas=args.adam_betas, eps=args.adam_eps)
