"""Attention over packed rows, as a core attention of megatron-core's layers.

megatron-core's SelfAttention projects the tokens and hands queries, keys and values to its *core attention*, which a
layer spec may replace. Here it calls an AttentionPattern, which travels in the place of PackedSeqParams: `CausalRows`
attends within rows, all at once, and `BeamStep` (decoding_cache.py) attends from one new token per beam to a cache.

Rows of a layout's block are padded to one length, behind their tokens, where no causal query looks; blocks are padded
little. So no mask is needed, torch's fused kernel leaves out what lies ahead of a query, and the work of a batch
follows the sum of the squared lengths, not rows × longest².
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
    """Who attends to whom; passed to a TransformerBlock as `packed_seq_params`."""

    qkv_format: str = "thd"  # megatron-core then gives and takes tokens as (num_tokens, num_heads, head_dim)

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer; there is at least one token.

        Args:
            layer: its number, from 1 on.
            query: `(num_tokens, num_heads, head_dim)`, the heads of this rank.
            key: as `query`.
            value: as `query`.

        Returns:
            `(num_tokens, num_heads, head_dim)`.
        """


class PatternAttention(torch.nn.Module):
    """The core attention of a layer: it calls the pattern, and has no parameters.

    Args:
        config: of the transformer; unused.
        layer_number: from 1 on.
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
    """Every token attends to itself and to what precedes it in its row."""

    layout: TokenLayout = field(kw_only=True)  # of the tokens
    # Is given the keys and values of all layers, for `BeamStep`; None where nothing follows.
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
