"""The attention of a block of queries, and the gradients of queries, keys and values."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from hstu.model.kernels.parts import (
    PLAIN,
    UNALIGNED,
    block_of,
    halved,
    key_ranges,
    load_bias,
    load_own,
    load_times,
    load_visited,
    mask_of,
    num_blocks,
    place_of,
    places,
    pointers_to,
    program_tile,
    query_ranges,
    sees,
    silu,
    store,
    time_bucket,
    twice_sigmoid,
)


@triton.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=UNALIGNED)
def forward(
    Q, K, V, POSITION, TIME, TIMES, OUT, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, window, origin, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The output of a block of queries. `before · after` is 1/N: the factors before the sum and after it."""
    head, first, length, history, context, start = program_tile(ROWS, TILES, num_heads, BLOCK_M)
    if start >= length:
        return
    if POSITION is not None:
        POSITION += head * width + origin
    if TIME is not None:
        TIME += head * num_buckets
    q = halved(load_own(Q, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_M, BLOCK_DIM))
    i = tl.minimum(start + tl.arange(0, BLOCK_M), length - 1)
    i_place = place_of(i, history, GROUP, CAUSAL)
    i_high, i_low = load_times(TIMES, first, i, FAST)
    column, place = tl.arange(0, BLOCK_N), places(BLOCK_N, FAST)
    sums = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    for masked in tl.static_range(2):
        begin, end, begin2, end2, begin3, end3 = key_ranges(
            masked, start, length, history, context, window, GROUP, BLOCK_M, BLOCK_N, CAUSAL
        )
        for step in range(0, num_blocks(begin, end, begin2, end2, begin3, end3, BLOCK_N)):
            if masked:
                n, limit = block_of(step, begin, end, begin2, end2, begin3, end3, BLOCK_N)
            else:
                n, limit = begin + step * BLOCK_N, length
            k = load_visited(
                K, first, n, limit, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK_N, BLOCK_DIM, TMA
            )
            v = load_visited(
                V, first, n, limit, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK_N, BLOCK_DIM, TMA
            )
            h = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            j = n + place
            if masked:
                j = tl.minimum(j, limit - 1)
                j_place = place_of(j, history, GROUP, CAUSAL)
            if POSITION is not None:
                if masked:
                    h += load_bias((POSITION + i_place)[:, None] - j_place[None, :], FAST)
                else:
                    h += load_bias((POSITION + i_place)[:, None] - n - column[None, :], FAST)
            if TIME is not None:
                j_high, j_low = load_times(TIMES, first, j, FAST)
                bucket = time_bucket(i_high[:, None] - j_high[None, :], i_low[:, None] - j_low[None, :], FAST)
                h += load_bias(TIME + bucket, FAST)
            weights = silu(h, FAST)
            if v.dtype == tl.float16:
                weights *= before
            if masked:
                seen = sees(i[:, None], j[None, :], i_place[:, None], j_place[None, :], history, context, window,
                            GROUP, CAUSAL)  # fmt: skip
                weights = tl.where(seen & (n + place < limit)[None, :], weights, 0.0)
            sums = tl.dot(weights.to(v.dtype), v, sums, input_precision=PRECISION)
    store(OUT, sums * after, first, start, length, head, num_heads, HEAD_DIM, BLOCK_M, BLOCK_DIM)


