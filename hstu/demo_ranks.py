"""What a rank of the HSTU demo does; see `commons.trainer.comparison_ranks`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.comparison import write_results
from commons.trainer.comparison_ranks import Replica, compare
from commons.trainer.data import train_and_eval_loaders
from commons.trainer.errors import log_to_file, run_main
from commons.trainer.launch import initialize_ranks
from commons.trainer.optimizers import OptimizerArgs, build_optimizer
from hstu.batch_shuffler import HSTUBalancedBatchShuffler
from hstu.demo import parse_options
from hstu.metrics import RankingMetrics
from hstu.model import HSTURankingModel, RankingConfig
from hstu.sharding import build_distributed_model
from hstu.train_config import ModelArgs


def main() -> None:
    """One rank of the demo."""
    options = parse_options()
    device = initialize_ranks(device_type=options.device)
    log_to_file(options.run_dir)
    trainer = TrainerArgs(options.batch_size, options.batch_size, run_dir=str(options.run_dir), seed=options.seed)
    dataset = DatasetArgs(
        "ml-1m", options.max_history_seqlen, dataset_path=str(options.data_dir), shuffle=True, drop_last=True
    )
    data: Any = train_and_eval_loaders(dataset, trainer, device)[0].dataset
    config = ModelArgs(num_layers=options.num_layers).ranking_config(
        max_sequence_length=data.max_sequence_length, tables=data.vocabulary_sizes, num_tasks=1
    )
    results = compare(
        options,
        make_loaders=lambda: train_and_eval_loaders(dataset, trainer, device),
        make_replica=lambda: make_replica(config, device),
        shuffler=make_shuffler(config),
        metrics=RankingMetrics(1, device=device),
        device=device,
    )
    if dist.get_rank() == 0:
        write_results(results, options.run_dir)


def make_replica(config: RankingConfig, device: torch.device) -> Replica:
    """The model on all ranks, and its optimizer."""
    # A table on one rank would be work that no shuffle can even out.
    args = OptimizerArgs(sharding="row_wise")
    model = build_distributed_model(
        HSTURankingModel(config), device=device, embedding_lr=args.embedding_lr, sharding=args.sharding
    )
    return model, build_optimizer(model, args)


def make_shuffler(config: RankingConfig) -> HSTUBalancedBatchShuffler:
    """The shuffler that knows what a row costs in this model."""
    hstu = config.hstu
    return HSTUBalancedBatchShuffler(hstu.hidden_size, hstu.num_attention_heads, hstu.kv_channels, hstu.num_layers)


if __name__ == "__main__":
    run_main(main)
