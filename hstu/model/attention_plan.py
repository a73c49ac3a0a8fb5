"""Which rows of a jagged batch attend together: dense blocks of rows of similar length.

    lengths on the host ─► AttentionPlan: blocks of rows, cut into chunks of queries ─► attention, in every layer

A row is its history followed by its targets. What its tokens see has up to three parts: the history and each group of
targets on themselves, targets on the history and, with a contextual mask, contextual tokens on all of the history. Rows
of one part and of similar length are padded to one shape, a block, and a block is closed as soon as its padding would
cost more than opening another one; rows longer than a window are cut into pieces, each with the keys around it. So the
work for a batch follows the pairs that the mask keeps, not rows × longest².

Within a block queries stand in reverse order: the bias of a pair, a function of its distance, is then a function of the
sum of its two places, and a strided view can show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from commons.sequence_batch.host_copies import to_device

# Fewer queries than this make poor matrix products.
_MIN_CHUNK = 16
# Queries of the shortest pieces that rows longer than a window are cut into: each takes the keys around it along.
_MIN_PIECE = 64


class DeviceTuning(NamedTuple):
    """What sizes blocks and chunks."""

    max_scores: int  # attention scores held at a time, over rows and heads; on a CPU they should stay in its cache
    dispatch_scores: int  # scores that are computed in the time it takes to start the operations of one chunk

    def chunk_size(self, num_matrices: int, num_queries: int, num_keys: int, span: int) -> int:
        """Queries to compute at a time, of matrices `(num_queries, num_keys)` whose rows see `span` + 1 keys at most.

        A causal chunk of c queries computes c/2 scores per query that the mask drops, and costs one dispatch: both
        together are least at c = √(2 · dispatch_scores ÷ num_matrices).
        """
        cheapest = round((2 * self.dispatch_scores / num_matrices) ** 0.5)
        fitting = self.max_scores // (num_matrices * min(num_keys, span + cheapest))
        return min(max(min(cheapest, fitting), _MIN_CHUNK), num_queries)


# The best powers of two on one x86-64 core, for heads of 16 channels and uniform, lognormal and Zipf lengths. On
# an accelerator a dispatch outweighs more scores, and memory is the limit.
CPU_TUNING = DeviceTuning(max_scores=2**18, dispatch_scores=2**14)
ACCELERATOR_TUNING = DeviceTuning(max_scores=2**25, dispatch_scores=2**20)


class Chunk(NamedTuple):
    """Queries computed at a time; query x and key y are at distance `distance − x % period − y`."""

    queries: torch.Tensor  # int64 `(num_rows, num_queries)`, tokens; padding is the token behind the last one
    keys: torch.Tensor  # int64 `(num_rows, num_keys)`, as `queries`: those that some of the queries may see
    place: slice  # of these keys among those of the block
    distance: int  # between query 0 and key 0
    period: int  # queries after which the distances repeat; `num_queries` is a multiple of it
    seen: tuple[int, int]  # the smallest and the largest distance at which keys are seen


class Block(NamedTuple):
    """Rows that attend as one dense batch."""

    keys: torch.Tensor  # int64 `(num_rows, num_keys)`, tokens; padding is the token behind the last one
    chunks: list[Chunk]  # its queries


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What the plans of all kernel backends know of a jagged batch."""

    num_tokens: int  # tokens of the batch
    longest: int  # tokens of the longest row
    sees_ahead: bool  # whether some token sees a later one, so that distances below zero have a bias

    def require_tokens(self, query: torch.Tensor) -> None:
        """Raise ValueError unless the plan was made for these tokens."""
        if query.shape[0] != self.num_tokens:
            raise ValueError(
                f"query has {query.shape[0]} tokens, the plan was made for {self.num_tokens}; a plan serves the batch "
                "it was made from: make one from this batch's lengths"
            )

    def require_reach(self, reach: int) -> None:
        """Raise ValueError for a row of more than `reach` tokens."""
        if self.longest > reach:
            raise ValueError(
                f"the longest row has {self.longest} tokens, the position bias reaches {reach}; a row may have at most "
                "max_sequence_length tokens: raise it or truncate the rows"
            )

    def zero_column(self, bias: torch.Tensor) -> int:
        """The column of distance 0 in a bias by rising distance; ValueError if that does not reach the longest row."""
        zero = bias.shape[1] // 2 if self.sees_ahead else 0
        self.require_reach(bias.shape[1] - zero)
        return zero


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(BatchPlan):
    """The blocks of a jagged batch."""

    blocks: list[Block]
    seen: tuple[int, int]  # the smallest and the largest distance at which keys are seen, but by contextual tokens
    has_context: bool  # whether there may be contextual tokens, which see all of the history


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
        max_attn_len: the largest distance at which a token is seen; every group of targets stands directly behind the
            history, and contextual tokens see all of it, also beyond the window. No window if not given.
        device: where the plan's index tensors go; the device of `lengths` if not given.
        tuning: sizes of blocks and chunks; by the kind of device if not given.

    Raises:
        ValueError: a negative length, or more targets and contextual tokens than tokens.
    """
    device = lengths.device if device is None else device
    tuning = tuning or (CPU_TUNING if device.type == "cpu" else ACCELERATOR_TUNING)
    first, tokens, history, contextual = read_rows(lengths, num_targets, num_contextual, is_causal=is_causal)
    targets = tokens - history
    num_tokens, longest = int(tokens.sum()), int(tokens.max(initial=0))
    everything = max(longest, 1)  # no distance is as large
    window = everything if max_attn_len is None else min(max_attn_len, everything)
    seen = (0 if is_causal else -window, window)
    group_size = min(target_group_size, max(1, int(targets.max(initial=0))))
    row, number = numbered(-(-targets // group_size))
    groups = np.minimum(group_size, targets[row] - number * group_size)
    group_first = (first + history)[row] + number * group_size
    near = np.minimum(history, window)
    parts = [
        _on_themselves(
            np.concatenate([first, group_first]),
            np.concatenate([history, groups]),
            np.concatenate([contextual, np.zeros_like(groups)]),  # queries of the next part
            seen,
        ),
        _Part(first, contextual, np.zeros_like(history), history, (-everything, everything)),
        _Part(first + history, targets, near, near, seen, period=group_size),
    ]
    drafts = [draft for part in parts for draft in part.blocks(num_heads, tuning, padding=num_tokens)]
    flat = iter(to_device([array.ravel() for draft in drafts for array in draft[:2]], device) if drafts else [])
    return AttentionPlan(
        num_tokens=num_tokens,
        longest=longest,
        sees_ahead=not is_causal or num_contextual is not None,
        blocks=[
            _block(next(flat).view(draft[0].shape), next(flat).view(draft[1].shape), *draft[2:]) for draft in drafts
        ],
        seen=seen,
        has_context=is_causal and num_contextual is not None,
    )


def _block(
    queries: torch.Tensor, keys: torch.Tensor, distance: int, period: int, seen: tuple[int, int], chunk_size: int
) -> Block:
    """A block, of whose queries `chunk_size` are computed at a time; `distance` is that of query 0 and key 0."""
    chunks = []
    for start in range(0, queries.shape[1], chunk_size):
        chunk = queries[:, start : start + chunk_size]
        nearest, repeats = distance - start % period, min(period, chunk.shape[1])
        first = max(nearest - repeats + 1 - seen[1], 0)
        place = slice(first, nearest - seen[0] + 1)
        chunks.append(Chunk(chunk, keys[:, place], place, nearest - first, repeats, seen))
    return Block(keys, chunks)


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and number within the row of `counts[row]` things per row, int64 `(counts.sum(),)` each.

    >>> numbered(np.array([2, 0, 1]))
    (array([0, 0, 2]), array([0, 1, 0]))
    """
    row = np.repeat(np.arange(counts.size), counts)
    return row, np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)


