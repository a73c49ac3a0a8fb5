"""Rows as they cross the ranks: nothing is lost in narrow columns, and no mistake is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared.one_of_many_ranks import packed_rows
from commons.perf_model.partitioner import core
from commons.perf_model.partitioner.core import encode_rows
from commons.perf_model.shuffle_plan import GatheredRows

NOTHING = np.zeros(0, np.int64)


def packed(lengths, real_rows, kept=None):
    """Rows that are all real, with what ranks pack of their lengths."""
    zeros = np.zeros(len(lengths), np.int64)
    return packed_rows(real_rows, real_rows, zeros, zeros, lengths, kept)


def as_gathered(words, first, real_rows, num_keys=0, num_kept=0, steps=1):
    """Words as if they had been gathered."""
    return GatheredRows(real_rows, real_rows, NOTHING, NOTHING, steps, words, first, num_keys, num_kept)


# At the edges of every width.
EDGES = [0, 1, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**62]


def encode_columns(workloads, lengths, kept, counted):
    """The block of rows that are all real and whose lengths are those stated."""
    rows = len(workloads)
    return encode_rows(workloads, [lengths], [int(lengths.sum())], kept, counted, rows, rows)


@st.composite
def numbers(draw, rows, signed=False):
    """int64 `(rows,)`: anything, or the same everywhere."""
    edges = EDGES + [-1, -(2**62)] * signed
    of_rows = st.lists(st.sampled_from(edges), min_size=rows, max_size=rows)
    return np.array(draw(st.one_of(of_rows, st.sampled_from(edges).map(lambda each: [each] * rows))), np.int64)


@st.composite
def tables(draw):
    """What ranks pack, of one batch or of windows, empty ranks among them; `(N, …)` arrays of it; and the table."""
    ranks, steps = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3]))
    keys, kept = draw(st.integers(0, 4)), draw(st.integers(0, 2))
    counted = draw(st.lists(st.integers(0, keys - 1), unique=True)) if keys else []
    known, words, first, real_rows = [], [], [], []
    for _ in range(ranks):
        blocks = []
        for _ in range(steps):
            rows = draw(st.sampled_from([0, 1, 3, 5]))
            workloads = draw(numbers(rows)) >> 3  # whose sum fits
            # The sum of all lengths has to fit.
            of_keys = [draw(numbers(rows)) >> draw(st.sampled_from([6, 40])) for _ in range(keys)]
            lengths = np.array(of_keys, np.int64).reshape(keys, rows)
            further = [draw(numbers(rows, signed=True)) for _ in range(kept)]
            first.append(sum(map(len, blocks)))
            blocks.append(encode_columns(workloads, lengths, further, counted))
            tokens = lengths[counted].sum(axis=0) if counted else np.ones(rows, np.int64)
            known.append(np.concatenate([workloads[None], tokens[None], lengths, *(each[None] for each in further)]).T)
            real_rows.append(rows)
        words.append(np.concatenate(blocks))
    room = max(map(len, words)) + draw(st.integers(0, 2))
    body = np.full((ranks, 3 + room), -1)[:, 3:]  # behind a header
    for row, each in zip(body, words):
        row[: len(each)] = each
    return np.concatenate(known), as_gathered(body, np.array(first), np.array(real_rows), keys, kept, steps)


@given(case=tables())
@settings(max_examples=20)
def test_what_ranks_pack_is_what_others_read(case):
    known, table = case
    keys = list(range(table.num_keys))[::-1]
    assert table.lengths_of_keys(keys).tolist() == known[:, [2 + key for key in keys]].T.tolist()
    columns = list(range(table.num_columns))
    for some in (columns, columns[1:], columns[::-1], []):
        read = core.read_columns(table, some)
        assert read.dtype == np.int64 and read.tolist() == known[:, some].T.tolist()
    rebuilt = packed(known[:, 2 : 2 + table.num_keys], table.real_rows, known[:, 2 + table.num_keys :])
    assert core.read_columns(rebuilt, columns[2:]).tolist() == known[:, 2:].T.tolist()


def test_columns_are_as_narrow_as_their_numbers():
    rows, one = 32, np.ones((1, 32), np.int64)

    def words(*columns):
        return len(encode_columns(one[0] * 2**40 + np.arange(rows), np.concatenate(columns), [], [0]))

    # 8-byte workloads, tokens and lengths of one byte, and a code for each column.
    assert words(np.arange(32)[None]) == -(-(3 + 8 * 32 + 2 * 32) // 8)
    contextual = [one] * 195  # one value each: two bytes for all rows
    assert words(np.arange(32)[None], *contextual) == -(-(198 + 8 * 32 + 2 * 32 + 195) // 8)
    jagged = np.arange(32)[None] + 250
    assert words(jagged, *contextual) - words(np.arange(32)[None], *contextual) == 2 * 32 // 8
    assert not len(encode_columns(np.zeros(0, np.int64), np.zeros((200, 0), np.int64), [], [0]))


def _own_rows(**changes):
    """Three rows and one of padding; lengths of four, two and eight bytes, some of them column by column."""
    given = {
        "workloads": np.array([5, 0, 7, -1]),
        "lengths": [np.asfortranarray([[1, 2, 3, 0], [4, 0, 6, 0]], np.int32), np.array([[9, 8, 7, 0]], np.int16)],
        "sums": [16, 24],
        "kept": [np.array([-1, -2, -3, -4])],
        "counted": [0, 2],
        "rows": 4,
        "real_rows": 3,
    }
    return encode_rows(*(given | changes).values())


def test_what_a_rank_sends_is_put_together_unless_something_is_wrong():
    words, real = _own_rows(), np.array([3])
    table = as_gathered(words[None], np.zeros(1, np.int64), real, 3, 1)
    columns = [[5, 0, 7], [10, 10, 10], [1, 2, 3], [4, 0, 6], [9, 8, 7], [-1, -2, -3]]
    assert core.read_columns(table, range(6)).tolist() == columns
    padding = np.array([[9, 8, 7, 1]])
    for changes in (
        {"workloads": np.array([5, -1, 7, 0])},
        {"workloads": np.array([5, 0, 7])},
        {"workloads": np.arange(8).reshape(4, 2)},
        {"workloads": np.zeros((4, 0), np.int64)},
        {"workloads": np.array([2**61, 2**61, 0, 0])},
        {"sums": [16, 23]},
        {"sums": [16, 25]},
        {"lengths": [np.array([[1, 2, 3, 0], [4, -1, 7, 0]], np.int32), np.array([[9, 8, 7, 0]])]},
        {"lengths": [np.array([[1, 2, 3, 0], [4, 0, 6, 0]]), padding]},
        {"lengths": [np.zeros((1, 3), np.int64)], "sums": [0], "counted": []},
        {"kept": [np.array([-1, -2, -3])]},
    ):
        assert _own_rows(**changes) is None, changes
    with pytest.raises(ValueError, match="encode_rows: sizes do not match"):
        _own_rows(real_rows=5)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        _own_rows(sums=[40])
    with pytest.raises(ValueError, match="encode_rows: a key is out of its range"):
        _own_rows(counted=[3])


def test_words_that_are_no_rows_are_refused():
    """A message that was damaged, or from another release: whatever it holds, nothing outside it is read."""
    good = packed(np.array([[1, 2], [300, 4], [5, 6]]), np.array([2, 1]))
    changed = {
        "words": [good.words[:, :0], np.zeros_like(good.words), np.full_like(good.words, -1), good.words[:, :1]],
        "first": [good.first + good.words.shape[1] + 1, good.first - 1],
        "real_rows": [np.array([50, 1])],
    }
    for name, values in changed.items():
        for value in values:
            table = GatheredRows(**{**vars(good), name: value})
            with pytest.raises(ValueError, match="a gathered table: a size or column is out of its range"):
                table.lengths_of_keys([0, 1])


def test_counts_whose_sum_overflows_are_refused():
    """Of a column with one number for all rows, the words say nothing of how many there are."""
    counts = np.full(16, 2**60)
    counts[-1] += 3
    table = packed(np.full((16, 1), 7), np.ones(16, np.int64))
    table = as_gathered(table.words, table.first, counts, 1)
    with pytest.raises(ValueError, match="a gathered table: sizes do not match"):
        core.read_columns(table, [0, 1])


def cut(words, sizes):
    """Address and words of pieces that lie apart, and the pieces."""
    pieces = [piece.copy() for piece in np.split(words, np.cumsum(sizes)[:-1])]
    return [(piece.ctypes.data, len(piece)) for piece in pieces], pieces


@given(data=st.data())
@settings(max_examples=50)
def test_segments_in_a_new_order(data):
    counts = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4))
    lengths = np.array([length for piece in counts for length in piece], np.int64)
    words = np.arange(lengths.sum(), dtype=np.int32)
    segments = np.split(words, np.cumsum(lengths)[:-1]) if len(lengths) else []
    chosen = st.lists(st.integers(0, len(lengths) - 1), max_size=12) if len(lengths) else st.just([])
    orders = data.draw(st.lists(chosen, min_size=1, max_size=3))
    order = np.array([segment for each in orders for segment in each], np.int32)
    expected = [np.concatenate([words[:0], *(segments[segment] for segment in each)]) for each in orders]
    read, kept = cut(words, [sum(piece) for piece in counts])
    written, results = cut(np.full(sum(map(len, expected)), -1, np.int32), [len(each) for each in expected])
    given_ = lengths.ctypes.data, len(lengths), order.ctypes.data, len(order)
    core.permute_words(*given_, read, written)
    assert all(map(np.array_equal, results, expected)) and len(results) == len(expected) and kept


@pytest.mark.parametrize(
    "lengths, order, read, written",
    [
        ([2, 2], [2], [4], [2]),  # no such segment
        ([2, 2], [-1], [4], [2]),
        ([2, -1], [0], [4], [2]),  # no length
        ([2, 3], [0], [4], [2]),  # more than there are
        ([3, 1], [0], [2, 2], [3]),  # over two pieces
        ([2, 2], [0, 1], [4], [3]),  # more than there is room for
        ([2, 2], [0, 1], [4], [3, 1]),
        ([2, 2], [0], [4], [3]),  # less
        ([2, 2], [0], [4], [2, 1]),
    ],
)
def test_segments_that_do_not_fit_are_refused(lengths, order, read, written):
    lengths, order = np.array(lengths, np.int64), np.array(order, np.int32)
    (read, kept), (written, results) = (cut(np.zeros(sum(sizes), np.int32), sizes) for sizes in (read, written))
    with pytest.raises(ValueError, match="permute_words: sizes do not match"):
        core.permute_words(lengths.ctypes.data, len(lengths), order.ctypes.data, len(order), read, written)
    assert kept and results
