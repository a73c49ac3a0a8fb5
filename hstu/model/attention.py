"""Pointwise SiLU attention over jagged rows, in time proportional to the pairs that the mask keeps.

    y_i = 1/N · Σ_j mask(i, j) · SiLU(q_i · k_j + bias(i − j) + time_bias(t_i − t_j)) · v_j        per head

after Zhai et al. 2024, "Actions Speak Louder than Words", section 3.2. There is no softmax, so the sum can be computed
in parts: history on history, context on history, targets on history, and targets within their group. N is a constant of
the model; with a number from the batch, a row's result would depend on the other rows.

Time and memory are saved in three ways:
- Padding is zeros, and a zero value adds nothing, so padding needs no mask.
- The bias of a chunk is a strided view of one short row of numbers per head, which includes the mask: at masked
  distances the bias is so low that SiLU and its derivative are exactly zero.
- A chunk has only the keys that any of its queries see, so nearly half of the square is never computed, with a window
  nearly all of it. Scores are recomputed in the backward pass, so memory is bounded for any lengths.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hstu.model.attention_plan import AttentionPlan, BatchPlan, Chunk

# ln(1.351): the width of a time bucket, as in the code published with the paper.
_LOG_TIME_STEP = 0.301


class TokenTimes(NamedTuple):
    """Timestamps of the tokens of a batch, and the bias by time."""

    values: torch.Tensor  # int64 `(num_tokens,)`, for example seconds
    # `(num_heads, num_buckets)`: a difference Δ is in bucket ⌊ln(max(1, Δ)) ÷ 0.301⌋, at most in the last bucket.
    bias: torch.Tensor


def hstu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    plan: AttentionPlan,
    *,
    normalizer: float,
    times: TokenTimes | None = None,
) -> torch.Tensor:
    """HSTU attention of a jagged batch.

    For the bias, the place of a token is its place in the row, except that every group of targets is placed directly
    after the history, so that the result of a group does not depend on the groups before it.

    Args:
        query: floating point `(num_tokens, num_heads, head_dim)`, row after row of the batch.
        key: as `query`.
        value: as `query`.
        bias: by distance i − j: `(num_heads, max_distance + 1)`, from distance 0, if no token sees later tokens; else
            (without a causal mask, or with contextual tokens in the plan) `(num_heads, 2 · max_distance + 1)`, from
            −max_distance. None for no bias.
        plan: the blocks of this batch, made for the same number of heads.
        normalizer: N, the divisor of the sums.
        times: timestamps and a bias for the time between two tokens; None for no such bias.

    Returns:
        `(num_tokens, num_heads, head_dim)`, the dtype of `query`. The gradients of all floating-point tensors are
        exact; they cannot be differentiated again.

    Raises:
        ValueError: a row longer than `max_distance + 1`, another number of tokens than the plan's, or inputs with
            different numbers of tokens or heads.
    """
    require_inputs(plan, query, key, value, bias, times)
    if bias is None:
        bias = query.new_zeros(query.shape[1], 2 * plan.longest + 1 if plan.sees_ahead else plan.longest)
    table = _bias_table(bias.to(torch.promote_types(bias.dtype, query.dtype)), plan, query.dtype)
    seconds = time_table = None
    if times is not None:
        seconds, time_table = torch.nn.functional.pad(times.values, (0, 1)), times.bias
    # Autocast must not change the dtype of sums over many chunks.
    with torch.autocast(query.device.type, enabled=False):
        return _HSTUAttention.apply(query, key, value, table, time_table, seconds, plan, 1.0 / normalizer)


def require_inputs(
    plan: BatchPlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    times: TokenTimes | None,
) -> None:
    """Raise ValueError unless all inputs have the plan's tokens and the query's heads.

    Without this check inputs with too many tokens or heads would be read in the wrong places.
    """
    plan.require_tokens(query)
    if not query.shape == key.shape == value.shape:
        raise ValueError(
            f"query has shape {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}; all three "
            "are (num_tokens, num_heads, head_dim): give them one shape"
        )
    for name, table in (("bias", bias), ("times.bias", None if times is None else times.bias)):
        if table is not None and table.shape[0] != query.shape[1]:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}, query has {query.shape[1]} heads; a bias has one row for "
                "every head: give it these rows"
            )
    if times is not None and times.values.shape[0] != plan.num_tokens:
        raise ValueError(
            f"times has {times.values.shape[0]} values, the plan was made for {plan.num_tokens} tokens; every token "
            "has one timestamp, without padding: give one for each"
        )


def time_buckets(apart: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Buckets of time differences Δ: ⌊ln(max(1, |Δ|)) ÷ 0.301⌋, at most `num_buckets − 1`; int64, the same shape.

    >>> time_buckets(torch.tensor([0, 1, 2, -60, 86_400, 10**9]), 64).tolist()
    [0, 0, 2, 13, 37, 63]
    """
    return (apart.abs().clamp_(min=1).float().log_() / _LOG_TIME_STEP).long().clamp_(max=num_buckets - 1)


def _bias_table(bias: torch.Tensor, plan: AttentionPlan, dtype: torch.dtype) -> torch.Tensor:
    """Bias by falling distance `(num_heads, 1 or 2, width)`: with the mask and, if there is context, also without it.

    `dtype` is that of the scores; the bias has at least its range.

    Distance d is in column `_farthest(plan) − d`. The outermost columns are for padding.
    """
    farthest, zero = _farthest(plan), plan.zero_column(bias)
    bare = torch.nn.functional.pad(bias.flip(1), (farthest + zero + 1 - bias.shape[1], farthest - zero))
    distance = torch.arange(farthest, -farthest - 1, -1, device=bias.device)
    hidden = (distance < plan.seen[0]) | (distance > plan.seen[1])
    masked = bare.masked_fill(hidden, torch.finfo(dtype).min / 2)
    return torch.stack([masked, bare] if plan.has_context else [masked], dim=1)


