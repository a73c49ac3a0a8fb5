"""Dimensions of an HSTU model, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from commons.checks import require_at_least

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
    """How the layers are computed; weights and, but for rounding, results do not depend on it.

    Raises:
        ValueError: an unknown name.
    """

    # "fp32" leaves everything in the dtype of the weights; "bf16" and "fp16" compute matrix products and attention in
    # bfloat16 or float16 (torch.autocast), with weights, norms and loss in float32. Training in float16 needs a
    # scaled loss; the trainer scales it, a loop of your own by `SequenceModel.scale_loss`.
    compute_dtype: ComputeDtype = "fp32"
    # Keep only the input of every layer for the backward pass, and compute the rest again.
    activation_checkpointing: bool = False
    # Who computes the attention: "triton", kernels for CUDA, "pytorch", which is for all devices, or "auto": Triton
    # where the model is on CUDA and Triton can compute its layers, else PyTorch.
    kernel_backend: KernelBackend = "auto"
    # Put what lies between the attentions under torch.compile, once for all layers and lengths; None for doing so on
    # CUDA, which it is made for. On a CPU it needs a C++ compiler and saves little.
    compile: bool | None = False

    def __post_init__(self) -> None:
        _require_one_of("compute_dtype", self.compute_dtype, ComputeDtype)
        _require_one_of("kernel_backend", self.kernel_backend, KernelBackend)


@dataclass(frozen=True)
class LayerOptions:
    """What HSTU layers compute; nothing of it depends on the data.

    Raises:
        ValueError: a number outside its range.
    """

    hidden_size: int  # width of a token between layers
    num_layers: int  # layers
    num_attention_heads: int  # attention heads per layer
    kv_channels: int  # width of a head
    # Probability with which an element of a layer's output is dropped in training. What is dropped is drawn on the
    # rank that has the row, so it changes when rows are balanced.
    dropout: float = 0.0
    # A token sees only itself and what precedes it. False lets all tokens see one another, targets too.
    is_causal: bool = True
    # Contextual tokens see all of the context and the history, what follows them too, but no targets. Has no effect
    # without the causal mask.
    contextual_mask: bool = False
    # Consecutive target tokens that may see one another, up to themselves; other targets are hidden from them. With
    # actions a candidate is two tokens. Has no effect without targets or without the causal mask.
    target_group_size: int = 1
    # The largest distance at which a token sees another one; None for no window. Each group of targets stands directly
    # behind the history, and with `contextual_mask` contextual tokens see all of it, also beyond the window. It is
    # `max_attn_len` of generative-recommenders, but for 0, which is no window there, and for contextual tokens, which
    # are at their own places here and all at one place there.
    max_attn_len: int | None = None
    # Learned bias per head and distance between tokens: "direct" has a number for every distance, "bucketed" one for
    # every bucket, whose widths grow with the distance, "none" has no bias.
    position_bias: PositionBias = "direct"
    position_buckets: int = 32  # buckets for distances of one sign, used by "bucketed"
    # Learned bias per head and bucket of the time between two tokens, see `hstu.model.attention.time_buckets`. A
    # batch then has a feature of timestamps.
    time_bias: bool = False
    time_buckets: int = 64  # how many; with the default and seconds the last one begins after five years

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_attention_heads", "kv_channels", "target_group_size"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("time_buckets", self.time_buckets, 1)
        if self.max_attn_len is not None:
            require_at_least("max_attn_len", self.max_attn_len, 1, optional=True)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it is a probability below 1: give 0 <= dropout < 1")
        _require_one_of("position_bias", self.position_bias, PositionBias)
        if not isinstance(self.position_buckets, int) or self.position_buckets < 2:
            raise ValueError(
                f"position_buckets is {self.position_buckets!r}; distance 0 has a bucket of its own, so at least 2 are "
                "needed: raise it"
            )

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


@dataclass(frozen=True)
class HSTUConfig(LayerOptions):
    """A stack of HSTU layers.

    Raises:
        ValueError: a number outside its range.
    """

    # The most tokens a row may have: contextual ones, interleaved history and targets. It is also the constant N that
    # attention is divided by: the same for every batch.
    max_sequence_length: int = field(kw_only=True)
    timestamp_feature_name: str = "timestamp"  # key of the timestamps, one integer per item
    # Added to the variance in layer norms. Attention is divided by a large N: keep it small.
    layer_norm_eps: float = 1e-6
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)  # how the layers are computed

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("max_sequence_length", self.max_sequence_length, 1)
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"layer_norm_eps is {self.layer_norm_eps}; it keeps a division finite: make it positive")


@dataclass(frozen=True)
class SequenceModelConfig:
    """What both tasks share: embeddings and layers.

    Raises:
        ValueError: a number below one, no table, or the width of an unknown table.
    """

    hstu: HSTUConfig  # the layers
    # Rows of each feature's table, by feature name: the item feature, the action feature if there is one, and all
    # contextual features. Ids lie in `[0, rows)`.
    embedding_tables: dict[str, int]
    # Widths of tables by feature name, for those that are not as wide as `hstu.hidden_size`; a linear layer brings
    # their embeddings to that width.
    embedding_dims: dict[str, int] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not self.embedding_tables:
            raise ValueError("embedding_tables is empty; every feature needs a table: give its number of rows by name")
        for name, num_rows in self.embedding_tables.items():
            require_at_least(f"embedding_tables[{name!r}]", num_rows, 1)
        unknown = [name for name in self.embedding_dims if name not in self.embedding_tables]
        if unknown:
            raise ValueError(
                f"embedding_dims names {unknown}, the tables are {list(self.embedding_tables)}; a width belongs to a "
                "table: correct the names"
            )
        for name, width in self.embedding_dims.items():
            require_at_least(f"embedding_dims[{name!r}]", width, 1)

    @property
    def table_widths(self) -> dict[str, int]:
        """Width of every table by feature name."""
        return {name: self.embedding_dims.get(name, self.hstu.hidden_size) for name in self.embedding_tables}


@dataclass(frozen=True)
class RankingConfig(SequenceModelConfig):
    """An HSTU ranking model: embeddings, layers and a multi-task head.

    Raises:
        ValueError: as SequenceModelConfig; also a head that does not end in `num_tasks`.
    """

    prediction_head_arch: tuple[int, ...]  # widths of the head's layers, the last one being `num_tasks`
    num_tasks: int  # labels per prediction

    def __post_init__(self) -> None:
        super().__post_init__()
        # A configuration file has lists.
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
    """What a retrieval model is trained with.

    Raises:
        ValueError: a number out of range, or an unknown pool.
    """

    # Retrieval: items that each true one is compared with in training. A positive number of them is drawn for every
    # row, uniformly from all items, and serves all predictions of the row. −1 takes all other predictions' true items,
    # with repetitions, so that frequent items are frequent negatives.
    num_negatives: int = -1
    temperature: float = 0.05  # retrieval: by which cosines are divided
    # Retrieval: whose predictions those are with num_negatives −1: those of this rank's batch, or of all ranks',
    # gathered. With "rank" a row's negatives are its neighbours' items, and so change when rows are balanced. With
    # "global" they do not; scores then grow with the square of the global batch.
    in_batch_pool: InBatchPool = "rank"

    def __post_init__(self) -> None:
        if self.num_negatives != -1 and (
            not isinstance(self.num_negatives, int) or isinstance(self.num_negatives, bool) or self.num_negatives < 1
        ):
            raise ValueError(
                f"num_negatives is {self.num_negatives!r}; it counts items, at least 1, or is -1 for all other "
                "predictions of the batch: correct it"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it divides cosines: make it positive")
        _require_one_of("in_batch_pool", self.in_batch_pool, InBatchPool)


@dataclass(frozen=True)
class RetrievalConfig(RetrievalOptions, SequenceModelConfig):
    """An HSTU retrieval model: embeddings, layers, and a query that is compared with the embeddings of items.

    Raises:
        ValueError: as RetrievalOptions and SequenceModelConfig; also an item feature without a table, or attention that
            would show the model what it is to predict.
    """

    item_feature_name: str  # the feature whose next value is predicted

    def __post_init__(self) -> None:
        super().__post_init__()
        SequenceModelConfig.__post_init__(self)
        if self.item_feature_name not in self.embedding_tables:
            raise ValueError(
                f"item_feature_name is {self.item_feature_name!r}, the tables are {list(self.embedding_tables)}; items "
                "are found by their embeddings: correct the name or add the table"
            )
        if not self.hstu.is_causal:
            raise ValueError(
                "is_causal is False; retrieval predicts the next item at every place of a history, where it must not "
                "be seen: set is_causal"
            )
        if self.hstu.contextual_mask:
            raise ValueError(
                "contextual_mask is True; retrieval predicts the next item at every place of a history, and contextual "
                "tokens that see all of it pass it on: unset contextual_mask"
            )

    @property
    def negatives_feature_name(self) -> str | None:
        """Key of the drawn negatives in a batch; None where none are drawn."""
        return None if self.num_negatives == -1 else f"{self.item_feature_name}_negatives"

    @property
    def item_dim(self) -> int:
        """Width of the items' table, in which queries and items are compared."""
        return self.table_widths[self.item_feature_name]


def _require_one_of(name: str, value: str, kind: Any) -> None:
    """Raise ValueError unless `value` is one of the strings of a Literal."""
    if value not in get_args(kind):
        raise ValueError(f"{name} is {value!r}; it is one of {list(get_args(kind))}: choose one")
