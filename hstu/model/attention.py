"""Pointwise SiLU attention over jagged rows, in time that follows the sum of the squared lengths.

    y_i = 1/N · Σ_j mask(i, j) · SiLU(q_i · k_j + bias(i − j)) · v_j        per head

after Zhai et al. 2024, "Actions Speak Louder than Words", section 3.2. There is no softmax, so the sum may be taken in
parts: history on history, targets on history, and targets within their group. N is a constant of the model; a number
taken from the batch would make a row's result depend on the rows beside it.

What keeps it cheap:
- Padding slots hold zeros, and a zero value adds nothing: padding needs no mask.
- The bias of a chunk is a strided view of one short row of numbers per head, and the causal mask is written into that
  row: at distances below zero it is so low that SiLU and its derivative are exactly zero.
- A chunk of queries sees only the keys up to its last one, so nearly half of the square is never computed, and its
  scores are computed again in the backward pass, so memory is bounded whatever the lengths.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hstu.model.attention_plan import AttentionPlan, RowBlock, Slots


def hstu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    plan: AttentionPlan,
    *,
    normalizer: float,
) -> torch.Tensor:
    """HSTU attention of a jagged batch.

    The position that the bias sees is a token's place in its row, except that every group of targets stands directly
    behind the history: what a target gets does not depend on its place among the targets.

    Args:
        query: floating point `(num_tokens, num_heads, head_dim)`, the rows of the batch one after the other.
        key: as `query`.
        value: as `query`.
        bias: `(num_heads, max_distance + 1)` by distance i − j in causal attention, `(num_heads, 2 · max_distance + 1)`
            by distance from −max_distance to max_distance otherwise.
        plan: the blocks of this batch, made for the same number of heads.
        normalizer: N, by which the sums are divided.

    Returns:
        `(num_tokens, num_heads, head_dim)`, the dtype of `query`. The gradients of all four tensors are exact; they
        cannot be differentiated again.

    Raises:
        ValueError: a row longer than the bias reaches, or tensors of another number of tokens than the plan's.

    """
    num_tokens = plan.key_slots.numel()
    if query.shape[0] != num_tokens:
        raise ValueError(
            f"query has {query.shape[0]} tokens, the plan was made for {num_tokens}; a plan serves the batch it was "
            "made from: make one from this batch's lengths"
        )
    reach = bias.shape[1] if plan.is_causal else (bias.shape[1] + 1) // 2
    if plan.longest > reach:
        raise ValueError(
            f"the longest row has {plan.longest} tokens, the position bias reaches {reach}; a row may have at most "
            "max_sequence_length tokens: raise it or truncate the rows"
        )
    table, origin = _bias_table(bias.to(query.dtype), plan)
    # Sums run over many chunks: autocast must not change their dtype on the way.
    with torch.autocast(query.device.type, enabled=False):
        return _HSTUAttention.apply(query, key, value, table, origin, plan, 1.0 / normalizer)


def _bias_table(bias: torch.Tensor, plan: AttentionPlan) -> tuple[torch.Tensor, int]:
    """Bias by falling distance, the causal mask in it, and the column of distance 0: column `origin − d` is distance d.

    The first columns, `target_group_size` many, are further away than any key can be; only padding is there.
    """
    reach = max(plan.longest, 1)
    if plan.is_causal:
        behind = bias[:, :reach].flip(1)
        ahead = bias.new_full((bias.shape[0], reach - 1), torch.finfo(bias.dtype).min / 2)
    else:
        middle = bias.shape[1] // 2
        behind = bias[:, middle : middle + reach].flip(1)
        ahead = bias[:, middle - reach + 1 : middle].flip(1)
    beyond = bias.new_zeros(bias.shape[0], plan.target_group_size)
    return torch.cat([beyond, behind, ahead], dim=1), plan.target_group_size + reach - 1


class _HSTUAttention(torch.autograd.Function):
    """Attention over the blocks of a plan; the backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        origin: int,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, table)
        ctx.origin, ctx.plan, ctx.scale = origin, plan, scale
        attention = _DenseAttention(table, origin)
        queries, keys, values = _pad_queries(query, plan), _pad_keys(key, plan), _pad_keys(value, plan)
        outputs = torch.empty_like(queries)
        for block in plan.blocks:
            k, v = _read(keys, block.tokens), _read(values, block.tokens)
            for slots, chunks in _query_parts(block, query.shape[1], plan):
                _write(outputs, slots, attention.forward(_read(queries, slots), k, v, chunks))
        return _gather_queries(outputs, plan).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, table = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        attention = _DenseAttention(table, ctx.origin)
        grad_table = torch.zeros_like(table)
        queries, keys, values = _pad_queries(query, plan), _pad_keys(key, plan), _pad_keys(value, plan)
        grad_outputs = _pad_queries(grad_output * ctx.scale, plan)
        grad_queries, grad_keys, grad_values = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(keys)
        for block in plan.blocks:
            k, v = _read(keys, block.tokens), _read(values, block.tokens)
            grads = _Gradients(torch.zeros_like(k), torch.zeros_like(v), grad_table)
            for slots, chunks in _query_parts(block, query.shape[1], plan):
                q, grad = _read(queries, slots), _read(grad_outputs, slots)
                _write(grad_queries, slots, attention.backward(grad, q, k, v, chunks, grads))
            _write(grad_keys, block.tokens, grads.key)
            _write(grad_values, block.tokens, grads.value)
        return (
            _gather_queries(grad_queries, plan),
            grad_keys.index_select(0, plan.key_slots),
            grad_values.index_select(0, plan.key_slots),
            grad_table,
            None,
            None,
            None,
        )