@triton.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=UNALIGNED)
def backward_key(
    Q, K, V, POSITION, TIME, TIMES, GRAD_OUT, GRAD_Q, GRAD_K, GRAD_V, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, window, origin, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, and its contribution to the gradients of the visited queries.

    An output that is None is not computed. GRAD_Q is float32 and starts as zeros; with TMA it is a descriptor. Scores
    are transposed, `(BLOCK_N, BLOCK_M)`, so that they are the left factor of products, which is in registers.
    """
    head, first, length, history, context, start = program_tile(ROWS, TILES, num_heads, BLOCK_N)
    if start >= length:
        return
    if POSITION is not None:
        POSITION += head * width + origin
    if TIME is not None:
        TIME += head * num_buckets
    k = halved(load_own(K, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM))
    v = load_own(V, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_N, BLOCK_DIM)
    j = tl.minimum(start + tl.arange(0, BLOCK_N), length - 1)
    j_place = place_of(j, history, GROUP, CAUSAL)
    j_high, j_low = load_times(TIMES, first, j, FAST)
    column, place = tl.arange(0, BLOCK_M), places(BLOCK_M, FAST)
    key_sums = tl.zeros((BLOCK_N, BLOCK_DIM), tl.float32)
    value_sums = tl.zeros((BLOCK_N, BLOCK_DIM), tl.float32)
    # The gradients of keys and queries are scaled by 1/N before the sum in float16, after it in other dtypes.
    is_half: tl.constexpr = k.dtype == tl.float16
    for masked in tl.static_range(2):
        begin, end, begin2, end2, begin3, end3 = query_ranges(
            masked, start, length, history, context, window, GROUP, BLOCK_M, BLOCK_N, CAUSAL
        )
        for step in range(0, num_blocks(begin, end, begin2, end2, begin3, end3, BLOCK_M)):
            if masked:
                m, limit = block_of(step, begin, end, begin2, end2, begin3, end3, BLOCK_M)
            else:
                m, limit = begin + step * BLOCK_M, length
            q = load_visited(
                Q, first, m, limit, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK_M, BLOCK_DIM, TMA
            )
            grad = load_visited(
                GRAD_OUT, first, m, limit, head, num_heads * HEAD_DIM, HEAD_DIM, masked, HEAD_DIM, BLOCK_M, BLOCK_DIM,
                TMA,
            )  # fmt: skip
            h = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            i = m + place
            if masked:
                i = tl.minimum(i, limit - 1)
                i_place = place_of(i, history, GROUP, CAUSAL)
            if POSITION is not None:
                if masked:
                    h += load_bias((POSITION - j_place)[:, None] + i_place[None, :], FAST)
                else:
                    h += load_bias((POSITION + m - j_place)[:, None] + column[None, :], FAST)
            if TIME is not None:
                i_high, i_low = load_times(TIMES, first, i, FAST)
                bucket = time_bucket(i_high[None, :] - j_high[:, None], i_low[None, :] - j_low[:, None], FAST)
                h += load_bias(TIME + bucket, FAST)
            a = twice_sigmoid(h, FAST)
            weights = h * a
            if masked:
                seen = sees(i[None, :], j[:, None], i_place[None, :], j_place[:, None], history, context, window,
                            GROUP, CAUSAL)  # fmt: skip
                seen = seen & (m + place < limit)[None, :]
            if GRAD_V is not None:
                shown = weights * before if is_half else weights
                if masked:
                    shown = tl.where(seen, shown, 0.0)
                value_sums = tl.dot(shown.to(grad.dtype), grad, value_sums, input_precision=PRECISION)
            if GRAD_K is not None:
                grad_h = tl.dot(v, tl.trans(grad), input_precision=PRECISION) * (a + weights * (2.0 - a))
                if is_half:
                    grad_h *= before * after
                if masked:
                    grad_h = tl.where(seen, grad_h, 0.0)
                grad_h = grad_h.to(q.dtype)
                key_sums = tl.dot(grad_h, q, key_sums, input_precision=PRECISION)
                if GRAD_Q is not None:
                    added = tl.dot(tl.trans(grad_h), k, input_precision=PRECISION)
                    if TMA:
                        GRAD_Q.atomic_add([(first + m).to(tl.int32), head * HEAD_DIM], added)
                    else:
                        pointers = pointers_to(
                            GRAD_Q, first, m, head, num_heads * HEAD_DIM, HEAD_DIM, BLOCK_M, BLOCK_DIM
                        )
                        mask = mask_of(m, limit, HEAD_DIM, BLOCK_M, BLOCK_DIM)
                        tl.atomic_add(pointers, added, mask=mask, sem="relaxed")
    if GRAD_K is not None:
        key_sums *= 0.5 if is_half else 0.5 * (before * after)
        store(GRAD_K, key_sums, first, start, length, head, num_heads, HEAD_DIM, BLOCK_N, BLOCK_DIM)
    if GRAD_V is not None:
        store(GRAD_V, value_sums * after, first, start, length, head, num_heads, HEAD_DIM, BLOCK_N, BLOCK_DIM)


@triton.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=UNALIGNED)
def backward_query(
    Q, K, V, POSITION, TIME, TIMES, GRAD_OUT, GRAD_Q, ROWS, TILES,
    num_heads, token_stride, head_stride, before, after, window, origin, width, num_buckets,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, summed in a fixed order."""
    head, first, length, history, context, start = program_tile(ROWS, TILES, num_heads, BLOCK_M)
    if start >= length:
        return
    if POSITION is not None:
        POSITION += head * width + origin
    if TIME is not None:
        TIME += head * num_buckets
    q = load_own(Q, first, start, length, head, token_stride, head_stride, HEAD_DIM, BLOCK_M, BLOCK_DIM)
    # Halved queries stay in registers, of which wide heads have too few; then the scores are halved instead.
    halves: tl.constexpr = BLOCK_DIM <= 128
    if halves:
        q = halved(q)
    grad = load_own(GRAD_OUT, first, start, length, head, num_heads * HEAD_DIM, HEAD_DIM, HEAD_DIM, BLOCK_M, BLOCK_DIM)
    i = tl.minimum(start + tl.arange(0, BLOCK_M), length - 1)
    i_place = place_of(i, history, GROUP, CAUSAL)
    i_high, i_low = load_times(TIMES, first, i, FAST)
    column, place = tl.arange(0, BLOCK_N), places(BLOCK_N, FAST)
    sums = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    is_half: tl.constexpr = q.dtype == tl.float16
    for masked in tl.static_range(2):
        begin, end, begin2, end2, begin3, end3 = key_ranges(
            masked, start, length, history, context, window, GROUP, BLOCK_M, BLOCK_N, CAUSAL
        )
        for step in range(0, num_blocks(begin, end, begin2, end2, begin3, end3, BLOCK_N)):
            if masked:
                n, limit = block_of(step, begin, end, begin2, end2, begin3, end3, BLOCK_N)
            else:
                n, limit = begin + step * BLOCK_N, length
            k = load_visited(
                K, first, n, limit, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK_N, BLOCK_DIM, TMA
            )
            v = load_visited(
                V, first, n, limit, head, token_stride, head_stride, masked, HEAD_DIM, BLOCK_N, BLOCK_DIM, TMA
            )
            h = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if not halves:
                h *= 0.5
            j = n + place
            if masked:
                j = tl.minimum(j, limit - 1)
                j_place = place_of(j, history, GROUP, CAUSAL)
            if POSITION is not None:
                if masked:
                    h += load_bias((POSITION + i_place)[:, None] - j_place[None, :], FAST)
                else:
                    h += load_bias((POSITION + i_place)[:, None] - n - column[None, :], FAST)
            if TIME is not None:
                j_high, j_low = load_times(TIMES, first, j, FAST)
                bucket = time_bucket(i_high[:, None] - j_high[None, :], i_low[:, None] - j_low[None, :], FAST)
                h += load_bias(TIME + bucket, FAST)
            a = twice_sigmoid(h, FAST)
            grad_h = tl.dot(grad, tl.trans(v), input_precision=PRECISION) * (a + h * a * (2.0 - a))
            if is_half:
                grad_h *= before * after
            if masked:
                seen = sees(i[:, None], j[None, :], i_place[:, None], j_place[None, :], history, context, window,
                            GROUP, CAUSAL)  # fmt: skip
                grad_h = tl.where(seen & (n + place < limit)[None, :], grad_h, 0.0)
            sums = tl.dot(grad_h.to(k.dtype), k, sums, input_precision=PRECISION)
    sums *= 0.5 if is_half else 0.5 * (before * after)
    store(GRAD_Q, sums, first, start, length, head, num_heads, HEAD_DIM, BLOCK_M, BLOCK_DIM)
