"""Which optimizers train a model: fields of a config, and the optimizer of the dense parameters made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from commons.trainer.config.args import require_positive
from commons.trainer.sharding import EmbeddingOptimizer, Sharding, dense_parameters


@dataclass
class OptimizerArgs:
    """What trains the model."""

    dense_optimizer: Literal["adam", "sgd"] = "adam"  # optimizer of everything but the tables
    dense_lr: float = 1e-3  # its learning rate
    adam_betas: tuple[float, float] = (0.9, 0.999)  # decay of its running means, where it is Adam
    adam_eps: float = 1e-8  # what keeps its steps finite, where it is Adam
    # Optimizer of the tables; on CPU fbgemm has "sgd" and "rowwise_adagrad".
    embedding_optimizer: EmbeddingOptimizer = "rowwise_adagrad"
    embedding_lr: float = 0.05  # its learning rate
    sharding: Sharding | None = None  # how tables lie on the ranks; None lets TorchRec's planner choose

    def kinds(self) -> dict[str, str]:
        """The optimizers by name; their state fits no other."""
        return {"dense_optimizer": self.dense_optimizer, "embedding_optimizer": self.embedding_optimizer}

    def __post_init__(self) -> None:
        for name in ("dense_lr", "embedding_lr"):
            require_positive(name, getattr(self, name), "a learning rate is positive and finite: correct it")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(
                f"adam_betas is {self.adam_betas}; they are two numbers of at least 0 and below 1: correct it"
            )
        require_positive("adam_eps", self.adam_eps, "it is a small positive number: correct it")


def build_optimizer(model: nn.Module, args: OptimizerArgs) -> torch.optim.Optimizer:
    """The optimizer of what the tables' own optimizers do not train."""
    parameters = dense_parameters(model).values()
    if args.dense_optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=args.dense_lr)
    return torch.optim.Adam(parameters, lr=args.dense_lr, betas=args.adam_betas, eps=args.adam_eps)
