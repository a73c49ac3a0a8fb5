"""The gradients of the biases by position and by time.

A program visits blocks `(m, n)` of queries and keys at one distance m − n, row after row, and sums the gradients of
their scores in registers. At its end it sums them by distance, and adds the sums to memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from hstu.model.kernels.parts import (
    PLAIN,
    TILE_SPAN,
    UNALIGNED,
    block_of,
    load_bias,
    load_times,
    load_visited,
    num_blocks,
    place_of,
    sees,
    time_bucket,
    twice_sigmoid,
)


@triton.jit
def _program_work(TILES, num_heads, BLOCK: tl.constexpr):
    """This program's head, its block's distance or place, and the other two numbers of its entry in TILES `(n, 3)`."""
    blocks_per_tile: tl.constexpr = TILE_SPAN // BLOCK
    block = tl.program_id(0) // num_heads
    work = TILES + 3 * (block // blocks_per_tile)
    place = tl.load(work) + block % blocks_per_tile * BLOCK
    return tl.program_id(0) % num_heads, place, tl.load(work + 1), tl.load(work + 2)


@triton.jit
def _row_of(ROWS, row):
    """First token (int64), length, history and context of a row."""
    row = ROWS + 4 * row
    return tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _grad_scores(
    Q, K, V, GRAD_OUT, TIME, bias, bucket, first, m, n, length, head, num_heads, token_stride, head_stride,
    masked: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of halved scores, without the factor 1/N."""
    q = load_visited(Q, first, m, length, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK, BLOCK_DIM, TMA)
    k = load_visited(K, first, n, length, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK, BLOCK_DIM, TMA)
    h = 0.5 * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if bias is not None:
        h += bias
    if TIME is not None:
        h += load_bias(TIME + bucket, FAST)
    a = twice_sigmoid(h, FAST)
    v = load_visited(V, first, n, length, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK, BLOCK_DIM, TMA)
    grad = load_visited(
        GRAD_OUT, first, m, length, head, num_heads * HEAD_DIM, HEAD_DIM, masked, HEAD_DIM, BLOCK, BLOCK_DIM, TMA
    )
    return tl.dot(grad, tl.trans(v), input_precision=PRECISION) * (a + h * a * (2.0 - a))


@triton.jit
def _buckets(TIMES, first, i, j, FAST: tl.constexpr):
    """Buckets of the time differences between queries and keys; 0 without a bias by time."""
    if TIMES is None:
        return 0
    else:
        i_high, i_low = load_times(TIMES, first, i, FAST)
        j_high, j_low = load_times(TIMES, first, j, FAST)
        return time_bucket(i_high[:, None] - j_high[None, :], i_low[:, None] - j_low[None, :], FAST)


@triton.jit
def _add_buckets(GRADIENT, grad_h, bucket, scale):
    """Add the gradients of a block to the gradient of the bias by time.

    The time differences of a block are mostly in a few buckets, so there is one atomic addition per bucket.
    """
    for b in range(tl.min(bucket), tl.max(bucket) + 1):
        tl.atomic_add(GRADIENT + b, tl.sum(tl.where(bucket == b, grad_h, 0.0)) * scale, sem="relaxed")


@triton.jit
def _add_distances(GRADIENT, sums, place, BLOCK: tl.constexpr):
    """Add `(BLOCK, BLOCK)` sums to the gradient of the bias by distance `place − column`.

    Every row is rotated so that the distances in a column are equal modulo BLOCK; there is one atomic addition for each
    distance in a column.
    """
    column = tl.arange(0, BLOCK)
    ahead = place[:, None] - column[None, :]
    rotation = ahead & (BLOCK - 1)  # the key that moves to this column; BLOCK is a power of two
    rotated = tl.gather(sums, rotation, 1)
    distance = ahead - rotation + column[None, :]
    lowest = tl.min(place) - (BLOCK - 1)
    for begin in range(lowest - (lowest & (BLOCK - 1)), tl.max(place) + 1, BLOCK):
        wanted = begin + column
        total = tl.sum(tl.where(distance == wanted[None, :], rotated, 0.0), 0)
        tl.atomic_add(GRADIENT + wanted, total, mask=total != 0.0, sem="relaxed")


