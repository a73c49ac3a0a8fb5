"""Pointwise attention of a block: dense matrices of queries and keys, chunk by chunk, forward and backward.

The bias of a chunk is a strided view of one short row of numbers per head, with the causal mask in it. What such a view
cannot show, the bias of contextual queries (few) and that of times (if asked for), is gathered.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hstu.model.attention_plan import AttentionPlan, RowBlock, Slots

# ln(1.351): the width of a time bucket, as in the code published with the paper.
_LOG_TIME_STEP = 0.301


class SlotTimes(NamedTuple):
    """Times in the slots of keys and of queries; int64."""

    keys: torch.Tensor
    queries: torch.Tensor


class BiasTables(NamedTuple):
    """What is added to the scores, or the gradients of that.

    Attributes:
        position: `(num_heads, width)` by falling distance, see `_bias_table`.
        context: `(num_heads, 2 · max_distance + 1)` by rising distance; None without contextual queries.
        time: `(num_heads, num_buckets)`; None without times.

    """

    position: torch.Tensor
    context: torch.Tensor | None
    time: torch.Tensor | None

    def zeros(self) -> BiasTables:
        """Sums for gradients."""
        position, context, time = self
        return BiasTables(
            zeros_to_add_to(position),
            None if context is None else zeros_to_add_to(context),
            None if time is None else zeros_to_add_to(time),
        )


def zeros_to_add_to(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of `tensor`, at least float32: in bfloat16 a long sum stands still before its last terms."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def read_slots(padded: torch.Tensor, slots: Slots) -> torch.Tensor:
    """The slots as matrices, heads first: `(num_heads · num_rows, length, head_dim)`."""
    rows = padded[slots.first : slots.end].view(slots.num_rows, slots.length, *padded.shape[1:])
    return rows.permute(2, 0, 1, 3).reshape(-1, slots.length, padded.shape[2])


def write_slots(padded: torch.Tensor, slots: Slots, matrices: torch.Tensor) -> None:
    """The inverse of `read_slots`."""
    rows = padded[slots.first : slots.end].view(slots.num_rows, slots.length, *padded.shape[1:])
    rows.copy_(matrices.view(-1, slots.num_rows, slots.length, padded.shape[2]).permute(1, 2, 0, 3))


class _Chunk(NamedTuple):
    """Queries `[start, end)` of a matrix on its first `num_keys` keys.

    Query `start + x` is at distance `first_distance − x % period − j` from key j; not so for contextual queries.
    """

    start: int
    end: int
    num_keys: int
    first_distance: int
    period: int


class QueryPart(NamedTuple):
    """Queries of a block on its tokens.

    Attributes:
        slots: where they are.
        keys: where the tokens are.
        chunks: in which they are computed.
        front_padding: of contextual queries, int64 `(num_rows,)`: empty slots before the first key of each row. None
            for other queries.

    """

    slots: Slots
    keys: Slots
    chunks: list[_Chunk]
    front_padding: torch.Tensor | None = None


def query_parts(block: RowBlock, num_heads: int, plan: AttentionPlan) -> Iterator[QueryPart]:
    """The block's tokens as queries on themselves and, where there are any, its targets and context on the tokens."""
    tokens, targets, context, first_row = block
    num_matrices, length = tokens.num_rows * num_heads, tokens.length
    size = plan.tuning.chunk_size(num_matrices, length, length)
    chunks = []
    for start in range(0, length, size):
        end = min(start + size, length)
        # Queries stand in reverse order: the first of the chunk is the last in time and sees the most.
        last = length - 1 - start
        chunks.append(_Chunk(start, end, last + 1 if plan.is_causal else length, last, end - start))
    yield QueryPart(tokens, tokens, chunks)
    if targets.length:
        group = plan.target_group_size
        size = max(plan.tuning.max_scores // (num_matrices * length * group), 1) * group
        yield QueryPart(
            targets,
            tokens,
            [
                _Chunk(start, min(start + size, targets.length), length, length + group - 1, group)
                for start in range(0, targets.length, size)
            ],
        )
    if context.length and plan.front_padding is not None:
        size = max(plan.tuning.max_scores // (num_matrices * length), 1)
        yield QueryPart(
            context,
            tokens,
            [
                _Chunk(start, min(start + size, context.length), length, 0, 0)
                for start in range(0, context.length, size)
            ],
            plan.front_padding[first_row : first_row + tokens.num_rows],
        )


class BlockGradients(NamedTuple):
    """Gradients that all queries of a block add to."""

    key: torch.Tensor
    value: torch.Tensor
    tables: BiasTables


class DenseAttention:
    """Attention of dense matrices `(num_heads · num_rows, length, head_dim)`, chunk by chunk."""

    def __init__(self, tables: BiasTables, origin: int, times: SlotTimes | None) -> None:
        self._tables = tables
        self._num_heads = tables.position.shape[0]
        self._origin = origin
        self._times = times

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: QueryPart) -> torch.Tensor:
        """Sums over the keys, not divided by N; the shape of `query`."""
        output = torch.empty_like(query)
        for chunk in part.chunks:
            weights = torch.nn.functional.silu(self._scores(chunk, query, key, part), inplace=True)
            output[:, chunk.start : chunk.end] = torch.bmm(weights, value[:, : chunk.num_keys])
        return output

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        part: QueryPart,
        grads: BlockGradients,
    ) -> torch.Tensor:
        """Gradient of `query`; the other gradients are added to `grads`."""
        grad_query = torch.empty_like(query)
        for chunk in part.chunks:
            queries, keys = slice(chunk.start, chunk.end), slice(chunk.num_keys)
            weights = self._scores(chunk, query, key, part)
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
            if part.front_padding is None:
                skewed = self._skewed(chunk, weights)
                grad_scores = torch.mul(derivative, grad_weights, out=skewed[..., keys])
            else:
                grad_scores = derivative.mul_(grad_weights)
            grad_query[:, queries] = torch.bmm(grad_scores, key[:, keys])
            self._add_product(grads.key[:, keys], grad_scores, query[:, queries])
            if grads.tables.time is not None and self._times is not None:
                buckets = _buckets_of(chunk, part, self._times, grads.tables.time.shape[1])
                self._scatter(grads.tables.time, buckets, grad_scores)
            if part.front_padding is None:
                self._add_to_table(grads.tables.position, chunk, skewed)
            elif grads.tables.context is not None:
                columns = _context_columns(chunk, part.front_padding, grads.tables.context.shape[1])
                self._scatter(grads.tables.context, columns, grad_scores)
        return grad_query

    def _scores(self, chunk: _Chunk, query: torch.Tensor, key: torch.Tensor, part: QueryPart) -> torch.Tensor:
        """Scores q · k + bias of a chunk: `(num_matrices, num_queries, num_keys)`, in memory that is used again."""
        scores = _scratch.take("scores", (query.shape[0], chunk.end - chunk.start, chunk.num_keys), query)
        if part.front_padding is None:
            first, width = self._window(chunk)
            bias = self._tables.position[:, first : first + width].unfold(1, chunk.num_keys, 1)
            # (num_heads, period, num_keys), for all rows and periods
            scores.view(self._num_heads, -1, *bias.shape[1:]).copy_(bias.unsqueeze(1))
        elif self._tables.context is not None:
            columns = _context_columns(chunk, part.front_padding, self._tables.context.shape[1])
            scores.copy_(self._tables.context.index_select(1, columns).view_as(scores))
        if self._tables.time is not None and self._times is not None:
            buckets = _buckets_of(chunk, part, self._times, self._tables.time.shape[1])
            scores += self._tables.time.index_select(1, buckets).view_as(scores)
        return scores.baddbmm_(query[:, chunk.start : chunk.end], key[:, : chunk.num_keys].transpose(1, 2))

    def _scatter(self, total: torch.Tensor, columns: torch.Tensor, grad_scores: torch.Tensor) -> None:
        """Add the gradients of scores to the columns `(num_rows · num_queries · num_keys,)` that they came from."""
        by_head = grad_scores.reshape(self._num_heads, -1).to(total.dtype)
        total.scatter_add_(1, columns.expand_as(by_head), by_head)

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
        by_row = skewed.view(grad_table.shape[0], -1, chunk.period * (width + 1)).sum(1, dtype=grad_table.dtype)
        by_column = by_row[:, : chunk.period * width].view(-1, chunk.period, width).sum(1)
        grad_table[:, first : first + width] += by_column

    @staticmethod
    def _add_product(total: torch.Tensor, scores: torch.Tensor, factor: torch.Tensor) -> None:
        """Add `scoresᵀ · factor`."""
        product = _scratch.take("product", total.shape, factor)
        total += torch.bmm(scores.transpose(1, 2), factor, out=product)


