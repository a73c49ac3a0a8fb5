"""What a model is trained to predict, ranking or retrieval: config of the model, batches, metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from commons.distributed.process_group import resolve_process_group
from commons.trainer import DatasetArgs
from commons.trainer.config.load import same_fields
from commons.trainer.evaluation import Metrics
from hstu.metrics import RankingMetrics
from hstu.model import HSTURankingModel, HSTURetrievalModel, RankingConfig, RetrievalConfig, SequenceModel
from hstu.model.config import SequenceModelConfig
from hstu.negatives import sample_negatives
from hstu.retrieval_metrics import RetrievalMetrics
from hstu.train_config import ModelArgs

Split = Literal["train", "test"]


class Objective(ABC):
    """What a model is trained to predict, with the settings of the model for it.

    `data` is the data set: vocabulary sizes, the longest sequence, names of features. `tables` are rows by feature
    name, where they are others than the vocabulary sizes.
    """

    config: SequenceModelConfig
    model_class: ClassVar[type[SequenceModel]]

    def __init__(self, model: ModelArgs, dataset: DatasetArgs, data: Any, tables: dict[str, int] | None = None) -> None:
        names = feature_names(data)
        widths = model.table_widths(names.item_feature_name, names.contextual_feature_names)
        shared = {
            "hstu": model.hstu_config(data.max_sequence_length),
            "embedding_tables": tables or data.vocabulary_sizes,
            "embedding_dims": widths,
        }
        self.config = self._model_config(model, dataset, data, shared)

    @abstractmethod
    def _model_config(
        self, model: ModelArgs, dataset: DatasetArgs, data: Any, shared: dict[str, Any]
    ) -> SequenceModelConfig:
        """The model's own config; `shared` are the fields of SequenceModelConfig."""

    def make_model(self, **options: Any) -> SequenceModel:
        """The model; options as those of `SequenceModel`."""
        return self.model_class(self.config, **options)

    def prepare(self, loader: DataLoader[Any], split: Split, seed: int) -> DataLoader[Any]:
        """A loader of what the model needs, from one of what the data set has."""
        return loader

    @abstractmethod
    def metrics(
        self, model: nn.Module, names: Sequence[str], popularity: torch.Tensor | None, device: torch.device
    ) -> Metrics:
        """What evaluations measure.

        `names` are of metrics, where the objective has a choice. `popularity` are occurrences `(num_items,)` of every
        item in training, to compare with; None for no comparison.
        """


class RankingObjective(Objective):
    """The action on every item, or on every candidate; AUC per task."""

    config: RankingConfig
    model_class = HSTURankingModel

    def _model_config(self, model: ModelArgs, dataset: DatasetArgs, data: Any, shared: dict[str, Any]) -> RankingConfig:
        if data.num_tasks == 0:
            raise ValueError(
                "task is 'ranking' and the data have no actions; ranking predicts them: set dataset.columns.actions, "
                "or task to 'retrieval'"
            )
        return RankingConfig(prediction_head_arch=model.prediction_head_arch, num_tasks=dataset.num_tasks, **shared)

    def metrics(
        self, model: nn.Module, names: Sequence[str], popularity: torch.Tensor | None, device: torch.device
    ) -> Metrics:
        """See Objective; there is no choice of metrics."""
        return RankingMetrics(self.config.num_tasks, popularity=popularity, device=device)


class RetrievalObjective(Objective):
    """The next item among all items; HR@K and NDCG@K."""

    config: RetrievalConfig
    model_class = HSTURetrievalModel

    def _model_config(
        self, model: ModelArgs, dataset: DatasetArgs, data: Any, shared: dict[str, Any]
    ) -> RetrievalConfig:
        item = feature_names(data).item_feature_name
        return RetrievalConfig(item_feature_name=item, **same_fields(RetrievalConfig, model), **shared)

    def prepare(self, loader: DataLoader[Any], split: Split, seed: int) -> DataLoader[Any]:
        """Rows bring negatives, if the model wants drawn ones; in evaluation only the feature is there."""
        name = self.config.negatives_feature_name
        if name is None:
            return loader
        group = resolve_process_group()
        return sample_negatives(
            loader,
            name,
            self.config.num_negatives if split == "train" else 0,
            self.config.embedding_tables[self.config.item_feature_name],
            seed=seed,
            rank=dist.get_rank(group),
            world_size=dist.get_world_size(group),
        )

    def metrics(
        self, model: nn.Module, names: Sequence[str], popularity: torch.Tensor | None, device: torch.device
    ) -> Metrics:
        """See Objective."""
        return RetrievalMetrics(
            model,
            self.config.item_feature_name,
            names,
            temperature=self.config.temperature,
            popularity=popularity,
            device=device,
        )


OBJECTIVES: dict[str, type[Objective]] = {"ranking": RankingObjective, "retrieval": RetrievalObjective}


def feature_names(data: Any) -> Any:
    """What knows a data set's `item_feature_name` and `contextual_feature_names`: its schema, or random data itself."""
    return getattr(data, "schema", data)
