"""What a rank of the SID-GR demo does; see `commons.trainer.comparison_ranks`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.datasets.movielens import SCHEMA
from commons.datasets.sid_histories import PreprocessedHistories
from commons.datasets.sid_map import SIDMap
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.comparison import write_results
from commons.trainer.comparison_ranks import Replica, compare
from commons.trainer.data import train_and_eval_loaders
from commons.trainer.errors import log_to_file, run_main
from commons.trainer.launch import initialize_ranks
from commons.trainer.optimizers import OptimizerArgs, build_optimizer
from sid_gr.batch_shuffler import SIDGRBalancedBatchShuffler
from sid_gr.demo import POPULARITY, WORDING, DemoOptions, parse_options
from sid_gr.metrics import GenerationMetrics
from sid_gr.model import GenerationOutput, SIDGRConfig, SIDGRModel, SIDTrie
from sid_gr.model.beam_search import GeneratedItems
from sid_gr.model.decoder import candidate_codes
from sid_gr.parallel import initialize_model_parallel
from sid_gr.sharding import build_distributed_model
from sid_gr.train_config import ModelArgs

BEAM_WIDTH = 10


def main() -> None:
    """One rank of the demo."""
    options = parse_options()
    device = initialize_ranks(device_type=options.device)
    initialize_model_parallel()
    log_to_file(options.run_dir)
    trainer = TrainerArgs(options.batch_size, options.batch_size, run_dir=str(options.run_dir), seed=options.seed)
    # Every item of a user is predicted from those before it.
    dataset = DatasetArgs(
        "sid-ml-1m",
        options.max_history_seqlen,
        dataset_path=str(options.data_dir),
        max_num_candidates=0,
        shuffle=True,
        drop_last=True,
    )
    sid_map = SIDMap.load(options.map_path, options.codebook_sizes)
    trie = SIDTrie(sid_map.codes, sid_map.codebook_sizes)
    config = ModelArgs(num_layers=options.num_layers).decoder_config(
        codebook_sizes=sid_map.codebook_sizes, max_items=options.max_history_seqlen + 1
    )
    metrics = GenerationMetrics(list(WORDING.metrics), BEAM_WIDTH, device=device)

    def make_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
        return train_and_eval_loaders(dataset, trainer, device, sid_map=sid_map)

    results = compare(
        options,
        make_loaders=make_loaders,
        make_replica=lambda: make_replica(config, trie, device),
        shuffler=make_shuffler(config),
        metrics=metrics,
        device=device,
    )
    popular = most_popular(options, sid_map, trie)
    results.baselines[POPULARITY] = judge_constant(popular, make_loaders()[1], trie, metrics)
    if dist.get_rank() == 0:
        write_results(results, options.run_dir)


def make_replica(config: SIDGRConfig, trie: SIDTrie, device: torch.device) -> Replica:
    """The model on all ranks, and its optimizer."""
    # The whole table on one rank would be work that no shuffle can even out.
    args = OptimizerArgs(dense_lr=3e-3, embedding_lr=0.3, sharding="row_wise")
    model = build_distributed_model(
        SIDGRModel(config, trie=trie, beam_width=BEAM_WIDTH),
        device=device,
        embedding_lr=args.embedding_lr,
        sharding=args.sharding,
    )
    return model, build_optimizer(model, args)


def make_shuffler(config: SIDGRConfig) -> SIDGRBalancedBatchShuffler:
    """The shuffler that knows what a row costs in this model."""
    return SIDGRBalancedBatchShuffler(
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.num_layers,
        ffn_hidden_size=config.ffn_width,
    )


def most_popular(options: DemoOptions, sid_map: SIDMap, trie: SIDTrie) -> torch.Tensor:
    """Leaves of the items that training users have most often, the most popular first: int64 `(BEAM_WIDTH,)`."""
    histories = PreprocessedHistories(options.data_dir, SCHEMA, "train")
    users = np.arange(len(histories))
    rows = sid_map.rows_of(histories.tails(users, histories.lengths(users)))
    popular = np.argsort(-np.bincount(rows, minlength=sid_map.num_items), kind="stable")[:BEAM_WIDTH]
    return trie.lookup(torch.from_numpy(sid_map.codes[popular]).to(trie.sids.device))


def judge_constant(
    leaves: torch.Tensor, batches: Iterable[GPTSIDBatch], trie: SIDTrie, metrics: GenerationMetrics
) -> dict[str, float]:
    """Metrics of the same items for everyone; a collective call."""
    for batch in batches:
        lengths = batch.code_lengths(batch.candidate_feature_name)[: batch.actual_batch_size]
        codes = candidate_codes(batch, int(lengths.sum())).to(leaves.device)
        ranking = leaves.expand(len(lengths), -1)
        found = GeneratedItems(ranking, torch.zeros_like(ranking, dtype=torch.float32))
        lengths = (lengths // batch.num_hierarchies).to(leaves.device)
        metrics.update(GenerationOutput(torch.zeros(()), 0, found, trie.lookup(codes), lengths))
    results = metrics.compute()
    metrics.reset()
    return results


if __name__ == "__main__":
    run_main(main)
