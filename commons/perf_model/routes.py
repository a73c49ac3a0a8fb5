"""ROUTES: a plan as one rank's index arrays: which segment of which row lies where, who gets it, and how long it is.

Input: the plan, and how the fields of a row become segments of words. Output: `Routes`, with all that the device needs
in one array, so that one copy brings it there. It is pure arithmetic on the gathered lengths, of those rows alone that
concern the rank: it knows neither tensors nor process groups. The buffer that it speaks of is that of
`commons.distributed.row_exchange`.

The native core does the arithmetic (partitioner/native/routes.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.perf_model.partitioner import core
from commons.perf_model.shuffle_plan import ShufflePlan


@dataclass(frozen=True, slots=True)
class ResultSizes:
    """One batch that a rank trains; see `Routes`.

    Attributes:
        changes: whether its rows differ from those that the rank brought there.
        rows: rows of the result, padding included.
        real_rows: those that are no padding.
        parts: words of every part.
        length_per_key: elements of every key of all KeyedJaggedTensors.
    """

    changes: bool
    rows: int
    real_rows: int
    parts: list[int]
    length_per_key: list[int]


@dataclass(frozen=True, slots=True)
class Routes:
    """One rank's part of a plan; sizes are in words of the payload.

    Attributes:
        indices: int64 `(n,)`, one after another: the lengths of the buffer's segments, those of the own region first;
            by result, the lengths `(num_keys, rows)` of its rows; then, as int32, the segments of the own region that
            are sent and, by result, the segments of the buffer that it is made of.
        moves: whether rows of any rank move, and have words where that is known; the same on all ranks.
        block_words: words of the largest sender, to which an all-gather pads; 0 for an all-to-all.
        sent_words: words that this rank sends to one receiver each.
        segments: of the own region, of the whole buffer, and of what is sent.
        regions: words of the own region, of what arrives, and of a row of padding.
        input_splits: words to every rank.
        output_splits: words from every rank; of an all-gather, from every rank to all of them.
        own_parts: by batch that the rank brought, words of every part, and of what aligns the next batch.
        results: by batch that the rank trains.
    """

    indices: np.ndarray
    moves: bool
    block_words: int
    sent_words: int
    segments: tuple[int, int, int]
    regions: list[int]
    input_splits: list[int]
    output_splits: list[int]
    own_parts: list[list[int]]
    results: list[ResultSizes]


def route_rows(plan: ShufflePlan, parts: np.ndarray, rank: int, *, all_gather: bool) -> Routes:
    """One rank's part of a plan.

    Args:
        plan: the plan, the same on every rank.
        parts: int64 `(num_parts, 3)`: of every part of the payload its first column in the table of lengths, its
            segments per row, and the words of an element; of a dense part -1, 1, and the words of a row.
        rank: this rank.
        all_gather: whether every rank receives what any rank sends, padded to the largest sender; else each rank
            receives its own rows only.
    """
    gathered = plan.gathered
    indices, sizes = core.route_rows(
        gathered.rows,
        gathered.real_rows,
        plan.destination,
        gathered.table,
        parts,
        steps=gathered.steps,
        rank=rank,
        all_gather=all_gather,
        pads=plan.pads,
    )
    return _read_sizes(indices, sizes.tolist(), gathered.num_ranks, gathered.steps, len(parts))


def _read_sizes(indices: np.ndarray, sizes: list[int], num_ranks: int, steps: int, num_parts: int) -> Routes:
    """Routes from `indices`, and all numbers beside it one after another."""
    moves, block_words, sent_words, *segments = sizes[:6]
    at = 6

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return sizes[at - count : at]

    regions, input_splits, output_splits = take(3), take(num_ranks), take(num_ranks)
    own_parts = [take(num_parts + 1) for _ in range(steps)]
    num_keys = (len(sizes) - at) // steps - 3 - num_parts
    results = []
    for _ in range(steps):
        changes, rows, real_rows = take(3)
        results.append(ResultSizes(bool(changes), rows, real_rows, take(num_parts), take(num_keys)))
    own, buffer, sent = segments
    return Routes(
        indices,
        bool(moves),
        block_words,
        sent_words,
        (own, buffer, sent),
        regions,
        input_splits,
        output_splits,
        own_parts,
        results,
    )


def segment_words(lengths: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """int64 `(rows, num_segments)`, words of every segment of rows with lengths `(rows, num_keys)`.

    Args:
        lengths: int64 `(rows, num_keys)`.
        parts: of the payload, as `route_rows` takes them.
    """
    columns = [
        lengths[:, first : first + count] * words if first >= 0 else np.full((len(lengths), 1), words, dtype=np.int64)
        for first, count, words in parts.tolist()
    ]
    return np.concatenate(columns, axis=1)
