"""Which rows of a jagged batch attend together: blocks of similar length, padded little.

    lengths on the host ─► AttentionPlan: blocks of rows, and every token's slots in them ─► attention, in every layer

A row is its history followed by its targets. History tokens attend within the history; targets attend to the history
of their row and within their own group; contextual tokens, the first of a history, may see all of it. Rows of similar
length are padded to one length, so that a block is a dense batch of matrices, and a block is closed as soon as its
padding would cost more than opening another one. The work for a batch so follows the sum of the squared lengths, not
rows × longest².

Within a row keys stand in order and queries in reverse order: the bias of a pair, a function of its distance, is then
a function of the sum of its two places, and a strided view can show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from commons.sequence_batch.host_copies import to_device

# Fewer queries than this make poor matrix products.
_MIN_CHUNK = 16


@dataclass(frozen=True)
class DeviceTuning:
    """What sizes blocks and chunks.

    Attributes:
        max_scores: attention scores held at a time, over rows and heads; on a CPU they should stay in its cache.
        dispatch_scores: scores that are computed in the time it takes to start the operations of one chunk.

    """

    max_scores: int
    dispatch_scores: int

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
# an accelerator a dispatch outweighs more scores, and memory is the limit: the backward pass holds four buffers.
CPU_TUNING = DeviceTuning(max_scores=2**18, dispatch_scores=2**14)
ACCELERATOR_TUNING = DeviceTuning(max_scores=2**25, dispatch_scores=2**20)


class Slots(NamedTuple):
    """`num_rows` padded rows of `length` places each, one after the other from slot `first` on."""

    first: int
    num_rows: int
    length: int

    @property
    def end(self) -> int:
        """The slot behind the last."""
        return self.first + self.num_rows * self.length


class RowBlock(NamedTuple):
    """Rows that attend as one dense batch.

    Attributes:
        tokens: slots of the tokens that attend to one another, the same for keys and queries.
        targets: query slots of the targets that attend to these tokens, whole groups per row; of length 0 without any.
        context: query slots of the contextual tokens that attend to all these tokens; of length 0 without any.
        first_row: place of the first row in `AttentionPlan.front_padding`; of no meaning for groups of targets.

    """

    tokens: Slots
    targets: Slots
    context: Slots
    first_row: int


@dataclass(frozen=True)
class AttentionPlan:
    """Where every token of a jagged batch stands in the padded blocks.

    Attributes:
        blocks: blocks of histories, longest first, then blocks whose rows are groups of targets.
        key_slots: int64 `(num_tokens,)`, slot of every token as a key.
        query_slots: int64 `(num_tokens,)`, slot of every token as a query on its own history or group; that of a
            contextual token that sees all of its history is in `RowBlock.context`.
        target_tokens: int64 `(num_target_tokens,)`, the targets of rows that have a history, ascending.
        target_slots: int64 `(num_target_tokens,)`, their slots as queries on that history.
        front_padding: int64 `(num_rows,)`, empty key slots before each row with a history, block after block; None
            where contextual tokens are like the others.
        num_key_slots: slots for keys, padding included.
        num_query_slots: slots for queries, padding included.
        longest: tokens of the longest row.
        is_causal: whether a token sees only itself and what precedes it.
        target_group_size: targets per group; at most the most targets a row has.
        tuning: sizes of chunks.

    """

    blocks: list[RowBlock]
    key_slots: torch.Tensor
    query_slots: torch.Tensor
    target_tokens: torch.Tensor
    target_slots: torch.Tensor
    front_padding: torch.Tensor | None
    num_key_slots: int
    num_query_slots: int
    longest: int
    is_causal: bool
    target_group_size: int
    tuning: DeviceTuning

    @property
    def sees_ahead(self) -> bool:
        """Whether some token sees a later one of its history, so that distances below zero have a bias."""
        return not self.is_causal or self.front_padding is not None

    def pad_keys(self, values: torch.Tensor) -> torch.Tensor:
        """Values `(num_tokens, …)` in the slots of keys, zeros elsewhere."""
        padded = values.new_zeros(self.num_key_slots, *values.shape[1:])
        return padded.index_copy_(0, self.key_slots, values)

    def pad_queries(self, values: torch.Tensor) -> torch.Tensor:
        """Values as in `pad_keys`, in the slots of queries; a target stands there twice."""
        padded = values.new_zeros(self.num_query_slots, *values.shape[1:])
        padded.index_copy_(0, self.query_slots, values)
        return padded.index_copy_(0, self.target_slots, values.index_select(0, self.target_tokens))


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
    group_size = min(target_group_size, max(1, int(targets.max(initial=0))))
    grouped = -(-targets // group_size) * group_size  # targets rounded up to whole groups

    order = np.argsort(-history, kind="stable")
    cuts = _cut_rows(history[order], grouped[order], contextual[order], num_heads, is_causal, tuning)
    blocks = _place_blocks(cuts, int(grouped.sum()), group_size, num_heads, tuning)
    starts = _first_slots(blocks[: len(cuts)], order, history)
    first_group_slot = sum(cut.num_rows * cut.longest for cut in cuts) + np.cumsum(grouped) - grouped

    token_row = np.repeat(np.arange(tokens.size), tokens)  # (num_tokens,)
    place = np.arange(token_row.size) - (np.cumsum(tokens) - tokens)[token_row]
    key_slots = starts.key[token_row] + place
    query_slots = starts.query[token_row] - place
    target_tokens = np.flatnonzero(place >= history[token_row])
    row, target = token_row[target_tokens], (place - history[token_row])[target_tokens]  # (all targets,)
    key_slots[target_tokens] = first_group_slot[row] + target
    query_slots[target_tokens] = first_group_slot[row] + target + group_size - 1 - 2 * (target % group_size)
    has_history = history[row] > 0
    context_tokens = np.flatnonzero(place < contextual[token_row])
    query_slots[context_tokens] = starts.context[token_row[context_tokens]] + place[context_tokens]
    indices = [
        *(key_slots, query_slots, target_tokens[has_history], (starts.target[row] - target)[has_history]),
        _front_padding(blocks[: len(cuts)], order, history),
    ]
    key_index, query_index, target_index, target_query_index, front_padding = to_device(indices, device)
    return AttentionPlan(
        blocks=blocks,
        key_slots=key_index,
        query_slots=query_index,
        target_tokens=target_index,
        target_slots=target_query_index,
        front_padding=front_padding if num_contextual is not None and is_causal else None,
        num_key_slots=max((block.tokens.end for block in blocks), default=0),
        num_query_slots=max((block.context.end for block in blocks), default=0),
        longest=int(tokens.max(initial=0)),
        is_causal=is_causal,
        target_group_size=group_size,
        tuning=tuning,
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


class _Cut(NamedTuple):
    """Consecutive rows, longest first, that make a block."""

    num_rows: int
    longest: int
    most_targets: int
    most_contextual: int


def _cut_rows(
    lengths: np.ndarray,
    targets: np.ndarray,
    contextual: np.ndarray,
    num_heads: int,
    is_causal: bool,
    tuning: DeviceTuning,
) -> list[_Cut]:
    """Cut rows, longest first, into blocks; rows without history come last and are in no block.

    Padding is accepted until it has cost as much as a new block would: so short rows share a block whatever their
    lengths, and long ones are padded little.
    """

    def pairs(length: int, num_dense: int) -> int:
        return (length * (length + 1) // 2 if is_causal else length * length) + num_dense * length

    cuts: list[_Cut] = []
    needed = 0
    for length, num_targets, num_contextual in zip(lengths.tolist(), targets.tolist(), contextual.tolist()):
        if length == 0:
            break
        # A contextual token costs as many scores as a target, one for every token of the history.
        own_pairs = pairs(length, num_targets + num_contextual)
        grown = _Cut(1, length, num_targets, num_contextual)
        if cuts:
            num_rows, longest, most_targets, most_contextual = cuts[-1]
            grown = _Cut(num_rows + 1, longest, max(most_targets, num_targets), max(most_contextual, num_contextual))
            padded_pairs = grown.num_rows * pairs(longest, grown.most_targets + grown.most_contextual)
            wasted = padded_pairs - needed - own_pairs
            held = grown.num_rows * longest * min(longest, _MIN_CHUNK)
            if num_heads * wasted <= 2 * tuning.dispatch_scores and num_heads * held <= tuning.max_scores:
                cuts.pop()
            else:
                grown, needed = _Cut(1, length, num_targets, num_contextual), 0
        cuts.append(grown)
        needed += own_pairs
    return cuts


def _place_blocks(
    cuts: list[_Cut], num_grouped: int, group_size: int, num_heads: int, tuning: DeviceTuning
) -> list[RowBlock]:
    """Give every block its slots: histories first, then groups of targets, then targets and context on histories."""
    num_groups = num_grouped // group_size
    groups_per_block = max(1, tuning.max_scores // (num_heads * group_size * group_size))
    shapes = [*cuts] + [
        _Cut(min(groups_per_block, num_groups - first), group_size, 0, 0)
        for first in range(0, num_groups, groups_per_block)
    ]
    blocks: list[RowBlock] = []
    token = row = 0
    dense = sum(shape.num_rows * shape.longest for shape in shapes)
    for shape in shapes:
        targets = Slots(dense, shape.num_rows, shape.most_targets)
        context = Slots(targets.end, shape.num_rows, shape.most_contextual)
        blocks.append(RowBlock(Slots(token, shape.num_rows, shape.longest), targets, context, row))
        token, dense, row = blocks[-1].tokens.end, context.end, row + shape.num_rows
    return blocks


class _FirstSlots(NamedTuple):
    """Slots of every row's first history token as key and as query, and of its first target and contextual token.

    Int64 `(batch_size,)` each.
    """

    key: np.ndarray
    query: np.ndarray
    target: np.ndarray
    context: np.ndarray


def _first_slots(blocks: list[RowBlock], order: np.ndarray, history: np.ndarray) -> _FirstSlots:
    """Place the rows in the blocks of histories.

    Keys stand at the end of a padded row, so that the distance from a target to a key is the same in all rows.
    """
    first = _FirstSlots(*(np.zeros_like(history) for _ in range(4)))
    for tokens, targets, context, first_row in blocks:
        rows = order[first_row : first_row + tokens.num_rows]
        within = np.arange(tokens.num_rows)
        first.key[rows] = tokens.first + (within + 1) * tokens.length - history[rows]
        first.query[rows] = tokens.first + within * tokens.length + history[rows] - 1
        first.target[rows] = targets.first + (within + 1) * targets.length - 1
        first.context[rows] = context.first + within * context.length
    return first


def _front_padding(blocks: list[RowBlock], order: np.ndarray, history: np.ndarray) -> np.ndarray:
    """Empty key slots before each row of the blocks of histories; int64 `(num_rows,)`."""
    longest = np.concatenate([np.full(block.tokens.num_rows, block.tokens.length) for block in blocks] or [history[:0]])
    return longest - history[order[: longest.size]]
