"""Which rows of a jagged batch attend together: blocks of similar length, padded little.

    lengths on the host ─► AttentionPlan: blocks of rows, and every token's slots in them ─► attention, in every layer

A row is its history followed by its targets. History tokens attend within the history; targets attend to the history
of their row and within their own group. Rows of similar length are padded to one length, so that a block is a dense
batch of matrices, and a block is closed as soon as its padding would cost more than opening another one. The work for
a batch so follows the sum of the squared lengths, not rows × longest².

Within a row keys stand in order and queries in reverse order: the bias of a pair, a function of its distance, is then
a function of the sum of its two places, and a strided view can show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

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

    """

    tokens: Slots
    targets: Slots


@dataclass(frozen=True)
class AttentionPlan:
    """Where every token of a jagged batch stands in the padded blocks.

    Attributes:
        blocks: blocks of histories, longest first, then blocks whose rows are groups of targets.
        key_slots: int64 `(num_tokens,)`, slot of every token as a key.
        query_slots: int64 `(num_tokens,)`, slot of every token as a query on its own history or group.
        target_tokens: int64 `(num_target_tokens,)`, the targets of rows that have a history, ascending.
        target_slots: int64 `(num_target_tokens,)`, their slots as queries on that history.
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
    num_key_slots: int
    num_query_slots: int
    longest: int
    is_causal: bool
    target_group_size: int
    tuning: DeviceTuning


def plan_attention(
    lengths: torch.Tensor,
    num_targets: torch.Tensor | None = None,
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
        num_heads: attention heads.
        is_causal: whether a token sees only itself and what precedes it.
        target_group_size: targets that see one another; a row's groups start at its first target.
        device: where the plan's index tensors go; the device of `lengths` if not given.
        tuning: sizes of blocks and chunks; by the kind of device if not given.

    Raises:
        ValueError: a negative length, or more targets than tokens.

    """
    device = lengths.device if device is None else device
    tuning = tuning or (CPU_TUNING if device.type == "cpu" else ACCELERATOR_TUNING)
    tokens, targets = _read_lengths(lengths, num_targets)
    if not is_causal:
        targets = np.zeros_like(tokens)
    history = tokens - targets
    group_size = min(target_group_size, max(1, int(targets.max(initial=0))))
    grouped = -(-targets // group_size) * group_size  # targets rounded up to whole groups

    order = np.argsort(-history, kind="stable")
    cuts = _cut_rows(history[order], grouped[order], num_heads, is_causal, tuning)
    blocks = _place_blocks(cuts, int(grouped.sum()), group_size, num_heads, tuning)
    starts = _first_slots(blocks[: len(cuts)], order, history)
    first_group_slot = sum(cut.num_rows * cut.longest for cut in cuts) + np.cumsum(grouped) - grouped

    row = np.repeat(np.arange(tokens.size), tokens)  # (num_tokens,)
    place = np.arange(row.size) - (np.cumsum(tokens) - tokens)[row]
    key_slots = starts.key[row] + place
    query_slots = starts.query[row] - place
    target_tokens = np.flatnonzero(place >= history[row])
    row, target = row[target_tokens], (place - history[row])[target_tokens]  # (all targets,)
    key_slots[target_tokens] = first_group_slot[row] + target
    query_slots[target_tokens] = first_group_slot[row] + target + group_size - 1 - 2 * (target % group_size)
    has_history = history[row] > 0
    indices = [key_slots, query_slots, target_tokens[has_history], (starts.target[row] - target)[has_history]]
    # One copy to the device for all of them.
    on_device = torch.from_numpy(np.concatenate(indices)).to(device, non_blocking=True)
    key_index, query_index, target_index, target_query_index = on_device.split([index.size for index in indices])
    return AttentionPlan(
        blocks=blocks,
        key_slots=key_index,
        query_slots=query_index,
        target_tokens=target_index,
        target_slots=target_query_index,
        num_key_slots=max((block.tokens.end for block in blocks), default=0),
        num_query_slots=max((block.targets.end for block in blocks), default=0),
        longest=int(tokens.max(initial=0)),
        is_causal=is_causal,
        target_group_size=group_size,
        tuning=tuning,
    )


def _read_lengths(lengths: torch.Tensor, num_targets: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and targets per row as int64 arrays: the one place that may wait for a device."""
    if num_targets is None:
        num_targets = torch.zeros_like(lengths)
    both = torch.stack([lengths, num_targets.to(lengths.device)]).to(torch.int64).cpu().numpy()
    tokens, targets = both[0], both[1]
    wrong = np.flatnonzero((targets < 0) | (targets > tokens))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"row {row} has {int(tokens[row])} tokens and {int(targets[row])} targets; targets are counted among a "
            "row's tokens: give 0 <= num_targets <= lengths"
        )
    return tokens, targets


class _Cut(NamedTuple):
    """Consecutive rows, longest first, that make a block."""

    num_rows: int
    longest: int
    most_targets: int


def _cut_rows(
    lengths: np.ndarray, targets: np.ndarray, num_heads: int, is_causal: bool, tuning: DeviceTuning
) -> list[_Cut]:
    """Cut rows, longest first, into blocks; rows without history come last and are in no block.

    The rule is that of ski rental: padding is accepted until it has cost as much as a new block would. So short rows
    share a block whatever their lengths, and long ones are padded little.
    """

    def pairs(length: int, num_targets: int) -> int:
        return (length * (length + 1) // 2 if is_causal else length * length) + num_targets * length

    cuts: list[_Cut] = []
    needed = 0
    for length, num_targets in zip(lengths.tolist(), targets.tolist()):
        if length == 0:
            break
        grown = _Cut(1, length, num_targets)
        if cuts:
            num_rows, longest, most_targets = cuts[-1]
            grown = _Cut(num_rows + 1, longest, max(most_targets, num_targets))
            wasted = grown.num_rows * pairs(longest, grown.most_targets) - needed - pairs(length, num_targets)
            held = grown.num_rows * longest * min(longest, _MIN_CHUNK)
            if num_heads * wasted <= 2 * tuning.dispatch_scores and num_heads * held <= tuning.max_scores:
                cuts.pop()
            else:
                grown, needed = _Cut(1, length, num_targets), 0
        cuts.append(grown)
        needed += pairs(length, num_targets)
    return cuts


def _place_blocks(
    cuts: list[_Cut], num_grouped: int, group_size: int, num_heads: int, tuning: DeviceTuning
) -> list[RowBlock]:
    """Give every block its slots: histories first, then groups of targets, then the targets on the histories."""
    num_groups = num_grouped // group_size
    groups_per_block = max(1, tuning.max_scores // (num_heads * group_size * group_size))
    shapes = [*cuts] + [
        _Cut(min(groups_per_block, num_groups - first), group_size, 0)
        for first in range(0, num_groups, groups_per_block)
    ]
    blocks: list[RowBlock] = []
    token = 0
    target = sum(shape.num_rows * shape.longest for shape in shapes)
    for shape in shapes:
        block = RowBlock(Slots(token, shape.num_rows, shape.longest), Slots(target, shape.num_rows, shape.most_targets))
        blocks.append(block)
        token, target = block.tokens.end, block.targets.end
    return blocks


class _FirstSlots(NamedTuple):
    """Slots of every row's first history token, as key and as query, and of its first target; `(batch_size,)` each."""

    key: np.ndarray
    query: np.ndarray
    target: np.ndarray


def _first_slots(blocks: list[RowBlock], order: np.ndarray, history: np.ndarray) -> _FirstSlots:
    """Place the rows in the blocks of histories.

    Keys stand at the end of a padded row, so that the distance from a target to a key is the same in all rows.
    """
    first = _FirstSlots(*(np.zeros_like(history) for _ in range(3)))
    start = 0
    for tokens, targets in blocks:
        rows = order[start : start + tokens.num_rows]
        within = np.arange(tokens.num_rows)
        first.key[rows] = tokens.first + (within + 1) * tokens.length - history[rows]
        first.query[rows] = tokens.first + within * tokens.length + history[rows] - 1
        first.target[rows] = targets.first + (within + 1) * targets.length - 1
        start += tokens.num_rows
    return first