def _pad_keys(values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Values `(num_tokens, num_heads, head_dim)` in the slots of keys, zeros elsewhere."""
    padded = values.new_zeros(plan.num_key_slots, *values.shape[1:])
    return padded.index_copy_(0, plan.key_slots, values)


def _pad_queries(values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Values as in `_pad_keys`, in the slots of queries; a target stands there twice."""
    padded = values.new_zeros(plan.num_query_slots, *values.shape[1:])
    padded.index_copy_(0, plan.query_slots, values)
    return padded.index_copy_(0, plan.target_slots, values.index_select(0, plan.target_tokens))


def _gather_queries(padded: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """The transpose of `_pad_queries`: values of the tokens, both of a target's places added."""
    gathered = padded.index_select(0, plan.query_slots)
    return gathered.index_add_(0, plan.target_tokens, padded.index_select(0, plan.target_slots))


def _read(padded: torch.Tensor, slots: Slots) -> torch.Tensor:
    """The slots as matrices, heads first: `(num_heads · num_rows, length, head_dim)`."""
    rows = padded[slots.first : slots.end].view(slots.num_rows, slots.length, *padded.shape[1:])
    return rows.permute(2, 0, 1, 3).reshape(-1, slots.length, padded.shape[2])


def _write(padded: torch.Tensor, slots: Slots, matrices: torch.Tensor) -> None:
    """The inverse of `_read`."""
    rows = padded[slots.first : slots.end].view(slots.num_rows, slots.length, *padded.shape[1:])
    rows.copy_(matrices.view(-1, slots.num_rows, slots.length, padded.shape[2]).permute(1, 2, 0, 3))


class _Chunk(NamedTuple):
    """Queries `[start, end)` of a matrix on its first `num_keys` keys.

    Query `start + x` is at distance `first_distance − x % period − j` from key j.
    """

    start: int
    end: int
    num_keys: int
    first_distance: int
    period: int


def _query_parts(block: RowBlock, num_heads: int, plan: AttentionPlan) -> Iterator[tuple[Slots, list[_Chunk]]]:
    """The block's tokens as queries on themselves and, where there are any, its targets as queries on the tokens."""
    tokens, targets = block
    num_matrices, length = tokens.num_rows * num_heads, tokens.length
    size = plan.tuning.chunk_size(num_matrices, length, length)
    chunks = []
    for start in range(0, length, size):
        end = min(start + size, length)
        # Queries stand in reverse order: the first of the chunk is the last in time and sees the most.
        last = length - 1 - start
        chunks.append(_Chunk(start, end, last + 1 if plan.is_causal else length, last, end - start))
    yield tokens, chunks
    if targets.length:
        group = plan.target_group_size
        size = max(plan.tuning.max_scores // (num_matrices * length * group), 1) * group
        yield (
            targets,
            [
                _Chunk(start, min(start + size, targets.length), length, length + group - 1, group)
                for start in range(0, targets.length, size)
            ],
        )


class _Gradients(NamedTuple):
    """Gradients that all queries of a block add to."""

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor


class _DenseAttention:
    """Attention of dense matrices `(num_heads · num_rows, length, head_dim)`, chunk by chunk."""

    def __init__(self, table: torch.Tensor, origin: int) -> None:
        self._table = table  # (num_heads, width)
        self._origin = origin

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunks: list[_Chunk]
    ) -> torch.Tensor:
        """Sums over the keys, not divided by N; the shape of `query`."""
        output = torch.empty_like(query)
        for chunk in chunks:
            weights = torch.nn.functional.silu(self._scores(chunk, query, key), inplace=True)
            output[:, chunk.start : chunk.end] = torch.bmm(weights, value[:, : chunk.num_keys])
        return output

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunks: list[_Chunk],
        grads: _Gradients,
    ) -> torch.Tensor:
        """Gradient of `query`; the other gradients are added to `grads`."""
        grad_query = torch.empty_like(query)
        for chunk in chunks:
            queries, keys = slice(chunk.start, chunk.end), slice(chunk.num_keys)
            weights = self._scores(chunk, query, key)
            sigmoid = torch.sigmoid(weights, out=_scratch.take("sigmoid", weights.shape, weights))
            weights.mul_(sigmoid)  # SiLU(s) = s · σ(s)
            self._add_product(grads.value[:, keys], weights, grad_output[:, queries])
            # SiLU'(s) = σ(s) + SiLU(s) · (1 − σ(s))
            derivative = torch.addcmul(sigmoid, weights, sigmoid, value=-1, out=sigmoid).add_(weights)
            grad_weights = torch.bmm(
                grad_output[:, queries],
                value[:, keys].transpose(1, 2),
                out=_scratch.take("grad_weights", weights.shape, weights),
            )
            skewed = self._skewed(chunk, weights)
            grad_scores = torch.mul(derivative, grad_weights, out=skewed[..., keys])
            grad_query[:, queries] = torch.bmm(grad_scores, key[:, keys])
            self._add_product(grads.key[:, keys], grad_scores, query[:, queries])
            self._add_to_table(grads.table, chunk, skewed)
        return grad_query

    def _scores(self, chunk: _Chunk, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Scores q · k + bias of a chunk: `(num_matrices, num_queries, num_keys)`, in memory that is used again."""
        scores = _scratch.take("scores", (query.shape[0], chunk.end - chunk.start, chunk.num_keys), query)
        first, width = self._window(chunk)
        bias = self._table[:, first : first + width].unfold(1, chunk.num_keys, 1)  # (num_heads, period, num_keys)
        scores.view(bias.shape[0], -1, *bias.shape[1:]).copy_(bias.unsqueeze(1))
        return scores.baddbmm_(query[:, chunk.start : chunk.end], key[:, : chunk.num_keys].transpose(1, 2))

    def _window(self, chunk: _Chunk) -> tuple[int, int]:
        """First column of the table that a chunk sees, and how many: query x and key j see column `first + x + j`."""
        return self._origin - chunk.first_distance, chunk.period + chunk.num_keys - 1

    def _skewed(self, chunk: _Chunk, like: torch.Tensor) -> torch.Tensor:
        """Memory for a chunk whose rows are `period` longer, with zeros there: see `_add_to_table`.

        It is that of the scores, which are not needed any more.
        """
        shape = (*like.shape[:2], chunk.num_keys + chunk.period)
        skewed = _scratch.take("scores", shape, like)
        skewed[..., chunk.num_keys :].zero_()
        return skewed

    def _add_to_table(self, grad_table: torch.Tensor, chunk: _Chunk, skewed: torch.Tensor) -> None:
        """Add what a chunk's scores give the table: sums over its anti-diagonals.

        Rows of width + 1 numbers, read as rows of width, move one more column to the right each, so that anti-diagonals
        become columns.
        """
        first, width = self._window(chunk)
        by_row = skewed.view(grad_table.shape[0], -1, chunk.period * (width + 1)).sum(1)
        by_column = by_row[:, : chunk.period * width].view(-1, chunk.period, width).sum(1)
        grad_table[:, first : first + width] += by_column

    @staticmethod
    def _add_product(total: torch.Tensor, scores: torch.Tensor, factor: torch.Tensor) -> None:
        """Add `scoresᵀ · factor`."""
        product = _scratch.take("product", total.shape, total)
        total += torch.bmm(scores.transpose(1, 2), factor, out=product)


class _Scratch(threading.local):
    """Memory for intermediate results, kept per thread on CPU; nothing in it outlives a chunk.

    Fresh memory costs a page fault every 4 kB, about as much as the results that are written into it. An
    accelerator's allocator keeps its memory itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the dtype and device of `like`; it is what was taken under this name before."""
        if like.device.type != "cpu":
            return like.new_empty(shape)
        size = math.prod(shape)
        buffer = self._buffers.get((name, like.dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be used outside of it
                buffer = torch.empty(size, dtype=like.dtype)
            self._buffers[name, like.dtype] = buffer
        return buffer[:size].view(shape)


_scratch = _Scratch()
