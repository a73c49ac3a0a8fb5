"""Pointwise SiLU attention over jagged rows, in time that follows the pairs that the mask keeps.

    y_i = 1/N · Σ_j mask(i, j) · SiLU(q_i · k_j + bias(i − j) + time_bias(t_i − t_j)) · v_j        per head

after Zhai et al. 2024, "Actions Speak Louder than Words", section 3.2. There is no softmax, so the sum may be taken in
parts: history on history, context on history, targets on history, and targets within their group. N is a constant of
the model; a number taken from the batch would make a row's result depend on the rows beside it.

What keeps it cheap:
- Padding holds zeros, and a zero value adds nothing: padding needs no mask.
- The bias of a chunk is a strided view of one short row of numbers per head, and the mask is written into that row: at
  distances below zero, and beyond a window, it is so low that SiLU and its derivative are exactly zero.
- A chunk of queries has only the keys that some of them see, so nearly half of the square is never computed, with a
  window nearly all of it. Scores are computed again in the backward pass, so memory is bounded whatever the lengths.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hstu.model.attention_plan import AttentionPlan, Chunk

# ln(1.351): the width of a time bucket, as in the code published with the paper.
_LOG_TIME_STEP = 0.301


class TokenTimes(NamedTuple):
    """When the tokens of a batch happened."""

    values: torch.Tensor  # int64 `(num_tokens,)`, such as seconds
    # `(num_heads, num_buckets)`: times Δ apart are in bucket ⌊ln(max(1, Δ)) ÷ 0.301⌋, or in the last one.
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
    plan.require_tokens(query)
    table = _bias_table(bias.to(query.dtype), plan)
    seconds, time_table = (None, None) if times is None else (times.values, times.bias.to(query.dtype))
    # Sums run over many chunks: autocast must not change their dtype on the way.
    with torch.autocast(query.device.type, enabled=False):
        return _HSTUAttention.apply(query, key, value, table, time_table, seconds, plan, 1.0 / normalizer)


def time_buckets(apart: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Buckets of differences of times: ⌊ln(max(1, |Δ|)) ÷ 0.301⌋, at most `num_buckets − 1`; int64, the same shape.

    >>> time_buckets(torch.tensor([0, 1, 2, -60, 86_400, 10**9]), 64).tolist()
    [0, 0, 2, 13, 37, 63]
    """
    return (apart.abs().clamp_(min=1).float().log_() / _LOG_TIME_STEP).long().clamp_(max=num_buckets - 1)


def _bias_table(bias: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Bias by falling distance `(num_heads, 1 or 2, width)`: with the mask in it, and where contextual tokens are bare.

    Distance d is in column `_farthest(plan) − d`. Columns of distances that no row has serve padding.
    """
    farthest, zero = _farthest(plan), plan.zero_column(bias)
    bare = torch.nn.functional.pad(bias.flip(1), (farthest + zero + 1 - bias.shape[1], farthest - zero))
    distance = torch.arange(farthest, -farthest - 1, -1, device=bias.device)
    hidden = (distance < plan.seen[0]) | (distance > plan.seen[1])
    masked = bare.masked_fill(hidden, torch.finfo(bias.dtype).min / 2)
    return torch.stack([masked, bare] if plan.has_context else [masked], dim=1)


def _farthest(plan: AttentionPlan) -> int:
    """No query and key of a block are as far apart, padding included: each is at most as long as the longest row."""
    return 2 * plan.longest


class _HSTUAttention(torch.autograd.Function):
    """Attention over the blocks of a plan; the backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        time_table: torch.Tensor | None,
        times: torch.Tensor | None,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, table, time_table, times)
        ctx.plan, ctx.scale = plan, scale
        # Half of the division by N comes before the sum, so that float16 neither overflows nor loses small values; by a
        # power of two, which rounds nothing.
        before = 2.0 ** round(math.log2(scale) / 2)
        queries, keys, values = (_heads_first(tensor) for tensor in (query, key, value * before))
        bias = _Bias(plan, table, time_table, times)
        outputs = torch.zeros_like(queries)
        for block in plan.blocks:
            k, v = _take(keys, block.keys), _take(values, block.keys)
            for chunk in block.chunks:
                scores = bias.scores(_take(queries, chunk.queries), k[:, chunk.place], chunk)
                weights = torch.nn.functional.silu(scores, inplace=True)
                _add(outputs, chunk.queries, torch.bmm(weights, v[:, chunk.place]))
        return _tokens_first(outputs).mul_(scale / before)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *biases = ctx.saved_tensors
        queries, keys, values = inputs = [_heads_first(tensor) for tensor in (query, key, value)]
        grad_outputs = _heads_first(grad_output * ctx.scale)
        grad_queries, grad_keys, grad_values = (_zeros_to_add_to(tensor) for tensor in inputs)
        bias = _Bias(ctx.plan, *biases)
        for block in ctx.plan.blocks:
            k, v = _take(keys, block.keys), _take(values, block.keys)
            grad_k, grad_v = _zeros_to_add_to(k), _zeros_to_add_to(v)
            for chunk in block.chunks:
                q, grad = _take(queries, chunk.queries), _take(grad_outputs, chunk.queries)
                scores = bias.scores(q, k[:, chunk.place], chunk)
                grad_weights = torch.bmm(grad, v[:, chunk.place].transpose(1, 2))
                grad_scores = torch.ops.aten.silu_backward(grad_weights, scores)
                weights = torch.nn.functional.silu(scores, inplace=True)
                grad_v[:, chunk.place] += torch.bmm(weights.transpose(1, 2), grad)
                grad_k[:, chunk.place] += torch.bmm(grad_scores.transpose(1, 2), q)
                _add(grad_queries, chunk.queries, torch.bmm(grad_scores, k[:, chunk.place]))
                bias.add_gradients(grad_scores, chunk)
            _add(grad_keys, block.keys, grad_k)
            _add(grad_values, block.keys, grad_v)
        grads = (_tokens_first(grad).to(query.dtype) for grad in (grad_queries, grad_keys, grad_values))
        return *grads, *bias.gradients(), None, None, None


