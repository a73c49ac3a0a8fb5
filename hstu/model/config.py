"""The configs of an HSTU model and of its execution, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from commons.checks import Count, Positive, require_at_least, require_field_types, take_python_scalars

PositionBias = Literal["direct", "bucketed", "none"]
ComputeDtype = Literal["fp32", "bf16", "fp16"]
KernelBackend = Literal["auto", "pytorch", "triton"]
InBatchPool = Literal["rank", "global"]

COMPUTE_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class ExecutionConfig:
    """How the layers are computed; weights and, except for rounding, results do not depend on it.

    Raises:
        ValueError: an unknown name.
    """

    # "fp32" computes in the dtype of the weights; "bf16" and "fp16" compute matrix products and attention in bfloat16
    # or float16 (torch.autocast), with weights, norms and loss in float32. Training in float16 needs a scaled loss: the
    # trainer scales it, your own loop calls `SequenceModel.scale_loss`.
    compute_dtype: ComputeDtype = "fp32"
    # Keep only the input of every layer for the backward pass, and recompute the rest.
    activation_checkpointing: bool = False
    # Implementation of the attention: "triton" (kernels for CUDA), "pytorch" (all devices), or "auto": Triton where it
    # supports the device and the layers and is faster, else PyTorch.
    kernel_backend: KernelBackend = "auto"
    # Whether to compile the layers, except the attention, with torch.compile, once for all layers and lengths; None for
    # yes on CUDA only. On a CPU it needs a C++ compiler and saves little.
    compile: bool | None = False

    def __post_init__(self) -> None:
        take_python_scalars(self)
        require_field_types(self)


@dataclass(frozen=True)
class LayerOptions:
    """The options of HSTU layers that do not depend on the data.

    Raises:
        ValueError: a number outside its range.
    """

    hidden_size: Count  # width of a token between layers
    num_layers: Count  # number of layers
    num_attention_heads: Count  # attention heads per layer
    kv_channels: Count  # width of a head
    # Probability that an element of a layer's output is dropped in training. The rank that trains a row draws its
    # dropout, so balancing changes the dropout of rows that move.
    dropout: float = 0.0
    # Whether a token attends only to itself and earlier tokens. If False, all tokens, targets included, attend to one
    # another.
    is_causal: bool = True
    # Whether contextual tokens attend to all of the context and the history, also to later tokens, but not to targets.
    # No effect without the causal mask.
    contextual_mask: bool = False
    # Number of consecutive target tokens that form a group. A target attends to itself and earlier targets of its
    # group, not to other groups. With actions a candidate is two tokens. No effect without targets or the causal mask.
    target_group_size: Count = 1
    # The largest distance at which a token attends to another token; None for no window. Every group of targets is
    # placed directly after the history. With `contextual_mask` contextual tokens attend to all of the history, also
    # beyond the window. As `max_attn_len` of generative-recommenders, except that 0 means no window there, and that
    # contextual tokens share one place there and have their own places here.
    max_attn_len: Count | None = None
    # Learned bias per head and distance between tokens: "direct" has a number for every distance, "bucketed" a number
    # for every bucket of distances, wider for larger distances, "none" has no bias.
    position_bias: PositionBias = "direct"
    position_buckets: int = 32  # number of buckets for distances of one sign, for "bucketed"
    # Whether to add a learned bias per head and bucket of the time between two tokens,
    # see `hstu.model.attention.time_buckets`. Batches then need a feature of timestamps.
    time_bias: bool = False
    time_buckets: Count = 64  # number of buckets; with 64 and timestamps in seconds the last begins after five years

    def __post_init__(self) -> None:
        take_python_scalars(self)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it is a probability below 1: give 0 <= dropout < 1")
        require_field_types(self)
        require_at_least("position_buckets", self.position_buckets, 2)  # distance 0 has its own bucket

    @property
    def cost_dimensions(self) -> dict[str, Any]:
        """The arguments of HSTUAttentionTask and the shuffler for these layers."""
        return {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "head_dim": self.kv_channels,
            "num_layers": self.num_layers,
            "causal": self.is_causal,
            "target_group_size": self.target_group_size,
            "max_attn_len": self.max_attn_len,
        }


@dataclass(frozen=True)
class HSTUConfig(LayerOptions):
    """A stack of HSTU layers.

    Raises:
        ValueError: a number outside its range.
    """

    # Most tokens of a row: contextual tokens, interleaved history and targets. Also the constant N by which attention
    # is divided in every batch.
    max_sequence_length: Count = field(kw_only=True)
    timestamp_feature_name: str = "timestamp"  # key of the timestamps, one integer per item
    # Added to the variance in layer norms. Keep it small, because attention values are divided by the large N.
    layer_norm_eps: Positive = 1e-6
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)  # how the layers are computed


@dataclass(frozen=True)
class SequenceModelConfig:
    """The config that ranking and retrieval share: embeddings and layers.

    Raises:
        ValueError: a number below one, no table, a name that torch's modules cannot have, or the width of an unknown
            table.
    """

    hstu: HSTUConfig  # the layers
    # Rows of each feature's table, by feature name: the item feature, the action feature if there is one, and all
    # contextual features. Ids are in `[0, rows)`.
    embedding_tables: dict[str, int]
    # Widths of tables by feature name, for tables that are not `hstu.hidden_size` wide; a linear layer projects their
    # embeddings to that width.
    embedding_dims: dict[str, int] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        take_python_scalars(self)
        if not self.embedding_tables:
            raise ValueError("embedding_tables is empty; every feature needs a table: give its number of rows by name")
        for name, num_rows in self.embedding_tables.items():
            require_at_least(f"embedding_tables[{name!r}]", num_rows, 1)
            if not name or "." in name or hasattr(nn.ModuleDict(), name):
                raise ValueError(
                    f"embedding_tables has {name!r}; a table is a module of its feature's name, and torch allows no "
                    "dot in it and no name of its own attributes, such as 'type' or 'items': rename the feature (in "
                    "your own data, the column)"
                )
        unknown = [name for name in self.embedding_dims if name not in self.embedding_tables]
        if unknown:
            raise ValueError(
                f"embedding_dims has {unknown}, the tables are {list(self.embedding_tables)}; a width belongs to a "
                "table: correct the names"
            )
        for name, width in self.embedding_dims.items():
            require_at_least(f"embedding_dims[{name!r}]", width, 1)

    @property
    def table_widths(self) -> dict[str, int]:
        """Width of every table by feature name."""
        return {name: self.embedding_dims.get(name, self.hstu.hidden_size) for name in self.embedding_tables}

    @property
    def features_of_tables(self) -> dict[str, list[str]]:
        """The features that are looked up in every table, by table; the first has the name of the table."""
        return {name: [name] for name in self.embedding_tables}


@dataclass(frozen=True)
class RankingConfig(SequenceModelConfig):
    """An HSTU ranking model: embeddings, layers and a multi-task head.

    Raises:
        ValueError: as SequenceModelConfig; also if the last width of the head is not `num_tasks`.
    """

    prediction_head_arch: tuple[int, ...]  # widths of the head's layers; the last width is `num_tasks`
    num_tasks: int  # labels per prediction

    def __post_init__(self) -> None:
        super().__post_init__()
        # Config files contain lists.
        object.__setattr__(self, "prediction_head_arch", tuple(self.prediction_head_arch))
        require_at_least("num_tasks", self.num_tasks, 1)
        for width in self.prediction_head_arch:
            require_at_least("a width in prediction_head_arch", width, 1)
        if not self.prediction_head_arch or self.prediction_head_arch[-1] != self.num_tasks:
            raise ValueError(
                f"prediction_head_arch is {list(self.prediction_head_arch)}, num_tasks is {self.num_tasks}; the last "
                "width is the number of tasks: append or correct it"
            )


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions:
    """The options of the retrieval loss.

    Raises:
        ValueError: a number out of range, or an unknown pool.
    """

    # Retrieval: number of negatives per row in training, drawn uniformly from all items and shared by all predictions
    # of the row; or −1 for in-batch negatives: the true items of all other predictions, with repetitions, so that
    # frequent items are frequent negatives.
    num_negatives: int = -1
    temperature: Positive = 0.05  # retrieval: divisor of the cosines in the loss
    # Retrieval: the predictions whose items are in-batch negatives (num_negatives −1). "rank": this rank's batch;
    # balancing changes the negatives, because rows move. "global": the batches of all ranks, gathered; balancing does
    # not change the negatives, but the number of scores grows with the square of the global batch.
    in_batch_pool: InBatchPool = "rank"

    def __post_init__(self) -> None:
        take_python_scalars(self)
        if self.num_negatives != -1 and (
            not isinstance(self.num_negatives, int) or isinstance(self.num_negatives, bool) or self.num_negatives < 1
        ):
            raise ValueError(
                f"num_negatives is {self.num_negatives!r}; it is a number of items, at least 1, or -1 for the items of "
                "all other predictions of the batch: correct it"
            )
        require_field_types(self)


@dataclass(frozen=True)
class RetrievalConfig(RetrievalOptions, SequenceModelConfig):
    """An HSTU retrieval model: embeddings, layers, and a query that is compared with the embeddings of items.

    Raises:
        ValueError: as RetrievalOptions and SequenceModelConfig; also an item feature without a table, or a mask that
            reveals the item to predict.
    """

    item_feature_name: str  # the feature whose next value is predicted

    def __post_init__(self) -> None:
        super().__post_init__()
        SequenceModelConfig.__post_init__(self)
        if self.item_feature_name not in self.embedding_tables:
            raise ValueError(
                f"item_feature_name is {self.item_feature_name!r}, the tables are {list(self.embedding_tables)}; items "
                "need a table: correct the name or add the table"
            )
        if not self.hstu.is_causal:
            raise ValueError(
                "is_causal is False; retrieval predicts the next item at every place of a history, so no token may see "
                "later items: set is_causal"
            )
        if self.hstu.contextual_mask:
            raise ValueError(
                "contextual_mask is True; retrieval predicts the next item at every place of a history, and contextual "
                "tokens that see the whole history reveal it: unset contextual_mask"
            )

    @property
    def negatives_feature_name(self) -> str | None:
        """Key of the drawn negatives in a batch; None for in-batch negatives."""
        return None if self.num_negatives == -1 else f"{self.item_feature_name}_negatives"

    @property
    def features_of_tables(self) -> dict[str, list[str]]:
        """As SequenceModelConfig; drawn negatives are looked up in the items' table."""
        negatives = self.negatives_feature_name
        return super().features_of_tables | (
            {} if negatives is None else {self.item_feature_name: [self.item_feature_name, negatives]}
        )

    @property
    def item_dim(self) -> int:
        """Width of the items' table and of queries."""
        return self.table_widths[self.item_feature_name]
