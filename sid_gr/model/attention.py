"""Attention over packed rows, as a core attention of megatron-core's layers.

megatron-core's SelfAttention projects the tokens and passes queries, keys and values to its *core attention*, which a
layer spec may replace. The core attention here calls an AttentionPattern, which is passed as PackedSeqParams:
`CausalRows` computes attention within all rows at once, and `BeamStep` (decoding_cache.py) from one new token per beam
to a cache.

Rows of a layout's block are padded to one length after their tokens, where causal queries do not look, so no mask is
needed. Blocks have little padding, and torch's fused kernel skips keys after a query, so the work of a batch is
proportional to the sum of the squared lengths, not to rows × longest².
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from sid_gr.megatron_core import PackedSeqParams
from sid_gr.model.token_layout import DenseBlock, TokenLayout

if TYPE_CHECKING:
    from sid_gr.model.decoding_cache import DecodingCache


@dataclass
class AttentionPattern(PackedSeqParams, ABC):
    """Computes attention by some pattern; passed to a TransformerBlock as `packed_seq_params`."""

    qkv_format: str = "thd"  # megatron-core then passes tokens as (num_tokens, num_heads, head_dim)

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer; there is at least one token.

        Args:
            layer: number of the layer, from 1.
            query: `(num_tokens, num_heads, head_dim)`, with the heads of this rank.
            key: as `query`.
            value: as `query`.

        Returns:
            `(num_tokens, num_heads, head_dim)`.
        """


class PatternAttention(torch.nn.Module):
    """The core attention of a layer: calls the pattern; it has no parameters.

    Args:
        config: config of the transformer; unused.
        layer_number: number of the layer, from 1.
        options: further arguments of a core attention; unused.
    """

    def __init__(self, config: Any, layer_number: int, **options: Any) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: AttentionPattern,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of this layer; see `AttentionPattern.attend`."""
        return packed_seq_params.attend(self.layer_number, query, key, value)


@dataclass
class CausalRows(AttentionPattern):
    """Every token attends to itself and to earlier tokens of its row."""

    layout: TokenLayout = field(kw_only=True)  # layout of the tokens
    # Receives the keys and values of all layers, for `BeamStep`; None without generation.
    cache: DecodingCache | None = field(default=None, kw_only=True)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See AttentionPattern."""
        blocks = self.layout.blocks
        sizes = [block.num_tokens for block in blocks]
        attended = []
        for block, *parts in zip(blocks, *(part.split(sizes) for part in (query, key, value))):
            q, k, v = (pad(part, block) for part in parts)
            if self.cache is not None:
                self.cache.append_prefix(layer, k, v)
            attended.append(unpad(functional.scaled_dot_product_attention(q, k, v, is_causal=True), block))
        return torch.cat(attended)


def pad(tokens: torch.Tensor, block: DenseBlock) -> torch.Tensor:
    """The tokens of a block, `(num_tokens, num_heads, head_dim)`, as `(num_rows, num_heads, length, head_dim)`."""
    if block.slots is not None:
        padded = tokens.new_zeros(block.num_rows * block.length, *tokens.shape[1:])
        tokens = padded.index_copy(0, block.slots, tokens)
    return tokens.view(block.num_rows, block.length, *tokens.shape[1:]).transpose(1, 2)


def unpad(rows: torch.Tensor, block: DenseBlock) -> torch.Tensor:
    """The inverse of `pad`."""
    tokens = rows.transpose(1, 2).flatten(0, 1)
    return tokens if block.slots is None else tokens.index_select(0, block.slots)
