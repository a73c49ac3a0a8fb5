"""The plan of PyTorch's attention over a jagged batch: dense blocks of rows of similar length.

    lengths on the host ─► AttentionPlan: blocks of rows, cut into chunks of queries ─► attention, in every layer

A row is a history followed by targets. Its attention has up to three parts: the history and each group of targets
attend to themselves, targets attend to the history and, with a contextual mask, contextual tokens attend to all of the
history. For each part, rows of similar length are padded to one shape, a block; a new block begins when more padding
would cost more than another block. Rows longer than a window are cut into pieces, each with the keys around it. So the
work for a batch is proportional to the pairs that the mask keeps, not to rows × longest².

Within a block queries are in reverse order: the distance of a pair is then a function of the sum of its two indices, so
the biases of a block are a strided view of one row of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from commons.sequence_batch.host_copies import to_device

# Fewest queries of a chunk: matrix products with fewer rows are slow.
_MIN_CHUNK = 16
# Fewest queries of the pieces of rows longer than a window: every piece also needs the keys around it.
_MIN_PIECE = 64


class DeviceTuning(NamedTuple):
    """Constants of a device that determine the sizes of blocks and chunks."""

    max_scores: int  # most scores in memory at a time, over rows and heads; on a CPU they should fit into its cache
    dispatch_scores: int  # number of scores that take as long as the dispatch of the operations of one chunk

    def chunk_size(self, num_matrices: int, num_queries: int, num_keys: int, span: int) -> int:
        """Queries of a chunk of matrices `(num_queries, num_keys)`, in which a query sees at most `span` + 1 keys.

        A causal chunk of c queries costs c/2 masked scores per query, and one dispatch; the sum of both is least at
        c = √(2 · dispatch_scores ÷ num_matrices).
        """
        cheapest = round((2 * self.dispatch_scores / num_matrices) ** 0.5)
        fitting = self.max_scores // (num_matrices * min(num_keys, span + cheapest))
        return min(max(min(cheapest, fitting), _MIN_CHUNK), num_queries)


# For the CPU: the fastest powers of two on one x86-64 core, with heads of 16 channels and uniform, lognormal and Zipf
# lengths. On an accelerator a dispatch takes as long as more scores, and memory limits max_scores.
CPU_TUNING = DeviceTuning(max_scores=2**18, dispatch_scores=2**14)
ACCELERATOR_TUNING = DeviceTuning(max_scores=2**25, dispatch_scores=2**20)


class Chunk(NamedTuple):
    """Queries computed at a time, and their keys; query x and key y are at distance `distance − x % period − y`."""

    queries: torch.Tensor  # int64 `(num_rows, num_queries)`, token numbers; `num_tokens` for padding
    keys: torch.Tensor  # int64 `(num_rows, num_keys)`, as `queries`: the keys that any of the queries may see
    place: slice  # the range of these keys in the block's keys
    distance: int  # between query 0 and key 0
    period: int  # number of queries after which the distances repeat; `num_queries` is a multiple of it
    seen: tuple[int, int]  # the smallest and the largest distance at which a query sees a key


class Block(NamedTuple):
    """Rows that are computed as one dense batch."""

    keys: torch.Tensor  # int64 `(num_rows, num_keys)`, token numbers; `num_tokens` for padding
    chunks: list[Chunk]  # the queries


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The base of the plans of all kernel backends."""

    num_tokens: int  # tokens of the batch
    longest: int  # tokens of the longest row
    sees_ahead: bool  # whether a token may see later tokens, so that negative distances have a bias

    def require_tokens(self, query: torch.Tensor) -> None:
        """Raise ValueError unless the plan was made for these tokens."""
        if query.shape[0] != self.num_tokens:
            raise ValueError(
                f"query has {query.shape[0]} tokens, the plan was made for {self.num_tokens}; a plan is for one batch: "
                "make a plan from this batch's lengths"
            )

    def require_reach(self, reach: int) -> None:
        """Raise ValueError for a row of more than `reach` tokens."""
        if self.longest > reach:
            raise ValueError(
                f"the longest row has {self.longest} tokens, the position bias reaches {reach}; a row may have at most "
                "max_sequence_length tokens: raise it or truncate the rows"
            )

    def zero_column(self, bias: torch.Tensor) -> int:
        """The column of distance 0 in a bias by rising distance; ValueError if it has too few for the longest row."""
        zero = bias.shape[1] // 2 if self.sees_ahead else 0
        self.require_reach(bias.shape[1] - zero)
        return zero


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(BatchPlan):
    """The blocks of a jagged batch."""

    blocks: list[Block]
    seen: tuple[int, int]  # the smallest and the largest distance at which tokens, except contextual ones, see keys
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
        lengths: int64 `(batch_size,)`, tokens per row. Lengths on a device are copied to the host, once, together with
            the next two arguments.
        num_targets: int64 `(batch_size,)`, number of targets, which are a row's last tokens; None for no targets. No
            effect without a causal mask, where all tokens see one another.
        num_contextual: int64 `(batch_size,)`, number of a row's first tokens that see all of its history, also later
            tokens; None for none. No effect without a causal mask.
        num_heads: number of attention heads.
        is_causal: whether a token sees only itself and earlier tokens.
        target_group_size: number of consecutive targets that see one another; the first group starts at the first
            target.
        max_attn_len: the largest distance at which a token is seen; None for no window. Every group of targets is
            placed directly after the history; contextual tokens see all of the history, also beyond the window.
        device: device of the plan's index tensors; None for the device of `lengths`.
        tuning: sizes of blocks and chunks; None for the values of this type of device.

    Raises:
        ValueError: a negative length, or more targets and contextual tokens than tokens.
    """
    device = lengths.device if device is None else device
    tuning = tuning or (CPU_TUNING if device.type == "cpu" else ACCELERATOR_TUNING)
    first, tokens, history, contextual = read_rows(lengths, num_targets, num_contextual, is_causal=is_causal)
    targets = tokens - history
    num_tokens, longest = int(tokens.sum()), int(tokens.max(initial=0))
    everything = max(longest, 1)  # larger than any distance
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
            np.concatenate([contextual, np.zeros_like(groups)]),  # contextual queries are in the next part
            seen,
        ),
        _Part(first, contextual, np.zeros_like(history), history, (-everything, everything)),
        _Part(first + history, targets, near, near, seen, period=group_size),
    ]
    drafts = [draft for part in parts for draft in part.blocks(num_heads, tuning, padding=num_tokens)]
    tensors = iter(to_device([array for draft in drafts for array in draft[:2]], device) if drafts else [])
    return AttentionPlan(
        num_tokens=num_tokens,
        longest=longest,
        sees_ahead=not is_causal or num_contextual is not None,
        blocks=[_block(next(tensors), next(tensors), *draft[2:]) for draft in drafts],
        seen=seen,
        has_context=is_causal and num_contextual is not None,
    )


def _block(
    queries: torch.Tensor, keys: torch.Tensor, distance: int, period: int, seen: tuple[int, int], chunk_size: int
) -> Block:
    """A block whose queries are cut into chunks of whole periods, or of at most `chunk_size` queries of one period.

    `distance` is between query 0 and key 0.
    """
    chunks, whole = [], max(chunk_size // period, 1) * period
    for begin in range(0, queries.shape[1], whole):
        for start in range(begin, begin + whole, min(chunk_size, whole)):
            chunk = queries[:, start : min(start + chunk_size, begin + whole)]
            nearest, repeats = distance - start % period, min(period, chunk.shape[1])
            first = max(nearest - repeats + 1 - seen[1], 0)
            place = slice(first, nearest - seen[0] + 1)
            if keys[:, place].shape[1]:  # the last targets of a group longer than the window see no history
                chunks.append(Chunk(chunk, keys[:, place], place, nearest - first, repeats, seen))
    return Block(keys, chunks)


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For `counts[row]` items per row: each item's row, and its number in the row, int64 `(counts.sum(),)` each.

    >>> numbered(np.array([2, 0, 1]))
    (array([0, 0, 2]), array([0, 1, 0]))
    """
    row = np.repeat(np.arange(counts.size), counts)
    return row, np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)


