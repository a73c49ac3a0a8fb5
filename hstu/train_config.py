"""The config of an HSTU run: what `hstu/configs/*.toml` hold and what the flags of `hstu.train` set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
import tyro

from commons.checks import require_at_least
from commons.datasets.loader.data_loader import HSTU_DATASETS, SID_DATASETS
from commons.datasets.sequences.metadata import TIMESTAMP
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.config.load import require_shuffler, same_fields
from commons.trainer.optimize.optimizers import OptimizerArgs
from commons.trainer.sharding import Sharding
from hstu.model import ExecutionConfig, HSTUConfig, RankingConfig, RetrievalConfig
from hstu.model.config import ComputeDtype, InBatchPool, KernelBackend, PositionBias


@dataclass
class ModelArgs:
    """Dimensions of the model; the longest sequence and the tables follow from the data set."""

    hidden_size: int = 64  # width of a token between layers
    num_layers: int = 2  # HSTU layers
    num_attention_heads: int = 4  # attention heads per layer
    kv_channels: int = 16  # width of a head
    # Width of the items' table, in which retrieval compares; None for hidden_size.
    item_embedding_dim: int | None = None
    contextual_embedding_dim: int | None = None  # width of the contextual features' tables; None for hidden_size
    # Probability with which an element of a layer's output is dropped in training, drawn by each rank for itself.
    dropout: float = 0.0
    is_causal: bool = True  # a token sees only itself and what precedes it
    # Contextual tokens see all of the history, what follows them too; for ranking of candidates.
    contextual_mask: bool = False
    # Consecutive target tokens that may see one another; with actions a candidate is two tokens.
    target_group_size: int = 1
    # Largest distance, in tokens, at which a token sees another one; None for no window.
    max_attn_len: int | None = None
    # Learned bias by distance: a number for every distance, for buckets of them, or none.
    position_bias: PositionBias = "direct"
    position_buckets: int = 32  # buckets of a bucketed position bias
    # Learned bias by the time between two tokens, in seconds; every public data set has it, and random data too.
    time_bias: bool = False
    time_buckets: int = 64  # its buckets, each a third wider than the one before
    compute_dtype: ComputeDtype = "fp32"  # of matrix products and attention; weights, norms and loss stay in float32
    # Compute layers again in the backward pass instead of keeping what they computed.
    activation_checkpointing: bool = False
    # Who computes the attention: "triton" on CUDA, "pytorch" on every device; "auto" takes the former where it can.
    kernel_backend: KernelBackend = "auto"
    # Put what lies around the attention under torch.compile; None for doing so on CUDA, and not on a CPU.
    compile: bool | None = None
    # Ranking: widths of the head's layers; the last one is the number of tasks.
    prediction_head_arch: tuple[int, ...] = (64, 1)
    # Retrieval: items that are drawn for every row to compare with; -1 for all other predictions of the batch.
    num_negatives: int = -1
    in_batch_pool: InBatchPool = "rank"  # Retrieval with num_negatives -1: predictions of this rank, or of all ranks
    temperature: float = 0.05  # Retrieval: by which cosines are divided

    def __post_init__(self) -> None:
        # The configs of both objectives raise what is wrong with a number, whatever the data set and the objective.
        num_tasks = self.prediction_head_arch[-1] if self.prediction_head_arch else 1
        RankingConfig(self.hstu_config(1), {"item": 1}, self.prediction_head_arch, num_tasks)
        RetrievalConfig(HSTUConfig(1, 1, 1, 1, 1), {"item": 1}, "item", **same_fields(RetrievalConfig, self))
        for name in ("item_embedding_dim", "contextual_embedding_dim"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)

    @property
    def cost_dimensions(self) -> dict[str, Any]:
        """What HSTUAttentionTask and the shuffler need to know of the layers."""
        return {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "head_dim": self.kv_channels,
            "num_layers": self.num_layers,
            "causal": self.is_causal,
            "target_group_size": self.target_group_size,
            "max_attn_len": self.max_attn_len,
        }

    def on(self, device: torch.device) -> ModelArgs:
        """These settings with what they leave to the device; but for `kernel_backend`, which the layers decide."""
        return replace(self, compile=device.type == "cuda" if self.compile is None else self.compile)

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
        execution = same_fields(ExecutionConfig, self) | {"compile": bool(self.compile)}
        return HSTUConfig(
            **same_fields(HSTUConfig, self),
            max_sequence_length=max_sequence_length,
            timestamp_feature_name=TIMESTAMP,
            execution=ExecutionConfig(**execution),
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