@triton.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=UNALIGNED)
def bias_gradient(
    Q, K, V, POSITION, TIME, TIMES, GRAD_OUT, GRAD_POSITION, GRAD_TIME, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, window, origin, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the biases from history on history, and from targets on targets.

    TILES has the distance from the first query of a block to its first key, and a range of rows.
    """
    head, apart, row_begin, row_end = _program_work(TILES, num_heads, BLOCK_M)
    column = tl.arange(0, BLOCK_M)
    bias = None
    if POSITION is not None:
        POSITION += head * width + origin
        bias = load_bias((POSITION + apart + column)[:, None] - column[None, :], FAST)
    if TIME is not None:
        TIME += head * num_buckets
        GRAD_TIME += head * num_buckets
    sums = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for row in range(row_begin, row_end):
        first, length, history, context = _row_of(ROWS, row)
        begin, end = tl.maximum(apart, 0), history + tl.minimum(apart, 0)
        if CAUSAL:
            seen_by_all = (apart >= BLOCK_M) & (apart + BLOCK_M - 1 <= window)
            end = tl.where((apart < 0) | (apart - BLOCK_M >= window), tl.minimum(end, context), end)
            has_targets = (apart >= 0) & (apart < GROUP + BLOCK_M)
            targets = tl.where(has_targets, history + apart, length)
        else:
            seen_by_all = tl.abs(apart) + BLOCK_M - 1 <= window
            targets = length
        whole = begin + tl.where(seen_by_all, tl.maximum(end - begin, 0) // BLOCK_M * BLOCK_M, 0)
        for masked in tl.static_range(2):
            if masked:
                steps = num_blocks(whole, tl.maximum(whole, end), targets, tl.maximum(targets, length), 0, 0, BLOCK_M)
            else:
                steps = (whole - begin) // BLOCK_M
            for step in range(0, steps):
                if masked:
                    m, limit = block_of(
                        step, whole, tl.maximum(whole, end), targets, tl.maximum(targets, length), 0, 0, BLOCK_M
                    )
                    limit = tl.where(limit > history, length, history)
                else:
                    m, limit = begin + step * BLOCK_M, length
                n = m - apart
                i, j = m + column, n + column
                if masked:
                    i, j = tl.minimum(i, limit - 1), tl.minimum(j, limit - 1)
                bucket = _buckets(TIMES, first, i, j, FAST)
                grad_h = _grad_scores(
                    Q, K, V, GRAD_OUT, TIME, bias, bucket, first, m, n, length, head, num_heads, token_stride,
                    head_stride, masked, HEAD_DIM, BLOCK_M, BLOCK_DIM, PRECISION, FAST, TMA,
                )  # fmt: skip
                if masked:
                    i_place, j_place = place_of(i, history, GROUP, CAUSAL), place_of(j, history, GROUP, CAUSAL)
                    seen = sees(i[:, None], j[None, :], i_place[:, None], j_place[None, :], history, context, window,
                                GROUP, CAUSAL)  # fmt: skip
                    seen = seen & (m + column < limit)[:, None] & (n + column < limit)[None, :]
                    grad_h = tl.where(seen, grad_h, 0.0)
                sums += grad_h
                if TIME is not None:
                    _add_buckets(GRAD_TIME, grad_h, bucket, before * after)
    if POSITION is not None:
        GRAD_POSITION += head * width + origin
        _add_distances(GRAD_POSITION, sums * (before * after), apart + column, BLOCK_M)


@triton.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=UNALIGNED)
def target_bias_gradient(
    Q, K, V, POSITION, TIME, TIMES, GRAD_OUT, GRAD_POSITION, GRAD_TIME, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, window, origin, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the biases from targets on the history.

    TILES has a place in the history, where a block of keys begins, and a row. Targets are visited in blocks with equal
    places: of whole groups, or of a part of each group.
    """
    head, n, row, _ = _program_work(TILES, num_heads, BLOCK_M)
    first, length, history, _ = _row_of(ROWS, row)
    if n >= history:
        return
    if POSITION is not None:
        POSITION += head * width + origin
        GRAD_POSITION += head * width + origin
    if TIME is not None:
        TIME += head * num_buckets
        GRAD_TIME += head * num_buckets
    column = tl.arange(0, BLOCK_M)
    j = tl.minimum(n + column, history - 1)
    whole_groups: tl.constexpr = GROUP <= BLOCK_M
    step: tl.constexpr = BLOCK_M // GROUP * GROUP if whole_groups else GROUP
    size: tl.constexpr = step if whole_groups else BLOCK_M
    parts = 1 if whole_groups else tl.cdiv(tl.minimum(GROUP, length - history), BLOCK_M)
    for part in range(0, parts):
        of_group = part * BLOCK_M + column % GROUP  # places in the group
        place = history + of_group
        bias = None
        if POSITION is not None:
            bias = load_bias((POSITION + place - n)[:, None] - column[None, :], FAST)
        there = (column < size) & (part * BLOCK_M + column < GROUP if not whole_groups else column >= 0)
        seen = there[:, None] & (n + column < history)[None, :] & (place[:, None] - n - column[None, :] <= window)
        sums = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
        for m in range(history + part * BLOCK_M, length, step):
            i = tl.minimum(m + column, length - 1)
            bucket = _buckets(TIMES, first, i, j, FAST)
            grad_h = _grad_scores(
                Q, K, V, GRAD_OUT, TIME, bias, bucket, first, m, n, length, head, num_heads, token_stride,
                head_stride, True, HEAD_DIM, BLOCK_M, BLOCK_DIM, PRECISION, FAST, TMA,
            )  # fmt: skip
            grad_h = tl.where(seen & (m + column < length)[:, None], grad_h, 0.0)
            sums += grad_h
            if TIME is not None:
                _add_buckets(GRAD_TIME, grad_h, bucket, before * after)
        if POSITION is not None:
            _add_distances(GRAD_POSITION, sums * (before * after), place - n, BLOCK_M)
