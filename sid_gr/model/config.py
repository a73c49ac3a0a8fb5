"""The config of a semantic-ID decoder, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from commons.checks import Count, Positive, require_at_least, require_field_types, take_python_scalars

HeadKind = Literal["separate", "shared"]


@dataclass(frozen=True)
class SIDGRConfig:
    """A decoder of semantic IDs: code embeddings, transformer layers, a head for every hierarchy.

    Raises:
        ValueError: a number outside its range, or heads or a feed-forward block that the ranks cannot share evenly.
    """

    # Number of codes of each hierarchy, the coarsest first; an item has one code per hierarchy.
    codebook_sizes: tuple[int, ...]
    max_items: Count  # most items of a row: history and candidates, or history and the generated item
    hidden_size: Count  # width of a token between layers, and of every embedding
    num_layers: Count  # number of transformer layers
    num_attention_heads: Count  # attention heads per layer
    kv_channels: Count | None = None  # width of a head; None for hidden_size ÷ num_attention_heads
    ffn_hidden_size: Count | None = None  # width of the feed-forward block; None for 4 · hidden_size
    # Output matrices: "separate" for one per hierarchy, "shared" for one for all hierarchies; a hierarchy then uses the
    # first codebook_sizes[hierarchy] rows.
    heads: HeadKind = "separate"
    # Probability that an element of the output of an attention or feed-forward block is dropped in training. Attention
    # weights are not dropped.
    dropout: float = 0.0
    init_method_std: Positive = 0.02  # standard deviation of initial weights
    layer_norm_eps: Positive = 1e-5  # added to the variance in layer norms
    # Number of ranks that share the attention heads and the feed-forward block of every layer. Each of these ranks
    # computes everything else: output matrices of a few hundred codes are not worth a collective.
    tensor_model_parallel_size: Count = 1

    def __post_init__(self) -> None:
        # Config files contain lists.
        object.__setattr__(self, "codebook_sizes", tuple(self.codebook_sizes))
        take_python_scalars(self)
        if not self.codebook_sizes:
            raise ValueError("codebook_sizes is empty; an item has at least one code: give the size of every codebook")
        for size in self.codebook_sizes:
            require_at_least("a size in codebook_sizes", size, 1)
        require_field_types(self)
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, num_attention_heads is {self.num_attention_heads}; without "
                "kv_channels the heads share the width evenly: choose a divisor, or give kv_channels"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it is a probability below 1: give 0 <= dropout < 1")
        for name, shared in (("num_attention_heads", self.num_attention_heads), ("ffn_hidden_size", self.ffn_width)):
            if shared % self.tensor_model_parallel_size:
                raise ValueError(
                    f"{name} is {shared}, tensor_model_parallel_size is {self.tensor_model_parallel_size}; the ranks "
                    f"share {name} evenly: choose a divisor of {shared}, or another {name}"
                )

    @property
    def num_hierarchies(self) -> int:
        """Number of codes of an item."""
        return len(self.codebook_sizes)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward block."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def cost_dimensions(self) -> dict[str, Any]:
        """The arguments of SelfAttentionTask and the shuffler for these layers."""
        return {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "head_dim": self.head_dim,
            "num_layers": self.num_layers,
            "ffn_hidden_size": self.ffn_width,
        }

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a row: BOS and all codes except the last, which predicts nothing."""
        return self.max_items * self.num_hierarchies
