"""The config of a ranking run: what `hstu/configs/*.toml` hold and what the flags of `hstu.train` set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.trainer import DatasetArgs, TrainerArgs
from hstu.model import HSTUConfig, RankingConfig
from hstu.model.config import PositionBias
from hstu.sharding import EmbeddingOptimizer, Sharding


@dataclass
class ModelArgs:
    """Dimensions of the model; the longest sequence and the tables follow from the data set."""

    hidden_size: int = 64
    """Width of a token between layers, and of every embedding."""

    num_layers: int = 2
    """HSTU layers."""

    num_attention_heads: int = 4
    """Attention heads per layer."""

    kv_channels: int = 16
    """Width of a head."""

    dropout: float = 0.0
    """Probability with which an element of a layer's output is dropped in training."""

    position_bias: PositionBias = "direct"
    """Learned bias by distance: a number for every distance, for buckets of them, or none."""

    target_group_size: int = 1
    """Consecutive target tokens that may see one another."""

    prediction_head_arch: tuple[int, ...] = (64, 1)
    """Widths of the head's layers; the last one is the number of tasks."""

    def ranking_config(self, *, max_sequence_length: int, tables: dict[str, int], num_tasks: int) -> RankingConfig:
        """The model's own config.

        Raises:
            ValueError: a number outside its range.
        """
        hstu = HSTUConfig(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            kv_channels=self.kv_channels,
            max_sequence_length=max_sequence_length,
            dropout=self.dropout,
            position_bias=self.position_bias,
            target_group_size=self.target_group_size,
        )
        return RankingConfig(hstu, tables, self.prediction_head_arch, num_tasks)


@dataclass
class OptimizerArgs:
    """What trains the model."""

    dense_optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of everything but the tables."""

    dense_lr: float = 1e-3
    """Its learning rate."""

    embedding_optimizer: EmbeddingOptimizer = "rowwise_adagrad"
    """Optimizer of the tables; on CPU fbgemm has "sgd" and "rowwise_adagrad"."""

    embedding_lr: float = 0.05
    """Its learning rate."""

    sharding: Sharding | None = None
    """How tables lie on the ranks; None lets TorchRec's planner choose."""

    def kinds(self) -> dict[str, str]:
        """The optimizers by name; their state fits no other."""
        return {"dense_optimizer": self.dense_optimizer, "embedding_optimizer": self.embedding_optimizer}

    def __post_init__(self) -> None:
        for name in ("dense_lr", "embedding_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a learning rate is positive: raise it")


@dataclass
class TrainConfig:
    """A training run of an HSTU ranking model."""

    trainer: TrainerArgs
    """How the model is trained."""

    dataset: DatasetArgs
    """What it is trained on."""

    model: ModelArgs = field(default_factory=ModelArgs)
    """The model."""

    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)
    """What trains it."""

    shuffler_type: str = "hstu"
    """Name of a batch shuffler, used with trainer.enable_balanced_shuffler."""

    def __post_init__(self) -> None:
        known = sorted(BatchShufflerFactory.list_available())
        if self.shuffler_type not in known:
            raise ValueError(
                f"shuffler_type is {self.shuffler_type!r}; registered are {', '.join(known)}: choose one, or register "
                "yours with BatchShufflerFactory before the config is read"
            )
