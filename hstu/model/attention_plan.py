"""Which rows of a jagged batch attend together: dense blocks of rows of similar length.

    lengths on the host ─► AttentionPlan: blocks of rows ─► attention, in every layer

A row is its history followed by its targets. What its tokens see has up to three parts: the history and each group of
targets on themselves, targets on the history and, with a contextual mask, contextual tokens on all of the history. Rows
of one part and of similar length are padded to one shape, a block, and a block is closed as soon as its padding would
cost more than opening another one. So the work for a batch follows the pairs that the mask keeps, not rows × longest².

Within a block queries stand in reverse order: the bias of a pair, a function of its distance, is then a function of the
sum of its two places, and a strided view can show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from commons.perf_model.task_estimator import attention_pairs
from commons.sequence_batch.host_copies import to_device

# Fewer queries than this make poor matrix products.
_MIN_CHUNK = 16


class DeviceTuning(NamedTuple):
    """What sizes blocks and chunks."""

    max_scores: int  # attention scores held at a time, over rows and heads; on a CPU they should stay in its cache
    dispatch_scores: int  # scores that are computed in the time it takes to start the operations of one chunk

    def chunk_size(self, num_matrices: int, num_queries: int, num_keys: int, span: int) -> int:
        """Queries to compute at a time.

        A causal chunk of c queries computes c/2 scores per query that the mask drops, and costs one dispatch: both
        together are least at c = √(2 · dispatch_scores ÷ num_matrices).

        Args:
            num_matrices: score matrices side by side (rows × heads).
            num_queries: rows of a matrix.
            num_keys: columns of a matrix.
            span: how far apart the first and the last key that a query sees may be.
        """
        cheapest = round((2 * self.dispatch_scores / num_matrices) ** 0.5)
        fitting = self.max_scores // (num_matrices * min(num_keys, span + cheapest))
        return min(max(min(cheapest, fitting), _MIN_CHUNK), num_queries)


# The best powers of two on one x86-64 core, for heads of 16 channels and uniform, lognormal and Zipf lengths. On
# an accelerator a dispatch outweighs more scores, and memory is the limit.
CPU_TUNING = DeviceTuning(max_scores=2**18, dispatch_scores=2**14)
ACCELERATOR_TUNING = DeviceTuning(max_scores=2**25, dispatch_scores=2**20)


class Block(NamedTuple):
    """Rows that attend as one dense batch; query x and key y are at distance `distance − x % period − y`."""

    queries: torch.Tensor  # int64 `(num_rows, num_queries)`, tokens; padding is the token behind the last one
    keys: torch.Tensor  # int64 `(num_rows, num_keys)`, as `queries`
    distance: int  # between query 0 and key 0
    period: int  # queries after which the distances repeat; `num_queries` is a multiple of it
    seen: tuple[int, int] | None  # the smallest and the largest distance at which keys are seen; None for all
    chunk_size: int  # queries to compute at a time

    def chunks(self) -> Iterator[tuple[slice, Block]]:
        """The queries, `chunk_size` at a time, as blocks with the keys that they may see, and which keys these are."""
        for start in range(0, self.queries.shape[1], self.chunk_size):
            queries, keys = self.queries[:, start : start + self.chunk_size], slice(0, self.keys.shape[1])
            distance, period = self.distance - start % self.period, min(self.period, queries.shape[1])
            if self.seen is not None:
                nearest, farthest = self.seen
                keys = slice(max(distance - period + 1 - farthest, 0), min(distance - nearest + 1, keys.stop))
            yield (
                keys,
                self._replace(queries=queries, keys=self.keys[:, keys], distance=distance - keys.start, period=period),
            )


@dataclass(frozen=True)
class AttentionPlan:
    """The blocks of a jagged batch."""

    blocks: list[Block]
    num_tokens: int  # tokens of the batch
    longest: int  # tokens of the longest row
    seen: tuple[int, int]  # the smallest and the largest distance at which keys are seen, but by contextual tokens
    has_context: bool  # whether there may be contextual tokens, which see all of the history
    target_group_size: int  # targets per group; at most the most targets a row has

    @property
    def sees_ahead(self) -> bool:
        """Whether some token sees a later one of its history, so that distances below zero have a bias."""
        return self.has_context or self.seen[0] < 0

    @property
    def farthest(self) -> int:
        """The largest distance from a query to a key, padding included."""
        return self.target_group_size + max(self.longest, 1) - 1


def plan_attention(
    lengths: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    num_contextual: torch.Tensor | None = None,
    *,
    num_heads: int,
    is_causal: bool = True,
    target_group_size: int = 1,
    max_attn_len: int | None = None,
    device: torch.device | None = None,
    tuning: DeviceTuning | None = None,
) -> AttentionPlan:
    """Group the rows of a jagged batch into blocks.

    Args:
        lengths: int64 `(batch_size,)`, tokens per row. On the host they are used as they are; on a device they are
            read back, once, together with `num_targets`.
        num_targets: int64 `(batch_size,)`, how many of a row's last tokens are targets; none if not given. Without
            a causal mask every token sees every other one, and targets are tokens like the others.
        num_contextual: int64 `(batch_size,)`, how many of a row's first tokens see all of its history, what follows
            them too; none if not given. Without a causal mask they are tokens like the others.
        num_heads: attention heads.
        is_causal: whether a token sees only itself and what precedes it.
        target_group_size: targets that see one another; a row's groups start at its first target.
        max_attn_len: the largest distance at which a token is seen, every group of targets standing directly behind
            the history; by contextual tokens it is seen at any. No window if not given.
        device: where the plan's index tensors go; the device of `lengths` if not given.
        tuning: sizes of blocks and chunks; by the kind of device if not given.

    Raises:
        ValueError: a negative length, or more targets and contextual tokens than tokens.
    """
    device = lengths.device if device is None else device
    tuning = tuning or (CPU_TUNING if device.type == "cpu" else ACCELERATOR_TUNING)
    tokens, targets, contextual = read_lengths(lengths, num_targets, num_contextual)
    if not is_causal:
        targets, contextual = np.zeros_like(tokens), np.zeros_like(tokens)
    history = tokens - targets
    first = np.cumsum(tokens) - tokens
    longest = int(tokens.max(initial=0))
    window = max(longest, 1) if max_attn_len is None else min(max_attn_len, max(longest, 1))
    seen = (0 if is_causal else -window, window)
    group_size = min(target_group_size, max(1, int(targets.max(initial=0))))
    num_groups = -(-targets // group_size)
    row = np.repeat(np.arange(tokens.size), num_groups)
    done = (np.arange(row.size) - np.repeat(np.cumsum(num_groups) - num_groups, num_groups)) * group_size
    groups = np.minimum(group_size, targets[row] - done)  # targets per group

    none, near = np.zeros_like(history), np.minimum(history, window)
    # Histories and groups of targets, each on itself.
    own = np.concatenate([history, groups])
    own_first = np.concatenate([first, (first + history)[row] + done])
    parts = [
        # As queries, the contextual tokens of a history are in the second part.
        _Part(own_first, np.concatenate([contextual, np.zeros_like(groups)]), own, own_first, own, seen),
        _Part(first, none, contextual, first, history, None),
        _Part(first + history, none, targets, first + history - near, near, seen, group_size),
    ]
    num_tokens = int(tokens.sum())
    drafts = [draft for part in parts for draft in part.blocks(num_heads, tuning, padding=num_tokens)]
    flat = iter(to_device([array.ravel() for draft in drafts for array in draft[:2]], device) if drafts else [])
    return AttentionPlan(
        blocks=[Block(*(next(flat).view(array.shape) for array in draft[:2]), *draft[2:]) for draft in drafts],
        num_tokens=num_tokens,
        longest=longest,
        seen=seen,
        has_context=is_causal and num_contextual is not None,
        target_group_size=group_size,
    )


def read_lengths(lengths: torch.Tensor, *parts: torch.Tensor | None) -> list[np.ndarray]:
    """Tokens, targets and contextual tokens per row as int64 arrays: the one place that may wait for a device."""
    given = [torch.zeros_like(lengths) if part is None else part.to(lengths) for part in parts]
    tokens, targets, contextual = torch.stack([lengths, *given]).to(torch.int64).cpu().numpy()
    wrong = np.flatnonzero((targets < 0) | (contextual < 0) | (targets + contextual > tokens))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"row {row} has {int(tokens[row])} tokens and {int(targets[row])} targets and {int(contextual[row])} "
            "contextual tokens; these are counted among a row's tokens: give 0 <= num_targets + num_contextual <= "
            "lengths"
        )
    return [tokens, targets, contextual]


@dataclass(frozen=True)
class _Part:
    """Queries of some rows on keys of these rows; int64 `(num_rows,)` each."""

    first_query: np.ndarray  # token of a row's query 0
    skipped: np.ndarray  # queries at the front of a row that are not of this part
    num_queries: np.ndarray  # queries of a row, those skipped included
    first_key: np.ndarray  # token of a row's key 0
    num_keys: np.ndarray
    seen: tuple[int, int] | None  # as in a block
    # Of targets on a history: targets per group, each of which stands directly behind the keys. None where query i and
    # key i are at distance 0.
    group_size: int | None = None

    def blocks(self, num_heads: int, tuning: DeviceTuning, padding: int) -> Iterator[tuple[Any, ...]]:
        """Fields of every block, those with the most keys first; rows without pairs are in no block.

        Padding is accepted until it has cost as much as a new block would: so short rows share a block whatever their
        lengths, and long ones are padded little.
        """
        rows = np.flatnonzero(self.num_keys * (self.num_queries - self.skipped))
        rows = rows[np.argsort(-self.num_keys[rows], kind="stable")]
        while rows.size:
            num_rows = np.arange(1, rows.size + 1)
            widest = np.maximum.accumulate(self.num_queries[rows])
            longest = self.num_keys[rows[0]]
            needed = np.cumsum(self._pairs(self.num_queries[rows], self.num_keys[rows]))
            wasted = num_rows * self._pairs(widest, longest) - needed
            held = num_rows * min(longest, self._span(longest) + _MIN_CHUNK) * np.minimum(widest, _MIN_CHUNK)
            fits = (num_heads * wasted <= 2 * tuning.dispatch_scores) & (num_heads * held <= tuning.max_scores)
            count = max(1, int(np.cumprod(fits).sum()))
            yield self._block(rows[:count], num_heads, tuning, padding)
            rows = rows[count:]

    def _pairs(self, num_queries: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        if self.seen is None or self.group_size is not None:
            return num_queries * num_keys
        nearest, farthest = self.seen
        return attention_pairs(num_keys, causal=nearest == 0, max_attn_len=farthest)

    def _span(self, num_keys: int) -> int:
        return num_keys if self.seen is None else self.seen[1] - self.seen[0]

    def _block(self, rows: np.ndarray, num_heads: int, tuning: DeviceTuning, padding: int) -> tuple[Any, ...]:
        """Fields of the block of these rows: of queries and keys their tokens, `padding` elsewhere.

        Keys of targets stand at the end of a padded row, so that their distance to a target is the same in all rows.
        """
        num_queries, num_keys = int(self.num_queries[rows].max()), int(self.num_keys[rows].max())
        period = self.group_size or num_queries
        query = np.arange(-(-num_queries // period) * period)
        query += period - 1 - 2 * (query % period)  # in reverse order
        is_query = (query >= self.skipped[rows, None]) & (query < self.num_queries[rows, None])
        count = self.num_keys[rows, None]
        key = np.arange(num_keys) - (0 if self.group_size is None else num_keys - count)
        size = tuning.chunk_size(num_heads * rows.size, query.size, num_keys, self._span(num_keys))
        return (
            np.where(is_query, self.first_query[rows, None] + query, padding),
            np.where((key >= 0) & (key < count), self.first_key[rows, None] + key, padding),
            period - 1 + (0 if self.group_size is None else num_keys),
            period,
            self.seen,
            size if self.group_size is None else max(size // period, 1) * period,
        )
