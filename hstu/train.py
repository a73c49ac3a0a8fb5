"""Train an HSTU model, for ranking or for retrieval.

    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/demo.toml
    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/retrieval.toml
    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/demo.toml \\
        --trainer.enable-balanced-shuffler --trainer.train-batch-size 16

Config ─► ranks ─► data ─► task ─► model ─► optimizer ─► shuffler ─► loop.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.trainer.config import load_config
from commons.trainer.data import train_and_eval_loaders
from commons.trainer.errors import run_main
from commons.trainer.launch import initialize_ranks, seed_all
from commons.trainer.loss_scaling import LossScaler
from commons.trainer.optimizers import build_optimizer
from commons.trainer.run import run_training
from commons.trainer.run_folder import open_run_folder
from commons.trainer.shuffler import make_shuffler
from commons.trainer.train_log import TrainSummary
from hstu.flops import batch_training_flops, count_tokens, hstu_task
from hstu.model.config import COMPUTE_DTYPES, SequenceModelConfig
from hstu.popularity import count_items
from hstu.sharding import Sharding, build_distributed_model
from hstu.tasks import TASKS, Task, data_options, feature_roles
from hstu.train_config import ModelArgs, TrainConfig


def main() -> None:
    """One rank of a run."""
    config = load_config(TrainConfig, sys.argv[1:], prog="hstu.train", description=__doc__)
    device = initialize_ranks(config.trainer.world_size, config.trainer.device)
    open_run_folder(config, device)
    train(config, device)


def train(config: TrainConfig, device: torch.device) -> TrainSummary:
    """Train and evaluate as a config says; called on all ranks together.

    Args:
        config: the run.
        device: of this rank.

    Raises:
        KeyError, FileNotFoundError, ValueError: data or settings that do not fit.

    """
    require_device(config.model, device)
    config = replace(config, model=config.model.on(device))
    loaders = train_and_eval_loaders(config.dataset, config.trainer, device, **data_options(config.model))
    task = TASKS[config.task](config.model, config.dataset, loaders[0].dataset)
    train_loader = task.prepare(loaders[0], "train", config.trainer.seed)
    eval_loader = task.prepare(loaders[1], "test", config.trainer.seed)
    popularity = item_popularity(config, task.config, device) if config.popularity_baseline else None
    # Every rank initialises its own shards of the tables, and draws its own dropout; the dense weights are rank 0's.
    seed_all(config.trainer.seed + dist.get_rank())
    scaler = build_loss_scaler(config, device)
    model = build_model(config, task, device, scaler)
    flops = partial(batch_training_flops, hstu_task(task.config.hstu), contextual_mask=task.config.hstu.contextual_mask)
    return run_training(
        config.trainer,
        device=device,
        build_shuffler=partial(build_shuffler, config, task.config),
        train_loader=train_loader,
        eval_loader=eval_loader,
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        metrics=task.metrics(model, config.trainer.eval_metrics, popularity, device),
        count=count_tokens,
        fingerprint={"task": config.task, "model": weights_of(task.config), "optimizer": config.optimizer.kinds()},
        flops=flops,
        compute_dtype=COMPUTE_DTYPES[config.model.compute_dtype],
        loss_scaler=scaler,
    )


def require_device(model: ModelArgs, device: torch.device) -> None:
    """Raise ValueError where the model asks for something that this device does not have."""
    if device.type == "cuda":
        return
    for asked, name, instead in (
        (model.compile is True, "compile is True", "unset it"),
        (model.kernel_backend != "pytorch", f"kernel_backend is {model.kernel_backend!r}", "choose 'pytorch'"),
    ):
        if asked:
            raise ValueError(f"{name} and the device is {device.type!r}; it is made for CUDA: {instead}")


def build_loss_scaler(config: TrainConfig, device: torch.device) -> LossScaler | None:
    """What scales the loss in training in float16; None in other dtypes."""
    if config.model.compute_dtype != "fp16":
        return None
    return LossScaler(device, initial_scale=config.trainer.optimization.initial_loss_scale)


def build_model(
    config: TrainConfig, task: Task, device: torch.device, loss_scaler: LossScaler | None = None
) -> nn.Module:
    """The model on all ranks: tables sharded, everything else copied."""
    model = task.make_model(embedding_device=torch.device("meta"))
    sharding: dict[str, Sharding | None] = dict.fromkeys(task.config.embedding_tables, config.optimizer.sharding)
    sharding |= config.table_sharding
    if loss_scaler is not None:
        model.scale_loss(loss_scaler, [table for table, kind in sharding.items() if kind == "data_parallel"])
    return build_distributed_model(
        model,
        device=device,
        embedding_optimizer=config.optimizer.embedding_optimizer,
        embedding_lr=config.optimizer.embedding_lr,
        sharding=sharding,
    )


def item_popularity(config: TrainConfig, model_config: SequenceModelConfig, device: torch.device) -> torch.Tensor:
    """Occurrences `(num_items,)` of every item in the training data, as the model is shown them; a collective call."""
    # Every rank reads its own rows, once, in any order.
    trainer = replace(config.trainer, single_rank_load=False, balance_batch=False)
    dataset = replace(config.dataset, shuffle=False, drop_last=False)
    loader, _ = train_and_eval_loaders(dataset, trainer, device)
    item_feature_name = feature_roles(loader.dataset)["item_feature_name"]
    return count_items(loader, model_config.embedding_tables[item_feature_name], device=device)


def weights_of(config: SequenceModelConfig) -> dict[str, Any]:
    """What a checkpoint has to agree on with a model: all but how it is executed."""
    fields = asdict(config)
    del fields["hstu"]["execution"]
    return fields


def build_shuffler(
    config: TrainConfig, model_config: SequenceModelConfig, balances: bool
) -> BaseTaskBalancedBatchShuffler:
    """The shuffler that the config names, or the one that moves nothing."""
    hstu = model_config.hstu
    # Times and negatives come with a row, but are no tokens of it.
    tokens = list(model_config.embedding_tables)
    dimensions = {
        "hidden_size": hstu.hidden_size,
        "num_heads": hstu.num_attention_heads,
        "head_dim": hstu.kv_channels,
        "num_layers": hstu.num_layers,
        "causal": hstu.is_causal,
        "contextual_mask": hstu.contextual_mask,
        "target_group_size": hstu.target_group_size,
        "token_feature_names": tokens,
    }
    arguments: dict[str, dict[str, Any]] = {"hstu": dimensions, "tokens": {"feature_names": tokens}}
    return make_shuffler(config.trainer, config.shuffler_type, arguments, balances=balances)


if __name__ == "__main__":
    run_main(main)
