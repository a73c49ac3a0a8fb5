"""Train an HSTU ranking model.

    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/demo.toml
    torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/demo.toml \\
        --trainer.enable-balanced-shuffler --trainer.train-batch-size 16

Config ─► ranks ─► data ─► model ─► optimizer ─► shuffler ─► loop.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.trainer.config import load_config
from commons.trainer.data import train_and_eval_loaders
from commons.trainer.errors import log_to_file, run_main
from commons.trainer.launch import initialize_ranks, seed_all
from commons.trainer.logging import write_config
from commons.trainer.loop import TrainingLoop
from hstu.flops import batch_training_flops, hstu_task
from hstu.metrics import RankingMetrics
from hstu.model import HSTURankingModel, RankingConfig
from hstu.sharding import build_distributed_model, dense_parameters
from hstu.train_config import OptimizerArgs, TrainConfig


def main() -> None:
    """One rank of a run."""
    config = load_config(TrainConfig, sys.argv[1:], prog="hstu.train", description=__doc__)
    device = initialize_ranks(config.trainer.world_size, config.trainer.device)
    log_to_file(config.trainer.run_dir)
    write_config(config, config.trainer.run_dir)
    # Every rank initialises its own shards of the tables, and draws its own dropout; the dense weights are rank 0's.
    seed_all(config.trainer.seed + dist.get_rank())

    train_loader, eval_loader = train_and_eval_loaders(config.dataset, config.trainer, device)
    dataset: Any = train_loader.dataset
    model_config = config.model.ranking_config(
        max_sequence_length=dataset.max_sequence_length,
        tables=dataset.vocabulary_sizes,
        num_tasks=config.dataset.num_tasks,
    )
    model = build_model(model_config, config.optimizer, device)
    trains_balanced = config.trainer.enable_balanced_shuffler
    shuffler = build_shuffler(config, model_config, balances=trains_balanced)
    eval_shuffler = build_shuffler(config, model_config, balances=trains_balanced and config.trainer.shuffle_eval)
    loop = TrainingLoop(
        config.trainer,
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        device=device,
        shuffler=shuffler,
        train_loader=train_loader,
        eval_shuffler=eval_shuffler,
        eval_loader=eval_loader,
        metrics=RankingMetrics(config.dataset.num_tasks, device=device),
        fingerprint={"model": asdict(model_config), "optimizer": config.optimizer.kinds()},
        flops=partial(batch_training_flops, hstu_task(model_config.hstu)),
    )
    loop.run()
    # Not after a failure: the worker may then wait for a rank that is gone.
    shuffler.close()
    eval_shuffler.close()


def build_model(config: RankingConfig, optimizer: OptimizerArgs, device: torch.device) -> nn.Module:
    """The model on all ranks: tables sharded, everything else copied."""
    return build_distributed_model(
        HSTURankingModel(config, embedding_device=torch.device("meta")),
        device=device,
        embedding_optimizer=optimizer.embedding_optimizer,
        embedding_lr=optimizer.embedding_lr,
        sharding=optimizer.sharding,
    )


def build_optimizer(model: nn.Module, args: OptimizerArgs) -> torch.optim.Optimizer:
    """The optimizer of what the tables' own optimizers do not train."""
    optimizer_class = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[args.dense_optimizer]
    return optimizer_class(dense_parameters(model).values(), lr=args.dense_lr)


def build_shuffler(
    config: TrainConfig, model_config: RankingConfig, *, balances: bool
) -> BaseTaskBalancedBatchShuffler:
    """The shuffler that the config names, or the one that moves nothing."""
    options: dict[str, Any] = {"options": config.trainer.shuffler}
    if not balances:
        return IdentityBalancedBatchShuffler(**options)
    if config.shuffler_type == "hstu":
        hstu = model_config.hstu
        options |= {
            "hidden_size": hstu.hidden_size,
            "num_heads": hstu.num_attention_heads,
            "head_dim": hstu.kv_channels,
            "num_layers": hstu.num_layers,
            "causal": hstu.is_causal,
            "target_group_size": hstu.target_group_size,
        }
    return BatchShufflerFactory.create(config.shuffler_type, **options)


if __name__ == "__main__":
    run_main(main)
