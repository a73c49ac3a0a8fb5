"""ROUTES: a plan as one rank's index arrays: which segment of which row lies where, who gets it, and how long it is.

Input: the plan, and how the fields of a row become segments of words. Output: `Routes`, with all that the device needs
in one array, so that one copy brings it there. It is pure arithmetic on the gathered lengths, of those rows alone that
concern the rank: it knows neither tensors nor process groups. The buffer that it speaks of is that of
`commons.distributed.row_exchange`.

The native core computes the same (native/routes.hpp), bit for bit; without the interpreter lock where there are many
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.native_core import native_core
from commons.perf_model.shuffle_plan import ShufflePlan

# Every batch in the buffer begins at a multiple of the largest element, a complex number of two doubles.
_ALIGNED_WORDS = 4


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
    gathered, core = plan.gathered, native_core()
    if core is None:
        indices, sizes = reference_routes(plan, parts, rank, all_gather)
    else:
        indices, sizes = core.route_rows(
            gathered.rows,
            gathered.real_rows,
            plan.destination,
            gathered.table.words,
            gathered.table.first,
            gathered.table.num_columns,
            gathered.table.num_keys,
            parts,
            gathered.steps,
            rank,
            all_gather,
            plan.pads,
        )
    return _read_sizes(indices, sizes.tolist(), gathered.num_ranks, gathered.steps, len(parts))


def _read_sizes(indices: np.ndarray, sizes: list[int], num_ranks: int, steps: int, num_parts: int) -> Routes:
    """Routes from what both implementations return: `indices`, and all numbers one after another."""
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


def reference_routes(
    plan: ShufflePlan, parts: np.ndarray, rank: int, all_gather: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The arithmetic in numpy; returns `Routes.indices` and the numbers beside it, as `_read_sizes` reads them."""
    gathered = plan.gathered
    home, num_ranks, steps = gathered.home, gathered.num_ranks, gathered.steps
    sender, receiver = home // steps, plan.destination // steps
    num_keys, segments = gathered.table.num_keys, np.arange(parts[:, 1].sum())
    places = range(rank * steps, (rank + 1) * steps)
    near = (sender == rank) | (plan.moves & ((receiver == rank) | all_gather))
    lengths_of, row_words = np.zeros((len(home), num_keys), np.int64), np.zeros((len(home), len(segments)), np.int64)
    lengths_of[near] = gathered.table.lengths(np.flatnonzero(near))  # the others' stay unknown
    row_words[near] = segment_words(lengths_of[near], parts)
    words_of_row = row_words.sum(axis=1)

    own_tables = [_own_lengths(plan, place, lengths_of) for place in places]
    own_parts = [_words_of_parts(table, parts) for table in own_tables]
    own_parts = [np.append(words, -words.sum() % _ALIGNED_WORDS) for words in own_parts]
    own_lengths = np.concatenate(
        [np.append(segment_words(table, parts).T, words[-1]) for table, words in zip(own_tables, own_parts)]
    )
    own_rows = np.array([len(table) for table in own_tables])
    first_of_batch = np.cumsum(own_rows * len(segments) + 1) - (own_rows * len(segments) + 1)
    own = np.flatnonzero(sender == rank)
    step = home[own] - places.start
    # Of every real row that this rank has or gets: its first segment in the buffer, and from one to the next.
    first, stride = np.zeros(len(home), dtype=np.int64), np.ones(len(home), dtype=np.int64)
    first[own] = first_of_batch[step] + gathered.local_row[own]
    stride[own] = own_rows[step]

    moved = np.flatnonzero(plan.moves)
    moved = moved[np.lexsort((moved, receiver[moved], sender[moved]))]
    sent, arriving = moved[sender[moved] == rank], moved[receiver[moved] == rank]
    if all_gather:
        arriving, block_words, received_lengths, first_segment = _blocks(moved, sender, row_words, num_ranks)
    else:
        block_words, received_lengths = 0, row_words[arriving].ravel()
        first_segment = np.arange(len(arriving)) * len(segments)
    came = receiver[arriving] == rank
    first[arriving[came]] = len(own_lengths) + first_segment[came]

    zero_lengths = segment_words(np.zeros((1, num_keys), dtype=np.int64), parts)[0]
    buffer_lengths = np.concatenate([own_lengths, received_lengths, zero_lengths])
    first_zero = len(buffer_lengths) - len(zero_lengths)

    def results() -> Iterator[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]:
        for place in places:
            chosen, rows = plan.rows_for(place), plan.result_batch_size(place)
            source = np.empty((len(segments), rows), dtype=np.int64)  # in the buffer, of every segment of the result
            source[:, : len(chosen)] = first[chosen] + segments[:, None] * stride[chosen]
            source[:, len(chosen) :] = (first_zero + segments)[:, None]
            lengths = np.zeros((rows, num_keys), dtype=np.int64)
            lengths[: len(chosen)] = lengths_of[chosen]
            changes = rows != gathered.rows[place] or not np.array_equal(chosen, np.flatnonzero(home == place))
            sizes = [np.array([changes, rows, len(chosen)]), _words_of_parts(lengths, parts), lengths.sum(axis=0)]
            yield lengths.T.ravel(), source.ravel(), sizes

    lengths, sources, sizes_of_results = zip(*results())
    order = (first[sent][:, None] + segments * stride[sent][:, None]).ravel()
    orders = np.concatenate([order, *sources])
    packed = np.zeros(-(-len(orders) // 2) * 2, dtype=np.int32)  # two to a word of eight bytes
    packed[: len(orders)] = orders
    indices = np.concatenate([buffer_lengths, *lengths, packed.view(np.int64)])
    regions = [region.sum() for region in (own_lengths, received_lengths, zero_lengths)]
    sizes = np.concatenate(
        [
            [block_words > 0 if all_gather else len(moved) * len(segments) > 0, block_words, words_of_row[sent].sum()],
            [len(own_lengths), len(buffer_lengths), len(order)],
            regions,
            sum_by_rank(receiver[sent], words_of_row[sent], num_ranks),
            sum_by_rank(sender[arriving], words_of_row[arriving], num_ranks),
            *own_parts,
            *(each for sizes in sizes_of_results for each in sizes),
        ]
    )
    return indices, sizes.astype(np.int64)


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


def _words_of_parts(lengths: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """int64 `(num_parts,)`, words of every part of a batch with lengths `(rows, num_keys)`."""
    return np.add.reduceat(segment_words(lengths, parts).sum(axis=0), np.cumsum(parts[:, 1]) - parts[:, 1])


def _own_lengths(plan: ShufflePlan, place: int, lengths_of: np.ndarray) -> np.ndarray:
    """int64 `(rows, num_keys)`, the lengths of all rows of a batch as it was brought, padding included."""
    gathered = plan.gathered
    table = np.zeros((int(gathered.rows[place]), lengths_of.shape[1]), dtype=np.int64)
    here = gathered.home == place
    table[gathered.local_row[here]] = lengths_of[here]
    return table


def _blocks(
    moved: np.ndarray, sender: np.ndarray, row_words: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """The received region of an all-gather: one block per sender, each ending in a segment that pads it.

    Returns:
        The moved rows in order of arrival, the words of a block, the words of every segment, and each row's first
        segment within the region.
    """
    num_segments = row_words.shape[1]
    sent = sum_by_rank(sender[moved], row_words[moved].sum(axis=1), num_ranks)
    block_words = int(sent.max(initial=0))
    # Sender k's rows come after the k pads of the blocks before it.
    first_segment = np.arange(len(moved)) * num_segments + sender[moved]
    pad_segment = np.cumsum(np.bincount(sender[moved], minlength=num_ranks)) * num_segments + np.arange(num_ranks)
    lengths = np.empty(len(moved) * num_segments + num_ranks, dtype=np.int64)
    lengths[pad_segment] = block_words - sent
    lengths[(first_segment[:, None] + np.arange(num_segments)).ravel()] = row_words[moved].ravel()
    return moved, block_words, lengths, first_segment