def read_rows(lengths: torch.Tensor, *parts: torch.Tensor | None, is_causal: bool) -> tuple[np.ndarray, ...]:
    """Of every row its first token, tokens, those of the history and how many of those are contextual, as int64 arrays.

    `parts` are targets and contextual tokens of the rows. The one place that may wait for a device.
    """
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
    if not is_causal:  # tokens like the others
        targets, contextual = np.zeros_like(tokens), np.zeros_like(tokens)
    return np.cumsum(tokens) - tokens, tokens, tokens - targets, contextual


class _Part(NamedTuple):
    """Queries of rows, or of pieces of rows, on keys of the same rows; int64 `(num_rows,)` each."""

    first: np.ndarray  # token of a row's query 0
    num_queries: np.ndarray
    lead: np.ndarray  # tokens from key 0 to query 0
    num_keys: np.ndarray
    seen: tuple[int, int]  # as in a chunk
    period: int | None = None  # as in a chunk; as many as there are queries if not given
    kept: float = 1.0  # of the pairs of queries and keys where there is no window, about

    def blocks(self, num_heads: int, tuning: DeviceTuning, padding: int) -> Iterator[tuple[Any, ...]]:
        """Arguments of `_block` for every block, those with the most keys first; rows without pairs are in no block.

        Padding is accepted until it has cost as much as a new block would: so short rows share a block whatever their
        lengths, and long ones are padded little.
        """
        pairs, span = self.num_keys * self.num_queries, self.seen[1] - self.seen[0]
        rows = np.flatnonzero(pairs)
        rows = rows[np.argsort(-self.num_keys[rows], kind="stable")]
        while rows.size:
            num_rows, widest = np.arange(1, rows.size + 1), np.maximum.accumulate(self.num_queries[rows])
            longest = int(self.num_keys[rows[0]])
            kept = min(self.kept, span / longest)
            wasted = kept * (num_rows * widest * longest - np.cumsum(pairs[rows]))
            at_once = min(longest, span + _MIN_CHUNK)  # keys of the smallest chunk
            held = num_rows * at_once * np.minimum(widest, _MIN_CHUNK)
            fits = (num_heads * wasted <= 2 * tuning.dispatch_scores) & (num_heads * held <= tuning.max_scores)
            count = max(1, int(np.cumprod(fits).sum()))
            yield self._padded(rows[:count], num_heads, tuning, padding)
            rows = rows[count:]

    def _padded(self, rows: np.ndarray, num_heads: int, tuning: DeviceTuning, padding: int) -> tuple[Any, ...]:
        """Arguments of `_block` for these rows: of queries and keys their tokens, `padding` elsewhere.

        Keys stand so far behind the front of a padded row that query 0 is as far from place 0 in all rows.
        """
        first, num_queries, lead, num_keys = (each[rows, None] for each in self[:4])
        period = self.period or int(num_queries.max())
        query = np.arange(-(-int(num_queries.max()) // period) * period)
        query += period - 1 - 2 * (query % period)  # in reverse order
        front = lead.max() - lead
        key = np.arange((front + num_keys).max()) - front
        size = tuning.chunk_size(num_heads * rows.size, query.size, key.shape[1], self.seen[1] - self.seen[0])
        return (
            np.where(query < num_queries, first + query, padding),
            np.where((key >= 0) & (key < num_keys), first - lead + key, padding),
            period - 1 + int(lead.max()),
            period,
            self.seen,
            size if self.period is None else max(size // period, 1) * period,
        )


def _on_themselves(first: np.ndarray, length: np.ndarray, skipped: np.ndarray, seen: tuple[int, int]) -> _Part:
    """Sequences of tokens, each on itself; of one longer than a window, pieces of its queries on the keys around them.

    The first `skipped` tokens of a sequence are keys alone.
    """
    size = max(2 * seen[1], _MIN_PIECE)
    row, number = numbered(-(-(length - skipped) // size))
    begin = skipped[row] + number * size
    end = np.minimum(begin + size, length[row])
    key, key_end = np.maximum(begin - seen[1], 0), np.minimum(end - seen[0], length[row])
    return _Part(first[row] + begin, end - begin, begin - key, key_end - key, seen, kept=1.0 if seen[0] else 0.5)
