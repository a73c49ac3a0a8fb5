"""Train a semantic-ID decoder.

    torchrun --standalone --nproc_per_node=2 -m sid_gr.train --config sid_gr/configs/demo.toml
    torchrun --standalone --nproc_per_node=2 -m sid_gr.train --config sid_gr/configs/demo.toml \\
        --trainer.enable-balanced-shuffler --trainer.top-k-for-generation 20
    torchrun --standalone --nproc_per_node=4 -m sid_gr.train --config sid_gr/configs/random.toml \\
        --model.tensor-model-parallel-size 2

Config ─► ranks ─► semantic IDs ─► data ─► model ─► optimizer ─► shuffler ─► loop.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torchrec.distributed.model_parallel import DistributedModelParallel

from commons.datasets.sid_dataset import CANDIDATE, HISTORY, SIDDataset
from commons.datasets.sid_map import SIDMap
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.trainer.config import load_config
from commons.trainer.data import train_and_eval_loaders
from commons.trainer.errors import run_main
from commons.trainer.launch import initialize_ranks, seed_all
from commons.trainer.optimizers import OptimizerArgs, build_optimizer
from commons.trainer.run import run_training
from commons.trainer.run_folder import open_run_folder
from commons.trainer.shuffler import make_shuffler
from commons.trainer.train_log import TrainSummary
from sid_gr.flops import batch_training_flops, sid_task
from sid_gr.metrics import GenerationMetrics
from sid_gr.model import SIDGRConfig, SIDGRModel, SIDTrie
from sid_gr.parallel import initialize_model_parallel
from sid_gr.sharding import build_distributed_model
from sid_gr.train_config import TrainConfig


def main() -> None:
    """One rank of a run."""
    config = load_config(TrainConfig, sys.argv[1:], prog="sid_gr.train", description=__doc__)
    device = initialize_ranks(config.trainer.world_size, config.trainer.device)
    initialize_model_parallel(config.model.tensor_model_parallel_size)
    open_run_folder(config, device)
    train(config, device)


def train(config: TrainConfig, device: torch.device) -> TrainSummary:
    """Train and evaluate as a config says; called on all ranks together, after `initialize_model_parallel`.

    Args:
        config: the run.
        device: of this rank.

    Raises:
        KeyError, FileNotFoundError, ValueError: data or settings that do not fit.

    """
    trainer = config.trainer
    sid_map = config.sid.load_map(config.dataset.dataset_name, trainer.seed)
    options: dict[str, Any] = {"sid_map": sid_map}
    if config.dataset.dataset_name == "sid":
        options["history_column"] = config.sid.history_column
    train_loader, eval_loader = train_and_eval_loaders(config.dataset, trainer, device, **options)
    datasets: dict[str, Any] = {"training": train_loader.dataset, "evaluation": eval_loader.dataset}
    report_cut_histories(datasets)
    model_config = config.model.decoder_config(
        codebook_sizes=sid_map.codebook_sizes, max_items=max(dataset.max_items for dataset in datasets.values())
    )
    model = build_model(
        model_config,
        sid_map,
        beam_width=trainer.top_k_for_generation,
        optimizer=config.optimizer,
        seed=trainer.seed,
        device=device,
    )
    return run_training(
        trainer,
        device=device,
        build_shuffler=partial(build_shuffler, config, model_config),
        train_loader=train_loader,
        eval_loader=eval_loader,
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        metrics=GenerationMetrics(trainer.eval_metrics, trainer.top_k_for_generation, device=device),
        fingerprint={"model": asdict(model_config), "optimizer": config.optimizer.kinds()},
        flops=partial(batch_training_flops, sid_task(model_config)),
    )


def report_cut_histories(datasets: Mapping[str, Any]) -> None:
    """Say how many users have more items than a row holds; rank 0 does."""
    for name, dataset in datasets.items():
        if dist.get_rank() == 0 and isinstance(dataset, SIDDataset) and dataset.num_cut_histories:
            Console().print(
                f"{name}: {dataset.num_cut_histories:,} of {len(dataset):,} users have more than {dataset.max_items:,} "
                f"items; {dataset.num_cut_items:,} of their oldest items are cut off",
                highlight=False,
            )


def build_model(
    config: SIDGRConfig,
    sid_map: SIDMap,
    *,
    beam_width: int,
    optimizer: OptimizerArgs,
    seed: int,
    device: torch.device,
) -> DistributedModelParallel:
    """The model on all ranks: the table sharded, the decoder copied to every data-parallel rank.

    Leaves the ranks with random states for their dropout: one for every data-parallel rank, since tensor-parallel peers
    drop the same elements.
    """
    seed_all(seed)  # the same whole weights on all ranks, of which tensor-parallel ranks keep their part
    model = SIDGRModel(
        config,
        trie=SIDTrie(sid_map.codes, sid_map.codebook_sizes),
        beam_width=beam_width,
        feature_names=(HISTORY, CANDIDATE),
        embedding_device=torch.device("meta"),
    )
    seed_all(seed + 1 + dist.get_rank())  # every rank initialises its own rows of the table
    sharded = build_distributed_model(
        model,
        device=device,
        embedding_optimizer=optimizer.embedding_optimizer,
        embedding_lr=optimizer.embedding_lr,
        sharding=optimizer.sharding,
    )
    seed_all(seed + 1 + dist.get_rank(resolve_process_group()))
    return sharded


def build_shuffler(config: TrainConfig, model_config: SIDGRConfig, balances: bool) -> BaseTaskBalancedBatchShuffler:
    """The shuffler that the config names, or the one that moves nothing."""
    dimensions = {
        "hidden_size": model_config.hidden_size,
        "num_heads": model_config.num_attention_heads,
        "head_dim": model_config.head_dim,
        "num_layers": model_config.num_layers,
        "ffn_hidden_size": model_config.ffn_width,
    }
    return make_shuffler(config.trainer, config.shuffler_type, {"sid_gr": dimensions}, balances=balances)


if __name__ == "__main__":
    run_main(main)