class _Bias:
    """What is added to the scores, and its gradients."""

    def __init__(
        self, plan: AttentionPlan, table: torch.Tensor, time_table: torch.Tensor | None, times: torch.Tensor | None
    ) -> None:
        self._plan = plan
        self._table, self._time_table = table, time_table
        self._times = table.new_zeros(0) if times is None else torch.nn.functional.pad(times, (0, 1))  # of padding, too
        self._grad_table = _zeros_to_add_to(table)
        self._grad_time_table = None if time_table is None else _zeros_to_add_to(time_table)

    def scores(self, query: torch.Tensor, key: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Scores q · k + bias of a chunk: `(num_heads · num_rows, num_queries, num_keys)`."""
        num_heads, num_keys = self._table.shape[0], chunk.keys.shape[1]
        scores = query.new_empty(query.shape[0], query.shape[1], num_keys)
        # (num_heads, period, num_keys), for all rows and periods: query x and key j are in column x + j
        bias = self._columns(self._table, chunk).unfold(1, num_keys, 1)
        scores.view(num_heads, -1, *bias.shape[1:]).copy_(bias.unsqueeze(1))
        if self._time_table is not None:
            scores += self._time_table.index_select(1, self._buckets(chunk, self._time_table)).view_as(scores)
        return scores.baddbmm_(query, key.transpose(1, 2))

    def add_gradients(self, grad_scores: torch.Tensor, chunk: Chunk) -> None:
        """Add the gradients of a chunk's scores to those of the bias."""
        num_heads = self._table.shape[0]
        if self._grad_time_table is not None:
            by_pair = grad_scores.view(num_heads, -1).to(self._grad_time_table.dtype)
            buckets = self._buckets(chunk, self._grad_time_table)
            self._grad_time_table.scatter_add_(1, buckets.expand_as(by_pair), by_pair)
        # Sums over anti-diagonals: rows of width + 1 numbers, read as rows of width, move one more column to the right
        # each, so that anti-diagonals become columns.
        columns = self._columns(self._grad_table, chunk)
        period, width = chunk.period, columns.shape[1]
        by_distance = grad_scores.view(num_heads, -1, period, chunk.keys.shape[1]).sum(1, dtype=columns.dtype)
        skewed = torch.nn.functional.pad(by_distance, (0, period)).flatten(1)[:, : period * width]
        columns += skewed.view(num_heads, period, width).sum(1)

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of both tables, in their dtype."""
        by_time = None if self._grad_time_table is None else self._grad_time_table.to(self._table.dtype)
        return self._grad_table.to(self._table.dtype), by_time

    def _columns(self, table: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The columns of the table that a chunk sees: `(num_heads, period + num_keys − 1)`, by falling distance."""
        first, is_masked = _farthest(self._plan) - chunk.distance, chunk.seen == self._plan.seen
        return table[:, 0 if is_masked else -1, first : first + chunk.period + chunk.keys.shape[1] - 1]

    def _buckets(self, chunk: Chunk, time_table: torch.Tensor) -> torch.Tensor:
        """Buckets of the times between queries and keys: int64 `(num_rows · num_queries · num_keys,)`."""
        apart = self._times[chunk.queries][:, :, None] - self._times[chunk.keys][:, None]
        return time_buckets(apart, time_table.shape[1]).flatten()


def _heads_first(values: torch.Tensor) -> torch.Tensor:
    """Values `(num_tokens, num_heads, head_dim)` as `(num_heads, num_tokens + 1, head_dim)`, with zeros as padding."""
    return torch.nn.functional.pad(values.transpose(0, 1), (0, 0, 0, 1))


def _tokens_first(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `_heads_first`."""
    return values[:, :-1].transpose(0, 1).contiguous()


def _take(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Values of tokens `(num_rows, length)` as matrices `(num_heads · num_rows, length, head_dim)`."""
    return values.index_select(1, tokens.flatten()).view(-1, tokens.shape[1], values.shape[2])


def _add(total: torch.Tensor, tokens: torch.Tensor, matrices: torch.Tensor) -> None:
    """Add matrices as `_take` returns them to the values of their tokens."""
    total.index_add_(1, tokens.flatten(), matrices.view(total.shape[0], -1, total.shape[2]).to(total.dtype))


def _zeros_to_add_to(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of `tensor`, at least float32: in bfloat16 a long sum stands still before its last terms."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
