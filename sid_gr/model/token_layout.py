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


class RowSpans(NamedTuple):
    """The ranges of each row's codes in all history ids and in all candidate ids; int64 `(num_rows,)` arrays."""

    history_start: np.ndarray  # index of the first history id
    history_length: np.ndarray  # number of codes of the history
    candidate_start: np.ndarray  # index of the first candidate id
    candidate_length: np.ndarray  # number of codes of the candidates that are tokens


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
    spans = RowSpans(
        (np.cumsum(history) - history)[:num_rows],
        history[:num_rows],
        (np.cumsum(candidates) - candidates)[:num_rows],
        np.maximum(candidates - 1, 0)[:num_rows],
    )
    return lay_out(
        spans,
        num_history_ids=int(history.sum()),
        predicted=candidates[:num_rows],
        num_hierarchies=num_hierarchies,
        num_heads=num_heads,
        device=device,
    )


def lay_out(
    spans: RowSpans,
    *,
    num_history_ids: int,
    predicted: np.ndarray,
    num_hierarchies: int,
    num_heads: int,
    device: torch.device,
) -> TokenLayout:
    """The layout of rows with given ranges of codes; several rows may share a history.

    Args:
        spans: the ranges of every row's codes.
        num_history_ids: number of history ids, which come before the candidate ids.
        predicted: int64 `(num_rows,)`, number of predicted codes after the history of every row.
        num_hierarchies: number of codes of an item.
        num_heads: number of attention heads of this rank.
        device: device of the index tensors.
    """
    lengths = 1 + spans.history_length + spans.candidate_length
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    sorted_starts = np.cumsum(sorted_lengths) - sorted_lengths
    starts = np.empty_like(lengths)
    starts[order] = sorted_starts

    row = np.repeat(order, sorted_lengths)  # (num_tokens,)
    place = _places(sorted_lengths)
    behind_history = place - 1 - spans.history_length[row]
    source = np.where(
        behind_history < 0,
        1 + spans.history_start[row] + place - 1,
        1 + num_history_ids + spans.candidate_start[row] + behind_history,
    )
    source[place == 0] = 0
    prefix = 1 + spans.history_length
    predicting = np.repeat(starts + spans.history_length, predicted) + _places(predicted)
    blocks = _cut_blocks(sorted_lengths, num_heads, device)
    slots = [_slots(sorted_lengths, block) for block in blocks if block.slots is not None]
    indices = [
        source,
        (place + num_hierarchies - 1) // num_hierarchies,
        predicting,
        (starts + prefix - 1)[order],
        prefix[order],
        order,
        *slots,
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
        blocks=[block if block.slots is None else block._replace(slots=next(remaining)) for block in blocks],
    )


def _cut_blocks(sorted_lengths: np.ndarray, num_heads: int, device: torch.device) -> list[DenseBlock]:
    """Cut rows, longest first, into blocks; in a block with padding, `slots` is an empty tensor for now.

    A block takes rows until its padding costs as much as another block: short rows of any lengths share a block, and
    long rows get little padding.
    """
    dispatch = _DISPATCH_PAIRS["cpu" if device.type == "cpu" else "accelerator"]
    pending = torch.empty(0, dtype=torch.int64)
    blocks: list[DenseBlock] = []
    wasted = 0
    for row, length in enumerate(sorted_lengths.tolist()):
        if blocks:
            first_row, num_rows, num_tokens, longest, _ = blocks[-1]
            wasted += (longest * (longest + 1) - length * (length + 1)) // 2 * num_heads
            if wasted <= dispatch:
                slots = None if length == longest else pending
                blocks[-1] = DenseBlock(first_row, num_rows + 1, num_tokens + length, longest, slots)
                continue
        blocks.append(DenseBlock(row, 1, length, length, None))
        wasted = 0
    return blocks


def _slots(sorted_lengths: np.ndarray, block: DenseBlock) -> np.ndarray:
    lengths = sorted_lengths[block.first_row : block.first_row + block.num_rows]
    return np.repeat(np.arange(block.num_rows) * block.length, lengths) + _places(lengths)


def _places(lengths: np.ndarray) -> np.ndarray:
    """0 … length − 1 for every row, row after row."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
