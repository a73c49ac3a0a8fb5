"""From the lengths of a batch to packed tokens: which code is which token, and which tokens attend together.

    lengths on the host ─► TokenLayout ─► embeddings gathered into tokens ─► layers ─► what predicts a code

A row of the batch becomes

    place   0    1 … H      H + 1 … 2H          nH + 1 …        (n + m)·H − 1
    token   BOS  item 1     item 2      …  item n  candidate 1 … candidate m, without its last code

and the token at place p predicts the code of place p + 1, in hierarchy p mod H. The last code of a row predicts nothing
and is no token. Rows stand one after the other without padding, the longest first: rows of similar length are then
neighbours, and a block of them attends as one dense batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from commons.sequence_batch.host_copies import to_device

# Pairs of one head that are computed in the time it takes to start the operations of one block: about 40 µs of a CPU
# core and 100 µs of an accelerator's stream, forward and backward.
_DISPATCH_PAIRS = {"cpu": 2**13, "accelerator": 2**23}


class DenseBlock(NamedTuple):
    """Rows that attend as one dense batch."""

    first_row: int  # of the sorted rows
    num_rows: int  # rows
    num_tokens: int  # their tokens
    length: int  # tokens of the longest of them
    # int64 `(num_tokens,)`, the place of every token among `num_rows` rows of `length` places; None where all rows are
    # equally long, so that tokens and places are the same.
    slots: torch.Tensor | None


@dataclass(frozen=True)
class TokenLayout:
    """Where everything stands in the packed tokens of a batch."""

    # int64 `(num_tokens,)`, where a token's embedding is found in BOS, all history ids, all candidate ids, one after
    # the other.
    source: torch.Tensor
    positions: torch.Tensor  # int64 `(num_tokens,)`, 0 for BOS, else the number of its item in the row, from 1 on
    predicting: torch.Tensor  # int64 `(num_candidate_codes,)`, the token that predicts each candidate code
    # int64 `(num_rows,)`, by sorted row, the last token of the history: BOS where it is empty.
    last_history: torch.Tensor
    prefix_lengths: torch.Tensor  # int64 `(num_rows,)`, by sorted row, BOS and history
    order: torch.Tensor  # int64 `(num_rows,)`, the row of the batch that is each sorted row
    blocks: list[DenseBlock]  # rows that attend together, in the order of the tokens

    @property
    def num_rows(self) -> int:
        """Rows with tokens."""
        return self.order.numel()


class RowSpans(NamedTuple):
    """Where the codes of some rows lie among all history and all candidate ids; int64 `(num_rows,)` arrays."""

    history_start: np.ndarray  # of a row's history
    history_length: np.ndarray  # codes of its history
    candidate_start: np.ndarray  # of its candidates
    candidate_length: np.ndarray  # codes of its candidates that are tokens


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
        history: int64 `(batch_size,)`, ids per history.
        candidates: int64 `(batch_size,)`, ids of candidates per row.
        num_rows: real rows; padding rows have no tokens.
        num_hierarchies: codes of an item.
        num_heads: attention heads of this rank.
        device: where the index tensors go.
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
    """The layout of rows whose codes may lie anywhere; several rows may have the same history.

    Args:
        spans: where the codes of every row are.
        num_history_ids: history ids in front of the candidate ids.
        predicted: int64 `(num_rows,)`, codes behind the history that are predicted in every row.
        num_hierarchies: codes of an item.
        num_heads: attention heads of this rank.
        device: where the index tensors go.
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
    """Cut rows, longest first, into blocks; a block to be padded has an empty tensor in place of its slots.

    Padding is accepted until it has cost as much as a block of its own would: so short rows share a block whatever
    their lengths, and long ones are padded little.
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
    """0 … length − 1 of every row, one row after the other."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
