"""HSTU on the generated MovieLens of the fixture `data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.optimize.optimizers import OptimizerArgs
from commons.trainer.run import open_run_folder, run_training
from hstu.recipe import HSTURecipe
from hstu.train_config import ModelArgs, TrainConfig


def movielens_config(
    data: str,
    trainer: TrainerArgs,
    *,
    dataset: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    task: str = "ranking",
    **model: Any,
) -> TrainConfig:
    """A small model with dropout; what is given replaces fields of its parts."""
    data_args = {"dataset_name": "ml-1m", "max_history_seqlen": 24, "shuffle": True} | (dataset or {})
    model_args = {"num_attention_heads": 2, "kv_channels": 8, "dropout": 0.2, "prediction_head_arch": (8, 1)} | model
    return TrainConfig(
        trainer,
        DatasetArgs(**data_args, dataset_path=data),
        ModelArgs(16, 1, **model_args),
        OptimizerArgs(**{"sharding": "row_wise"} | (optimizer or {})),
        task=task,
    )


class Noted(HSTURecipe):
    """Notes the users of every batch that this rank trains, the learning rates, and the model."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.users, self.rates = [], []

    def num_tokens(self, batch):
        self.users.append(batch.features["user_id"].values().tolist())
        return super().num_tokens(batch)

    def build_model(self):
        self.model = super().build_model()
        return self.model

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer.register_step_pre_hook(lambda optimizer, *_: self.rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer


def table_of(data, run_dir, **changes):
    """The rows of the table at the end, which the first rank prints."""
    args = TrainerArgs(4, 4, run_dir=run_dir, log_interval=1, sinks=[], num_epochs=1, **changes)
    config = movielens_config(data, args, dataset={"max_history_seqlen": 256})
    with mock.patch("commons.trainer.observe.train_log.print_summary") as print_summary:
        open_run_folder(config, torch.device("cpu"), logs_to_file=False)
        run_training(HSTURecipe(config, torch.device("cpu")))
    return [row for call in print_summary.call_args_list for row in call.args[1].items()]
