"""The config of an HSTU run: what `hstu/configs/*.toml` hold and what the flags of `hstu.train` set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from commons.checks import require_at_least
from commons.datasets.loader.data_loader import HSTU_DATASETS, SID_DATASETS
from commons.datasets.sequences.metadata import TIMESTAMP
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.config.load import require_shuffler, same_fields
from commons.trainer.optimize.optimizers import OptimizerArgs
from commons.trainer.sharding import Sharding
from hstu.model.config import ExecutionConfig, HSTUConfig, LayerOptions, RankingConfig, RetrievalOptions


@dataclass(frozen=True)
class ModelArgs(RetrievalOptions, ExecutionConfig, LayerOptions):
    """The model; the longest sequence and the tables follow from the data set."""

    hidden_size: int = 64  # width of a token between layers
    num_layers: int = 2  # HSTU layers
    num_attention_heads: int = 4  # attention heads per layer
    kv_channels: int = 16  # width of a head
    # Put what lies between the attentions under torch.compile; None for doing so on CUDA, and not on a CPU.
    compile: bool | None = None
    # Width of the items' table, in which retrieval compares; None for hidden_size.
    item_embedding_dim: int | None = None
    contextual_embedding_dim: int | None = None  # width of the contextual features' tables; None for hidden_size
    # Ranking: widths of the head's layers; the last one is the number of tasks.
    prediction_head_arch: tuple[int, ...] = (64, 1)

    def __post_init__(self) -> None:
        # These check the numbers that need neither the data set nor the task.
        super().__post_init__()
        num_tasks = self.prediction_head_arch[-1] if self.prediction_head_arch else 1
        RankingConfig(self.hstu_config(1), {"item": 1}, self.prediction_head_arch, num_tasks)
        for name in ("item_embedding_dim", "contextual_embedding_dim"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)

    def table_widths(self, item_feature_name: str, contextual_feature_names: Iterable[str]) -> dict[str, int]:
        """Widths of the tables that do not have the model's, by feature name."""
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
    dataset: DatasetArgs  # what it is trained on
    model: ModelArgs = field(default_factory=ModelArgs)  # the model
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)  # what trains it
    # What the model predicts: the action on an item, or the next item.
    task: Literal["ranking", "retrieval"] = "ranking"
    # How single tables lie on the ranks, by feature name; the others follow optimizer.sharding.
    table_sharding: dict[str, Sharding] = field(default_factory=dict)
    # Tell with every evaluation what the items' popularity would have scored; costs one reading of the data.
    popularity_baseline: bool = False
    # Name of a batch shuffler, used with trainer.enable_balanced_shuffler; one of your own is registered by `imports`
    # or by the entry point of an installed package.
    shuffler_type: str = "hstu"
    # Modules to import first on every rank, installed or in the working directory, such as one with a shuffler.
    imports: Annotated[tuple[str, ...], tyro.conf.arg(name="import")] = ()

    def __post_init__(self) -> None:
        require_shuffler(self.shuffler_type, self.imports)
        if self.dataset.dataset_name in SID_DATASETS:
            raise ValueError(
                f"dataset_name is {self.dataset.dataset_name!r}, whose items are semantic IDs; HSTU trains on "
                f"{', '.join(HSTU_DATASETS)}: choose one of them, or train sid_gr"
            )
        if self.task == "retrieval" and self.dataset.max_num_candidates > 0:
            raise ValueError(
                f"task is 'retrieval' and max_num_candidates is {self.dataset.max_num_candidates}; retrieval predicts "
                "every next item, with all items as candidates: set it to 0"
            )