def _context_columns(chunk: _Chunk, front_padding: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Columns of the table of contextual queries: int64 `(num_rows · num_queries · num_keys,)`."""
    widest = num_columns - 1
    queries = torch.arange(chunk.start, chunk.end, device=front_padding.device)
    keys = torch.arange(chunk.num_keys, device=front_padding.device) - front_padding[:, None]  # (num_rows, num_keys)
    # A key in front of its row is padding, and may be further away than the table reaches.
    return (queries[:, None] - keys[:, None] + widest // 2).clamp_(0, widest).flatten()


def _buckets_of(chunk: _Chunk, part: QueryPart, times: SlotTimes, num_buckets: int) -> torch.Tensor:
    """Buckets of the times between queries and keys: int64 `(num_rows · num_queries · num_keys,)`."""
    slots, keys = part.slots, part.keys
    asked = times.queries[slots.first : slots.end].view(slots.num_rows, slots.length)
    known = times.keys[keys.first : keys.end].view(keys.num_rows, keys.length)
    apart = asked[:, chunk.start : chunk.end, None] - known[:, None, : chunk.num_keys]
    return time_buckets(apart, num_buckets).flatten()


def time_buckets(apart: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Buckets of differences of times: ⌊ln(max(1, |Δ|)) ÷ 0.301⌋, at most `num_buckets − 1`; int64, the same shape.

    >>> time_buckets(torch.tensor([0, 1, 2, -60, 86_400, 10**9]), 64).tolist()
    [0, 0, 2, 13, 37, 63]

    """
    return (apart.abs().clamp_(min=1).float().log_() / _LOG_TIME_STEP).long().clamp_(max=num_buckets - 1)


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
