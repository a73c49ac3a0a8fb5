"""The work of the attention kernels' programs: tiles of a jagged batch, and blocks of equal distance for the biases.

lengths on the host ─► TritonPlan, once per batch ─► triton_attention, in every layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commons.sequence_batch.host_copies import to_device
from hstu.model.attention_plan import BatchPlan, numbered, read_rows
from hstu.model.triton_blocks import TILE_SPAN

# Largest window and group of targets: more tokens than a batch can have, and sums with places still fit into 32 bits.
NO_WINDOW = _LARGEST = 2**30
# A program of the bias gradient visits at least 16 blocks if there are enough, because its final additions are costly.
_LEAST_WORK, _MOST_PROGRAMS = 16, 512


@dataclass(frozen=True, kw_only=True)
class TritonPlan(BatchPlan):
    """The rows of a jagged batch, and the work of the kernels' programs."""

    # int32 `(batch_size, 4)`: for every row its first token, and its numbers of tokens, history tokens and contextual
    # tokens; the longest history first.
    rows: torch.Tensor
    # int32 `(num_tiles, 2)`: row and first place of every tile of queries; the tile with the most keys first.
    query_tiles: torch.Tensor
    key_tiles: torch.Tensor  # int32 `(num_tiles, 2)`: as `query_tiles`, for keys; the tile with the most queries first
    bias_work: torch.Tensor  # int32 `(n, 3)`: distance of blocks, first row, last row + 1
    target_work: torch.Tensor  # int32 `(n, 3)`: place in the history, row, 0: tiles of keys that targets see
    is_causal: bool  # whether a token sees only itself and earlier tokens
    target_group_size: int  # targets per group of the model, for which the kernels are compiled
    window: int  # the largest distance at which a token is seen

    def options(self, scale: float, origin: int) -> tuple[Any, ...]:
        """The last fields of `triton_launch.Inputs`: all except tokens and biases."""
        return (
            *(self.rows, self.query_tiles, self.key_tiles, self.bias_work, self.target_work, scale),
            *(self.target_group_size, self.is_causal, self.sees_ahead, self.window, origin),
        )


def plan_triton_attention(
    lengths: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    num_contextual: torch.Tensor | None = None,
    *,
    is_causal: bool = True,
    target_group_size: int = 1,
    max_attn_len: int | None = None,
    device: torch.device | None = None,
) -> TritonPlan:
    """Cut the rows of a jagged batch into tiles; for arguments and errors see `plan_attention`.

    The plan is copied to the device in one copy, from pinned memory for CUDA.
    """
    device = lengths.device if device is None else device
    rows = np.stack(read_rows(lengths, num_targets, num_contextual, is_causal=is_causal), axis=1)
    rows = rows[np.argsort(-rows[:, 2], kind="stable")]
    num_tokens = int(rows[:, 1].sum())
    window = launched_window(max_attn_len)
    group = compiled_group_size(target_group_size, is_causal=is_causal)
    parts = [
        rows,
        *_tiles(rows, window, is_causal=is_causal),
        _bias_work(rows, window, group, is_causal=is_causal),
        _target_work(rows, window),
    ]
    names = ("rows", "query_tiles", "key_tiles", "bias_work", "target_work")
    return TritonPlan(
        **dict(zip(names, to_device([part.astype(np.int32) for part in parts], device))),
        num_tokens=num_tokens,
        longest=int(rows[:, 1].max(initial=0)),
        is_causal=is_causal,
        sees_ahead=not is_causal or num_contextual is not None,
        target_group_size=group,
        window=window,
    )


def compiled_group_size(target_group_size: int, *, is_causal: bool) -> int:
    """The group size that the kernels are compiled for, for a model's `target_group_size`."""
    return min(target_group_size, _LARGEST) if is_causal else 1


def launched_window(max_attn_len: int | None) -> int:
    """The kernels' window for a model's `max_attn_len`."""
    return NO_WINDOW if max_attn_len is None else min(max_attn_len, NO_WINDOW)


def _tiles(rows: np.ndarray, window: int, *, is_causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """`query_tiles` and `key_tiles` of the plan, `(num_tiles, 2)` each."""
    _, tokens, history, contextual = rows.T
    counts = -(-tokens // TILE_SPAN)
    row, number = numbered(counts)
    place = number * TILE_SPAN
    end = np.minimum(place + TILE_SPAN, tokens[row])
    keys_seen = queries_seeing = np.minimum(tokens[row], 2 * window)
    if is_causal:
        seen = np.minimum(end, window + TILE_SPAN)
        keys_seen = np.where(place < contextual[row], np.maximum(history[row], end), seen)
        queries_seeing = np.where(place < history[row], tokens[row] - place, TILE_SPAN)
        queries_seeing = np.minimum(queries_seeing, window + TILE_SPAN)
    tiles = np.stack([row, place], axis=1)
    return tiles[np.argsort(-keys_seen, kind="stable")], tiles[np.argsort(-queries_seeing, kind="stable")]


def _bias_work(rows: np.ndarray, window: int, group: int, *, is_causal: bool) -> np.ndarray:
    """`bias_work` of the plan: distances and ranges of rows to visit, `(n, 3)`, the most blocks first.

    The ranges are cut so that all programs visit similar numbers of blocks.
    """
    _, tokens, history, contextual = rows.T
    longest = int(tokens.max(initial=0))
    lowest = -longest if not is_causal else -longest if contextual.any() else 0
    apart = np.arange(lowest // TILE_SPAN * TILE_SPAN, longest, TILE_SPAN)[:, None]
    ahead = apart < 0
    # Number of queries of the history in tiles at this distance.
    queries = np.where(ahead, history + apart + TILE_SPAN, history - apart)
    is_far = np.abs(apart) - TILE_SPAN >= window
    if is_causal:
        contextual_queries = np.minimum(queries, np.where(ahead, contextual, contextual - apart))
        queries = np.where(ahead | is_far, contextual_queries, queries)
        own = np.where((apart >= 0) & (apart < group + TILE_SPAN) & ~is_far, tokens - history - apart, 0)
    else:
        queries, own = np.where(is_far, 0, queries), np.zeros_like(queries)
    cost = -(-np.maximum(queries, 0) // TILE_SPAN) + -(-np.maximum(own, 0) // TILE_SPAN)
    before = np.cumsum(cost, axis=1) - cost
    part = before // max(_LEAST_WORK, int(cost.sum()) // _MOST_PROGRAMS)
    begins = np.diff(part, axis=1, prepend=-1) != 0
    offset, first = np.nonzero(begins)
    if not offset.size:
        return np.zeros((0, 3), np.int64)
    is_last = np.append(offset[1:] != offset[:-1], True)
    end = np.where(is_last, tokens.size, np.append(first[1:], 0))
    needed = np.add.reduceat(cost.ravel(), np.flatnonzero(begins))
    work = np.stack([apart[offset, 0], first, end], axis=1)
    order = np.argsort(-needed, kind="stable")
    return work[order[: np.count_nonzero(needed)]]


def _target_work(rows: np.ndarray, window: int) -> np.ndarray:
    """`target_work` of the plan: tiles of the history that targets see, `(n, 3)`, the most targets first."""
    _, tokens, history, _ = rows.T
    targets = tokens - history
    first = np.where(targets > 0, np.maximum(history - window, 0) // TILE_SPAN, 0)
    counts = np.where(targets > 0, -(-history // TILE_SPAN) - first, 0)
    row, number = numbered(counts)
    place = (number + first[row]) * TILE_SPAN
    return np.stack([place, row, np.zeros_like(row)], axis=1)[np.argsort(-targets[row], kind="stable")]
