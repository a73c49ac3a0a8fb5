"""ROUTES: a plan turned into the index arrays of one rank's exchange, on the host, by the worker thread.

The payload buffer of a rank holds three regions of segments:

    own       every row the rank brought, segment by segment: segment s of row r is at s · rows + r
    received  what arrived, row by row: all segments of one row side by side
    zero      one row of padding: zero words for jagged segments, zeros for dense ones

One permute of the own region packs what is sent; one permute of the whole buffer unpacks the result in ascending global
id, padding last. Everything here follows from the gathered lengths, so no size is ever read back from a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.distributed.payload import PayloadLayout
from commons.perf_model.shuffle_plan import ShufflePlan, sum_by_rank


@dataclass(frozen=True)
class RowRoutes:
    """Index arrays and sizes of one rank's exchange; sizes are in words unless said otherwise.

    Attributes:
        pack_permute: int32, own segments in the order in which they are sent.
        own_lengths: int64, words of every own segment.
        sent_words: words this rank sends.
        input_splits: words to every rank, for the all-to-all.
        output_splits: words from every rank, for the all-to-all.
        all_gather: whether every rank receives what any rank sends.
        gather_words: words of the largest sender, to which the all-gather pads; 0 for the all-to-all.
        moved_words: words that all ranks send together; no collective if there are none.
        unpack_permute: int32, buffer segments in the order of the result.
        buffer_lengths: int64, words of every segment of the buffer.
        own_words: words of the own region.
        received_words: words of the received region.
        zero_words: words of the zero region.
        own_section_words: words of every part in the own region.
        section_words: words of every part in the result.
        own_row_lengths: int64 `(own rows, num_keys)`, padding included.
        result_row_lengths: int64 `(result rows, num_keys)`, padding included.
        result_real_rows: rows of the result that are no padding.
        changed: whether the rank's rows differ from those it brought.
    """

    pack_permute: np.ndarray
    own_lengths: np.ndarray
    sent_words: int
    input_splits: list[int]
    output_splits: list[int]
    all_gather: bool
    gather_words: int
    moved_words: int
    unpack_permute: np.ndarray
    buffer_lengths: np.ndarray
    own_words: int
    received_words: int
    zero_words: int
    own_section_words: list[int]
    section_words: list[int]
    own_row_lengths: np.ndarray
    result_row_lengths: np.ndarray
    result_real_rows: int
    changed: bool


def route_rows(plan: ShufflePlan, lengths: np.ndarray, layout: PayloadLayout, rank: int, all_gather: bool) -> RowRoutes:
    """Index arrays for one rank.

    Args:
        plan: the plan, the same on every rank.
        lengths: int64 `(N, num_keys)` of all real rows, in the plan's order.
        layout: the parts of a row.
        rank: this rank.
        all_gather: whether every rank receives what any rank sends, padded to the largest sender; else each rank
            receives its own rows only.
    """
    gathered = plan.gathered
    home, destination, local_row = gathered.home, plan.destination, gathered.local_row
    num_ranks, num_segments = gathered.num_ranks, layout.num_segments
    row_words = layout.words(lengths)  # (N, num_segments)
    words_of_row = row_words.sum(axis=1)

    own_rows = int(gathered.rows[rank])
    own_row_lengths = np.zeros((own_rows, lengths.shape[1]), dtype=np.int64)
    own_row_lengths[local_row[home == rank]] = lengths[home == rank]
    own_lengths = layout.words(own_row_lengths).T.ravel()  # segment by segment
    segments = np.arange(num_segments)

    moved = np.flatnonzero(plan.moves)
    moved = moved[np.lexsort((local_row[moved], destination[moved], home[moved]))]  # sender, receiver, row
    sent = moved[home[moved] == rank]
    input_splits = sum_by_rank(destination[sent], words_of_row[sent], num_ranks)
    output_from = moved[destination[moved] == rank]
    output_splits = sum_by_rank(home[output_from], words_of_row[output_from], num_ranks)

    if all_gather:
        arrived, gather_words, arrived_lengths, first_segment = _gathered_blocks(
            moved, home, row_words, words_of_row, num_ranks
        )
    else:
        arrived, gather_words = output_from, 0
        arrived_lengths = row_words[arrived].ravel()
        first_segment = np.arange(len(arrived)) * num_segments

    zero_lengths = layout.words(np.zeros((1, lengths.shape[1]), dtype=np.int64))[0]
    result = plan.rows_for(rank)
    result_rows = plan.result_batch_size(rank)
    source = np.empty((num_segments, result_rows), dtype=np.int64)
    stays = home[result] == rank
    kept, came = np.flatnonzero(stays), np.flatnonzero(~stays)
    source[:, kept] = segments[:, None] * own_rows + local_row[result[kept]]
    position = np.empty(len(home), dtype=np.int64)
    position[arrived] = first_segment
    source[:, came] = len(own_lengths) + position[result[came]] + segments[:, None]
    source[:, len(result) :] = (len(own_lengths) + len(arrived_lengths) + segments)[:, None]

    result_row_lengths = np.zeros((result_rows, lengths.shape[1]), dtype=np.int64)
    result_row_lengths[: len(result)] = lengths[result]
    return RowRoutes(
        pack_permute=(segments * own_rows + local_row[sent][:, None]).ravel().astype(np.int32),
        own_lengths=own_lengths,
        sent_words=int(words_of_row[sent].sum()),
        input_splits=input_splits.tolist(),
        output_splits=output_splits.tolist(),
        all_gather=all_gather,
        gather_words=gather_words,
        moved_words=int(words_of_row[moved].sum()),
        unpack_permute=source.ravel().astype(np.int32),
        buffer_lengths=np.concatenate([own_lengths, arrived_lengths, zero_lengths]),
        own_words=int(own_lengths.sum()),
        received_words=int(arrived_lengths.sum()),
        zero_words=int(zero_lengths.sum()),
        own_section_words=[int(part.words(own_row_lengths).sum()) for part in layout.parts],
        section_words=[int(part.words(result_row_lengths).sum()) for part in layout.parts],
        own_row_lengths=own_row_lengths,
        result_row_lengths=result_row_lengths,
        result_real_rows=len(result),
        changed=bool(len(sent) or len(came) or result_rows != own_rows),
    )


def _gathered_blocks(
    moved: np.ndarray, home: np.ndarray, row_words: np.ndarray, words_of_row: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """The received region of an all-gather: one block per sender, each ending in a segment that pads it.

    Returns:
        The moved rows in order of arrival, the words of a block, the words of every segment, and each row's first
        segment within the region.
    """
    num_segments = row_words.shape[1]
    block_words = sum_by_rank(home[moved], words_of_row[moved], num_ranks)
    gather_words = int(block_words.max(initial=0))
    rows_per_sender = np.bincount(home[moved], minlength=num_ranks)
    # Sender k's rows come after k pads of the blocks before it.
    first_segment = np.arange(len(moved)) * num_segments + home[moved]
    pad_segment = np.cumsum(rows_per_sender) * num_segments + np.arange(num_ranks)
    lengths = np.empty(len(moved) * num_segments + num_ranks, dtype=np.int64)
    lengths[pad_segment] = gather_words - block_words
    lengths[(first_segment[:, None] + np.arange(num_segments)).ravel()] = row_words[moved].ravel()
    return moved, gather_words, lengths, first_segment
