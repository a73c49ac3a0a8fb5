"""SIDGRRecipe: builds the semantic-ID decoder, its data and metrics for training, demo, calibration and simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.datasets.loader.resumable import stated_by
from commons.datasets.sids.dataset import CANDIDATE, HISTORY, SIDDataset
from commons.datasets.sids.map import SIDMap
from commons.distributed.process_group import resolve_process_group
from commons.perf_model.measurement import RowTokens
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.sequence_batch.open_batch import real_rows
from commons.trainer.evaluation import Metrics
from commons.trainer.ranks.collectives import limit_collectives
from commons.trainer.ranks.launch import seed_all
from commons.trainer.recipe import Recipe
from sid_gr.batch_shuffler import decoder_flops
from sid_gr.megatron_core import TransformerBlock, parallel_state
from sid_gr.metrics import GenerationMetrics
from sid_gr.model import SIDGRConfig, SIDGRModel, SIDTrie
from sid_gr.parallel import groups_of_decoder, initialize_model_parallel, tensor_parallel_size
from sid_gr.sharding import build_distributed_model
from sid_gr.train_config import TrainConfig


class SIDGRRecipe(Recipe):
    """The recipe of a decoder with megatron-core layers, optionally tensor-parallel (`initialize_model_parallel`)."""

    config_class = TrainConfig
    config: TrainConfig
    _made_groups = False

    @classmethod
    def load(cls, path: Path, device: torch.device) -> SIDGRRecipe:
        """See Recipe. Also raises ValueError for a config with tensor parallelism, which needs several processes."""
        recipe = super().load(path, device)
        size = recipe.config.model.tensor_model_parallel_size
        if size > 1:
            raise ValueError(
                f"tensor_model_parallel_size is {size}; costs are measured in one process: use a config with 1"
            )
        return recipe

    @cached_property
    def task(self) -> SelfAttentionTask:
        """The cost of the layers."""
        return SelfAttentionTask(**self._decoder_config(1).cost_dimensions)

    def row_tokens(self, batch: GPTSIDBatch) -> RowTokens:
        """Tokens of every real row; there are no targets, as all attention is causal."""
        return RowTokens(batch.sequence_lengths()[: real_rows(batch)])

    def row_flops(self, batch: GPTSIDBatch) -> torch.Tensor:
        """Forward FLOPs of layers and heads for every real row, without lookups, which are small."""
        return decoder_flops(self.task, batch)[: real_rows(batch)]

    def prepare_ranks(self) -> None:
        """Make megatron-core's groups, or use existing groups.

        Raises:
            ValueError: existing groups have another tensor_model_parallel_size, or it does not divide the number of
                ranks.
        """
        size = self.config.model.tensor_model_parallel_size
        self._made_groups = not parallel_state.model_parallel_is_initialized()
        if self._made_groups:
            initialize_model_parallel(size)
            for group in groups_of_decoder():  # megatron-core's timeout is half an hour
                limit_collectives(self.config.trainer.shuffler.timeout, group)
        elif size != tensor_parallel_size():
            raise ValueError(
                f"tensor_model_parallel_size is {size}, megatron-core's groups exist already, with "
                f"{tensor_parallel_size()} ranks per decoder; existing groups are used: set their size, or destroy "
                "them before"
            )

    def release_ranks(self) -> None:
        """Destroy megatron-core's groups if `prepare_ranks` made them, before the process group is destroyed."""
        if self._made_groups:
            parallel_state.destroy_model_parallel()

    @cached_property
    def sid_map(self) -> SIDMap:
        """Semantic IDs of the items."""
        return self.config.sid.load_map(self.config.dataset.dataset_name, self.config.trainer.seed)

    @cached_property
    def trie(self) -> SIDTrie:
        """The valid semantic IDs, for beam search."""
        return SIDTrie(self.sid_map.codes, self.sid_map.codebook_sizes)

    def data_options(self) -> dict[str, Any]:
        """The map, and the column of histories in the user's file."""
        return {"sid_map": self.sid_map, "history_column": self.config.sid.history_column}

    def notes(self) -> list[str]:
        """The numbers of users and items that are affected by the limit of items per row."""
        loaders = zip(("training", "evaluation"), self.loaders)
        datasets: dict[str, Any] = {name: loader.dataset for name, loader in loaders if loader is not None}
        return [
            f"{name}: {dataset.num_cut_histories:,} of {len(dataset):,} users have more than {dataset.max_items:,} "
            f"items; {dataset.num_cut_items:,} of their oldest items are cut off"
            for name, dataset in datasets.items()
            if isinstance(dataset, SIDDataset) and dataset.num_cut_histories
        ]

    @cached_property
    def model_config(self) -> SIDGRConfig:
        """The model's own config, for the longest row of this run's data."""
        return self._decoder_config(max(dataset.max_items for dataset in self._datasets))

    @property
    def _datasets(self) -> list[Any]:
        # Without process groups, the data as a single rank reads them: rows of the evaluation are not longer.
        loaders = self.loaders if dist.is_initialized() else (self.single_loader,)
        return [loader.dataset for loader in loaders if loader is not None]

    def build_model(self) -> nn.Module:
        """The model on all ranks: the table sharded, the decoder copied to every data-parallel rank.

        Finally seeds each data-parallel rank for its dropout; tensor-parallel peers get the same seed, because they
        must drop the same elements.
        """
        seed, optimizer = self.config.trainer.seed, self.config.optimizer
        seed_all(seed)  # equal whole weights on all ranks; a tensor-parallel rank keeps its part
        model = self._make_model(self.model_config, embedding_device=torch.device("meta"))
        seed_all(seed + 1 + dist.get_rank())  # every rank initialises its own rows of the table
        sharded = build_distributed_model(
            model,
            device=self.device,
            embedding_optimizer=optimizer.embedding_optimizer,
            embedding_lr=optimizer.embedding_lr,
            sharding=optimizer.sharding,
        )
        seed_all(seed + 1 + dist.get_rank(resolve_process_group()))
        return sharded

    def layers(self, model: nn.Module) -> nn.Module:
        """The decoder's layers; tensor-parallel peers synchronise in them, and have the same batch."""
        return next(module for module in model.modules() if isinstance(module, TransformerBlock))

    def metrics(self, model: nn.Module) -> Metrics:
        """HitRate@K, NDCG@K and Recall@K of the items from beam search."""
        trainer = self.config.trainer
        return GenerationMetrics(trainer.eval_metrics, trainer.top_k_for_generation, device=self.device)

    def fingerprint(self) -> dict[str, Any]:
        """The settings that determine the shapes and the meaning of the weights."""
        shared = asdict(self.model_config)
        for name in ("dropout", "init_method_std"):
            del shared[name]
        items = stated_by(self._datasets[0], "vocabulary_digests").get("items")
        return {"model": shared, "sid_map": self.sid_map.digest, "items": items, **super().fingerprint()}

    def shuffler_arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """Dimensions of the layers."""
        return {"sid_gr": self._decoder_config(1).cost_dimensions}

    def single_process_model(self) -> nn.Module:
        """See Recipe; it generates as the trained one."""
        config = self.model_config
        # megatron-core's layers need a group, also in a single process.
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if not parallel_state.model_parallel_is_initialized():
            initialize_model_parallel()
        return self._make_model(config)

    def make_batch(self, lengths: Sequence[int]) -> GPTSIDBatch:
        """A random batch on the device, with as many candidates per row as in training."""
        items = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        candidates = items.clamp(max=self.config.dataset.max_num_candidates or int(items.max()))
        batch = GPTSIDBatch.random_of_lengths(
            items - candidates,
            candidates,
            self.sid_map.codebook_sizes,
            HISTORY,
            CANDIDATE,
            sids=torch.from_numpy(self.sid_map.codes),
        )
        return batch.to(self.device)

    def _make_model(self, config: SIDGRConfig, **options: Any) -> SIDGRModel:
        width, names = self.config.trainer.top_k_for_generation, (HISTORY, CANDIDATE)
        return SIDGRModel(config, trie=self.trie, beam_width=width, feature_names=names, **options)

    def _decoder_config(self, max_items: int) -> SIDGRConfig:
        return self.config.model.decoder_config(codebook_sizes=self.config.sid.codebook_sizes, max_items=max_items)


RECIPE = SIDGRRecipe
