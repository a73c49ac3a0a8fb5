"""Attention over packed rows, as a core attention of megatron-core's layers.

megatron-core's SelfAttention projects the tokens and passes queries, keys and values to its *core attention*, which a
layer spec may replace. The core attention here calls an AttentionPattern, which is passed as PackedSeqParams:
`CausalRows` computes attention within all rows at once, and `BeamStep` from one new token per beam to a cache.

Rows of a layout's block are padded to one length after their tokens, where causal queries do not look, so no mask is
needed. Blocks have little padding, and torch's fused kernel skips keys after a query, so the work of a batch is
proportional to the sum of the squared lengths, not to rows × longest².

All beams of a user share one copy of the history's keys and values, so a step of beam search reads them once per user,
in one matrix product for all beams. The few generated codes are cached per beam, and are reordered when new beams are
chosen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from sid_gr.megatron_core import PackedSeqParams
from sid_gr.model.token_layout import DenseBlock, TokenLayout


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


class KeysAndValues(NamedTuple):
    """Keys and values of one layer."""

    # For histories `(num_rows, num_heads, length, head_dim)`, for generated codes
    # `(num_rows, num_beams, length, num_heads, head_dim)`.
    keys: torch.Tensor
    values: torch.Tensor  # as `keys`


class DecodingCache:
    """Keys and values of all layers.

    Args:
        layout: layout of the tokens whose pass fills the cache; tokens after a row's history are masked.
    """

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.prefix: dict[int, list[KeysAndValues]] = defaultdict(list)  # by layer, one entry per block
        self.generated: dict[int, KeysAndValues] = {}
        self.masks = [
            # Added to scores: −∞ after a row's history. (num_rows of the block, 1, 1, length)
            torch.zeros(block.num_rows, 1, 1, block.length, device=lengths.device).masked_fill_(
                torch.arange(block.length, device=lengths.device) >= lengths[:, None, None, None], -math.inf
            )
            for block in layout.blocks
            for lengths in [layout.prefix_lengths[block.first_row : block.first_row + block.num_rows]]
        ]

    def append_prefix(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Cache the keys and values of the next block of a layer."""
        self.prefix[layer].append(KeysAndValues(keys, values))

    def append_generated(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        """Cache a new code of every beam, `(num_rows, num_beams, 1, num_heads, head_dim)`; returns all codes so far."""
        if layer in self.generated:
            before = self.generated[layer]
            keys, values = torch.cat([before.keys, keys], dim=2), torch.cat([before.values, values], dim=2)
        self.generated[layer] = KeysAndValues(keys, values)
        return self.generated[layer]

    def choose_beams(self, parents: torch.Tensor) -> None:
        """Replace the beams.

        Args:
            parents: int64 `(num_rows, num_beams)`, the old beam that each new beam extends.
        """
        rows = torch.arange(parents.shape[0], device=parents.device)[:, None]
        for layer, (keys, values) in self.generated.items():
            self.generated[layer] = KeysAndValues(keys[rows, parents], values[rows, parents])


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


@dataclass
class BeamStep(AttentionPattern):
    """One new token per beam attends to the history of its row, to the generated codes of its beam, and to itself."""

    cache: DecodingCache = field(kw_only=True)  # filled by a pass with `CausalRows`; the new tokens are added to it
    num_beams: int = field(kw_only=True)  # beams per row; tokens are in the order of rows, then of beams

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See AttentionPattern."""
        num_rows = self.cache.layout.num_rows
        shape = (num_rows, self.num_beams, 1, *query.shape[1:])
        own_keys, own_values = self.cache.append_generated(layer, key.view(shape), value.view(shape))
        scaled = query.view(num_rows, self.num_beams, *query.shape[1:]) * query.shape[-1] ** -0.5
        own_scores = torch.einsum("rbhd,rbthd->rhbt", scaled, own_keys)
        queries = scaled.transpose(1, 2)  # (num_rows, num_heads, num_beams, head_dim)
        attended = []
        for block, mask, (keys, values) in zip(self.cache.layout.blocks, self.cache.masks, self.cache.prefix[layer]):
            rows = slice(block.first_row, block.first_row + block.num_rows)
            scores = queries[rows] @ keys.transpose(2, 3) + mask.to(queries.dtype)
            weights = torch.cat([scores, own_scores[rows]], dim=3).softmax(dim=3)
            seen, own = weights.split([block.length, own_scores.shape[3]], dim=3)
            attended.append(seen @ values + torch.einsum("rhbt,rbthd->rhbd", own, own_values[rows]))
        return torch.cat(attended).transpose(1, 2).flatten(0, 1)  # (num_rows · num_beams, num_heads, head_dim)


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
