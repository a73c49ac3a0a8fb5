"""The config of an HSTU run: the fields of `hstu/configs/*.toml` and the flags of `hstu.train`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from commons.checks import Count, require_field_types
from commons.datasets.loader.data_loader import HSTU_DATASETS, SID_DATASETS
from commons.datasets.sequences.metadata import TIMESTAMP
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.config.load import require_shuffler, same_fields
from commons.trainer.optimize.optimizers import OptimizerArgs
from commons.trainer.sharding import Sharding
from hstu.model.config import ExecutionConfig, HSTUConfig, LayerOptions, RankingConfig, RetrievalOptions


@dataclass(frozen=True)
class ModelArgs(RetrievalOptions, ExecutionConfig, LayerOptions):
    """The model; the data set determines the longest sequence and the tables."""

    hidden_size: Count = 64  # width of a token between layers
    num_layers: Count = 2  # number of HSTU layers
    num_attention_heads: Count = 4  # attention heads per layer
    kv_channels: Count = 16  # width of a head
    # Whether to compile the layers, except the attention, with torch.compile; None for yes on CUDA and no on CPU.
    compile: bool | None = None
    # Width of the items' table, also of queries in retrieval; None for hidden_size.
    item_embedding_dim: Count | None = None
    contextual_embedding_dim: Count | None = None  # width of the contextual features' tables; None for hidden_size
    # Ranking: widths of the head's layers; the last width is the number of tasks.
    prediction_head_arch: tuple[int, ...] = (64, 1)

    def __post_init__(self) -> None:
        # Check the numbers that depend on neither the data set nor the task.
        super().__post_init__()
        num_tasks = self.prediction_head_arch[-1] if self.prediction_head_arch else 1
        RankingConfig(self.hstu_config(1), {"item": 1}, self.prediction_head_arch, num_tasks)

    def table_widths(self, item_feature_name: str, contextual_feature_names: Iterable[str]) -> dict[str, int]:
        """Widths of the tables whose width is set apart from hidden_size, by feature name."""
        widths: dict[str, int] = {}
        if self.contextual_embedding_dim is not None:
            widths |= dict.fromkeys(contextual_feature_names, self.contextual_embedding_dim)
        if self.item_embedding_dim is not None:
            widths[item_feature_name] = self.item_embedding_dim
        return widths

    def hstu_config(self, max_sequence_length: int) -> HSTUConfig:
        """The layers, for rows of at most `max_sequence_length` tokens; ValueError for a number outside its range."""
        return HSTUConfig(
            **same_fields(LayerOptions, self),
            max_sequence_length=max_sequence_length,
            timestamp_feature_name=TIMESTAMP,
            execution=ExecutionConfig(**same_fields(ExecutionConfig, self)),
        )


@dataclass
class TrainConfig:
    """A training run of an HSTU model."""

    trainer: TrainerArgs  # how the model is trained
    dataset: DatasetArgs  # the data set and how it is read
    model: ModelArgs = field(default_factory=ModelArgs)  # the model
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)  # the optimizers and the sharding
    # What the model predicts: the action on an item, or the next item.
    task: Literal["ranking", "retrieval"] = "ranking"
    # Sharding of single tables, by feature name; the other tables use optimizer.sharding.
    table_sharding: dict[str, Sharding] = field(default_factory=dict)
    # Report the metrics of the items' popularity with every evaluation, as a baseline; reads the training data once.
    popularity_baseline: bool = False
    # Name of the batch shuffler for trainer.enable_balanced_shuffler. A module in `imports`, or the entry point of an
    # installed package, registers your own shuffler.
    shuffler_type: str = "hstu"
    # Modules to import first on every rank, installed or in the working directory, such as a module with a shuffler.
    imports: Annotated[tuple[str, ...], tyro.conf.arg(name="import")] = ()

    def __post_init__(self) -> None:
        require_shuffler(self.shuffler_type, self.imports)
        require_field_types(self)
        if self.dataset.dataset_name in SID_DATASETS:
            raise ValueError(
                f"dataset_name is {self.dataset.dataset_name!r}, whose items are semantic IDs; HSTU trains on "
                f"{', '.join(HSTU_DATASETS)}: choose one of these, or train sid_gr"
            )
        if self.task == "retrieval" and self.dataset.max_num_candidates > 0:
            raise ValueError(
                f"task is 'retrieval' and max_num_candidates is {self.dataset.max_num_candidates}; retrieval predicts "
                "every next item, with all items as candidates: set it to 0"
            )
        if self.task == "retrieval" and self.dataset.max_history_seqlen < 2:
            raise ValueError(
                f"task is 'retrieval' and max_history_seqlen is {self.dataset.max_history_seqlen}; retrieval predicts "
                "an item of the history from the items before it: give 2 or more"
            )
