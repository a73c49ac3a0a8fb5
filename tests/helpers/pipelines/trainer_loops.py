"""Models, shufflers and recipes for the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.recipe import Recipe
from tests.helpers.models.torchrec_model import Head
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler

__all__ = ["CubicShuffler", "Output", "Parts", "StatedHead"]


@dataclass
class Output:
    loss_sum: torch.Tensor
    num_loss_tokens: int
    ids: list[int]


class StatedHead(Head):
    """Says what the loop asks for; `trained` has what it was trained on."""

    def forward(self, embeddings, batch):
        loss, loss_sum = super().forward(embeddings, batch)
        ids = self.trained[-1].tolist()
        if not self.training:
            self.trained.pop()
        return loss, Output(loss_sum, batch.actual_batch_size, ids)


class Parts(Recipe):
    """What a test has made, as a recipe on the CPU; `shufflers` has that of training. Evaluation moves nothing."""

    config_class = SimpleNamespace
    task = None

    def __init__(
        self,
        args: TrainerArgs,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        shufflers: Any,
        loaders: Any,
        *,
        flops: Any = lambda batch: 0,
        metrics: Any = None,
        layers: torch.nn.Module | None = None,
        loss_scaler: Any = None,
    ) -> None:
        super().__init__(SimpleNamespace(trainer=args, dataset=DatasetArgs("random", 1)), torch.device("cpu"))
        self._shufflers, self._parts = iter(shufflers), (model, optimizer, metrics, layers)
        self.loaders = loaders if isinstance(loaders, tuple) else (loaders, None)
        self.flops, self.loss_scaler = flops, loss_scaler

    def row_tokens(self, batch):
        raise NotImplementedError

    def build_model(self):
        return self._parts[0]

    def build_optimizer(self, model):
        return self._parts[1]

    def metrics(self, model):
        return self._parts[2]

    def layers(self, model):
        return self._parts[3]

    def fingerprint(self):
        return {}

    def build_shuffler(self, *, balances):
        return next(self._shufflers, None) or IdentityBalancedBatchShuffler()
