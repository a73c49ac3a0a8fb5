"""HSTURecipe: builds the HSTU model, its data and metrics for training, the demo, calibration and simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from commons.datasets.hstu_batch import HSTUBatch, padded_kjt
from commons.datasets.loader.resumable import stated_by
from commons.datasets.random.distribution import random_times
from commons.datasets.sequences.metadata import TIMESTAMP
from commons.distributed.process_group import resolve_process_group
from commons.perf_model.measurement import RowTokens
from commons.perf_model.task_estimator import HSTUAttentionTask
from commons.sequence_batch.open_batch import real_rows
from commons.trainer.checkpoint.random_state import kept_random_state
from commons.trainer.config.load import same_fields
from commons.trainer.data import train_and_eval_loaders
from commons.trainer.evaluation import Metrics
from commons.trainer.ranks.launch import seed_all
from commons.trainer.recipe import Recipe
from commons.trainer.sharding import Sharding
from hstu.metrics import RankingMetrics, count_items
from hstu.model import HSTURankingModel, HSTURetrievalModel, RankingConfig, RetrievalConfig, SequenceModel
from hstu.model.config import COMPUTE_DTYPES, RetrievalOptions
from hstu.model.layer import HSTUEncoder
from hstu.model.ranking import require_hidden_actions
from hstu.negatives import NegativeSampling, sample_negatives, with_negatives
from hstu.retrieval_metrics import RetrievalMetrics
from hstu.sharding import build_distributed_model
from hstu.train_config import TrainConfig

# The time of a lookup does not depend on the size of the table; small tables leave the memory to the layers.
_MOST_MEASURED_TABLE_ROWS = 10_000
_LOSS_OPTIONS = {option.name for option in fields(RetrievalOptions)}


class HSTURecipe(Recipe):
    """The recipe of an HSTU model; models for measurements have tables of at most 10,000 rows."""

    config_class = TrainConfig
    config: TrainConfig

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.compute_dtype = COMPUTE_DTYPES[config.model.compute_dtype]
        if config.model.compute_dtype == "fp16":
            self.loss_scaler = torch.amp.GradScaler(device.type)

    @cached_property
    def task(self) -> HSTUAttentionTask:
        """The cost of the layers, without projections of embeddings, the head and retrieval's scores."""
        return HSTUAttentionTask(**self.config.model.cost_dimensions)

    def row_tokens(self, batch: HSTUBatch) -> RowTokens:
        """Tokens of every real row, and how many of these are candidates and contextual tokens."""
        rows = real_rows(batch)
        seqlen, targets = batch.sequence_lengths()
        contextual = batch.contextual_lengths()[:rows] if self.config.model.contextual_mask else None
        return RowTokens(seqlen[:rows], targets[:rows], contextual)

    def num_tokens(self, batch: HSTUBatch) -> int:
        """Tokens that the model computes; timestamps and negatives do not count."""
        return int(batch.sequence_lengths()[0].sum())

    def data_options(self) -> dict[str, Any]:
        """Requests timestamps if the model has a time bias."""
        return {"timestamps": True} if self.config.model.time_bias else {}

    def open_loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """See Recipe; batches have drawn negatives if the model uses them."""
        train, test = train_and_eval_loaders(
            self.config.dataset, self.config.trainer, self.device, **self.data_options()
        )
        config, group = self.config_on(train.dataset), resolve_process_group()
        if not (isinstance(config, RetrievalConfig) and config.negatives_feature_name):
            return train, test
        sample = partial(
            sample_negatives,
            feature_name=config.negatives_feature_name,
            num_items=config.embedding_tables[config.item_feature_name],
            seed=self.config.trainer.seed,
            rank=dist.get_rank(group),
            world_size=dist.get_world_size(group),
        )
        # In evaluation the feature is empty.
        return sample(train, num_negatives=config.num_negatives), sample(test, num_negatives=0)

    @cached_property
    def model_config(self) -> RankingConfig | RetrievalConfig:
        """The model's own config, for the data of this run."""
        return self.config_on(self._training_data)

    @property
    def _training_data(self) -> Any:
        # Without process groups, as in a simulation, the data as a single rank reads them.
        data: Any = (self.loaders[0] if dist.is_initialized() else self.single_loader).dataset
        return data.dataset if isinstance(data, NegativeSampling) else data

    def config_on(self, data: Any, tables: dict[str, int] | None = None) -> RankingConfig | RetrievalConfig:
        """The model's own config for a data set: its vocabulary sizes, longest sequence and feature names.

        `tables` are numbers of rows by feature name; None for the vocabulary sizes.

        Raises:
            ValueError: the data do not fit the model.
        """
        model, names = self.config.model, _feature_names(data)
        shared: dict[str, Any] = {
            "hstu": model.hstu_config(data.max_sequence_length),
            "embedding_tables": tables or data.vocabulary_sizes,
            "embedding_dims": model.table_widths(names.item_feature_name, names.contextual_feature_names),
        }
        if self.config.task == "retrieval":
            own = same_fields(RetrievalOptions, model)
            return RetrievalConfig(item_feature_name=names.item_feature_name, **own, **shared)
        if data.num_tasks == 0:
            raise ValueError(
                "task is 'ranking' and the data have no actions; ranking predicts them: set dataset.columns.actions, "
                "or task to 'retrieval'"
            )
        require_hidden_actions(model, names, self.config.dataset.max_num_candidates)
        num_tasks = self.config.dataset.num_tasks
        return RankingConfig(prediction_head_arch=model.prediction_head_arch, num_tasks=num_tasks, **shared)

    def build_model(self) -> nn.Module:
        """The model on all ranks: tables sharded, everything else copied."""
        config, optimizer = self.model_config, self.config.optimizer
        # Every rank initialises its own shards of the tables and draws its own dropout; dense weights are rank 0's.
        seed_all(self.config.trainer.seed + dist.get_rank())
        model = _make_model(config, embedding_device=torch.device("meta"))
        sharding: dict[str, Sharding | None] = dict.fromkeys(config.embedding_tables, optimizer.sharding)
        sharding |= self.config.table_sharding
        if self.loss_scaler is not None:
            model.scale_loss(self.loss_scaler, [table for table, kind in sharding.items() if kind == "data_parallel"])
        return build_distributed_model(
            model,
            device=self.device,
            embedding_optimizer=optimizer.embedding_optimizer,
            embedding_lr=optimizer.embedding_lr,
            sharding=sharding,
        )

    def layers(self, model: nn.Module) -> nn.Module:
        """The HSTU layers."""
        return next(module for module in model.modules() if isinstance(module, HSTUEncoder))

    def metrics(self, model: nn.Module) -> Metrics:
        """AUC per task, or HR@K and NDCG@K; with `popularity_baseline` also for the items' popularity as the score."""
        popularity = self._item_popularity() if self.config.popularity_baseline else None
        config = self.model_config
        if isinstance(config, RankingConfig):
            return RankingMetrics(config.num_tasks, popularity=popularity, device=self.device)
        return RetrievalMetrics(
            model,
            config.item_feature_name,
            self.config.trainer.eval_metrics,
            temperature=config.temperature,
            popularity=popularity,
            device=self.device,
        )

    def fingerprint(self) -> dict[str, Any]:
        """The settings that determine the shapes and the meaning of the weights, and what the ids of the data mean."""
        ids = stated_by(self._training_data, "vocabulary_digests")
        if self.config.task == "ranking" and (labels := getattr(self._training_data, "labels", ())):
            ids["labels"] = ", ".join(labels)
        weights = weights_of(self.model_config)
        return {"task": self.config.task, "model": weights, "vocabulary_digests": ids, **super().fingerprint()}

    def shuffler_arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """Dimensions of the layers, and the features that are tokens: timestamps and negatives are not."""
        model, tokens = self.config.model, list(self.model_config.embedding_tables)
        of_hstu = {"contextual_mask": model.contextual_mask, "token_feature_names": tokens}
        return {"hstu": asdict(self.task) | of_hstu, "tokens": {"feature_names": tokens}}

    def single_process_model(self) -> nn.Module:
        """See Recipe."""
        model = _make_model(self._measured_config, plain_embeddings=True)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = True  # gradients of only the rows looked up, as in TorchRec's tables
        return model

    def make_batch(self, lengths: Sequence[int]) -> HSTUBatch:
        """A random batch on the device; rows have the most candidates that leave at least one item of history."""
        example, ids = self._example, self._measured_config.embedding_tables
        items = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        candidates = None
        if example.max_num_candidates:
            candidates = (items - 1).clamp(0, example.max_num_candidates)
        row_lengths = {
            name: torch.ones_like(items) if name in example.contextual_feature_names else items
            for name in example.features.keys()
        }
        values = {
            name: random_times(count)
            if name == TIMESTAMP
            else torch.randint(ids[name], (int(count.sum()),), device="cpu")
            for name, count in row_lengths.items()
        }
        predicted = items if candidates is None else candidates
        tasks = [f"task_{task}" for task in range(self.config.dataset.num_tasks)]
        labels = padded_kjt(
            {task: torch.randint(2, (int(predicted.sum()),), device="cpu").float() for task in tasks},
            dict.fromkeys(tasks, predicted),
            len(items),
        )
        rows, features = len(items), padded_kjt(values, row_lengths, len(items))
        batch = replace(
            example,
            features=features,
            batch_size=rows,
            actual_batch_size=rows,
            labels=labels,
            num_candidates=candidates,
        )
        return self._add_negatives(batch).to(self.device)

    def host_batches(self) -> Iterator[HSTUBatch]:
        """See Recipe.

        Raises:
            ValueError: the data do not fit the model.
        """
        _ = self._measured_config
        return super().host_batches()

    @cached_property
    def _measured_config(self) -> RankingConfig | RetrievalConfig:
        data: Any = self.single_loader.dataset
        rows = {name: min(rows, _MOST_MEASURED_TABLE_ROWS) for name, rows in data.vocabulary_sizes.items()}
        return self.config_on(data, rows)

    @cached_property
    def _example(self) -> HSTUBatch:
        """The first batch, for the feature names and limits of batches of this data set."""
        for batch in self.host_batches():
            return batch
        raise ValueError("the data set has no batch for training: check its path and split")

    def _add_negatives(self, batch: HSTUBatch) -> HSTUBatch:
        config = self._measured_config
        if not (isinstance(config, RetrievalConfig) and config.negatives_feature_name):
            return batch
        shape = (batch.batch_size, config.num_negatives)
        drawn = torch.randint(config.embedding_tables[config.item_feature_name], shape, device="cpu")
        return with_negatives(batch, config.negatives_feature_name, drawn)

    def _item_popularity(self) -> torch.Tensor:
        """Occurrences `(num_items,)` of every item in the training data that the model sees; collective."""
        # Every rank reads its own rows, once, in any order.
        trainer = replace(self.config.trainer, single_rank_load=False, balance_batch=False)
        dataset = replace(self.config.dataset, shuffle=False, drop_last=False)
        with kept_random_state():
            loader, _ = train_and_eval_loaders(dataset, trainer, self.device)
            item_feature_name = _feature_names(loader.dataset).item_feature_name
            return count_items(loader, self.model_config.embedding_tables[item_feature_name], device=self.device)


RECIPE = HSTURecipe


def weights_of(config: RankingConfig | RetrievalConfig) -> dict[str, Any]:
    """The settings that a checkpoint and a model must share: all except `execution`, dropout and the retrieval loss."""
    shared = {name: value for name, value in asdict(config).items() if name not in _LOSS_OPTIONS}
    for name in ("execution", "dropout"):
        del shared["hstu"][name]
    return shared


def _make_model(config: RankingConfig | RetrievalConfig, **options: Any) -> SequenceModel:
    return (HSTURankingModel if isinstance(config, RankingConfig) else HSTURetrievalModel)(config, **options)


def _feature_names(data: Any) -> Any:
    """The object with the names of the features by their meaning: a data set's schema, or random data itself."""
    return getattr(data, "schema", data)
