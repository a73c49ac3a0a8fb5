"""Which optimizers train a model: fields of a config, and the optimizer of the dense parameters made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from commons.distributed.sharding import EmbeddingOptimizer, Sharding, dense_parameters


@dataclass
class OptimizerArgs:
    """What trains the model."""

    dense_optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of everything but the tables."""

    dense_lr: float = 1e-3
    """Its learning rate."""

    embedding_optimizer: EmbeddingOptimizer = "rowwise_adagrad"
    """Optimizer of the tables; on CPU fbgemm has "sgd" and "rowwise_adagrad"."""

    embedding_lr: float = 0.05
    """Its learning rate."""

    sharding: Sharding | None = None
    """How tables lie on the ranks; None lets TorchRec's planner choose."""

    def kinds(self) -> dict[str, str]:
        """The optimizers by name; their state fits no other."""
        return {"dense_optimizer": self.dense_optimizer, "embedding_optimizer": self.embedding_optimizer}

    def __post_init__(self) -> None:
        for name in ("dense_lr", "embedding_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a learning rate is positive: raise it")


def build_optimizer(model: nn.Module, args: OptimizerArgs) -> torch.optim.Optimizer:
    """The optimizer of what the tables' own optimizers do not train."""
    optimizer_class = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[args.dense_optimizer]
    return optimizer_class(dense_parameters(model).values(), lr=args.dense_lr)
