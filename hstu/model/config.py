"""Dimensions of an HSTU model, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PositionBias = Literal["direct", "bucketed", "none"]


@dataclass(frozen=True)
class HSTUConfig:
    """A stack of HSTU layers.

    Attributes:
        hidden_size: width of a token between layers, and of every embedding.
        num_layers: layers.
        num_attention_heads: attention heads per layer.
        kv_channels: width of a head.
        max_sequence_length: the most tokens a row may have: contextual ones, interleaved history and targets. It is
            also the constant N that attention is divided by, whatever the rows of a batch.
        dropout: probability with which an element of a layer's output is dropped in training.
        is_causal: a token sees only itself and what precedes it. False lets all tokens see one another, targets too.
        target_group_size: consecutive target tokens that may see one another, up to themselves; other targets are
            hidden from them. Has no effect without targets or without the causal mask.
        position_bias: learned bias per head and distance between tokens: "direct" has a number for every distance,
            "bucketed" one for every bucket, whose widths grow with the distance, "none" has no bias.
        position_buckets: buckets for distances of one sign, used by "bucketed".
        layer_norm_eps: added to the variance in layer norms. Attention is divided by a large N: keep it small.

    Raises:
        ValueError: a number outside its range.

    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    kv_channels: int
    max_sequence_length: int
    dropout: float = 0.0
    is_causal: bool = True
    target_group_size: int = 1
    position_bias: PositionBias = "direct"
    position_buckets: int = 32
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_attention_heads",
            "kv_channels",
            "max_sequence_length",
            "target_group_size",
        ):
            require_at_least_one(name, getattr(self, name))
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it is a probability below 1: give 0 <= dropout < 1")
        if self.position_bias not in get_args(PositionBias):
            raise ValueError(
                f"position_bias is {self.position_bias!r}; it is one of {list(get_args(PositionBias))}: choose one"
            )
        if not isinstance(self.position_buckets, int) or self.position_buckets < 2:
            raise ValueError(
                f"position_buckets is {self.position_buckets!r}; distance 0 has a bucket of its own, so at least 2 are "
                "needed: raise it"
            )
        if not self.layer_norm_eps > 0:
            raise ValueError(f"layer_norm_eps is {self.layer_norm_eps}; it keeps a division finite: make it positive")


@dataclass(frozen=True)
class RankingConfig:
    """An HSTU ranking model: embeddings, layers and a multi-task head.

    Attributes:
        hstu: the layers.
        embedding_tables: rows of each feature's table, by feature name: the item feature, the action feature if there
            is one, and all contextual features. Ids lie in `[0, rows)`.
        prediction_head_arch: widths of the head's layers, the last one being `num_tasks`.
        num_tasks: labels per prediction.

    Raises:
        ValueError: a number below one, no table, or a head that does not end in `num_tasks`.

    """

    hstu: HSTUConfig
    embedding_tables: dict[str, int]
    prediction_head_arch: tuple[int, ...]
    num_tasks: int

    def __post_init__(self) -> None:
        # A configuration file has lists.
        object.__setattr__(self, "prediction_head_arch", tuple(self.prediction_head_arch))
        require_at_least_one("num_tasks", self.num_tasks)
        for width in self.prediction_head_arch:
            require_at_least_one("a width in prediction_head_arch", width)
        if not self.prediction_head_arch or self.prediction_head_arch[-1] != self.num_tasks:
            raise ValueError(
                f"prediction_head_arch is {list(self.prediction_head_arch)}, num_tasks is {self.num_tasks}; the last "
                "width is the number of tasks: append or correct it"
            )
        if not self.embedding_tables:
            raise ValueError("embedding_tables is empty; every feature needs a table: give its number of rows by name")
        for name, num_rows in self.embedding_tables.items():
            require_at_least_one(f"embedding_tables[{name!r}]", num_rows)


def require_at_least_one(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it counts something: give an integer of at least 1")
