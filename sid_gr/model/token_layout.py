"""The layout of a batch's packed tokens: the token of every code, and the blocks of rows that attend together.

    lengths on the host ─► TokenLayout ─► embeddings gathered into tokens ─► layers ─► tokens that predict codes

A row of the batch becomes

    place   0    1 … H      H + 1 … 2H          nH + 1 …        (n + m)·H − 1
    token   BOS  item 1     item 2      …  item n  candidate 1 … candidate m, without its last code

and the token at place p predicts the code of place p + 1, in hierarchy p mod H. The last code of a row predicts nothing
and is no token. Rows are concatenated without padding, the longest first, so that rows of similar length are adjacent;
a block of them attends as one dense batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from commons.sequence_batch.host_copies import to_device

# Number of pairs of one head that take as long as the dispatch of one block's operations, forward and backward: about
# 40 µs of a CPU core and 100 µs of an accelerator's stream.
_DISPATCH_PAIRS = {"cpu": 2**13, "accelerator": 2**23}


class DenseBlock(NamedTuple):
    """Rows that are computed as one dense batch."""

    first_row: int  # first of the sorted rows
    num_rows: int  # number of rows
    num_tokens: int  # tokens of these rows
    length: int  # tokens of the longest of these rows
    # int64 `(num_tokens,)`, the place of every token in `num_rows` padded rows of `length` places; None if all rows are
    # equally long, so that there is no padding.
    slots: torch.Tensor | None


@dataclass(frozen=True)
class TokenLayout:
    """Index tensors for the packed tokens of a batch."""

    # int64 `(num_tokens,)`, the index of a token's embedding in the concatenation of BOS, all history ids and all
    # candidate ids.
    source: torch.Tensor
    positions: torch.Tensor  # int64 `(num_tokens,)`, 0 for BOS, else the number of the item in its row, from 1
    predicting: torch.Tensor  # int64 `(num_candidate_codes,)`, the token that predicts each candidate code
    # int64 `(num_rows,)`, by sorted row, the last token of the history; BOS if the history is empty.
    last_history: torch.Tensor
    prefix_lengths: torch.Tensor  # int64 `(num_rows,)`, by sorted row, number of tokens of BOS and history
    order: torch.Tensor  # int64 `(num_rows,)`, the batch's row of each sorted row
    blocks: list[DenseBlock]  # rows that attend together, in the order of the tokens

    @property
    def num_rows(self) -> int:
        """Number of rows with tokens."""
        return self.order.numel()


def lay_out_batch(
    history: np.ndarray,
    candidates: np.ndarray,
    *,
    num_rows: int,
    num_hierarchies: int,
    num_heads: int,
    device: torch.device,
) -> TokenLayout:
    """The layout of a batch.

    Args:
        history: int64 `(batch_size,)`, number of history ids per row.
        candidates: int64 `(batch_size,)`, number of candidate ids per row.
        num_rows: number of real rows; padding rows have no tokens.
        num_hierarchies: number of codes of an item.
        num_heads: number of attention heads of this rank.
        device: device of the index tensors.
    """
    history_start = (np.cumsum(history) - history)[:num_rows]
    candidate_start = (np.cumsum(candidates) - candidates)[:num_rows]
    num_history_ids = int(history.sum())
    history, candidates = history[:num_rows], candidates[:num_rows]
    lengths = 1 + history + np.maximum(candidates - 1, 0)
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    sorted_starts = np.cumsum(sorted_lengths) - sorted_lengths
    starts = np.empty_like(lengths)
    starts[order] = sorted_starts

    row = np.repeat(order, sorted_lengths)  # (num_tokens,)
    place = _places(sorted_lengths)
    behind_history = place - 1 - history[row]
    source = np.where(
        behind_history < 0,
        1 + history_start[row] + place - 1,
        1 + num_history_ids + candidate_start[row] + behind_history,
    )
    source[place == 0] = 0
    predicting = np.repeat(starts + history, candidates) + _places(candidates)
    first_rows = _first_rows_of_blocks(sorted_lengths, num_heads, device)
    parts = np.split(sorted_lengths, first_rows[1:])[: len(first_rows)]
    is_padded = [part[0] > part[-1] for part in parts]
    slots = (np.repeat(np.arange(part.size) * part[0], part) + _places(part) for part in parts)
    indices = [
        source,
        (place + num_hierarchies - 1) // num_hierarchies,
        predicting,
        (starts + history)[order],
        (1 + history)[order],
        order,
        *itertools.compress(slots, is_padded),
    ]
    source_index, positions, tokens, last, prefixes, rows, *slot_parts = to_device(indices, device)
    remaining = iter(slot_parts)
    return TokenLayout(
        source=source_index,
        positions=positions,
        predicting=tokens,
        last_history=last,
        prefix_lengths=prefixes,
        order=rows,
        blocks=[
            DenseBlock(first_row, part.size, int(part.sum()), int(part[0]), next(remaining) if padded else None)
            for first_row, part, padded in zip(first_rows, parts, is_padded)
        ],
    )


def _first_rows_of_blocks(sorted_lengths: np.ndarray, num_heads: int, device: torch.device) -> list[int]:
    """Cut rows, longest first, into blocks.

    A block takes rows until its padding costs as much as another block: short rows of any lengths share a block, and
    long rows get little padding.
    """
    dispatch = _DISPATCH_PAIRS["cpu" if device.type == "cpu" else "accelerator"]
    first_rows: list[int] = []
    longest = wasted = 0
    for row, length in enumerate(sorted_lengths.tolist()):
        wasted += (longest * (longest + 1) - length * (length + 1)) // 2 * num_heads
        if not first_rows or wasted > dispatch:
            first_rows.append(row)
            longest, wasted = length, 0
    return first_rows


def _places(lengths: np.ndarray) -> np.ndarray:
    """0 … length − 1 for every row, row after row."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