def read_rows(lengths: torch.Tensor, *parts: torch.Tensor | None, is_causal: bool) -> tuple[np.ndarray, ...]:
    """Each row's first token, and numbers of tokens, history tokens and contextual tokens: int64 `(batch_size,)` each.

    `parts` are the numbers of targets and of contextual tokens. Waits for the device if the tensors are on one.
    """
    given = [torch.zeros_like(lengths) if part is None else part.to(lengths) for part in parts]
    tokens, targets, contextual = torch.stack([lengths, *given]).to(torch.int64).cpu().numpy()
    wrong = np.flatnonzero((targets < 0) | (contextual < 0) | (targets + contextual > tokens))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"row {row} has {int(tokens[row])} tokens and {int(targets[row])} targets and {int(contextual[row])} "
            "contextual tokens; targets and contextual tokens are part of a row's tokens: give 0 <= num_targets + "
            "num_contextual <= lengths"
        )
    if not is_causal:  # then targets and contextual tokens are ordinary tokens
        targets, contextual = np.zeros_like(tokens), np.zeros_like(tokens)
    return np.cumsum(tokens) - tokens, tokens, tokens - targets, contextual


class _Part(NamedTuple):
    """Queries of rows, or of pieces of rows, and the keys of the same rows; arrays are int64 `(num_rows,)`."""

    first: np.ndarray  # token number of query 0
    num_queries: np.ndarray
    lead: np.ndarray  # token number of query 0 − token number of key 0
    num_keys: np.ndarray
    seen: tuple[int, int]  # as in a chunk
    period: int | None = None  # as in a chunk; None for the number of queries
    kept: float = 1.0  # approximate fraction of pairs of queries and keys that the mask keeps, without a window

    def blocks(self, num_heads: int, tuning: DeviceTuning, padding: int) -> Iterator[tuple[Any, ...]]:
        """Arguments of `_block` for every block, the most keys first; rows without pairs are in no block.

        A block takes rows until its padding costs as much as another block: short rows of any lengths share a block,
        and long rows get little padding.
        """
        pairs, span = self.num_keys * self.num_queries, self.seen[1] - self.seen[0]
        rows = np.flatnonzero(pairs)
        rows = rows[np.argsort(-self.num_keys[rows], kind="stable")]
        while rows.size:
            longest = int(self.num_keys[rows[0]])
            at_once = min(longest, span + _MIN_CHUNK)  # keys of the smallest chunk
            # No more rows than would fit if all were as wide as the first one, or the work would be rows × blocks.
            least_held = num_heads * at_once * min(int(self.num_queries[rows[0]]), _MIN_CHUNK)
            next_rows = rows[: max(1, tuning.max_scores // least_held)]
            num_rows, widest = np.arange(1, next_rows.size + 1), np.maximum.accumulate(self.num_queries[next_rows])
            kept = min(self.kept, span / longest)
            wasted = kept * (num_rows * widest * longest - np.cumsum(pairs[next_rows]))
            held = num_rows * at_once * np.minimum(widest, _MIN_CHUNK)
            fits = (num_heads * wasted <= 2 * tuning.dispatch_scores) & (num_heads * held <= tuning.max_scores)
            count = max(1, int(np.cumprod(fits).sum()))
            yield self._padded(rows[:count], num_heads, tuning, padding)
            rows = rows[count:]

    def _padded(self, rows: np.ndarray, num_heads: int, tuning: DeviceTuning, padding: int) -> tuple[Any, ...]:
        """Arguments of `_block` for these rows: token numbers of queries and keys, padded with `padding`.

        Keys are shifted so that the distance between query 0 and the first column is the same in all rows.
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
            size,
        )


def _on_themselves(first: np.ndarray, length: np.ndarray, skipped: np.ndarray, seen: tuple[int, int]) -> _Part:
    """Sequences that attend to themselves; long ones are cut into pieces of queries, each with the keys around it.

    The first `skipped` tokens of a sequence are only keys.
    """
    size = max(2 * seen[1], _MIN_PIECE)
    row, number = numbered(-(-(length - skipped) // size))
    begin = skipped[row] + number * size
    end = np.minimum(begin + size, length[row])
    key, key_end = np.maximum(begin - seen[1], 0), np.minimum(end - seen[0], length[row])
    return _Part(first[row] + begin, end - begin, begin - key, key_end - key, seen, kept=1.0 if seen[0] else 0.5)