def _farthest(plan: AttentionPlan) -> int:
    """A bound of the distances in a block, padding included: queries and keys each span at most the longest row."""
    return 2 * plan.longest


class _HSTUAttention(torch.autograd.Function):
    """Attention over the blocks of a plan; the backward pass recomputes the scores."""

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
        table, time_table = table.to(query.dtype), None if time_table is None else time_table.to(query.dtype)
        ctx.save_for_backward(query, key, value, table, time_table, times)
        ctx.plan, ctx.scale = plan, scale
        # Divide by about √N before the sum and by the rest after it, so that float16 neither overflows nor loses small
        # values; the first divisor is a power of two, so that it causes no rounding.
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
        with torch.autocast(grad_output.device.type, enabled=False):  # as in the forward pass
            return _gradients(ctx, grad_output)


def _gradients(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the arguments of `_HSTUAttention.forward`."""
    *tokens, table, time_table, times = ctx.saved_tensors
    queries, keys, values = inputs = [_heads_first(tensor) for tensor in tokens]
    grad_outputs = _heads_first(grad_output * ctx.scale)
    grad_queries, grad_keys, grad_values = (_zeros_to_add_to(tensor) for tensor in inputs)
    bias = _Bias(ctx.plan, table, time_table, times)
    grad_table = _zeros_to_add_to(table)
    grad_time_table = None if time_table is None else _zeros_to_add_to(time_table)
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
            bias.add_gradients(grad_scores, chunk, grad_table, grad_time_table)
        _add(grad_keys, block.keys, grad_k)
        _add(grad_values, block.keys, grad_v)
    of_tokens = (_tokens_first(grad) for grad in (grad_queries, grad_keys, grad_values))
    # Autograd converts gradients to the dtypes of the inputs: of float32 tables they do not overflow in float16.
    return *of_tokens, grad_table, grad_time_table, None, None, None


class _Bias(NamedTuple):
    """The biases of the scores, in the dtype of the scores."""

    plan: AttentionPlan
    table: torch.Tensor  # by distance, see `_bias_table`
    time_table: torch.Tensor | None  # `(num_heads, num_buckets)`
    times: torch.Tensor | None  # int64 `(num_tokens + 1,)`, the last for padding

    def scores(self, query: torch.Tensor, key: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Scores q · k + bias of a chunk: `(num_heads · num_rows, num_queries, num_keys)`."""
        num_heads, num_keys = self.table.shape[0], chunk.keys.shape[1]
        scores = query.new_empty(query.shape[0], query.shape[1], num_keys)
        # (num_heads, period, num_keys), for all rows and periods: query x and key j are in column x + j
        bias = self._columns(self.table, chunk).unfold(1, num_keys, 1)
        scores.view(num_heads, -1, *bias.shape[1:]).copy_(bias.unsqueeze(1))
        if self.time_table is not None:
            scores += self.time_table.index_select(1, self._buckets(chunk, self.time_table)).view_as(scores)
        return scores.baddbmm_(query, key.transpose(1, 2))

    def add_gradients(
        self, grad_scores: torch.Tensor, chunk: Chunk, grad_table: torch.Tensor, grad_time_table: torch.Tensor | None
    ) -> None:
        """Add the gradients of a chunk's scores to the gradients of the tables."""
        num_heads = self.table.shape[0]
        if grad_time_table is not None:
            by_pair = grad_scores.view(num_heads, -1).to(grad_time_table.dtype)
            buckets = self._buckets(chunk, grad_time_table)
            grad_time_table.scatter_add_(1, buckets.expand_as(by_pair), by_pair)
        # Sum over anti-diagonals: rows padded to width + 1 numbers and read as rows of width shift each row one more
        # column to the right, so that anti-diagonals become columns.
        columns = self._columns(grad_table, chunk)
        period, width = chunk.period, columns.shape[1]
        by_distance = grad_scores.view(num_heads, -1, period, chunk.keys.shape[1]).sum(1, dtype=columns.dtype)
        skewed = torch.nn.functional.pad(by_distance, (0, period)).flatten(1)[:, : period * width]
        columns += skewed.view(num_heads, period, width).sum(1)

    def _columns(self, table: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The columns of the table for a chunk: `(num_heads, period + num_keys − 1)`, by falling distance."""
        first, is_masked = _farthest(self.plan) - chunk.distance, chunk.seen == self.plan.seen
        return table[:, 0 if is_masked else -1, first : first + chunk.period + chunk.keys.shape[1] - 1]

    def _buckets(self, chunk: Chunk, time_table: torch.Tensor) -> torch.Tensor:
        """Buckets of time differences between queries and keys: int64 `(num_rows · num_queries · num_keys,)`."""
        assert self.times is not None  # noqa: S101  given with the table
        apart = self.times[chunk.queries][:, :, None] - self.times[chunk.keys][:, None]
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
    """Add matrices, in the form that `_take` returns, to the values of their tokens."""
    total.index_add_(1, tokens.flatten(), matrices.view(total.shape[0], -1, total.shape[2]).to(total.dtype))


def _zeros_to_add_to(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of `tensor`, at least float32: bfloat16 would round away the last terms of a long sum."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
