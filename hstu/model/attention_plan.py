"""Which rows of a jagged batch attend together: dense blocks of rows of similar length.

    lengths on the host ─► AttentionPlan: blocks of rows ─► attention, in every layer

A row is its history followed by its targets. What its tokens see has up to three parts: the history and each group of
targets on themselves, targets on the history and, with a contextual mask, contextual tokens on all of the history. Rows
of one part and of similar length are padded to one shape, a block, and a block is closed as soon as its padding would
cost more than opening another one. So the work for a batch follows the sum of the squared lengths, not rows × longest².

Within a block queries stand in reverse order: the bias of a pair, a function of its distance, is then a function of the
sum of its two places, and a strided view can show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from commons.sequence_batch.host_copies import to_device

# Fewer queries than this make poor matrix products.
_MIN_CHUNK = 16


class DeviceTuning(NamedTuple):
    """What sizes blocks and chunks."""

    max_scores: int  # attention scores held at a time, over rows and heads; on a CPU they should stay in its cache
    dispatch_scores: int  # scores that are computed in the time it takes to start the operations of one chunk

    def chunk_size(self, num_matrices: int, num_queries: int, num_keys: int) -> int:
        """Queries to compute at a time.

        A causal chunk of c queries computes c/2 scores per query that the mask drops, and costs one dispatch: both
        together are least at c = √(2 · dispatch_scores ÷ num_matrices).

        Args:
            num_matrices: score matrices side by side (rows × heads).
            num_queries: rows of a matrix.
            num_keys: columns of a matrix.
        """
        cheapest = round((2 * self.dispatch_scores / num_matrices) ** 0.5)
        fitting = self.max_scores // (num_matrices * num_keys)
        return min(max(min(cheapest, fitting), _MIN_CHUNK), num_queries)


# The best powers of two on one x86-64 core, for heads of 16 channels and uniform, lognormal and Zipf lengths. On
# an accelerator a dispatch outweighs more scores, and memory is the limit.
CPU_TUNING = DeviceTuning(max_scores=2**18, dispatch_scores=2**14)
ACCELERATOR_TUNING = DeviceTuning(max_scores=2**25, dispatch_scores=2**20)


class Chunk(NamedTuple):
    """Queries of a block that are computed together.

    Query x of the chunk and key y of the block are at distance `distance − x % period − y`.
    """

    queries: torch.Tensor  # int64 `(num_rows, num_queries)`, their tokens
    keys: torch.Tensor  # int64 `(num_rows, num_keys)`, the first keys of the block: those that they see
    distance: int  # between query 0 and key 0
    period: int  # queries after which the distances repeat
    is_causal: bool  # whether keys at distances below zero are hidden


class Block(NamedTuple):
    """Rows that attend as one dense batch."""

    queries: torch.Tensor  # int64 `(num_rows, num_queries)`, tokens; padding is the token behind the last one
    keys: torch.Tensor  # int64 `(num_rows, num_keys)`, as `queries`
    distance: int  # between query 0 and key 0
    period: int  # queries after which the distances repeat; `num_queries` is a multiple of it
    is_causal: bool  # whether keys at distances below zero are hidden
    chunk_size: int  # queries to compute at a time

    def chunks(self) -> Iterator[Chunk]:
        """The queries, `chunk_size` at a time; a causal chunk leaves out the keys behind its last query in time."""
        num_queries, num_keys = self.queries.shape[1], self.keys.shape[1]
        for start in range(0, num_queries, self.chunk_size):
            queries = self.queries[:, start : start + self.chunk_size]
            keys = self.keys[:, : num_keys - start] if self.is_causal else self.keys
            period = min(self.period, queries.shape[1])
            yield Chunk(queries, keys, self.distance - start % self.period, period, self.is_causal)


@dataclass(frozen=True)
class AttentionPlan:
    """The blocks of a jagged batch."""

    blocks: list[Block]
    num_tokens: int  # tokens of the batch
    longest: int  # tokens of the longest row
    is_causal: bool  # whether a token sees only itself and what precedes it
    sees_ahead: bool  # whether some token sees a later one of its history, so that distances below zero have a bias
    target_group_size: int  # targets per group; at most the most targets a row has

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
    group_size = min(target_group_size, max(1, int(targets.max(initial=0))))
    num_groups = -(-targets // group_size)
    row = np.repeat(np.arange(tokens.size), num_groups)
    done = (np.arange(row.size) - np.repeat(np.cumsum(num_groups) - num_groups, num_groups)) * group_size
    groups = np.minimum(group_size, targets[row] - done)  # targets per group

    none = np.zeros_like(history)
    # Histories and groups of targets, each on itself.
    own = np.concatenate([history, groups])
    own_first = np.concatenate([first, (first + history)[row] + done])
    parts = [
        # As queries, the contextual tokens of a history are in the second part.
        _Part(own_first, np.concatenate([contextual, np.zeros_like(groups)]), own, own_first, own, is_causal=is_causal),
        _Part(first, none, contextual, first, history),
        _Part(first + history, none, targets, first, history, group_size=group_size),
    ]
    num_tokens = int(tokens.sum())
    pieces = [(part, part.places(rows, num_tokens)) for part in parts for rows in part.cut(num_heads, tuning)]
    arrays = [array for _, places in pieces for array in places]
    flat = iter(to_device([array.ravel() for array in arrays], device) if arrays else [])
    indices = iter([next(flat).view(array.shape) for array in arrays])
    return AttentionPlan(
        blocks=[part.block(next(indices), next(indices), num_heads, tuning) for part, _ in pieces],
        num_tokens=num_tokens,
        longest=int(tokens.max(initial=0)),
        is_causal=is_causal,
        sees_ahead=not is_causal or num_contextual is not None,
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
    # Of targets on a history: targets per group, each of which stands directly behind the history. None where query i
    # and key i are at distance 0.
    group_size: int | None = None
    is_causal: bool = False

    def cut(self, num_heads: int, tuning: DeviceTuning) -> Iterator[np.ndarray]:
        """Rows of each block, those with the most keys first; rows without pairs are in no block.

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
            held = num_rows * longest * np.minimum(widest, _MIN_CHUNK)
            fits = (num_heads * wasted <= 2 * tuning.dispatch_scores) & (num_heads * held <= tuning.max_scores)
            count = max(1, int(np.cumprod(fits).sum()))
            yield rows[:count]
            rows = rows[count:]

    def _pairs(self, num_queries: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        return num_queries * (num_keys + 1) // 2 if self.is_causal else num_queries * num_keys

    def places(self, rows: np.ndarray, padding: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the queries and keys of a block, `padding` elsewhere; int64 `(num_rows, places)` each.

        Keys of targets stand at the end of a padded row, so that their distance to a target is the same in all rows.
        """
        group = self.group_size or int(self.num_queries[rows].max())
        query = np.arange(-(-int(self.num_queries[rows].max()) // group) * group)
        query += group - 1 - 2 * (query % group)  # in reverse order
        num_keys, count = int(self.num_keys[rows].max()), self.num_keys[rows, None]
        key = np.arange(num_keys) - (0 if self.group_size is None else num_keys - count)
        is_query = (query >= self.skipped[rows, None]) & (query < self.num_queries[rows, None])
        return (
            np.where(is_query, self.first_query[rows, None] + query, padding),
            np.where((key >= 0) & (key < count), self.first_key[rows, None] + key, padding),
        )

    def block(self, queries: torch.Tensor, keys: torch.Tensor, num_heads: int, tuning: DeviceTuning) -> Block:
        """The block whose tokens are at these places."""
        (num_rows, num_queries), num_keys = queries.shape, keys.shape[1]
        size = tuning.chunk_size(num_heads * num_rows, num_queries, num_keys)
        if self.group_size is None:
            return Block(queries, keys, num_queries - 1, num_queries, self.is_causal, size)
        group = self.group_size
        return Block(queries, keys, num_keys + group - 1, group, False, max(size // group, 1) * group)
