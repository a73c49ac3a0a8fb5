"""Pointwise SiLU attention over jagged rows, in time that follows the sum of the squared lengths.

    y_i = 1/N · Σ_j mask(i, j) · SiLU(q_i · k_j + bias(i − j) + time_bias(t_i − t_j)) · v_j        per head

after Zhai et al. 2024, "Actions Speak Louder than Words", section 3.2. There is no softmax, so the sum may be taken in
parts: history on history, context on history, targets on history, and targets within their group. N is a constant of
the model; a number taken from the batch would make a row's result depend on the rows beside it.

What keeps it cheap:
- Padding slots hold zeros, and a zero value adds nothing: padding needs no mask.
- The bias of a chunk is a strided view of one short row of numbers per head, and the causal mask is written into that
  row: at distances below zero it is so low that SiLU and its derivative are exactly zero.
- What a strided view cannot show, the bias of contextual queries (few) and of times (if asked for), is gathered.
- A chunk of queries sees only the keys up to its last one, so nearly half of the square is never computed, and its
  scores are computed again in the backward pass, so memory is bounded whatever the lengths.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hstu.model.attention_plan import AttentionPlan
from hstu.model.dense_attention import (
    BiasTables,
    BlockGradients,
    DenseAttention,
    SlotTimes,
    query_parts,
    read_slots,
    write_slots,
    zeros_to_add_to,
)


class TokenTimes(NamedTuple):
    """When the tokens of a batch happened.

    Attributes:
        values: int64 `(num_tokens,)`, such as seconds.
        bias: `(num_heads, num_buckets)`: times Δ apart are in bucket ⌊ln(max(1, Δ)) ÷ 0.301⌋, or in the last one.

    """

    values: torch.Tensor
    bias: torch.Tensor


def hstu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    plan: AttentionPlan,
    *,
    normalizer: float,
    times: TokenTimes | None = None,
) -> torch.Tensor:
    """HSTU attention of a jagged batch.

    The position that the bias sees is a token's place in its row, except that every group of targets stands directly
    behind the history: what a target gets does not depend on its place among the targets.

    Args:
        query: floating point `(num_tokens, num_heads, head_dim)`, the rows of the batch one after the other.
        key: as `query`.
        value: as `query`.
        bias: by distance i − j: `(num_heads, max_distance + 1)` where no token sees later ones, else (without a causal
            mask, or with contextual tokens in the plan) `(num_heads, 2 · max_distance + 1)`, from −max_distance on.
        plan: the blocks of this batch, made for the same number of heads.
        normalizer: N, by which the sums are divided.
        times: adds a bias for the time between two tokens; none if not given.

    Returns:
        `(num_tokens, num_heads, head_dim)`, the dtype of `query`. The gradients of all floating-point tensors are
        exact; they cannot be differentiated again.

    Raises:
        ValueError: a row longer than the bias reaches, or tensors of another number of tokens than the plan's.

    """
    require_plan_of(query, plan.key_slots.numel())
    reach = require_reach(plan.longest, bias.shape[1], sees_ahead=plan.sees_ahead)
    bias = bias.to(query.dtype)
    table, origin = _bias_table(bias, plan, reach)
    context_table = None if plan.front_padding is None else bias
    slot_times, time_table = None, None
    if times is not None:
        slot_times = SlotTimes(plan.pad_keys(times.values), plan.pad_queries(times.values))
        time_table = times.bias.to(query.dtype)
    # Sums run over many chunks: autocast must not change their dtype on the way.
    with torch.autocast(query.device.type, enabled=False):
        return _HSTUAttention.apply(
            query, key, value, table, context_table, time_table, origin, slot_times, plan, 1.0 / normalizer
        )


def require_plan_of(query: torch.Tensor, num_tokens: int) -> None:
    """Raise ValueError unless a plan was made for these tokens."""
    if query.shape[0] != num_tokens:
        raise ValueError(
            f"query has {query.shape[0]} tokens, the plan was made for {num_tokens}; a plan serves the batch it was "
            "made from: make one from this batch's lengths"
        )


def require_reach(longest: int, width: int, *, sees_ahead: bool) -> int:
    """Tokens of the longest row that a bias of `width` distances serves; ValueError if the longest row has more."""
    reach = (width + 1) // 2 if sees_ahead else width
    if longest > reach:
        raise ValueError(
            f"the longest row has {longest} tokens, the position bias reaches {reach}; a row may have at most "
            "max_sequence_length tokens: raise it or truncate the rows"
        )
    return reach


def _bias_table(bias: torch.Tensor, plan: AttentionPlan, reach: int) -> tuple[torch.Tensor, int]:
    """Bias by falling distance, the causal mask in it, and the column of distance 0: column `origin − d` is distance d.

    The first columns, `target_group_size` many, are further away than any key can be; only padding is there.
    """
    longest = max(plan.longest, 1)
    zero = reach - 1 if plan.sees_ahead else 0  # column of distance 0 in `bias`
    behind = bias[:, zero : zero + longest].flip(1)
    if plan.is_causal:
        ahead = bias.new_full((bias.shape[0], longest - 1), torch.finfo(bias.dtype).min / 2)
    else:
        ahead = bias[:, zero - longest + 1 : zero].flip(1)
    beyond = bias.new_zeros(bias.shape[0], plan.target_group_size)
    return torch.cat([beyond, behind, ahead], dim=1), plan.target_group_size + longest - 1


class _HSTUAttention(torch.autograd.Function):
    """Attention over the blocks of a plan; the backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        context_table: torch.Tensor | None,
        time_table: torch.Tensor | None,
        origin: int,
        times: SlotTimes | None,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, table, context_table, time_table)
        ctx.origin, ctx.times, ctx.plan, ctx.scale = origin, times, plan, scale
        attention = DenseAttention(BiasTables(table, context_table, time_table), origin, times)
        # Half of the division by N comes before the sum, so that float16 neither overflows nor loses small values; by a
        # power of two, which rounds nothing.
        before = 2.0 ** round(math.log2(scale) / 2)
        queries, keys, values = plan.pad_queries(query), plan.pad_keys(key), plan.pad_keys(value).mul_(before)
        outputs = torch.empty_like(queries)
        for block in plan.blocks:
            k, v = read_slots(keys, block.tokens), read_slots(values, block.tokens)
            for part in query_parts(block, query.shape[1], plan):
                write_slots(outputs, part.slots, attention.forward(read_slots(queries, part.slots), k, v, part))
        return _gather_queries(outputs, plan).mul_(scale / before)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *tables = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        attention = DenseAttention(BiasTables(*tables), ctx.origin, ctx.times)
        grad_tables = BiasTables(*tables).zeros()
        queries, keys, values = plan.pad_queries(query), plan.pad_keys(key), plan.pad_keys(value)
        grad_outputs = plan.pad_queries(grad_output * ctx.scale)
        grad_queries, grad_keys, grad_values = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(keys)
        for block in plan.blocks:
            k, v = read_slots(keys, block.tokens), read_slots(values, block.tokens)
            grads = BlockGradients(zeros_to_add_to(k), zeros_to_add_to(v), grad_tables)
            for part in query_parts(block, query.shape[1], plan):
                q, grad = read_slots(queries, part.slots), read_slots(grad_outputs, part.slots)
                write_slots(grad_queries, part.slots, attention.backward(grad, q, k, v, part, grads))
            write_slots(grad_keys, block.tokens, grads.key)
            write_slots(grad_values, block.tokens, grads.value)
        return (
            _gather_queries(grad_queries, plan),
            grad_keys.index_select(0, plan.key_slots),
            grad_values.index_select(0, plan.key_slots),
            *(None if grad is None else grad.to(table.dtype) for grad, table in zip(grad_tables, tables)),
            *(None, None, None, None),
        )


def _gather_queries(padded: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """The transpose of `AttentionPlan.pad_queries`: values of the tokens, both of a target's places added."""
    gathered = padded.index_select(0, plan.query_slots)
    return gathered.index_add_(0, plan.target_tokens, padded.index_select(0, plan.target_slots))
